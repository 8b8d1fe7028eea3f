"""A batch of three rows, two of them padded, and small caches that are filled with it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fade_runtime import FadeConfig, TieredCache, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs

PROMPT, BEFORE, AFTER = 90, 11, 21
TIGHT: dict[str, Any] = dict(n_sink=2, recent_window=8, int4_budget=20, low_budget=12, reassign_every=8)


def ids_and_mask() -> tuple[Tensor, Tensor]:
    """Three rows, of which two are padded on the left."""
    ids = torch.randint(3, 250, (3, PROMPT + BEFORE + AFTER), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row, pad in ((1, 20), (2, 85)):
        ids[row, :pad], mask[row, :pad] = 257, 0
    return ids, mask


def feed(model: Any, cache: Any, start: int, stop: int, step: int = 1) -> Tensor:
    """Logits of tokens ``start`` to ``stop``, ``step`` at a time."""
    ids, mask = ids_and_mask()
    cuts = [*range(start, stop, step), stop]
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    return torch.cat(
        [
            model(
                ids[:, a:b],
                attention_mask=mask[:, :b],
                position_ids=position_ids[:, a:b],
                **forward_kwargs(cache, model),
            ).logits
            for a, b in itertools.pairwise(cuts)
        ],
        dim=1,
    )


def filled(model: Any, tokens: int = 60, **options: Any) -> TieredCache:
    cache = create_tiered_cache(model, FadeConfig(**{**TIGHT, **options}))
    feed(model, cache, 0, tokens, step=tokens)
    return cache
