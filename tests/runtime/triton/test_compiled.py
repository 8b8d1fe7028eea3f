"""What the Triton kernels compile to, ahead of time and without a GPU: registers, spills, shared memory.

The host code runs as it is, up to the launch: a driver that knows nothing but its target stands in for a GPU, and
kernels are compiled instead of run.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton as triton_package
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fade_runtime.kernels.reference import Part
from fade_runtime.kernels.triton import attention as triton
from fade_runtime.kernels.triton import pack_kernel as triton_pack
from fade_runtime.kernels.triton.codes import unpacking
from fade_runtime.storage.packed import Bits, pack_tokens
from predictor.rope import Table

CUOBJDUMP = Path(triton_package.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED = {80: 163, 90: 227, 100: 227}  # KiB of shared memory that a program can have at most
DEFAULT, WIDE = (4, 4, 4, 2), (8, 8, 4, 4)


class _Target:
    """Stands where a GPU's driver would."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # each has compiled kernels of its own

    def get_current_stream(self, device: int) -> int:
        return 0


binaries: set[int] = set()  # that were compiled
Compiled = dict[str, tuple[int, int, float]]  # registers, bytes of stack, KiB of shared memory


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiled:
    """What was compiled since: the most of each kernel by its name."""
    found: Compiled = {}

    def compile_only(kernel: Any, grid: Any, beside: Any, /, **arguments: Any) -> None:
        binary = kernel.warmup(grid=grid, **arguments)
        (tmp_path / "cubin").write_bytes(binary.asm["cubin"])
        words = [str(CUOBJDUMP), "--dump-resource-usage", str(tmp_path / "cubin")]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
        mine = used["REG"], used["STACK"] + used["LOCAL"], binary.metadata.shared / 1024
        name = kernel.fn.__name__
        binaries.add(id(binary))
        found[name] = tuple(max(pair) for pair in zip(mine, found.get(name, mine)))

    for module in (triton, triton_pack):
        monkeypatch.setattr(module, "launch", compile_only)
    return found


def _attend(
    capability: int,
    dim: int,
    *,
    bits: tuple[int, ...] = DEFAULT,
    kind: str = "plain",
    everything: bool = False,
    sliding: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 70,
    window: int = 132,
    page: int = 64,
) -> None:
    """Compile what one decode step launches, as the launch table says; everything: statistics, biases, a cap, sinks.

    sliding: a layer whose queries read a window.
    """
    driver.set_active(_Target(capability))
    slots = torch.arange(tokens)
    low = None if kind == "plain" else slots % 2 == 0
    key, value = torch.randn(2, tokens, dim)
    rows = torch.zeros_like(slots)
    packed = pack_tokens(key, value, rows, slots, None, low=low, bits=Bits(*bits), page_tokens=page)
    since = torch.zeros(1, 8, dtype=torch.int32) if sliding else None
    part = Part(packed, bias=torch.zeros(tokens, 8) if everything else None, since=since)
    if kind == "rotated":
        part = Part(packed, Table(torch.ones(99, dim), torch.zeros(99, dim)), slots, part.bias)
    full = torch.randn(3, 1, window, dim).to(dtype)
    weights, bias = (torch.ones(8), torch.zeros(1, 8, window)) if everything else (None, None)
    query, cap, sinks = full[0, :, :8], 30.0 if everything else None, torch.zeros(1, 8) if everything else None
    triton.fused(query, full[1], full[2], [part], weights, bias, cap, sinks, [triton.launch_of(query, part)])


CASES = {
    **{f"sm_{target} dim {dim} plain": (target, dim, {}, 255, 42) for target in SHARED for dim in (64, 128)},
    **{
        f"sm_{target} dim 128 both tiers, everything": (target, 128, dict(kind="tiered", everything=True), 232, 46)
        for target in SHARED
    },
    "sm_90 dim 128 small pages": (90, 128, dict(page=32), 255, 42),
    "sm_90 dim 128 small pages, both tiers, everything": (
        90,
        128,
        dict(kind="tiered", everything=True, page=32),
        232,
        46,
    ),
    "sm_90 dim 64 both tiers, everything": (90, 64, dict(kind="tiered", everything=True), 168, 28),
    "sm_90 dim 96 both tiers": (90, 96, dict(kind="tiered"), 232, 46),
    "sm_90 dim 256 plain": (90, 256, {}, 255, 76),
    "sm_90 dim 256 both tiers, everything": (90, 256, dict(kind="tiered", everything=True), 232, 76),
    "sm_80 dim 128 both tiers, sliding": (80, 128, dict(kind="tiered", sliding=True), 255, 46),
    "sm_90 dim 128 sliding": (90, 128, dict(sliding=True), 255, 42),
    "sm_90 dim 128 8 bits": (90, 128, dict(bits=WIDE), 255, 60),
    "sm_90 dim 128 float32": (90, 128, dict(dtype=torch.float32), 255, 82),
    "sm_90 dim 128 rotated keys, everything": (90, 128, dict(kind="rotated", everything=True), 255, 132),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_stays_within_registers_and_shared_memory(name: str, compiled: Compiled) -> None:
    target, dim, options, registers, shared = CASES[name]
    _attend(target, dim, **options)
    assert compiled["attend_kernel"][1] == 0, f"spills {compiled}"
    assert compiled["attend_kernel"][0] <= registers
    assert compiled["attend_kernel"][2] <= shared < SHARED[target]
    for other in compiled.keys() - {"attend_kernel"}:
        assert compiled[other][0] <= 96
        assert compiled[other][1] == 0
        assert compiled[other][2] <= 4


@pytest.mark.usefixtures("compiled")
def test_nothing_is_compiled_again_while_the_text_grows() -> None:
    _attend(90, 64, everything=True)
    before = set(binaries)
    for tokens, window in ((1, 133), (64, 144), (1024, 1), (128, 64), (1040, 128)):
        _attend(90, 64, everything=True, tokens=tokens, window=max(window, 8))
    assert binaries == before


@pytest.mark.parametrize(("target", "dim"), [(80, 64), (90, 128), (100, 128), (90, 96), (90, 256)], ids=str)
def test_packing_stays_within_registers_and_shared_memory(target: int, dim: int, compiled: Compiled) -> None:
    driver.set_active(_Target(target))
    body = torch.randn(2, 70, dim)
    rows, low = torch.zeros(70, dtype=torch.long), torch.arange(70) < 5
    packed = pack_tokens(body[0], body[1], rows, torch.arange(70), None, low=low)
    triton_pack.quantise(body[0].bfloat16(), body[1].bfloat16(), packed.page_len, Bits())
    triton_pack.dequantise(packed, torch.bfloat16)
    assert set(compiled) == {"pack_keys_kernel", "pack_values_kernel", "unpack_kernel"}
    for registers, spilled, shared in compiled.values():
        assert registers <= 255
        assert spilled == 0, f"spills {compiled}"
        assert shared <= 66 < SHARED[target]


@pytest.mark.parametrize(("bits", "shift"), [(b, s) for b in (2, 4, 8) for s in range(0, 8, b)], ids=str)
def test_unpacking_in_ptx_does_what_it_says(bits: int, shift: int) -> None:
    """The instructions, carried out here as the PTX manual defines them, on all bytes."""
    levels = 2**bits - 1
    for first in range(0, 256, 4):
        registers = {"$2": int.from_bytes(range(first, first + 4), "little")}
        for line in unpacking.fn(shift, levels).splitlines()[2:-1]:
            name, to, *words = re.findall(r"[\w.$]+", line)
            values = [registers[word] if word in registers else int(word, 0) for word in words]
            registers[to] = _INSTRUCTIONS[name](*values)
        halves = (registers["$0"] & 0xFFFF, registers["$0"] >> 16, registers["$1"] & 0xFFFF, registers["$1"] >> 16)
        codes = torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(torch.float16)
        assert codes.tolist() == [byte >> shift & levels for byte in range(first, first + 4)]


def _prmt(a: int, b: int, selector: int) -> int:
    eight = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(eight[selector >> 4 * i & 7] for i in range(4)), "little")


def _subtract(a: int, b: int) -> int:
    words = torch.tensor([a, b], dtype=torch.int64).to(torch.int32).view(torch.float16).view(2, 2)
    return int((words[0] - words[1]).view(torch.int32)) & 0xFFFFFFFF


_INSTRUCTIONS = {
    "shr.b32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "prmt.b32": _prmt,
    "mov.b32": lambda a: a,
    "sub.f16x2": _subtract,
}
