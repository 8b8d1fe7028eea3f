"""Freed memory goes back to the operating system.

A prompt's layers free large pieces between the small ones that stay, and the C library keeps the holes: a smaller
cache alone does not make the process smaller.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch


def trim_heap(device: torch.device) -> None:
    """Return what was freed on a CPU; does nothing elsewhere, nor under a C library without ``malloc_trim``.

    Example:
        >>> trim_heap(torch.device("cpu"))
    """
    if device.type == "cpu" and (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return None
