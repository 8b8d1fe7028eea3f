"""Freed memory goes back to the operating system.

A prompt's layers free large pieces between the small ones that stay, and the C library keeps the holes: a smaller
cache alone does not make the process smaller.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch


def give_back(device: torch.device) -> None:
    """Return what was freed on a CPU; does nothing elsewhere, nor under a C library without ``malloc_trim``.

    Example:
        >>> give_back(torch.device("cpu"))
    """
    if device.type == "cpu" and (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return None
