"""Which kernel computes on a device: decided once, by a test of the kernel itself, and said when it is the slow one."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fade_runtime.kernels import reference
from fade_runtime.kernels.cpu import attention as cpu
from fade_runtime.storage.packed import Quantiser, quantise
from predictor.errors import FadeError

Attend = Callable[..., "tuple[Tensor, Tensor | None, list[Tensor]]"]  # as :func:`reference.attend`


class Kernel(NamedTuple):
    """What computes on a device.

    Attributes:
        name: "cpu" (C), "triton" or "reference" (plain torch).
        attend: attention over full-precision and stored tokens, with the contract of :func:`reference.attend`.
        quantise: what packs tokens, with the contract of :func:`fade_runtime.storage.packed.quantise`.
    """

    name: str
    attend: Attend
    quantise: Quantiser


_DECIDING = threading.Lock()
_DECIDED: dict[torch.device, Kernel] = {}


def pick_kernel(device: torch.device) -> Attend:
    """The attention kernel of a device, chosen once: C on a CPU, Triton on a GPU, when it works and agrees.

    ``FADE_KERNEL=reference`` in the environment asks for plain torch. Several threads wait for one decision.
    """
    return _kernel_of(device).attend


def kernel_name(device: torch.device) -> str:
    """The name of that kernel: "cpu", "triton" or "reference"."""
    return _kernel_of(device).name


def pick_quantiser(device: torch.device) -> Quantiser:
    """What quantises and packs on a device: on a GPU what belongs to its attention kernel, elsewhere plain torch."""
    return quantise if device.type == "cpu" else _kernel_of(device).quantise


def forget() -> None:
    """Decide again at the next call."""
    _DECIDED.clear()


def _kernel_of(device: torch.device) -> Kernel:
    if device not in _DECIDED:  # in each layer of each step: without the lock
        with _DECIDING:
            if device not in _DECIDED:
                _DECIDED[device] = _decide(device)
    return _DECIDED[device]


def _decide(device: torch.device) -> Kernel:
    plain = Kernel("reference", reference.attend, quantise)
    if device.type not in ("cpu", "cuda") or os.environ.get("FADE_KERNEL") == "reference":
        return plain
    try:
        if device.type == "cpu":
            cpu.self_test()
            return Kernel("cpu", cpu.attend, quantise)
        # triton: not on every system, and slow to import
        from fade_runtime.kernels.triton import attention as triton
        from fade_runtime.kernels.triton import pack_kernel, self_test

        self_test.self_test(device)
        return Kernel("triton", triton.attend, pack_kernel.quantise)
    except (FadeError, OSError, ImportError) as problem:
        warnings.warn(f"slow attention over packed tokens: {problem}", RuntimeWarning, stacklevel=4)
        return plain
