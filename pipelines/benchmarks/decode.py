"""`python -m pipelines.bench decode`: one decode step over caches that hold the same values."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs, geometry, text_config
from pipelines.benchmarks.caches import cache_bytes, recurrent_states
from pipelines.benchmarks.settings import ContextSettings
from pipelines.benchmarks.timing import STOCK, relative_error, rotated, rows_beside
from predictor.errors import FadeError
from predictor.twin import dense_twin

STATIC, LOW = "static", "k4v2"
TOLERANCE = 1e-3  # largest relative difference of logits between caches that hold the same values


@dataclass(frozen=True)
class DecodeSettings(ContextSettings):
    """Options of `pipelines.bench decode`.

    Args:
        contexts: tokens in the cache before the first step.
        steps: timed steps of each method.
    """

    contexts: list[int] = field(default_factory=lambda: [2048, 4096, 8192])
    steps: int = 20


def decode(settings: DecodeSettings) -> None:
    """Time one decode step over caches that hold the same values, method by method, interleaved.

    Keys and values are random, stored in 4 bits by the tiered cache, and given to the other caches as they read back
    from it: so all logits must agree, and nothing is printed when they do not. Methods: stock (DynamicCache), static
    (StaticCache, preallocated), int4 (the body in 4 bits), int4+statistics (the same, with the h2o policy's sums),
    k4v2 (all of the body in the low tier; held to a DynamicCache of what it reads back, which is not timed).
    """
    settings.at_least_one(steps=settings.steps)
    lm, _ = settings.load()
    rows = [row for context in settings.contexts for row in _rows(lm, context, settings.steps)]
    settings.keep(rows)
    print(f"{'context':>8} {'cache':<16} {'ms/step':>8} {'tokens/s':>9} {'of stock':>9} {'of static':>9} {'MiB':>7}")
    for row in rows:
        print(
            f"{row['context']:>8,} {row['method']:<16} {row['p50']:>8.1f} {1e3 / row['p50']:>9.2f} "
            f"{row['of_stock']:>8.2f}x {row['of_static']:>8.2f}x {row['bytes'] / 2**20:>7.1f}"
        )


def _rows(lm: Any, context: int, steps: int) -> list[dict[str, Any]]:
    """Fill the caches of one context length, check that they agree, time them in turn."""
    stock_model = dense_twin(lm)
    caches, twin = _filled(lm, context, context + steps + 1)
    models = {name: stock_model if name in (STOCK, STATIC) else lm for name in caches}
    milliseconds: dict[str, list[float]] = {name: [] for name in caches}
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for step in range(steps + 1):
            token = torch.randint(lm.config.vocab_size, (1, 1), generator=generator)
            logits = {}
            for name in rotated(list(caches), step):
                started = time.perf_counter()
                logits[name] = models[name](token, **forward_kwargs(caches[name], lm)).logits
                if step:  # the first warms up
                    milliseconds[name].append(1e3 * (time.perf_counter() - started))
            low = stock_model(token, **forward_kwargs(twin, lm)).logits
            # transformers' own two caches hold the same numbers: how far they are apart is rounding
            rounding = _agree(STATIC, logits.pop(STATIC), logits[STOCK], context, 10 * TOLERANCE)
            for name, each in logits.items():
                _agree(name, each, low if name == LOW else logits[STOCK], context, max(TOLERANCE, 4 * rounding))
    rows = rows_beside(STOCK, "decode", context, milliseconds)
    median = {row["method"]: row["p50"] for row in rows}
    return [
        {
            **row,
            "of_stock": median[STOCK] / row["p50"],
            "of_static": median[STATIC] / row["p50"],
            "bytes": cache_bytes(caches[row["method"]]),
        }
        for row in rows
    ]


def _filled(lm: Any, context: int, limit: int) -> tuple[dict[str, Any], Any]:
    """Caches of ``context`` tokens that read back the same keys and values, and a DynamicCache of what k4v2 reads."""
    caches = {
        STOCK: DynamicCache(config=lm.config),
        STATIC: StaticCache(config=lm.config, max_cache_len=limit),
        "int4": create_tiered_cache(lm, FadeConfig.safe()),
        "int4+statistics": create_tiered_cache(lm, FadeConfig(int4_budget=1.0, eviction_policy="h2o")),
        LOW: create_tiered_cache(lm, FadeConfig(int4_budget=0, low_budget=None)),
    }
    twin = DynamicCache(config=lm.config)
    heads, dim = geometry(text_config(lm))
    generator = torch.Generator().manual_seed(context)
    states = recurrent_states(lm)
    for cache in (*caches.values(), twin):
        for index, layer in states.items():
            cache.layers[index] = copy.deepcopy(layer)
    for index in sorted(set(range(len(twin.layers))) - set(states)):
        key, value = torch.randn(2, 1, heads, context, dim, generator=generator)  # each [1, H, S, D]
        key /= 4  # attention that is neither flat nor on one token, where rounding would decide
        for name in ("int4", "int4+statistics", LOW):
            layer = caches[name].layers[index]
            layer.update(key, value, kwargs={})
            layer.compress()
        twin.update(*caches[LOW].layers[index].materialise(), index)
        key, value = caches["int4"].layers[index].materialise()
        for name in (STOCK, STATIC):
            caches[name].update(key, value, index)
    return caches, twin


def _agree(name: str, logits: Tensor, expected: Tensor, context: int, tolerance: float) -> float:
    """Refuse to report times of caches whose logits [1, 1, V] differ; returns by how much they do."""
    off = relative_error(logits, expected)
    if not off < tolerance:
        raise FadeError(
            f"bench at {context} tokens: logits of {name} are {off:.1e} away from those of a DynamicCache "
            "of the same values; no times are shown"
        )
    return off
