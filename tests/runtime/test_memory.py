"""Bytes are what is reachable, and they fall."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from tests.runtime.caches import reachable_bytes


@pytest.mark.parametrize("policy", ["position", "h2o", "ema"])
@pytest.mark.parametrize("budget", [None, 0.25])
def test_report_equals_reachable_bytes_at_every_stage(model: Any, policy: str, budget: float | None) -> None:
    config = FadeConfig(n_sink=2, recent_window=16, int4_budget=budget, eviction_policy=policy, reassign_every=16)
    cache = create_tiered_cache(model, config)
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache) == 0
    ids = torch.randint(0, 250, (2, 300))
    model(ids, **forward_kwargs(cache, model))
    sizes = []
    for step in range(120):
        if step % 29 == 0:
            assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)
            sizes.append(cache.memory_report()["compression"])
        model(ids[:, step : step + 1], **forward_kwargs(cache, model))
    assert min(sizes) > (3.5 if budget is None else 6.0)  # float32 model
    cache.activate_past_recording()
    model(ids[:, :3], **forward_kwargs(cache, model))
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)
    cache.crop(-2)
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)
    cache.reset()
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache) == 0


def test_full_bytes_are_those_of_a_stock_cache(model: Any) -> None:
    ids = torch.randint(0, 250, (2, 130))
    cache, stock = create_tiered_cache(model), DynamicCache(config=model.config)
    for each in (cache, stock):
        model(ids, **forward_kwargs(each, model))
    expected = sum(t.nbytes for layer in stock.layers for t in (layer.keys, layer.values))
    assert cache.memory_report()["full_bytes"] == expected


@pytest.mark.slow
def test_memory_is_flat_at_a_fixed_budget(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(num_hidden_layers=1)
    cache = create_tiered_cache(model, FadeConfig(n_sink=2, recent_window=8, int4_budget=40, reassign_every=8))
    model(torch.randint(0, 250, (1, 64)), **forward_kwargs(cache, model))
    sizes, pages = [], []
    for _ in range(1200):
        model(torch.randint(0, 250, (1, 1)), **forward_kwargs(cache, model))
        sizes.append(cache.memory_report()["resident_bytes"])
        pages.append(len(cache.tiered[0].tokens.packed.page_len))
    assert cache.memory_report()["tokens"]["HIGH"] == 2 * 40
    assert max(sizes[600:]) <= max(sizes[:600]) * 1.1
    assert max(pages) <= 2 * 40


def test_padding_earns_no_memory(model: Any) -> None:
    """A row with 200 slots of padding keeps only its own tokens."""
    ids = torch.randint(3, 250, (2, 300))
    mask = torch.ones_like(ids)
    mask[1, :200] = 0
    cache = create_tiered_cache(model, FadeConfig(n_sink=2, recent_window=8))
    model(ids, attention_mask=mask, **forward_kwargs(cache, model))
    packed = cache.tiered[0].tokens.packed
    assert torch.bincount(packed.token_row()).tolist() == [290, 290, 90, 90]
    assert int(packed.slots()[packed.token_row() == 2].min()) == 2
