"""What tests of the cache share: ids, calls of a model, bundles and codebooks, the bytes that a cache reaches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fade_runtime import FadeConfig, TieredCache, create_tiered_cache
from fade_runtime.storage.codebook import CodebookSet
from fade_runtime.storage.pq import LayerCodebook, PQCodebook
from fade_runtime.transformers_api import forward_kwargs
from predictor.budgets import HeadBudgets
from predictor.bundle import Predictor
from predictor.features import FeatureSpec
from predictor.nets import TokenMLP
from predictor.provenance import model_provenance


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    """Ids [B, S] of bytes, none of them special."""
    return torch.randint(3, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


def forward(model: Any, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    """Logits [B, S, V] of one call."""
    return model(ids, **forward_kwargs(cache, model), **options).logits


def forward_quietly(model: Any, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    """The same without the guard's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return forward(model, ids, cache, **options)


def decode(model: Any, ids: Tensor, prompt: int, cache: Any) -> Tensor:
    """Logits [B, S, V] of a prompt in one call and then token after token."""
    parts = ids.split([prompt, *[1] * (ids.shape[1] - prompt)], dim=1)
    return torch.cat([forward(model, part, cache) for part in parts], dim=1)


def create_quietly(model: Any, config: FadeConfig) -> TieredCache:
    """A cache, without the warnings that its making gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return create_tiered_cache(model, config)


def save_bundle(
    path: Path, model: Any, net: Any = None, budgets: HeadBudgets | None = None, offsets: Tensor | None = None
) -> Path:
    """A bundle for a model, untrained; offsets [L, H] are of its first layers."""
    layers = () if offsets is None else range(len(offsets))
    return Predictor(net or TokenMLP(), spec=FeatureSpec(window=16, block=4, horizon=32), metrics={}, manifest={},
        provenance=model_provenance(model), budgets=budgets, offsets=offsets, layers=layers,
    ).save(path / "bundle")  # fmt: skip


def make_codebook(model: Any, seed: int = 0) -> CodebookSet:
    """Random centroids of about the size of keys and values."""
    generator = torch.Generator().manual_seed(seed)
    books = [PQCodebook(torch.randn(4, 32, 4, generator=generator).half()) for _ in range(4)]
    return CodebookSet([LayerCodebook(*books[:2]), LayerCodebook(*books[2:])], model_provenance(model))


def reachable(root: Any) -> Iterator[Tensor]:
    """Every tensor that can be reached from an object by attributes, items and closures (not by weak references)."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type, torch.dtype, torch.device)):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, dict):
            todo += [*thing.keys(), *thing.values()]
        elif isinstance(thing, (list, tuple, set)):
            todo += list(thing)
        elif isinstance(thing, nn.Module):
            todo += [*thing.parameters(), *thing.buffers(), *vars(thing).values()]
        elif callable(thing) and getattr(thing, "__closure__", None):
            todo += [cell.cell_contents for cell in thing.__closure__]
        if hasattr(thing, "__dict__") and not isinstance(thing, Tensor):
            todo += list(vars(thing).values())


def reachable_bytes(cache: TieredCache) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in reachable(cache)}
    return sum(storages.values())
