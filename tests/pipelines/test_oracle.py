"""A cache that knows the future keeps what the future looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fade_runtime import FadeConfig
from pipelines.evaluation.measure import compare
from pipelines.evaluation.oracle import Oracle, future_attention
from pipelines.evaluation.runs import Method, OracleRun, show_future, start
from pipelines.reporting.rows import FULL
from predictor.errors import FadeError

CONTEXT, STEPS = 181, 21


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(256, (1, CONTEXT + STEPS), generator=torch.Generator().manual_seed(2))


def eager_future(model: Any, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
    """What eager attention says, averaged over the query heads of each kv head and over the steps."""
    model.set_attn_implementation("eager")
    maps = model(tokens, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    kv = model.config.num_key_value_heads
    return {
        layer: each[0].unflatten(0, (kv, -1)).mean(1)[:, CONTEXT:, :CONTEXT].mean(1) for layer, each in enumerate(maps)
    }


def test_the_future_is_that_of_eager_attention(tiny_model: Callable[..., Any], tokens: torch.Tensor) -> None:
    model = tiny_model()
    with torch.inference_mode():
        expected, found = eager_future(model, tokens), future_attention(model, tokens[0], CONTEXT)
    assert set(found) == set(expected)
    for layer, each in found.items():
        torch.testing.assert_close(each, expected[layer], rtol=0.02, atol=1e-5)  # recorded in half precision


def test_it_keeps_what_is_going_to_be_looked_at(tiny_model: Callable[..., Any], tokens: torch.Tensor) -> None:
    config = FadeConfig(int4_budget=30, n_sink=2, recent_window=16)
    model = tiny_model()
    (run,) = start([Method("oracle", Oracle(config))], model, model)
    assert isinstance(run, OracleRun)
    with torch.inference_mode():
        expected = eager_future(tiny_model(), tokens)
        show_future([run], tokens, CONTEXT)
        run.feed(tokens[:, :CONTEXT])
    for layer in run.cache.tiered:
        body = expected[layer.index][:, 2 : CONTEXT - 16]
        best = body.topk(30).indices + 2
        kept = torch.cat([part.token_row() * 1000 + part.slots() for part in layer.tokens.body()])
        wanted = {head * 1000 + slot for head, slots in enumerate(best.tolist()) for slot in slots}
        assert len(wanted & set(kept.tolist())) >= 0.97 * len(wanted)  # near ties, in half precision


def test_it_loses_less_than_what_cannot_know(tiny_model: Callable[..., Any], tokens: torch.Tensor) -> None:
    config = FadeConfig(int4_budget=0.1, n_sink=1, recent_window=4, eviction_policy="position")
    methods = [Method(FULL, None), Method("position", config), Method("oracle", Oracle(config))]
    full, position, oracle = compare(tiny_model(), methods, tokens, STEPS, timed=False)
    assert sum(full.kl) == 0 < sum(oracle.kl) < sum(position.kl)
    assert oracle.resident_bytes == pytest.approx(position.resident_bytes, rel=0.1)  # which keeps no statistics


def test_it_refuses_what_has_no_known_continuation(tiny_model: Callable[..., Any], tokens: torch.Tensor) -> None:
    model = tiny_model()
    (run,) = start([Method("oracle", Oracle(FadeConfig(int4_budget=30)))], model, model)
    with pytest.raises(FadeError, match="whose continuation is known"):
        run.feed(tokens)
