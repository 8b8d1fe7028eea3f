"""Bytes of another project's cache, counted by walking what is reachable from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def resident_bytes(cache: Any, dtype: torch.dtype) -> int:
    """Bytes of every storage reachable from a cache, had the model been of two-byte floats.

    Only tensors of the model's own ``dtype`` shrink with it. Views count their whole storage, each storage once.

    Example:
        >>> kept = {"codes": torch.zeros(10, dtype=torch.uint8), "scale": [torch.ones(4)], "again": torch.ones(4)}
        >>> resident_bytes(kept, torch.float32)
        26
    """
    stored: dict[int, int] = {}
    for tensor in reachable(cache):
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        stored[storage.data_ptr()] = size * 2 // dtype.itemsize if tensor.dtype == dtype else size
    stored.pop(0, None)  # empty tensors have no storage
    return sum(stored.values())


def reachable(root: Any) -> Iterator[Tensor]:
    """Plain tensors in containers, objects' attributes and tensor subclasses, each object once; no model's."""
    visited: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in visited or isinstance(item, nn.Module | type | str | bytes):
            continue
        visited.add(id(item))
        if isinstance(item, Tensor):
            names = item.__tensor_flatten__()[0] if hasattr(item, "__tensor_flatten__") else ()
            if names:
                waiting += [getattr(item, name) for name in names]
            else:
                yield item
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        else:
            waiting += vars(item).values() if hasattr(item, "__dict__") else []
            waiting += [getattr(item, name) for name in getattr(item, "__slots__", ()) if hasattr(item, name)]
