"""What tests of the kernels share: the compiled kernel for each set of instructions, tokens of both tiers."""

import functools
import platform
from pathlib import Path

import pytest
import torch

from fade_runtime.kernels.cpu import attention as cpu
from fade_runtime.kernels.cpu import library
from fade_runtime.storage.packed import PackedTokens
from fade_runtime.storage.tiers import Tier
from predictor.errors import FadeError

SETS = {"native": "", "skylake-avx512": "avx512bw", "x86-64-v3": "avx2", "x86-64": "sse2"}  # and what they need


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "native")) for name in SETS])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel built for this processor, for AVX-512 that multiplies no bytes, for AVX2, and for no more than SSE2.

    A machine without any C compiler runs the reference alone.
    """
    if request.param != "native":
        info = Path("/proc/cpuinfo")
        flags = info.read_text().split() if platform.machine() == "x86_64" and info.exists() else []
        if SETS[request.param] not in flags:
            pytest.skip(f"this machine cannot run {request.param}")
    try:
        library = _library(request.param)
    except FadeError as problem:
        if "no C compiler" in str(problem):
            pytest.skip(str(problem))
        raise
    monkeypatch.setattr(cpu, "_library", lambda: library)


_library = functools.cache(library.load)


def mixed(packed: PackedTokens) -> PackedTokens:
    """Tokens of both tiers in pages with gaps."""
    tiers = torch.tensor([Tier.HIGH, Tier.LOW, Tier.EVICTED])[torch.randint(3, (len(packed),))]
    tiers[0] = Tier.LOW
    return packed.retier(tiers)
