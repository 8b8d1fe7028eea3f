"""Rotation, heuristic scores, provenance and files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from predictor import rope, scores
from predictor.errors import FadeError
from predictor.files import sha256_file, write_aside
from predictor.provenance import check_provenance, model_provenance, tokenizer_hash, weights_fingerprint

SCHEMES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512,
    },
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("at", [0, 100, 5000])
def test_rotation_is_the_models_own_and_inverts(tiny_model: Callable[..., Any], scheme: str, at: int) -> None:
    model = tiny_model(rope_parameters=SCHEMES[scheme], max_position_embeddings=2048)
    rotary = rope.find_rotary(model)
    assert rotary is not None
    positions = torch.arange(at, at + 7)
    x = torch.randn(1, 2, 7, 16)
    cos, sin = rotary(x, positions[None])
    stock, _ = apply_rotary_pos_emb(x, x, cos, sin)
    table = rope.rotary_table(rotary, positions)
    torch.testing.assert_close(rope.rotate(x, table), stock)
    torch.testing.assert_close(rope.unrotate(stock, table), x, atol=1e-5, rtol=1e-5)


def test_partial_rotation_leaves_the_rest_alone() -> None:
    angle = torch.rand(5, 2).repeat(1, 2)
    table = (angle.cos(), angle.sin())
    x = torch.randn(3, 5, 10)
    turned = rope.rotate(x, table)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(rope.unrotate(turned, table), x)
    assert rope.rotary_table(None, torch.arange(3)) is None
    assert rope.rotate(x, None) is x
    assert rope.unrotate(x, None) is x


@given(st.integers(1, 40), st.floats(0.5, 0.99))
def test_ema_is_the_recursive_average_without_start_bias(steps: int, decay: float) -> None:
    rows = torch.rand(steps, 3, dtype=torch.float64)
    state, weight = torch.zeros(3, dtype=torch.float64), 0.0
    for row in rows:
        state, weight = decay * state + (1 - decay) * row, decay * weight + (1 - decay)
    torch.testing.assert_close(scores.ema(rows, decay), (state / weight).float(), atol=1e-5, rtol=1e-4)


def test_heuristics_rank_as_their_papers_say() -> None:
    assert scores.position(torch.tensor([3, 1, 2])).tolist() == [3, 1, 2]
    assert scores.h2o(torch.tensor([4.0, 1.0]), torch.tensor([8, 0])).tolist() == [0.5, 1.0]
    rows = torch.zeros(2, 9)
    rows[:, 4] = 1.0
    pooled = scores.snapkv(rows)
    torch.testing.assert_close(pooled, torch.tensor([0, 0, 0.2, 0.2, 0.2, 0.2, 0.2, 0, 0]))
    assert scores.ema_ea(torch.tensor(-1.0), torch.tensor(-2.0)) == -3.0


def test_provenance_is_of_the_weights_and_the_geometry(
    tiny_model: Callable[..., Any], tiny_tokenizer: Any
) -> None:
    model = tiny_model()
    facts = model_provenance(model, tiny_tokenizer)
    assert (facts["kv_heads"], facts["query_heads"]) == (2, 4)
    assert facts["tokenizer"] == tokenizer_hash(tiny_tokenizer)
    assert weights_fingerprint(tiny_model().to(torch.bfloat16)) == facts["weights"]
    check_provenance(facts, tiny_model(), "the bundle")
    with pytest.raises(
        FadeError, match="the bundle was made for another model: weights is .* make one for this"
    ):
        check_provenance(facts, tiny_model(seed=1), "the bundle")
    with pytest.raises(FadeError, match="layers is 2 there and 3 here"):
        check_provenance(facts, tiny_model(num_hidden_layers=3), "traces in x")
    with pytest.raises(FadeError, match="does not say its model's rope"):
        check_provenance({k: v for k, v in facts.items() if k != "rope"}, model, "x")


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    target = tmp_path / "whole.txt"
    target.write_text("old")

    def interrupted() -> None:
        with write_aside(target) as aside:
            aside.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == ["whole.txt"]
    assert target.read_text() == "old"
    with write_aside(tmp_path / "dir") as aside:
        aside.mkdir()
        (aside / "a").write_text("1")
    with write_aside(tmp_path / "dir") as aside:  # a directory replaces a directory
        aside.mkdir()
        (aside / "b").write_text("2")
    assert os.listdir(tmp_path / "dir") == ["b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dir", "whole.txt"]
    assert sha256_file(target) == "cba06b5736faf67e54b07b561eae94395e774c517a7d910a54369e1263ccfbd4"
