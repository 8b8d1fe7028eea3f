"""Heuristic scores and provenance."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predictor import scores
from predictor.errors import FadeError
from predictor.provenance import check_provenance, model_provenance, tokenizer_hash, weights_fingerprint


@given(st.integers(1, 40), st.floats(0.5, 0.99))
def test_ema_is_the_recursive_average_without_start_bias(steps: int, decay: float) -> None:
    rows = torch.rand(steps, 3, dtype=torch.float64)
    state, weight = torch.zeros(3, dtype=torch.float64), 0.0
    for row in rows:
        state, weight = decay * state + (1 - decay) * row, decay * weight + (1 - decay)
    torch.testing.assert_close(scores.ema(rows, decay), (state / weight).float(), atol=1e-5, rtol=1e-4)


def test_heuristics_rank_as_their_papers_say() -> None:
    assert scores.h2o(torch.tensor([4.0, 1.0]), torch.tensor([8, 0])).tolist() == [0.5, 1.0]
    rows = torch.zeros(2, 9)
    rows[:, 4] = 1.0
    pooled = scores.snapkv(rows)
    torch.testing.assert_close(pooled, torch.tensor([0, 0, 0.2, 0.2, 0.2, 0.2, 0.2, 0, 0]))


def test_provenance_is_of_the_weights_and_the_geometry(tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> None:
    model = tiny_model()
    facts = model_provenance(model, tiny_tokenizer)
    assert (facts["kv_heads"], facts["query_heads"]) == (2, 4)
    assert facts["tokenizer"] == tokenizer_hash(tiny_tokenizer)
    assert weights_fingerprint(tiny_model().to(torch.bfloat16)) == facts["weights"]
    check_provenance(facts, tiny_model(), "the bundle")
    with pytest.raises(FadeError, match="the bundle was made for another model: weights is .* make one for this"):
        check_provenance(facts, tiny_model(seed=1), "the bundle")
    with pytest.raises(FadeError, match="layers is 2 there and 3 here"):
        check_provenance(facts, tiny_model(num_hidden_layers=3), "traces in x")
    with pytest.raises(FadeError, match="does not say its model's rope"):
        check_provenance({k: v for k, v in facts.items() if k != "rope"}, model, "x")
