"""Caches that benchmarks fill with random keys and values, and their bytes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from fade_runtime import FadeConfig, TieredCache, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs, geometry, text_config
from pipelines.evaluation.reachable import reachable


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


@torch.inference_mode()
def recurrent_states(lm: Any, tokens: int = 8) -> dict[int, Any]:
    """Index -> layer of a stock cache that keeps a state in place of keys and values, after a few random tokens."""
    cache = DynamicCache(config=lm.config)
    indices = [index for index, layer in enumerate(cache.layers) if not isinstance(layer, CacheLayerMixin)]
    if indices:
        drawn = torch.randint(text_config(lm).vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
        lm(drawn, **forward_kwargs(cache, lm))
    return {index: cache.layers[index] for index in indices}


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds."""
    if hasattr(cache, "memory_report"):
        return cache.memory_report()["resident_bytes"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in reachable(cache.layers)}.values())
