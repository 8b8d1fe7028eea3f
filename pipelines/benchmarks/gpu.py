"""`python -m pipelines.bench gpu`: fused decode attention and whole decode steps on a GPU; needs no network."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.benchmarks.ledger import COLUMNS, add_rows, origin, quantiles
from predictor.errors import FadeError

if TYPE_CHECKING:
    import torch

    from pipelines.benchmarks.gpu_layer import Layer

QUERY_HEADS, WINDOW = 32, 132  # of a layer; tokens in full precision: 4 sinks and 128 newest
DIFFERENCE = 0.02  # largest relative error of the fused kernel to SDPA over the same values
SIZES = {
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64),
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128),
}
VOCABULARY = 128256
METHODS = ("full", "safe", "balanced")  # caches of the model
MIB = 2**20


def gpu(
    lengths: list[int] = [4096, 32768, 131072],  # noqa: B006
    batches: list[int] = [1, 16],  # noqa: B006
    groups: list[int] = [4, 8],  # noqa: B006
    dims: list[int] = [64, 128],  # noqa: B006
    model: str | None = "8b",
    context: int = 32768,
    steps: int = 24,
    repeats: int = 30,
    minutes: float = 7.5,
    out: str = "docs/results/ledger.csv",
) -> None:
    """Time the Triton kernel against SDPA on this GPU, then decode with a random-weight Llama.

    Parity comes first: the kernels against plain torch, then each layer's attention against SDPA over the same values;
    when it is red nothing is printed. A layer has 32 query heads, all but 132 tokens in 4 bits. Times are of the GPU
    alone, with its cache flushed before: "sdpa" over a full float16 cache (the faster of two ways to lay out the query
    group), "fused", and "dequantised", which unpacks the layer and runs SDPA over it. Bandwidth is relative to a
    measured copy. The model decodes with a full cache, all in 4 bits (safe) and evicting (balanced).

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
    lists = {"lengths": (lengths, WINDOW + 1), "batches": (batches, 1), "groups": (groups, 1), "dims": (dims, 16)}
    single = {"context": ([context], WINDOW + 1), "steps": ([steps], 1), "repeats": ([repeats], 1)}
    for name, (values, least) in {**lists, **single}.items():
        if min(values, default=least) < least:
            raise FadeError(f"{name} {min(values)} is too small; use at least {least}")
    if any(QUERY_HEADS % group for group in groups):
        raise FadeError(f"groups {groups} must divide the {QUERY_HEADS} query heads of a layer")
    if model is not None and model not in SIZES:
        raise FadeError(f"model {model!r} is not known; use one of {', '.join(SIZES)}, or null")
    device = a_gpu()
    from fade_runtime.kernels.triton import self_test as triton_check
    from fade_runtime.kernels.triton.launch_table import name_of

    ends = time.monotonic() + 60 * minutes
    triton_check.self_test(device)
    names = ("dim", "group", "batch", "length")
    every = [dict(zip(names, cell)) for cell in product(dims, groups, batches, lengths)]
    cells = list(_until(ends, every, lambda cell: check_cell(device, **cell)))
    here, bandwidth = {**origin(name_of(device)), "threads": None}, copy_bandwidth(device)
    print(f"{here['device']}: copies {bandwidth / 1e12:.2f} TB/s; the kernels agree with plain torch and SDPA")
    steps_of = [dict(method=name, context=context, steps=steps) for name in METHODS if model is not None]
    for rows in (
        _until(ends, cells, lambda cell: attention_rows(device, bandwidth, repeats, **cell)),
        _until(ends, steps_of, lambda cell: [decode_row(random_llama(model or "", device), **cell)]),
    ):
        for row in rows:
            add_rows(Path(out), COLUMNS, [{**here, **row}])
            print(_line(row), flush=True)


def a_gpu() -> torch.device:
    """The current GPU.

    Raises:
        FadeError: there is none, or no Triton.
    """
    import torch

    if not torch.cuda.is_available():
        raise FadeError("this benchmark needs a GPU that torch can use, and there is none; run it where there is one")
    try:
        import triton  # noqa: F401
    except ImportError as problem:
        raise FadeError("this benchmark needs triton; pip install triton") from problem
    return torch.device("cuda", torch.cuda.current_device())


def _until(
    ends: float, cells: list[dict[str, Any]], measure: Callable[[dict[str, Any]], list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Rows of each cell; what does not fit the memory or the time is named and left out."""
    import torch

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


def check_cell(device: torch.device, *, dim: int, group: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Compare the fused kernel with SDPA over the same values; returns the cell, which may be timed now.

    Raises:
        FadeError: they differ.
    """
    from pipelines.benchmarks.gpu_layer import random_layer

    layer = random_layer(device, batch * QUERY_HEADS // group, length - WINDOW, WINDOW, group, dim)
    got, expected = layer.fused(), layer.dequantised()
    off = float((got - expected).float().norm() / expected.float().norm())
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
    from pipelines.benchmarks.gpu_layer import random_layer, stored_bytes

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
    import torch

    rows, group, dim = layer.query.shape
    shape = (rows, layer.length, dim)
    key, value = (torch.randn(shape, device=layer.query.device, dtype=layer.query.dtype) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    query = layer.query.reshape(batch, rows // batch * group, 1, dim)
    keys, values = (each.view(batch, rows // batch, *shape[1:]) for each in (key, value))
    return [
        lambda: attend(query, keys, values, enable_gqa=True),
        lambda: attend(layer.query[:, None], key[:, None], value[:, None]),
    ]


def copy_bandwidth(device: torch.device, size: int = 2**30) -> float:
    """Bytes per second, read and written, of a copy of ``size`` bytes."""
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (1e-3 * milliseconds(lambda: target.copy_(source), device, 20)[1])


def milliseconds(
    call: Callable[[], Any], device: torch.device, repeats: int, graph: bool = True
) -> tuple[float, float, float]:
    """Quantiles .2, .5 and .8 of the time that a call takes on the GPU, launches left out, its cache flushed before.

    Args:
        call: without arguments. device: a GPU; on a CPU, the time of the call. repeats: timed calls.
        graph: replay the call as a CUDA graph; otherwise a call that waits for the CPU is timed with its waits.
    """
    import torch

    for _ in range(3 if device.type == "cuda" else 1):
        call()
    if device.type != "cuda":
        spent = []
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            spent.append(1e3 * (time.perf_counter() - started))
        return _spread(spent)
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
    return _spread([start.elapsed_time(end) for start, end in pairs])


def _spread(times: list[float]) -> tuple[float, float, float]:
    p20, p50, p80 = quantiles(times).values()
    return p20, p50, p80


@functools.lru_cache(maxsize=1)
def random_llama(size: str, device: torch.device) -> Any:
    """A Llama of one of :data:`SIZES` with random weights, in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads: Any = dict(num_attention_heads=32, num_key_value_heads=8, **SIZES[size])
    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2**18, **heads)
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def decode_row(lm: Any, *, method: str, context: int, steps: int) -> dict[str, Any]:
    """Decode with one cache: time of a step, tokens per second, peak of the GPU's memory from the prompt on."""
    import torch
    from transformers import DynamicCache

    from fade_runtime import FadeConfig, create_tiered_cache
    from fade_runtime.transformers_api import forward_kwargs

    config, device = lm.config, lm.device
    cache: Any = DynamicCache(config=config)
    if method != "full":
        cache = create_tiered_cache(lm, getattr(FadeConfig, method)())
    ids = torch.randint(config.vocab_size, (1, context + steps + 2), device=device)
    spent = []
    on_gpu = device.type == "cuda"
    wait = functools.partial(torch.cuda.synchronize, device) if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        lm(ids[:, :context], logits_to_keep=1, **forward_kwargs(cache, lm))
        for at in range(context, context + steps + 2):
            wait()
            started = time.perf_counter()
            lm(ids[:, at : at + 1], **forward_kwargs(cache, lm))
            wait()
            spent.append(1e3 * (time.perf_counter() - started))
    spread = quantiles(spent[2:])  # the first compile
    return {
        "bench": "decode", "dim": config.head_dim, "layers": config.num_hidden_layers, "batch": 1,
        "group": config.num_attention_heads // config.num_key_value_heads, "length": context, "method": method,
        "unit": "ms", **spread, "bytes": cache_bytes(cache), "tokens_per_second": 1e3 / spread["p50"],
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }  # fmt: skip


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds."""
    if hasattr(cache, "memory_report"):
        return cache.memory_report()["resident_bytes"]
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))


def _line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    what = f"dim {row['dim']:>3} group {row['group']} batch {row['batch']:>2} {row['length']:>7,} {row['method']:<11}"
    if "tokens_per_second" in row:
        sizes = f"cache {row['bytes'] / MIB:,.0f} MiB, peak {row['peak_bytes'] / MIB:,.0f} MiB"
        more = f"{row['tokens_per_second']:>7.1f} tokens/s, {sizes}"
    else:
        more = f"{row['share_of_copy']:>6.0%} of copy bandwidth {1 / row['ratio']:>6.2f}x of sdpa"
    return f"{row['bench']:<10} {what} {row['p50']:>9.4f} ms ({row['p20']:.4f} to {row['p80']:.4f}) {more}"
