"""`python -m pipelines.bench gpu`: fused decode attention and whole decode steps on a GPU; needs no network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fade_runtime.kernels.triton.launch_table import name_of
from pipelines.benchmarks.gpu_layer import Layer, random_layer, stored_bytes
from pipelines.benchmarks.gpu_model import METHODS, SIZES, decode_row, random_llama
from pipelines.benchmarks.gpu_timing import MIB, a_gpu, copy_bandwidth, milliseconds
from pipelines.benchmarks.ledger import COLUMNS, add_rows, origin
from predictor.errors import FadeError

QUERY_HEADS, WINDOW = 32, 132  # of a layer; tokens in full precision: 4 sinks and 128 newest
DIFFERENCE = 0.02  # largest relative error of the fused kernel to SDPA over the same values
Cell = dict[str, Any]  # sizes of one measurement


@dataclass(frozen=True)
class GpuSettings:
    """Options of `pipelines.bench gpu`.

    Args:
        lengths: tokens in a layer.
        batches: sizes of the batch.
        groups: query heads of a kv head.
        dims: head dims.
        model: size of the random-weight Llama, 1b or 8b; None leaves it out.
        context: tokens of its prompt.
        steps: tokens that it decodes.
        repeats: timed calls of each method.
        minutes: no further measurement is begun after that long.
        out: CSV file to add the rows to.
    """

    lengths: list[int] = field(default_factory=lambda: [4096, 32768, 131072])
    batches: list[int] = field(default_factory=lambda: [1, 16])
    groups: list[int] = field(default_factory=lambda: [4, 8])
    dims: list[int] = field(default_factory=lambda: [64, 128])
    model: str | None = "8b"
    context: int = 32768
    steps: int = 24
    repeats: int = 30
    minutes: float = 7.5
    out: str = "docs/results/ledger.csv"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            FadeError: names the one that cannot be.
        """
        least = {
            "lengths": WINDOW + 1, "batches": 1, "groups": 1, "dims": 16, "context": WINDOW + 1, "steps": 1,
            "repeats": 1,
        }  # fmt: skip
        for name, bound in least.items():
            values = getattr(self, name)
            smallest = min(values, default=bound) if isinstance(values, list) else values
            if smallest < bound:
                raise FadeError(f"{name} {smallest} is too small; use at least {bound}")
        if any(QUERY_HEADS % group for group in self.groups):
            raise FadeError(f"groups {self.groups} must divide the {QUERY_HEADS} query heads of a layer")
        if self.model is not None and self.model not in SIZES:
            raise FadeError(f"model {self.model!r} is not known; use one of {', '.join(SIZES)}, or null")

    def layers(self) -> list[Cell]:
        """Sizes of the layers whose attention is timed."""
        names = ("dim", "group", "batch", "length")
        return [dict(zip(names, sizes)) for sizes in product(self.dims, self.groups, self.batches, self.lengths)]

    def caches(self) -> list[Cell]:
        """Caches that the model decodes with."""
        methods = METHODS if self.model is not None else ()
        return [dict(method=name, context=self.context, steps=self.steps) for name in methods]


def gpu(settings: GpuSettings) -> None:
    """Time the Triton kernel against SDPA on this GPU, then decode with a random-weight Llama.

    Parity comes first: the kernels against plain torch, then each layer's attention against SDPA over the same values;
    when it is red nothing is printed. A layer has 32 query heads, all but 132 tokens in 4 bits. Times are of the GPU
    alone, with its cache flushed before: "sdpa" over a full float16 cache (the faster of two ways to lay out the query
    group), "fused", and "dequantised", which unpacks the layer and runs SDPA over it. Bandwidth is relative to a
    measured copy. The model decodes with a full cache, all in 4 bits (safe) and evicting (balanced).
    """
    device = a_gpu()
    from fade_runtime.kernels.triton import self_test as triton_check  # triton: Linux only

    ends = time.monotonic() + 60 * settings.minutes
    triton_check.self_test(device)
    cells = list(_until(ends, settings.layers(), lambda cell: check_cell(device, **cell)))
    here, bandwidth = {**origin(name_of(device)), "threads": None}, copy_bandwidth(device)
    print(f"{here['device']}: copies {bandwidth / 1e12:.2f} TB/s; the kernels agree with plain torch and SDPA")
    for rows in (
        _until(ends, cells, lambda cell: attention_rows(device, bandwidth, settings.repeats, **cell)),
        _until(ends, settings.caches(), lambda cell: [decode_row(random_llama(settings.model or "", device), **cell)]),
    ):
        for row in rows:
            add_rows(Path(settings.out), COLUMNS, [{**here, **row}])
            print(_line(row), flush=True)


def _until(ends: float, cells: list[Cell], measure: Callable[[Cell], list[Cell]]) -> Iterator[Cell]:
    """Rows of each cell; what does not fit the memory or the time is named and left out."""
    for cell in cells:
        named = ", ".join(f"{name} {value}" for name, value in cell.items())
        if time.monotonic() > ends:
            print(f"left out, no time left: {named}")
            continue
        try:
            yield from measure(cell)
        except torch.OutOfMemoryError:
            print(f"left out, not enough memory: {named}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def check_cell(device: torch.device, *, dim: int, group: int, batch: int, length: int) -> list[Cell]:
    """Compare the fused kernel with SDPA over the same values; returns the cell, which may be timed now.

    Raises:
        FadeError: they differ.
    """
    layer = random_layer(device, batch * QUERY_HEADS // group, length - WINDOW, WINDOW, group, dim)
    fused, expected = layer.fused(), layer.dequantised()
    off = float((fused - expected).float().norm() / expected.float().norm())
    if not off < DIFFERENCE:
        raise FadeError(
            f"bench at head dim {dim}, group {group}, batch {batch}, {length} tokens: the fused kernel is {off:.1e} "
            "away from SDPA over the same values; no times are shown"
        )
    return [dict(dim=dim, group=group, batch=batch, length=length)]


def attention_rows(
    device: torch.device, bandwidth: float, repeats: int, *, dim: int, group: int, batch: int, length: int
) -> list[dict[str, Any]]:
    """Time the attention of one decode step over one layer, method by method."""
    heads = QUERY_HEADS // group
    layer = random_layer(device, batch * heads, length - WINDOW, WINDOW, group, dim)
    sdpa = _sdpa(layer, batch)
    full = 2 * batch * heads * length * dim * layer.query.element_size()
    times = {
        "sdpa": (min((milliseconds(way, device, repeats) for way in sdpa), key=lambda each: each[1]), full),
        "fused": (milliseconds(layer.fused, device, repeats), stored_bytes(layer)),
        "dequantised": (milliseconds(layer.dequantised, device, repeats, graph=False), stored_bytes(layer)),
    }
    base = times["sdpa"][0][1]
    return [
        {
            "bench": "attention", "layers": 1, "dim": dim, "group": group, "batch": batch, "length": length,
            "method": name, "unit": "ms", "p20": p20, "p50": p50, "p80": p80, "baseline": "sdpa", "ratio": p50 / base,
            "bytes": size, "share_of_copy": size / (1e-3 * p50) / bandwidth,
        }
        for name, ((p20, p50, p80), size) in times.items()
    ]  # fmt: skip


def _sdpa(layer: Layer, batch: int) -> list[Callable[[], Any]]:
    """SDPA over a full cache of the layer's size, with the query group as heads and as queries."""
    rows, group, dim = layer.query.shape
    shape = (rows, layer.length, dim)
    key, value = (torch.randn(shape, device=layer.query.device, dtype=layer.query.dtype) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    query = layer.query.reshape(batch, rows // batch * group, 1, dim)  # [B, query heads, 1, D]
    keys, values = (each.view(batch, rows // batch, *shape[1:]) for each in (key, value))  # [B, H, S, D]
    return [
        lambda: attend(query, keys, values, enable_gqa=True),
        lambda: attend(layer.query[:, None], key[:, None], value[:, None]),
    ]


def _line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    what = f"dim {row['dim']:>3} group {row['group']} batch {row['batch']:>2} {row['length']:>7,} {row['method']:<11}"
    if "tokens_per_second" in row:
        sizes = f"cache {row['bytes'] / MIB:,.0f} MiB, peak {row['peak_bytes'] / MIB:,.0f} MiB"
        more = f"{row['tokens_per_second']:>7.1f} tokens/s, {sizes}"
    else:
        more = f"{row['share_of_copy']:>6.0%} of copy bandwidth {1 / row['ratio']:>6.2f}x of sdpa"
    return f"{row['bench']:<10} {what} {row['p50']:>9.4f} ms ({row['p20']:.4f} to {row['p80']:.4f}) {more}"
