"""Caches that benchmarks fill with random keys and values, and their bytes."""

from __future__ import annotations

from typing import Any

import torch

from fade_runtime import FadeConfig, TieredCache, create_tiered_cache
from fade_runtime.transformers_api import geometry, text_config


def filled(lm: Any, config: FadeConfig, context: int) -> tuple[TieredCache, torch.Generator]:
    """A tiered cache of ``context`` random tokens, compressed, and the generator that drew them."""
    cache = create_tiered_cache(lm, config)
    heads, dim = geometry(text_config(lm))
    generator = torch.Generator().manual_seed(context)
    for layer in cache.tiered:
        key, value = torch.randn(2, 1, heads, context, dim, generator=generator)  # each [1, H, S, D]
        layer.update(key / 4, value, kwargs={})
        layer.compress()
    return cache, generator


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds."""
    if hasattr(cache, "memory_report"):
        return cache.memory_report()["resident_bytes"]
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
