"""`python -m pipelines.bench tune`: measure how this GPU is best given the Triton kernel; write the launch table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

import torch

from fade_runtime.kernels.triton import launch_table as launches
from fade_runtime.kernels.triton.launch_table import Launch
from pipelines.benchmarks.gpu import WINDOW
from pipelines.benchmarks.gpu_layer import random_layer
from pipelines.benchmarks.gpu_timing import a_gpu, milliseconds
from predictor.errors import FadeError

ROWS, GROUP, LONG = 8, 4, 32768  # the layer that launches are compared on: kv heads, query group, tokens
WARPS, STAGES, PAGES, PROGRAMS = (1, 2, 4, 8), (1, 2, 3), (8, 16, 32), (2, 4, 8)
LENGTHS, QUERIES = (1024, 8192, 65536), (1, 16, 64, 256, 1024)  # where the dequantised layer is compared


@dataclass(frozen=True)
class TuneSettings:
    """Options of `pipelines.bench tune`.

    Args:
        dims: head dims.
        repeats: timed calls of each candidate.
        out: another table to write; it begins as a copy of the package's own.
    """

    dims: list[int] = field(default_factory=lambda: [64, 128])
    repeats: int = 20
    out: str | None = None


def tune(settings: TuneSettings) -> None:
    """Time the fused kernel with every number of warps and stages, then every cut of the rows, and note the fastest.

    Then find from how many queries a dequantised layer and SDPA are faster, by the tokens of a row. Keys in 4 bits;
    tokens of one tier, and of both. Rows go on top of the launch table, in place of earlier ones of this GPU.
    """
    dims, repeats = settings.dims, settings.repeats
    if repeats < 1 or min(dims, default=16) < 16:
        raise FadeError(f"repeats {repeats} and dims {dims} must be at least 1 and 16")
    device = a_gpu()
    from fade_runtime.kernels.triton import self_test as triton_check  # triton: Linux only

    triton_check.self_test(device)
    path, rows = launches.TABLE if settings.out is None else Path(settings.out), []
    for dim, kind in product(dims, ("plain", "tiered")):
        launch = best_launch(device, dim, kind, repeats)
        launch = replace(launch, dense=crossovers(device, dim, kind, launch, repeats))
        rows.append({"device": launches.name_of(device), "dim": dim, "bits": 4, "kind": kind, **asdict(launch)})
        print(rows[-1], flush=True)
    launches.add_rows(rows, path)
    print(f"written to {path}")


def best_launch(
    device: torch.device, dim: int, kind: str, repeats: int, tokens: int = LONG, warps: Sequence[int] = WARPS
) -> Launch:
    """The fastest launch for one decode step: warps and stages first, then the cut."""
    layer = random_layer(device, ROWS, tokens, WINDOW, GROUP, dim, low=kind == "tiered")
    start = launches.choose("any", dim, 4, kind)

    def median(launch: Launch) -> float:
        return _or_never(lambda: milliseconds(replace(layer, launch=launch).fused, device, repeats)[1])

    shapes = [replace(start, warps=w, stages=s) for w, s in product(warps, STAGES)]
    shape = min(shapes, key=median)
    return min((replace(shape, pages=p, programs=n) for p, n in product(PAGES, PROGRAMS)), key=median)


def crossovers(
    device: torch.device,
    dim: int,
    kind: str,
    launch: Launch,
    repeats: int,
    lengths: Sequence[int] = LENGTHS,
    queries: Sequence[int] = QUERIES,
) -> tuple[tuple[int, int], ...]:
    """By tokens of a row, the fewest of ``queries`` with which the dequantised layer is faster; see :class:`Launch`."""
    found = []
    for length in lengths:
        for count in queries:
            random = random_layer(device, ROWS, length, WINDOW, count, dim, low=kind == "tiered")
            layer = replace(random, launch=launch)
            fused, dense = (
                _or_never(lambda call=call: milliseconds(call, device, repeats, graph=False)[1])  # type: ignore[misc]
                for call in (layer.fused, layer.dequantised)
            )
            if dense < fused:
                found.append((0 if length == min(lengths) else length, count))
                break
    return tuple(found)


def _or_never(time: Callable[[], float]) -> float:
    """What was measured; infinity for a launch that the GPU refuses (too much shared memory, too many registers)."""
    from triton.runtime.errors import OutOfResources  # Linux only

    try:
        return time()
    except OutOfResources:
        return math.inf
