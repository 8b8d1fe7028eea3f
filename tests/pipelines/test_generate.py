"""`python -m pipelines.generate` on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fade_runtime import FadeConfig
from pipelines import generate
from predictor.errors import FadeError

PROMPT = " ".join(f"{i} sheep jump over the {i * 7 % 13}th fence." for i in range(12))


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    status = generate.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return status, out, err


def test_text_is_the_models_own_and_memory_is_told(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a budget that keeps all of a short prompt exact, the text is that of stock generation."""
    status, out, err = run(
        capsys, "--model", tiny_model_dir, "--prompt", "Once", "--max_new_tokens", 12, "--dtype", "float32"
    )
    assert (status, err) == (0, "")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_model_dir),
        AutoTokenizer.from_pretrained(tiny_model_dir),
    )
    ids = tokenizer("Once", return_tensors="pt")
    stock = tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0, 4:])
    assert stock.strip() in out
    assert "prompt: 4 tokens" in out
    assert "nothing evicted" in out
    assert re.search(r"first token after [\d.]+ s, then [\d.]+ tokens/s \(12 tokens\)", out)


def test_a_predictor_decides_and_saves_memory(
    tiny_model_dir: Path, bundles: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--model", tiny_model_dir, "--prompt", PROMPT, "--max_new_tokens", 4, "--dtype", "float32")
    found = {}
    for name, options in {"safe": (), "learned": ("--predictor", bundles["cnn"], "--budget", 40)}.items():
        status, out, _ = run(capsys, *args, *options)
        assert status == 0
        found[name] = float(re.search(r"\): ([\d.]+)x|: ([\d.]+)x smaller", out).group(2))  # type: ignore[union-attr]
    assert found["learned"] > found["safe"] > 1
    assert "40 tokens kept in 4 bits, chosen by policy 'learned'" in out


def test_telemetry_is_written_where_it_is_asked_for(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = ("--model", tiny_model_dir, "--prompt", PROMPT, "--max_new_tokens", 2, "--dtype", "float32")
    status, _, err = run(capsys, *args, "--telemetry", tmp_path / "events.jsonl")
    assert (status, err) == (0, "")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["layer"], event["seen"]) for event in events] == [(0, len(PROMPT)), (1, len(PROMPT))]
    status, _, err = run(capsys, *args, "--telemetry", tmp_path)
    assert status == 2
    assert "cannot be written" in err


def test_the_built_in_prompt_is_long_and_ends_in_a_question(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "--model", tiny_model_dir, "--prompt_tokens", 300, "--max_new_tokens", 1)
    assert status == 0
    question = len(generate.QUESTION)
    assert f"prompt: {300 + question} tokens" in out
    assert "first token after" in out
    assert "tokens/s" not in out  # one token has no rate


def chosen(predictor: str | None, preset: str | None, policy: str | None, budget: Any, **more: Any) -> FadeConfig:
    settings = generate.GenerateSettings(preset=preset, policy=policy, budget=budget, **more)
    return generate.choose_config(settings, predictor)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((None, None, None, None), FadeConfig.safe()),
        ((None, "safe", None, None), FadeConfig.safe()),
        ((None, None, "ema", None), FadeConfig(target_compression=6.0, min_budget=0.25, eviction_policy="ema")),
        ((None, "aggressive", None, 0.1), FadeConfig.aggressive(int4_budget=0.1)),
        ((None, None, None, 128), FadeConfig.balanced(int4_budget=128)),
        (("a/bundle", None, None, None), FadeConfig.balanced(predictor="a/bundle")),
        (("a/bundle", "aggressive", "learned", 0.3), FadeConfig.aggressive("a/bundle", int4_budget=0.3)),
        (("a/bundle", None, "fastgen", None), FadeConfig.balanced("a/bundle", eviction_policy="fastgen")),
    ],
)
def test_options_make_the_config(options: tuple[Any, ...], expected: FadeConfig) -> None:
    assert chosen(*options) == expected


def test_memory_and_loss_stand_in_for_a_budget() -> None:
    none = (None, None, None, None)
    assert chosen(*none, memory="2MiB") == FadeConfig(memory="2MiB")
    config = chosen("a/bundle", None, None, None, memory=0.5)
    assert config == FadeConfig(memory=0.5, eviction_policy="learned", predictor="a/bundle")
    assert "what fits 50% of the free memory kept in 4 bits" in generate.describe(config)
    config = chosen("smollm2-135m-instruct", None, None, None, max_kl=0.01)
    assert config.int4_budget == FadeConfig.risk(kl=0.01, predictor="smollm2-135m-instruct").int4_budget
    for options, more, words in (
        (none, dict(memory="2MiB", max_kl=0.01), "memory and max_kl exclude each other"),
        ((None, "safe", None, None), dict(memory="2MiB"), "preset and memory exclude each other"),
        ((None, None, None, 0.2), dict(max_kl=0.2), "budget and max_kl exclude each other"),
        (("a/bundle", None, "fastgen", None), dict(max_kl=0.2), "max_kl is certified for policy 'learned'"),
        (none, dict(max_kl=0.2), "risk reads a predictor's certificate"),
        (none, dict(memory="much"), "memory 'much' is no size"),
    ):
        with pytest.raises(FadeError, match=words):
            chosen(*options, **more)


def test_a_warning_of_the_cache_is_seen(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of libraries are silenced, ours are not."""
    words = ("--model", tiny_model_dir, "--prompt_tokens", 300, "--max_new_tokens", 1, "--memory", "1KiB")
    with pytest.warns(RuntimeWarning, match="the most that is allowed, and memory is 0.000977 MiB"):
        status, _, _ = run(capsys, *words)
    assert status == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((None, "best", None, None), "preset 'best' is not one of safe, balanced, aggressive"),
        ((None, None, "best", None), "'best' is not one of position, h2o, ema"),
        ((None, None, "learned", None), "needs a predictor"),
        (("a/bundle", None, "h2o", None), "exclude each other"),
        (("a/bundle", "safe", None, None), "evicts nothing"),
        ((None, None, "h2o", 1.5), "int4_budget 1.5"),
    ],
)
def test_contradictions_are_refused(options: tuple[Any, ...], words: str) -> None:
    with pytest.raises(FadeError, match=words):
        chosen(*options)


def test_bad_input_is_one_line(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    for args, words in [
        (("--model", tmp_path / "none"), "none does not exist; name a directory, a GGUF file or a hub id"),
        (("--prompt_file", tmp_path / "none.txt"), "none.txt is not there"),
        (("--prompt_file", tmp_path / "empty.txt"), "is empty"),
        (("--prompt", "a", "--prompt_file", "b"), "both given"),
        (("--predictor", "models:/nobody@champion", "--tracking_uri", store), "there is no registry at sqlite"),
        (("--predictor", tmp_path / "none"), "no bundle"),
        (("--max_new_tokens", 0), "max_new_tokens 0"),
    ]:
        status, out, err = run(capsys, *(() if "--model" in args else ("--model", tiny_model_dir)), *args)
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
        assert words in err


def test_a_prompt_beyond_the_model_is_refused_before_anything_is_computed(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("many words. " * 20_000)
    loaded = []
    load = generate.load_model
    monkeypatch.setattr(generate, "load_model", lambda *args: loaded.append(args) or load(*args))
    asked = ("--model", tiny_model_dir, "--prompt_file", file, "--max_new_tokens", 3)
    status, out, err = run(capsys, *asked)
    assert (status, out, loaded) == (2, "", [])
    assert re.fullmatch(
        r"error: prompt of 240,000 tokens and max_new_tokens 3 pass the 4096 positions of .*; cut the prompt .*\n", err
    )
    status, out, _ = run(capsys, *asked, "--prompt_tokens", 4094)  # the last new token is not read
    assert (status, len(loaded)) == (0, 1)
    assert "prompt: 4,094 tokens" in out
    assert run(capsys, *asked, "--prompt_tokens", 4095)[0] == 2


@pytest.mark.parametrize("kind", ["--prompt", "--prompt_file"])
def test_a_prompt_of_ones_own_is_cut_to_so_many_tokens(
    kind: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(PROMPT)
    given = PROMPT if kind == "--prompt" else tmp_path / "text.txt"
    asked = ("--model", tiny_model_dir, "--max_new_tokens", 8, "--dtype", "float32")
    cut = run(capsys, *asked, kind, given, "--prompt_tokens", 41)
    assert cut[0] == 0
    told = lambda out: out.split("cache: ")[1].split("\n\n")[1]  # the text alone, without times
    assert "prompt: 41 tokens" in cut[1]
    assert told(cut[1]) == told(run(capsys, *asked, "--prompt", PROMPT[:41])[1])
    assert f"prompt: {len(PROMPT)} tokens" in run(capsys, *asked, kind, given, "--prompt_tokens", 4000)[1]
    assert run(capsys, *asked, kind, given, "--prompt_tokens", 0)[0] == 2


def test_a_cut_has_no_special_token_twice(tiny_tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tiny_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 256)]
    )
    assert tiny_tokenizer("ab")["input_ids"][0] == 256
    cut = generate.first_tokens(tiny_tokenizer, PROMPT, 10)
    assert cut == PROMPT[:10]
    assert generate.chat_inputs(tiny_tokenizer, cut)["input_ids"].tolist()[0].count(256) == 1


def test_a_predictor_of_another_model_is_refused(
    tiny_model: Any,
    tiny_tokenizer: Any,
    bundles: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_model("llama", seed=9).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    status, _, err = run(capsys, "--model", tmp_path, "--predictor", bundles["mlp"], "--prompt", "a")
    assert status == 2
    assert "made for another model" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_demo_model_answers(real_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys,
        "--model",
        real_model_dir,
        "--prompt",
        "What is the capital of France?",
        "--max_new_tokens",
        16,
    )
    assert status == 0
    assert "Paris" in out
    assert torch.get_default_dtype() == torch.float32
