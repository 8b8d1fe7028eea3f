"""Heuristic scores, provenance and files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predictor import scores
from predictor.errors import FadeError
from predictor.files import sha256_file, write_aside
from predictor.provenance import check_provenance, model_provenance, tokenizer_hash, weights_fingerprint


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
