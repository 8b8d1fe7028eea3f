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

from fade_runtime.kernels import reference
from fade_runtime.packed import PackedTokens, pack_tokens
from predictor.errors import FadeError
from predictor.files import write_aside

SOURCE = Path(__file__).with_name("packed_attention.c")
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
    library = cache / f"packed_attention-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
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
    library.packed_attention.argtypes = [ctypes.c_int] * 5 + [ctypes.c_void_p] * 12
    library.packed_attention.restype = ctypes.c_int
    return library


def packed_attention(
    query: Tensor, packed: PackedTokens, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as :func:`fade_runtime.kernels.reference.packed_attention`, in C; a bias or a head dim that is no
    multiple of 16 goes to the reference.
    """
    rows, queries, dim = query.shape
    if bias is not None or dim % 16:
        return reference.packed_attention(query, packed, bias)
    given = query.float().contiguous()
    out = torch.empty(rows, queries, dim)
    lse = torch.empty(rows, queries)
    scores = torch.empty(len(packed), queries)
    stored = (
        packed.page_len, packed.page_row, packed.key_codes, packed.key_scale, packed.key_zero,
        packed.value_codes, packed.value_scale, packed.value_zero,
    )  # fmt: skip
    pointers = [t.contiguous().data_ptr() for t in (given, *stored, out, lse, scores)]
    groups = packed.value_scale.shape[1]
    if _library().packed_attention(rows, queries, dim, groups, len(packed.page_len), *pointers):
        raise MemoryError("the CPU kernel could not allocate its buffers")
    return out.to(query.dtype), lse, scores


def self_test() -> None:
    """Compare the compiled kernel with the reference on ragged rows.

    Raises:
        FadeError: it cannot be built, or its results differ.
    """
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    rows = torch.tensor([0] * 70 + [2] * 5)
    packed = pack_tokens(torch.randn(75, 96), torch.randn(75, 96), rows, torch.arange(75), None)
    query = torch.randn(3, 5, 96)
    torch.random.set_rng_state(state)
    for name, ours, theirs in zip(
        ("out", "lse", "scores"), packed_attention(query, packed), reference.packed_attention(query, packed)
    ):
        if not torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4):
            raise FadeError(f"the compiled CPU kernel disagrees with the reference in {name}; using the reference")
