"""Measuring a cache against the full one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from transformers.models.gpt_oss import modeling_gpt_oss

from fade_runtime import FadeConfig
from fade_runtime.cache.shadow import next_token_kl
from pipelines.evaluation.measure import Measured, compare
from pipelines.evaluation.runs import Method, full_twin
from pipelines.reporting.rows import FULL
from predictor.twin import dense_twin
from tests.conftest import make_tiny_model
from tests.families import FAMILIES

CONTEXT, STEPS = 301, 33
EVICTING = [
    Method(policy, FadeConfig(int4_budget=0.25, eviction_policy=policy)) for policy in ("position", "h2o", "ema")
]
METHODS = [Method(FULL, None), Method("safe", FadeConfig.safe()), *EVICTING]


@pytest.fixture(params=["llama", "gemma3"])
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes a model of full attention alone, or one with windows that are shorter than prompts."""
    options = dict(sliding_window=83, layer_types=["sliding_attention", "full_attention"] * 2)
    return make_tiny_model if request.param == "llama" else partial(FAMILIES["gemma3"], **options)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(256, (1, CONTEXT + STEPS), generator=torch.Generator().manual_seed(1))


def test_kl_is_scipys() -> None:
    p, q = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)) * 3
    expected = entropy(*(np.exp(x.double().numpy()) for x in (p, q)))
    measured = Measured("q")
    measured.add(torch.stack([p, p]), torch.stack([q, q + 5]))
    assert measured.kl == [pytest.approx(expected, rel=1e-9), pytest.approx(expected, rel=1e-5)]


def test_a_cache_that_compresses_nothing_loses_nothing(model: Any, tokens: torch.Tensor) -> None:
    exact = Method("exact", FadeConfig.safe(recent_window=CONTEXT + STEPS))
    full, other = compare(model, [Method(FULL, None), exact], tokens, STEPS)
    assert other.kl == full.kl == [0.0] * STEPS
    assert all(other.agree)


def test_loss_is_that_of_the_models_own_logits(make: Callable[[], Any], tokens: torch.Tensor) -> None:
    """The full cache's side comes from one plain forward, the other from `generate`-like steps by hand."""
    from fade_runtime import create_tiered_cache
    from fade_runtime.transformers_api import forward_kwargs

    config = FadeConfig(int4_budget=0.25, eviction_policy="position")
    _, measured = compare(make(), [Method(FULL, None), Method("position", config)], tokens, STEPS)
    full = make()(tokens).logits[0, CONTEXT:]
    model = make()
    cache = create_tiered_cache(model, config)
    model(tokens[:, :CONTEXT], **forward_kwargs(cache, model))
    for step in range(STEPS):
        at = CONTEXT + step
        logits = model(tokens[:, at : at + 1], **forward_kwargs(cache, model)).logits[0, -1]
        assert measured.kl[step] == pytest.approx(float(next_token_kl(full[step], logits)), rel=0.02, abs=1e-6)


def test_less_memory_costs_quality_and_counts_are_complete(model: Any, tokens: torch.Tensor) -> None:
    ticks = []
    measured = compare(model, METHODS, tokens, STEPS, lambda: ticks.append(1))
    by = {one.name: one for one in measured}
    assert [one.name for one in measured] == [method.name for method in METHODS]
    for one in measured:
        assert (len(one.kl), len(one.agree), len(one.seconds)) == (STEPS, STEPS, STEPS - 1)
        assert one.full_bytes == by[FULL].resident_bytes
    mean = {name: np.mean(one.kl) for name, one in by.items()}
    assert 0 == mean[FULL] < mean["safe"] < mean["position"]
    assert by["position"].resident_bytes < by["safe"].resident_bytes < by[FULL].resident_bytes
    assert len(ticks) == len(METHODS) * (1 + STEPS)


def test_untimed_steps_come_many_at_a_time_and_lose_the_same(
    tiny_model: Callable[..., Any], tokens: torch.Tensor
) -> None:
    low = Method("low", FadeConfig(int4_budget=0, low_budget=None))
    many = Method("many", FadeConfig(int4_budget=0.25, reassign_every=8))
    held = Method("held", FadeConfig(int4_budget=0.25, chunked_prefill=True))
    methods = [*METHODS, low, many, held]
    timed, sooner = (compare(tiny_model(), methods, tokens, STEPS, timed=each) for each in (True, False))
    for one, other in zip(timed, sooner):
        assert other.seconds == []
        assert other.kl == pytest.approx(one.kl, rel=0.02, abs=1e-5)
        assert other.agree == one.agree
        assert (other.resident_bytes, other.full_bytes) == (one.resident_bytes, one.full_bytes)


def test_a_prompt_that_all_caches_read_at_once_fills_each_as_its_own_would(
    make: Callable[[], Any], tokens: torch.Tensor
) -> None:
    model, read = make(), []
    count = lambda module, args, kwargs: read.append(args[0].shape[1])
    model.register_forward_pre_hook(count, with_kwargs=True)  # the twin has it too
    together = compare(model, METHODS, tokens, STEPS)
    assert read.count(CONTEXT) == 1
    for index, method in enumerate(METHODS[1:], 1):
        _, alone = compare(make(), [METHODS[0], method], tokens, STEPS)
        assert alone.kl == pytest.approx(together[index].kl, rel=1e-3, abs=1e-6)  # h2o reads the prompt in one pass
        assert alone.resident_bytes == together[index].resident_bytes


@pytest.mark.parametrize("name", ["safe", "position", "h2o", "ema"])
def test_bytes_are_those_of_a_bfloat16_model(name: str, tiny_model: Callable[..., Any], tokens: torch.Tensor) -> None:
    method = next(method for method in METHODS if method.name == name)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        full, one = compare(tiny_model().to(dtype), [Method(FULL, None), method], tokens, STEPS)
        found[dtype] = (full.resident_bytes, full.full_bytes, one.resident_bytes, one.full_bytes)
    assert found[torch.float32] == found[torch.bfloat16]
    layers, heads, dim = 2, 2, 16
    assert found[torch.float32][0] == 2 * 2 * layers * heads * dim * (CONTEXT + STEPS)


def test_a_twin_shares_weights_but_not_attention(model: Any, tokens: torch.Tensor) -> None:
    twin = dense_twin(model)
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters()))
    model.set_attn_implementation("eager")
    assert twin.config._attn_implementation != "eager"
    torch.testing.assert_close(twin(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-3)


def test_learned_sinks_need_no_matrix_of_all_scores(monkeypatch: pytest.MonkeyPatch, tokens: torch.Tensor) -> None:
    """transformers has eager attention alone for gpt-oss; the full cache is as exact without it."""
    model, ids = FAMILIES["gpt_oss"](), tokens[:, :200] % 250
    expected = model(ids).logits
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", None)
    twin = full_twin(model)
    torch.testing.assert_close(twin(ids).logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    safe = FadeConfig(n_sink=2, recent_window=8, reassign_every=8, middle_k_bits=8, middle_v_bits=8)
    full, ours = compare(model, [Method(FULL, None), Method("safe", safe)], ids, STEPS)
    assert full.kl == [0.0] * STEPS
    assert 0 < np.mean(ours.kl) < 0.01
    assert ours.resident_bytes < full.resident_bytes


def test_the_full_cache_comes_first(model: Any, tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be the full cache"):
        compare(model, METHODS[1:], tokens, STEPS)
