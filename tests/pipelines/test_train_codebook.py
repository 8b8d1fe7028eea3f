"""`python -m pipelines.train_codebook`, from text to a cache that uses the codebooks, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.storage.codebook import CodebookSet, load_codebook
from pipelines import train_codebook
from predictor.errors import FadeError
from predictor.provenance import model_provenance
from predictor.rope import find_rotary
from tests.families import FAMILIES

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tiny_model_dir: Path, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: Any, out: str = "book") -> tuple[int, str, str]:
        base = (
            "--model",
            tiny_model_dir,
            "--text",
            prose,
            "--documents",
            2,
            "--validation_documents",
            1,
            "--context",
            300,
        )
        sizes = ("--samples", 600, "--sub_dim", 4, "--num_centroids", 32, "--out", tmp_path / out)
        given = [str(arg) for arg in (*base, *sizes, *args)]
        status = train_codebook.main(given)
        printed, err = capsys.readouterr()
        return status, printed, err

    return call


def test_from_text_to_a_cache(run: Run, tiny_model_dir: Path, tmp_path: Path) -> None:
    status, out, err = run()
    assert status == 0, err
    book = load_codebook(tmp_path / "book")
    assert [tuple(t.shape) for t in book.tensors()] == [(4, 32, 4)] * 4
    assert book.facts["documents"] == 2
    assert book.facts["samples"] == 600
    errors = book.facts["held_out_error"]
    assert sorted(errors) == ["0", "1"]
    assert all(0 < each < 1 for both in errors.values() for each in both)
    key, value = (sum(both[part] for both in errors.values()) / 2 for part in (0, 1))
    assert f" mean   {key:.3f}   {value:.3f}".replace("0.", ".") in out.replace("0.", ".")
    assert "8 bytes a token" in out
    assert str(tmp_path / "book") in out

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    options = {"recent_window": 16, "int4_budget": 20, "low_budget": 30, "low_tier": "pq"}
    cache = create_tiered_cache(model, FadeConfig(codebook=tmp_path / "book", **options))
    model.generate(torch.randint(250, (1, 120)), past_key_values=cache, max_new_tokens=4)
    assert cache.memory_report()["tokens"]["PQ"] == 2 * 2 * 30


def test_values_may_have_smaller_parts(run: Run, tmp_path: Path) -> None:
    status, out, err = run("--value_sub_dim", 2, "--sub_dim", 8)
    assert status == 0, err
    assert [tuple(t.shape) for t in load_codebook(tmp_path / "book").tensors()] == [
        (2, 32, 8),
        (8, 32, 2),
    ] * 2
    assert "10 bytes a token" in out


def test_the_same_seed_gives_the_same_codebooks(run: Run, tmp_path: Path) -> None:
    for out, seed in (("one", 0), ("two", 0), ("three", 1)):
        assert run("--seed", seed, out=out)[0] == 0
    one, two, three = (load_codebook(tmp_path / out).tensors() for out in ("one", "two", "three"))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_what_is_gathered_are_the_keys_before_their_rotation(tiny_model_dir: Path) -> None:
    """Against the projections' own output, caught by hooks."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    tokens = torch.randint(250, (1, 40))
    caught: list[torch.Tensor] = []
    for layer in model.model.layers:
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            part.register_forward_hook(lambda _module, _input, output: caught.append(output))
    found = train_codebook.read_cache(model, find_rotary(model), tokens)
    for index, both in enumerate(found):
        assert both is not None
        for ours, projected in zip(both, caught[2 * index : 2 * index + 2]):
            heads = projected.view(40, 2, 16)[train_codebook.SINKS :].transpose(0, 1).flatten(0, 1)
            torch.testing.assert_close(ours, heads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "dims"),
    [("gemma4", [0, 32, 0, 32]), ("gpt2", [16, 16]), ("qwen3_next", [16, 0, 16, 0])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_cannot_be_tiered_have_no_codebook(family: str, dims: list[int]) -> None:
    model = FAMILIES[family]()
    found = train_codebook.read_cache(model, find_rotary(model), torch.randint(250, (1, 60)))
    assert [0 if both is None else both[0].shape[1] for both in found] == dims
    layers = [None if both is None else train_codebook.cluster(both, (8, 8), 4, 0) for both in found]
    CodebookSet(layers, model_provenance(model)).check(model)


def test_a_model_without_such_layers_is_refused() -> None:
    model = FAMILIES["mistral_sliding"]()
    with pytest.raises(FadeError, match="mistral has no full-attention layer"):
        train_codebook.read_cache(model, find_rotary(model), torch.randint(250, (1, 60)))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--sub_dim", 5), "sub_dim 5 does not divide head dim 16"),
        (("--value_sub_dim", 3), "sub_dim 3 does not divide head dim 16"),
        (("--num_centroids", 300), "num_centroids 300 is not between 2 and 256"),
        (("--samples", 10), "samples 10 is too small; use at least 32"),
        (("--documents", 0), "documents 0 is too small"),
        (("--context", 5000), "context 5000 passes the 4096 positions"),
        (("--documents", 500), "asked for"),
        (("--text", "nowhere.txt"), "nowhere.txt does not exist"),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, tuple) else "",
)
def test_bad_options_are_one_line_and_leave_nothing(run: Run, tmp_path: Path, args: tuple[Any, ...], says: str) -> None:
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert says in err.splitlines()[-1]
    assert not (tmp_path / "book").exists()
