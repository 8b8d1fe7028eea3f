"""The CPU kernel: a small C file, compiled once with the machine's own compiler and checked against the reference.

The library lies in the user's cache directory under a name made of source, flags, compiler and processor, so another
machine with the same home directory builds its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from fade_runtime import quant
from fade_runtime.kernels import reference
from fade_runtime.packed import PackedTokens, pack_tokens
from predictor.errors import FadeError
from predictor.files import write_aside

SOURCE = Path(__file__).with_name("attend.c")
# -ffast-math proper would switch the whole process to flush denormals; these flags only let sums be reordered.
FLAGS = (
    "-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11", "-fno-math-errno",
    "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in info.splitlines() if line.startswith(("flags", "Features"))), "")


def build() -> Path:
    """Compile the kernel unless it is there already; return the library.

    Raises:
        FadeError: no C compiler, or one that fails.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FadeError("no C compiler found; install gcc for the fast CPU kernel")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    facts = "\n".join([SOURCE.read_text(), *FLAGS, version, platform.machine(), _processor()])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fade-predictor"
    library = cache / f"attend-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        with write_aside(library) as aside:
            aside.parent.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(
                [compiler, *FLAGS, str(SOURCE), "-o", str(aside), "-lm"], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise FadeError(f"{compiler} could not compile {SOURCE.name}: {done.stderr.strip().splitlines()[:1]}")
    return library


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    library.attend.argtypes = [ctypes.c_int] * 6 + [ctypes.c_void_p] * 17
    library.attend.restype = ctypes.c_int
    return library


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedTokens,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    packed_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Same as :func:`fade_runtime.kernels.reference.attend`, in C.

    A bias, or a head dim that is no multiple of 16, goes to the reference.
    """
    rows, queries, dim = query.shape
    if bias is not None or packed_bias is not None or dim % 16:
        return reference.attend(query, key, value, packed, weights, bias, packed_bias)
    given = [t.float().contiguous() for t in (query, quant.hadamard(query), key, value)]
    stored = [
        t.contiguous()
        for t in (
            packed.page_len, packed.page_row, packed.key_codes, packed.key_scale, packed.key_zero,
            packed.value_codes, packed.value_scale, packed.value_zero,
        )
    ]  # fmt: skip
    out, rotated = torch.empty(2, rows, queries, dim)
    mass = packed_mass = None
    if weights is not None:
        weights = weights.float().contiguous()
        mass, packed_mass = torch.empty(rows, key.shape[1]), torch.empty(len(packed))
    pointers = [
        None if t is None else t.data_ptr() for t in (*given, *stored, weights, out, rotated, mass, packed_mass)
    ]
    groups, pages = packed.value_scale.shape[1], len(packed.page_len)
    if _library().attend(rows, queries, dim, groups, pages, key.shape[1], *pointers):
        raise MemoryError("the CPU kernel could not allocate its buffers")
    return out.add_(quant.hadamard(rotated)).to(query.dtype), mass, packed_mass


def self_test() -> None:
    """Compare the compiled kernel with the reference on ragged rows.

    Raises:
        FadeError: it cannot be built, or its results differ.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([0] * 70 + [2] * 5)
    body_key, body_value = torch.randn(2, 75, 96, generator=generator)
    packed = pack_tokens(body_key, body_value, rows, torch.arange(75), None)
    key, value = torch.randn(2, 3, 70, 96, generator=generator)
    query, weights = torch.randn(3, 5, 96, generator=generator), torch.rand(5, generator=generator)
    ours, theirs = (f(query, key, value, packed, weights) for f in (attend, reference.attend))
    for name, mine, other in zip(("output", "statistics", "packed statistics"), ours, theirs):
        if mine is None or other is None or not torch.allclose(mine, other, atol=1e-4, rtol=1e-4):
            raise FadeError(f"the compiled CPU kernel disagrees with the reference in its {name}; using the reference")
