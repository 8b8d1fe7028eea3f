"""Whether two caches hold the same."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fade_runtime.layer.sequences import Shared

OF_THE_MODEL = (
    "predictor.rope",
    "predictor.bundle",
    "fade_runtime.policies.base",
    "fade_runtime.policies.fastgen",
    "fade_runtime.transformers_api",
)


def differences(
    a: Any, b: Any, where: str = "cache", *, but: frozenset[str] = frozenset(), seen: set[int] | None = None
) -> list[str]:
    """Where two objects differ: attributes, items, tensors with their dtypes and strides.

    Args:
        but: names of attributes that may differ. seen: ids of objects that are being compared already.
    """
    seen = set() if seen is None else seen
    if type(a) is not type(b):
        return [f"{where}: {type(a)} and {type(b)}"]
    if isinstance(a, Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        dense = a.is_contiguous() or a.numel() < a.untyped_storage().nbytes() // a.element_size()
        return [] if alike and (dense or a.stride() == b.stride()) else [where]
    if isinstance(a, dict):
        found = [f"{where} {key}" for key in a.keys() ^ b.keys()]
        both = a.keys() & b.keys()
        return found + [d for key in both for d in differences(a[key], b[key], f"{where}.{key}", but=but, seen=seen)]
    if isinstance(a, (list, tuple)):
        pairs = enumerate(zip(a, b))
        found = [d for i, (x, y) in pairs for d in differences(x, y, f"{where}[{i}]", but=but, seen=seen)]
        return [where] * (len(a) != len(b)) + found
    if isinstance(a, nn.Module) or callable(a) or type(a).__module__ in OF_THE_MODEL:
        return []  # of the model, not of the text
    if not hasattr(a, "__dict__"):
        return [where] * (a != b and not (a != a and b != b))
    if id(a) in seen:
        return []
    seen.add(id(a))
    stored = [{name: value for name, value in _stored(each).items() if name not in but} for each in (a, b)]
    return differences(*stored, where, but=but, seen=seen)


def _stored(thing: Any) -> dict[str, Any]:
    """Its attributes, but for those that are computed from others when they are first wanted."""
    kinds = {name: getattr(type(thing), name, None) for name in vars(thing)}
    own = {name: vars(thing)[name] for name, kind in kinds.items() if not isinstance(kind, functools.cached_property)}
    return {name: own[name] for name in ("last", "running")} if isinstance(thing, Shared) else own
