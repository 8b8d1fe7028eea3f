"""Models some of whose layers keep no tokens that could be evicted, through every command that takes a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, pipeline

from data.trace import Traces
from fade_runtime import FadeConfig
from fade_runtime.storage.codebook import load_codebook
from pipelines import bench, collect_traces, evaluate, evaluate_tasks, generate, lm_eval, train, train_codebook
from pipelines.budget_study import budget_study
from pipelines.certify import certify_bundle
from pipelines.cli import run
from pipelines.integrations.hf_pipeline import TASK, register_pipeline
from pipelines.register import NOT_PROMOTED, register
from pipelines.reporting.rows import mean
from pipelines.reselect import reselect
from predictor.bundle import load_bundle
from predictor.certificate import ladder
from predictor.registry import load_predictor
from tests.conftest import make_tiny_tokenizer
from tests.families import FAMILIES

pytestmark = pytest.mark.slow

SLIDING = dict(hidden_size=60, num_attention_heads=6, num_key_value_heads=3, head_dim=20, sliding_window=83)
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def kinds(*each: str) -> dict[str, Any]:
    """Options for a model of layers of these kinds."""
    return {"num_hidden_layers": len(each), "layer_types": [f"{kind}_attention" for kind in each]}


@dataclass(frozen=True)
class Family:
    """A tiny model: how it is made, which layers can evict, its kv heads."""

    make: Callable[[], Any]
    layers: tuple[int, ...]
    of: int
    kv_heads: int


TINY = {
    "gemma3": Family(  # windows shorter than prompts, longer than what stays exact; rope differs between the kinds
        partial(FAMILIES["gemma3"], **SLIDING, **kinds("sliding", "sliding", "full", "sliding", "full")), (2, 4), 5, 3
    ),
    "gpt_oss": Family(
        partial(FAMILIES["gpt_oss"], **SLIDING, **kinds("sliding", "full", "sliding", "full")), (1, 3), 4, 3
    ),
    "lfm2": Family(
        partial(FAMILIES["lfm2"], num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2), (1, 3), 4, 2
    ),
}


@dataclass(frozen=True)
class Job:
    """What the commands have made for one model."""

    family: Family
    folder: Path
    prose: Path
    numbers: Path
    store: str

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def traces(self) -> Path:
        return self.folder / "traces"

    @property
    def fitted(self) -> Path:
        return self.folder / "fit"

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    def told(self, command: Callable[[list[str]], int], *words: Any, status: tuple[int, ...] = (0,)) -> None:
        """Run a command with its words."""
        assert command([str(word) for word in words]) in status

    @property
    def held_out(self) -> list[str]:
        return [f"--model={self.model}", f'--held_out=["{self.numbers}"]', "--context=220", "--steps=9"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module", params=TINY)
def job(request: pytest.FixtureRequest, prose: Path, store: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Traces, a fit of one epoch and a registered bundle; each command's own test looks at what it made."""
    folder, family = tmp_path_factory.mktemp(request.param), TINY[request.param]
    numbers = folder / "numbers"
    numbers.mkdir()
    for file in range(3):
        lines = [" ".join(WORDS[int(digit)] for digit in str(7919 * (file + 1) * n**3)) for n in range(60)]
        (numbers / f"{file}.txt").write_text("\n\n".join(lines))
    made = Job(family, folder, prose, numbers, store)
    family.make().save_pretrained(made.model)
    make_tiny_tokenizer().save_pretrained(made.model)
    made.told(
        collect_traces.main,
        *(f"--text={prose}", f"--model={made.model}", f"--out={made.traces}", "--accelerator=cpu", "--future=40"),
        *("--train_documents=2", "--validation_documents=2", "--min_prompt=200", "--max_prompt=230"),
    )
    fit(made, made.fitted, "--model.net=predictor.nets.TokenMLP")
    made.told(
        partial(run, register),
        *(f"--checkpoint={made.fitted}", f"--name={request.param}", f"--traces={made.traces}"),
        *(f"--bundle={made.bundle}", "--held_out_documents=2", f"--tracking_uri={store}", *made.held_out),
        status=(0, NOT_PROMOTED),
    )
    return made


def fit(job: Job, output: Path, *words: str) -> None:
    job.told(
        train.main,
        *("fit", *words, f"--data.traces={job.traces}", f"--output={output}", "--trainer.max_epochs=1"),
        *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.logger=false"),
    )


def test_traces_are_of_the_evictable_layers(job: Job, capsys: pytest.CaptureFixture) -> None:
    traces, family = Traces(job.traces), job.family
    assert traces.layers == list(family.layers)
    places = [(layer, head) for layer in family.layers for head in range(family.kv_heads)]
    assert [(row["layer"], row["head"]) for row in traces.read(traces.shards("train")[0])] == 2 * places
    picture, last = job.folder / "attention.png", family.layers[-1]
    job.told(collect_traces.main, "inspect", job.traces, f"--layer={last}", "--head=1", f"--out={picture}")
    told = capsys.readouterr().out
    named = ", ".join(map(str, family.layers))
    assert f"of {family.of} layers x {family.kv_heads} kv heads, recorded: layers {named}" in told
    assert picture.stat().st_size > 10_000
    job.told(collect_traces.main, "inspect", job.traces, f"--layer={last - 1}", status=(2,))
    assert f"they hold layers {named} and" in capsys.readouterr().err


def test_fits_are_of_the_same_layers(job: Job) -> None:
    lines = (job.fitted / "layers.csv").read_text().splitlines()
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(job.family.layers)
    fit(job, job.folder / "heads", "--model=predictor.module.HeadBudgetModule")
    budgets = load_bundle(job.folder / "heads" / "best").budgets
    assert budgets is not None
    assert budgets.layers == job.family.layers
    assert (job.folder / "heads" / "heads.png").stat().st_size > 10_000


def test_networks_with_numbers_for_each_head_choose_again(job: Job, capsys: pytest.CaptureFixture) -> None:
    own = f"--model.net.layers={job.family.of}", f"--model.net.kv_heads={job.family.kv_heads}"
    bank = job.folder / "bank"
    fit(job, bank, "--model.net=predictor.temporal.EmaBank", *own, "--model.every=1", "--model.loss=listwise_mass")
    capsys.readouterr()
    job.told(partial(run, reselect), f"--predictors=[{bank}]", f"--traces={job.traces}", "--every=[8]", "--stride=9")
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.strip().splitlines()[2:]}
    assert float(rows["oracle"][0]) >= float(rows["bank"][0]) > 0


def test_head_budgets_are_studied(job: Job, capsys: pytest.CaptureFixture) -> None:
    job.told(partial(run, budget_study), f"--traces={job.traces}", "--parts=2", "--sizes=[1,2]")
    told = capsys.readouterr().out
    losses = [float(each) for each in re.findall(r"\d+\.\d{4}", told)]
    assert len(losses) == 2 * 6
    assert "nan" not in told


def test_what_was_registered_is_about_the_evictable_layers(job: Job) -> None:
    pulled = load_predictor(f"models:/{job.folder.name[:-1]}/1", tracking_uri=job.store)
    assert pulled.budgets is not None
    assert pulled.budgets.layers == job.family.layers
    assert pulled.certificate is not None
    named = ", ".join(map(str, job.family.layers))
    assert f"layers {named} of {job.family.of}" in (job.bundle / "README.md").read_text()


def test_it_is_certified(job: Job, capsys: pytest.CaptureFixture) -> None:
    certified = load_bundle(job.bundle).save(job.folder / "certified")
    job.told(partial(run, certify_bundle), f"--bundle={certified}", "--documents=2", *job.held_out)
    certificate = load_bundle(certified).certificate
    assert certificate is not None
    rungs = ladder(certificate)
    assert all(len(rung.kl) == 2 for rung in rungs)
    assert rungs[0].int4_budget is None
    assert max(mean(rung.kl) for rung in rungs) > mean(rungs[0].kl) > 0


def test_it_is_evaluated_beside_what_knows_the_future(job: Job) -> None:
    knows = {"knows": {"oracle": True, "int4_budget": 0.25, "eviction_policy": "h2o"}}
    job.told(
        evaluate.main,
        *(f"--model={job.model}", f"--traces={job.traces}", f"--out={job.folder / 'eval'}", "--documents=1"),
        *(f"--heatmap_layer={job.family.layers[-1]}", "--context=190", "--steps=17"),
        *(f"--predictors={json.dumps({'mine': str(job.bundle)})}", "--speed=false"),
        *(f"--configs={json.dumps(knows)}", "--methods=[full,safe,h2o,learned,fastgen,knows]"),
    )
    rows = [json.loads(line) for line in (job.folder / "eval" / "results.jsonl").read_text().splitlines()]
    by = {row["method"]: row for row in rows if row["kind"] == "method"}
    assert set(by) == {"full", "safe", "h2o", "mine", "fastgen", "knows"}
    assert by["full"]["kl"] == 0 < by["safe"]["kl"] < min(by["h2o"]["kl"], by["mine"]["kl"])
    assert {row["layer"] for row in rows if row["kind"] == "occupancy" and "layer" in row} <= set(job.family.layers)
    assert (job.folder / "eval" / "attention.png").stat().st_size > 10_000


def test_tasks_are_answered(job: Job) -> None:
    files = json.dumps({"needle": str(job.prose), "copy": str(job.prose)})
    job.told(
        evaluate_tasks.main,
        *(f"--model={job.model}", "--n=1", "--length=700", f"--files={files}", f"--out={job.folder / 'tasks'}"),
        *("--tasks=[needle,copy]", "--methods=[full,safe,learned]"),
        f"--predictors={json.dumps({'mine': str(job.bundle)})}",
    )
    rows = [json.loads(line) for line in (job.folder / "tasks" / "results.jsonl").read_text().splitlines()]
    assert {row["method"] for row in rows if row["kind"] == "task"} == {"full", "safe", "mine"}


def test_text_is_generated_and_scored(job: Job, capsys: pytest.CaptureFixture) -> None:
    prompt, options = "Once upon a time " * 20, ("--max_new_tokens=5", "--dtype=float32")
    events = job.folder / "events.jsonl"
    job.told(
        generate.main,
        *(f"--model={job.model}", f"--prompt={prompt}", f"--predictor={job.bundle}", f"--telemetry={events}", *options),
    )
    assert "chosen by policy 'learned'" in capsys.readouterr().out
    assert {json.loads(line)["layer"] for line in events.read_text().splitlines()} >= set(job.family.layers)
    guarded = "--guard=rollback", "--spill=host", "--monitor_every=4"
    job.told(generate.main, f"--model={job.model}", f"--prompt={prompt}", "--policy=h2o", *guarded, *options)
    assert "guard" in "".join(capsys.readouterr())
    model = AutoModelForCausalLM.from_pretrained(job.model)
    (scored,), report = lm_eval.score(model, FadeConfig.balanced(predictor=job.bundle), list(range(250)), [[1, 2, 3]])
    assert scored[0] < 0
    assert report["compression"] > 1
    register_pipeline()
    asked = pipeline(TASK, model=str(job.model), dtype="float32", device="cpu", fade_config=FadeConfig.safe())
    ((answer,),) = asked([prompt], return_memory=True, return_full_text=False, do_sample=False, max_new_tokens=5)
    assert answer["memory"]["compression"] > 1


def test_codebooks_are_trained(job: Job) -> None:
    book = job.folder / "book"
    job.told(
        train_codebook.main,
        *(f"--model={job.model}", f"--text={job.prose}", "--documents=2", "--held_out=1", "--context=300"),
        *("--samples=600", "--sub_dim=4", "--num_centroids=32", f"--out={book}"),
    )
    coded = load_codebook(book).layers
    assert tuple(index for index, layer in enumerate(coded) if layer is not None) == job.family.layers


@pytest.mark.parametrize("name", ["collect", "prefill", "profile", "select", "decode", "guard"])
def test_it_is_timed(name: str, job: Job) -> None:
    one = {"profile": ["--context=200", "--steps=70"], "collect": ["--repeats=1", "--future=8"]}
    few = {
        "memory": ["--new_tokens=2"],
        "decode": ["--steps=2"],
        "guard": ["--steps=4"],
        "select": ["--steps=64"],
        "prefill": ["--repeats=1"],
    }
    contexts = [] if name == "profile" else ["--contexts=[200]"]
    job.told(bench.main, name, f"--model={job.model}", *contexts, *{**one, **few}[name])
