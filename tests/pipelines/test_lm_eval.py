"""lm-eval over a compressed cache: log-probabilities by hand, HFLM's own answers, a run of its command line."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines import lm_eval
from predictor.errors import FadeError

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'fade-predictor[eval]'"
)
EVICTING = FadeConfig(int4_budget=0.2, eviction_policy="position")
OFF = FadeConfig(compression="off")
TEXTS = ["one two three " * 30, "four five " * 40, "six"]


def drawn(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]


def by_hand(model: Any, config: FadeConfig | None, context: list[int], tokens: list[int]) -> tuple[float, bool]:
    """The context's head in one call, then token by token; without a config one call of the plain model."""
    if config is None:
        logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
    else:
        cache = create_tiered_cache(model, config)
        pieces = [context[:-1], context[-1:], *([token] for token in tokens[:-1])]
        rows = [model(torch.tensor([piece]), **forward_kwargs(cache, model)).logits[0, -1] for piece in pieces]
        logits = torch.stack(rows[1:])
    each = torch.log_softmax(logits.double(), -1)[torch.arange(len(tokens)), tokens]
    return float(each.sum()), logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("config", [OFF, FadeConfig.safe(), EVICTING], ids=["off", "safe", "evicting"])
def test_each_continuation_is_read_over_the_compressed_context(model: Any, config: FadeConfig) -> None:
    context, *continuations = drawn(301, 1, 40, 1, 7)
    found, report = lm_eval.score(model, config, context, continuations)
    for (likely, greedy), tokens in zip(found, continuations):
        expected = by_hand(model, None if config is OFF else config, context, tokens)
        assert (likely, greedy) == (pytest.approx(expected[0], abs=1e-3), expected[1])
    plain = [by_hand(model, None, context, tokens)[0] for tokens in continuations]
    apart = [abs(one[0] - other) for one, other in zip(found, plain)]
    assert max(apart) < 1e-3 if config is OFF else min(apart) > 1e-3  # those of one token too
    assert report["seen"] == 301 + 6
    assert report["compression"] > 2 if config is not OFF else 0.9 < report["compression"] <= 1


def test_what_greedy_decoding_says_is_greedy(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    (context,) = drawn(200)
    cache = create_tiered_cache(model, EVICTING)
    said = list(context)
    model(torch.tensor([said[:-1]]), **forward_kwargs(cache, model))
    for _ in range(5):
        said.append(int(model(torch.tensor([said[-1:]]), **forward_kwargs(cache, model)).logits[0, -1].argmax()))
    tokens = said[200:]
    wrong = [*tokens[:2], (tokens[2] + 1) % 256, *tokens[3:]]
    (_, right), (_, not_right) = lm_eval.score(model, EVICTING, context, [tokens, wrong])[0]
    assert (right, not_right) == (True, False)


def test_of_a_single_token_of_context_the_rest_is_compressed_as_it_comes(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    context, tokens = drawn(1, 400)
    ((likely, _),), report = lm_eval.score(model, EVICTING, context, [tokens])
    assert report["compression"] > 2
    assert likely != pytest.approx(by_hand(model, None, context, tokens)[0], abs=1e-2)
    (short, _), (same, _) = lm_eval.score(model, EVICTING, context, [tokens[:40], tokens[:40]])[0]
    assert short == same == pytest.approx(by_hand(model, None, context, tokens[:40])[0], abs=1e-3)


def scoring(model: Any, max_length: int) -> lm_eval.Tiered:
    """What scores requests, without the rest of lm-eval's model."""
    made = lm_eval.Tiered.__new__(lm_eval.Tiered)
    made.model, made.max_length, made.fade_config, made._resident, made._full = model, max_length, OFF, 0, 0
    return made


@pytest.mark.parametrize("length", [1, 60, 63, 64])
def test_a_request_reads_the_last_tokens_that_the_model_has_room_for(
    length: int, tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model()
    context, tokens = drawn(160, length)
    ((likely, _),) = scoring(model, 64)._loglikelihood_tokens([(None, context, tokens)], disable_tqdm=True)
    read = (context + tokens)[-65:]  # the last one is predicted, not read
    assert likely == pytest.approx(by_hand(model, None, read[:-length], tokens)[0], abs=1e-3)


@pytest.mark.parametrize("length", [0, 65, 80])
def test_a_continuation_that_cannot_be_read_whole_is_refused_before_any_is_scored(
    length: int, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_eval, "score", lambda *given: pytest.fail("one was scored"))
    context, good, bad = drawn(160, 5, length)
    with pytest.raises(FadeError, match=f"continuation of {length} tokens .* 1 to max_length 64"):
        scoring(tiny_model(), 64)._loglikelihood_tokens([(None, context, good), (None, context, bad)])


def test_without_lm_eval_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    with pytest.raises(FadeError, match=r"pip install 'fade-predictor\[eval\]'"):
        lm_eval.register()
    assert lm_eval.main(["--model", "fade"]) == 2
    assert "lm-eval cannot be imported" in capsys.readouterr().err


def instances(*arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, each, index) for index, each in enumerate(arguments)]


def loaded(kind: str, path: Path, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    made = HFLM if kind == "hf" else lm_eval.register()
    return made(pretrained=str(path), device="cpu", prefix_token_id=257, **options)


@needs_lm_eval
def test_with_nothing_compressed_it_answers_as_lm_eval_does(tiny_model_dir: Path) -> None:
    stock = loaded("hf", tiny_model_dir, max_length=300, batch_size=2)
    ours = loaded("fade", tiny_model_dir, config=OFF, max_length=300, batch_size=2)
    asked = instances(*[(text, more) for text in ["", *TEXTS] for more in [" seven", "e", " eight nine"]])
    for one, other in zip(ours.loglikelihood(asked), stock.loglikelihood(asked)):
        assert (one[0], one[1]) == (pytest.approx(other[0], abs=1e-3), other[1])
    rolling = instances(*[(text,) for text in TEXTS])
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(stock.loglikelihood_rolling(rolling), abs=1e-2)
    until = {"until": ["zzz"], "max_gen_toks": 20, "do_sample": False}
    generated = instances(*[(text, until) for text in TEXTS])
    assert ours.generate_until(generated) == stock.generate_until(generated)


@needs_lm_eval
def test_generation_and_rolling_go_through_the_compressed_cache(tiny_model_dir: Path) -> None:
    off, ours = (loaded("fade", tiny_model_dir, config=each, batch_size=3) for each in (OFF, EVICTING))
    until = {"until": ["zzz"], "max_gen_toks": 20, "do_sample": False}
    asked = instances(*[(text, until) for text in TEXTS])
    assert ours.generate_until(asked) != off.generate_until(asked)
    rolling = instances((TEXTS[0],))
    assert ours.loglikelihood_rolling(rolling) != pytest.approx(off.loglikelihood_rolling(rolling), abs=1e-3)
    info = ours.get_model_info()
    assert info["fade_compression"] > 2
    assert info["fade_config"] == {"int4_budget": "0.2", "eviction_policy": "position"}
    with pytest.raises(FadeError, match="config 'brave' is neither"):
        loaded("fade", tiny_model_dir, config="brave")


@needs_lm_eval
def test_lm_evals_command_line_runs_a_local_task(
    tiny_model_dir: Path, bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    rows = [{"text": text, "choices": [" a", " bc"], "label": index % 2} for index, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "local.yaml").write_text(
        f"""task: local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
    )
    monkeypatch.setattr(sys, "argv", ["untouched"])
    model = f"pretrained={tiny_model_dir},config=aggressive,predictor={bundles['mlp']},int4_budget=0.3"
    asked = ["--tasks", "local", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    assert lm_eval.main(["--model", "fade", "--model_args", model, *asked]) == 0
    (written,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(written.read_text())
    assert results["results"]["local"]["acc,none"] in (0, 1 / 3, 2 / 3, 1)
    assert results["config"]["fade_compression"] > 2
    assert results["config"]["fade_config"]["int4_budget"] == "0.3"
    wrong = model.replace("aggressive", "brave")
    assert lm_eval.main(["--model", "fade", "--model_args", wrong, *asked]) == 2


@needs_lm_eval
def test_the_longest_continuation_is_the_one_that_lm_eval_takes(tiny_model_dir: Path) -> None:
    stock = loaded("hf", tiny_model_dir, max_length=64)
    ours = loaded("fade", tiny_model_dir, config=OFF, max_length=64)
    context, tokens, longer = drawn(160, 64, 65)
    asked = [(None, context, tokens)]
    (one,), (other,) = (each._loglikelihood_tokens(asked, disable_tqdm=True) for each in (ours, stock))
    assert (one[0], one[1]) == (pytest.approx(other[0], abs=1e-3), other[1])
    for each, error in ((ours, FadeError), (stock, AssertionError)):
        with pytest.raises(error):
            each._loglikelihood_tokens([(None, context, longer)], disable_tqdm=True)
