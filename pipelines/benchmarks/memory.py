"""`python -m pipelines.bench memory`: the most memory that a whole run takes with each cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from data.lm import DEMO_MODEL, load_lm
from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines import cli
from pipelines.benchmarks.ledger import record
from pipelines.benchmarks.timing import STOCK, quantiles, ratio
from pipelines.reporting.machine import machine
from pipelines.reporting.rows import add_jsonl
from predictor.errors import FadeError

METHODS = (STOCK, "safe", "h2o", "learned")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM = 100  # tokens of the prompt that warms up: more than sinks and window, so that something is packed
MIB = 2**20


@dataclass(frozen=True)
class MemorySettings:
    """Options of `pipelines.bench memory`.

    Args:
        model: directory or hub id of a causal language model.
        predictor: bundle directory, `models:/NAME@alias` or hub id; adds the learned cache.
        contexts: tokens of the prompt, which are random.
        new_tokens: tokens generated after it.
        repeats: processes for each cache, in turn; the median is printed.
        budget: share of the context that evicting caches keep.
        dtype: float32, bfloat16 or float16.
        threads: of torch.
        out: JSON lines file to add the rows to.
        ledger: CSV file to add the rows to, for `pipelines.bench compare`.
    """

    model: str = DEMO_MODEL
    predictor: str | None = None
    contexts: list[int] = field(default_factory=lambda: [2048])
    new_tokens: int = 64
    repeats: int = 1
    budget: float = 0.25
    dtype: str = "float32"
    threads: int = 1
    out: str | None = None
    ledger: str | None = None


@dataclass(frozen=True)
class OneRun:
    """One cache to be measured in a process of its own; options as in :class:`MemorySettings`."""

    method: str
    context: int
    new_tokens: int
    model: str
    predictor: str | None
    budget: float
    dtype: str
    threads: int


def memory(settings: MemorySettings) -> None:
    """Run `generate` on a long prompt with each cache, in a process of its own, and print the peak of its memory.

    The peak is that of the resident set (VmHWM), cleared after the model is loaded and has run once: so "peak" is the
    whole process less what loading took for a moment, and "over the model" is what prompt, cache and decoding added to
    the model at rest. Activations of the prompt are part of it and are the same with every cache. The first new token
    must be stock's, or nothing is printed. Caches: stock (DynamicCache), safe (all in 4 bits), h2o, and learned with a
    predictor. Needs Linux.
    """
    numbers = ("new_tokens", settings.new_tokens), ("repeats", settings.repeats), ("threads", settings.threads)
    cli.at_least_one(*numbers, ("contexts", min(settings.contexts, default=0)))
    if not CLEAR.exists():
        raise FadeError(f"memory is read from {STATUS}, which this system lacks; run it on Linux")
    rows = [row for context in settings.contexts for row in _measure(settings, context)]
    _keep(settings, rows)
    print(f"{'prompt':>8} {'cache':<8} {'peak, MiB':>10} {'of stock':>9} {'over the model, MiB':>20} {'of stock':>9}")
    for row in rows:
        peak, added = (_times(row[f"{what}_of_stock"]) for what in ("peak", "added"))
        print(
            f"{row['context']:>8,} {row['method']:<8} {row['peak'] / MIB:>10.0f} {peak} "
            f"{row['added'] / MIB:>20.1f} {added}"
        )


def _measure(settings: MemorySettings, context: int) -> list[dict[str, Any]]:
    """Run each cache in processes of its own; rows of one context."""
    options = {name: getattr(settings, name) for name in ("new_tokens", "model", "predictor", "budget", "dtype")}
    methods = [name for name in METHODS if name != "learned" or settings.predictor is not None]
    runs = [
        [_in_process(OneRun(method=name, context=context, threads=settings.threads, **options)) for name in methods]
        for _ in range(settings.repeats)
    ]
    return _rows(context, methods, runs)


def _keep(settings: MemorySettings, rows: Sequence[dict[str, Any]]) -> None:
    """Add the rows to the files that are named."""
    name, dtype = Path(settings.model).name, settings.dtype
    if settings.out is not None:
        add_jsonl(Path(settings.out), [{**row, "model": name, "dtype": dtype, **machine()} for row in rows])
    for what in ("peak", "added"):
        shared = {"bench": f"memory {what}", "unit": "bytes", "baseline": STOCK, "threads": settings.threads}
        record(
            settings.ledger,
            [{**row, **shared, **row[f"{what}_spread"], "ratio": row[f"{what}_of_stock"]} for row in rows],
            model=f"{name} {dtype}",
        )


def _times(x: float | None) -> str:
    return f"{'-':>9}" if x is None else f"{x:>8.3f}x"


def _rows(context: int, methods: Sequence[str], runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians over repeats, beside stock's, which comes first; None beside a stock that added nothing."""
    for run in runs:
        for name, one in zip(methods, run):
            if one["first"] != run[0]["first"]:
                raise FadeError(
                    f"prompt of {context} tokens: {name} begins with token {one['first']}, {STOCK} with "
                    f"{run[0]['first']}; no memory is shown"
                )
    rows: list[dict[str, Any]] = []
    for name, *each in zip(methods, *runs):
        row = {key: median(one[key] for one in each) for key in ("peak", "added", "resting")}
        stock = rows[0] if rows else row
        ratios = {f"{key}_of_stock": ratio(row[key], stock[key]) for key in ("peak", "added")}
        spreads = {f"{key}_spread": quantiles([one[key] for one in each]) for key in ("peak", "added")}
        rows.append({"bench": "memory", "context": context, "method": name, **row, **ratios, **spreads})
    return rows


def _in_process(run: OneRun) -> dict[str, Any]:
    """Measure one cache in a new process.

    Raises:
        FadeError: the process failed; with its last line.
    """
    words = [sys.executable, "-m", "pipelines.benchmarks.memory", json.dumps(asdict(run))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise FadeError(f"{run.method} at {run.context} tokens: {last.removeprefix('error: ')}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_one(run: OneRun) -> dict[str, Any]:
    """Generate with one cache in this process.

    Returns:
        resting: bytes of the process before; peak: the most while generating; added: their difference, which is 0 where
        memory that was there already sufficed; first: the first new token.
    """
    torch.set_num_threads(run.threads)
    lm, _ = load_lm(run.model, run.dtype)
    config = _config(run)

    def generate(length: int, count: int) -> int:
        cache = DynamicCache(config=lm.config) if config is None else create_tiered_cache(lm, config)
        size, generator = lm.config.get_text_config().vocab_size, torch.Generator().manual_seed(length)
        prompt = torch.randint(size, (1, length), generator=generator)
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        new = lm.generate(prompt, attention_mask=torch.ones_like(prompt), **forward_kwargs(cache, lm), **options)
        return int(new[0, length])

    generate(WARM, 2)  # libraries, thread pools and kernels come now
    CLEAR.write_text("5")
    resting = status_bytes("VmRSS")
    first = generate(run.context, run.new_tokens)
    peak = max(status_bytes("VmHWM"), resting)  # the mark is kept from counters that lag behind, and may lie below
    return {"resting": resting, "peak": peak, "added": peak - resting, "first": first}


def _config(run: OneRun) -> FadeConfig | None:
    if run.method == STOCK:
        return None
    if run.method == "safe":
        return FadeConfig.safe()
    return FadeConfig(int4_budget=run.budget, eviction_policy=run.method, predictor=run.predictor)


def status_bytes(name: str) -> int:
    """A field of this process's status, in bytes: VmRSS is resident now, VmHWM the most since it was cleared.

    Example:
        >>> status_bytes("VmHWM") >= status_bytes("VmRSS") > 0
        True
    """
    found = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(found[0].split()[1]) * 1024


if __name__ == "__main__":  # the process of one cache: its options as JSON, one line of JSON as the answer
    sys.exit(cli.guarded(lambda args: print(json.dumps(measure_one(OneRun(**json.loads(args[0])))))))
