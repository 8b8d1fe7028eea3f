"""Which kernel computes on a device: decided once, by a test of the kernel itself, and said when it is the slow one."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fade_runtime.kernels import reference
from fade_runtime.kernels.cpu import attention as cpu
from fade_runtime.storage.packed import Quantiser, quantise
from predictor.errors import FadeError

Kernel = Callable[..., "tuple[Tensor, Tensor | None, list[Tensor]]"]
_DECIDING = threading.Lock()
_DECIDED: dict[torch.device, Kernel] = {}


def pick_kernel(device: torch.device) -> Kernel:
    """Choose the attention kernel of a device, once: C on a CPU, Triton on a GPU, when it works and agrees.

    ``FADE_KERNEL=reference`` in the environment asks for plain torch. Several threads wait for one decision.
    """
    if device not in _DECIDED:  # in each layer of each step: without the lock
        with _DECIDING:
            if device not in _DECIDED:
                _DECIDED[device] = _decide(device)
    return _DECIDED[device]


def forget() -> None:
    """Decide again at the next call."""
    _DECIDED.clear()


def _decide(device: torch.device) -> Kernel:
    if device.type not in ("cpu", "cuda") or os.environ.get("FADE_KERNEL") == "reference":
        return reference.attend
    try:
        if device.type == "cpu":
            cpu.self_test()
            return cpu.attend
        # triton: not on every system, and slow to import
        from fade_runtime.kernels.triton import attention as triton
        from fade_runtime.kernels.triton import self_test

        self_test.self_test(device)
        return triton.attend
    except (FadeError, OSError, ImportError) as problem:
        warnings.warn(f"slow attention over packed tokens: {problem}", RuntimeWarning, stacklevel=3)
        return reference.attend


def pick_quantiser(device: torch.device) -> Quantiser:
    """What quantises and packs on a device: on a GPU what belongs to its attention kernel, elsewhere plain torch."""
    if device.type == "cpu" or pick_kernel(device) is reference.attend:
        return quantise
    from fade_runtime.kernels.triton import pack_kernel  # triton: not on every system, and slow to import

    return pack_kernel.quantise
