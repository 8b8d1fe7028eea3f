"""Times of calls on a GPU: launches left out, its cache flushed before each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from pipelines.benchmarks.timing import quantiles
from predictor.errors import FadeError

MIB = 2**20


def a_gpu() -> torch.device:
    """The current GPU.

    Raises:
        FadeError: there is none, or no Triton.
    """
    if not torch.cuda.is_available():
        raise FadeError("this benchmark needs a GPU that torch can use, and there is none; run it where there is one")
    try:
        import triton  # noqa: F401  Linux only
    except ImportError as problem:
        raise FadeError("this benchmark needs triton; pip install triton") from problem
    return torch.device("cuda", torch.cuda.current_device())


def milliseconds(
    call: Callable[[], Any], device: torch.device, repeats: int, graph: bool = True
) -> tuple[float, float, float]:
    """Quantiles .2, .5 and .8 of the time that a call takes on the GPU, launches left out, its cache flushed before.

    Args:
        call: without arguments. device: a GPU; on a CPU, the time of the call. repeats: timed calls.
        graph: replay the call as a CUDA graph; otherwise a call that waits for the CPU is timed with its waits.
    """
    on_gpu = device.type == "cuda"
    for _ in range(3 if on_gpu else 1):
        call()
    times = _gpu_times(call, device, repeats, graph) if on_gpu else _cpu_times(call, repeats)
    p20, p50, p80 = quantiles(times).values()
    return p20, p50, p80


def _cpu_times(call: Callable[[], Any], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return times


def _gpu_times(call: Callable[[], Any], device: torch.device, repeats: int, graph: bool) -> list[float]:
    run = call
    if graph:
        torch.cuda.synchronize(device)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            call()
        run = recorded.replay
    flush = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairs]


def copy_bandwidth(device: torch.device, size: int = 2**30) -> float:
    """Bytes per second, read and written, of a copy of ``size`` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (1e-3 * milliseconds(lambda: target.copy_(source), device, 20)[1])
