"""Benchmarks: `python -m pipelines.bench decode`. Every number is a ratio to a baseline of the same run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from pipelines import cli
from pipelines.benchmarks.collect import collect
from pipelines.benchmarks.compare import compare
from pipelines.benchmarks.gpu import cache_bytes, gpu
from pipelines.benchmarks.guard import guard
from pipelines.benchmarks.ledger import quantiles, this_commit
from pipelines.benchmarks.memory import memory
from pipelines.benchmarks.prefill import prefill
from pipelines.benchmarks.profile import profile
from pipelines.benchmarks.select import select
from pipelines.benchmarks.tune import tune
from predictor.errors import FadeError

STOCK, STATIC, LOW = "stock", "static", "k4v2"
TOLERANCE = 1e-3  # largest relative difference of logits between caches that hold the same values


def decode(
    model: str = "artefacts/models/smollm2-135m-instruct",
    contexts: list[int] = [2048, 4096, 8192],  # noqa: B006
    steps: int = 20,
    threads: int = 1,
    out: str | None = None,
    ledger: str | None = None,
) -> None:
    """Time one decode step over caches that hold the same values, method by method, interleaved.

    Keys and values are random, stored in 4 bits by the tiered cache, and given to the other caches as they read back
    from it: so all logits must agree, and nothing is printed when they do not. Methods: stock (DynamicCache), static
    (StaticCache, preallocated), int4 (the body in 4 bits), int4+statistics (the same, with the h2o policy's sums),
    k4v2 (all of the body in the low tier; held to a DynamicCache of what it reads back, which is not timed).

    Args:
        model: directory or hub id of a causal language model, loaded in float32.
        contexts: tokens in the cache before the first step.
        steps: timed steps of each method.
        threads: of torch.
        out: JSON lines file to add the rows to.
        ledger: CSV file to add the rows to, for `pipelines.bench compare`.
    """
    import torch

    from data.lm import load_lm
    from pipelines.evaluation.report import keep

    cli.at_least_one(("steps", steps), ("threads", threads), ("contexts", min(contexts, default=0)))
    torch.set_num_threads(threads)
    lm, _ = load_lm(model, "float32")
    rows = [row for context in contexts for row in _decode_rows(lm, context, steps)]
    keep(rows, model, out, ledger)
    print(f"{'context':>8} {'cache':<16} {'ms/step':>8} {'tokens/s':>9} {'of stock':>9} {'of static':>9} {'MiB':>7}")
    for row in rows:
        print(
            f"{row['context']:>8,} {row['method']:<16} {row['p50']:>8.1f} {1e3 / row['p50']:>9.2f} "
            f"{row['of_stock']:>8.2f}x {row['of_static']:>8.2f}x {row['bytes'] / 2**20:>7.1f}"
        )


def _decode_rows(lm: Any, context: int, steps: int) -> list[dict[str, Any]]:
    """Fill the caches of one context length, check that they agree, time them in turn."""
    import torch

    from fade_runtime.transformers_api import forward_kwargs
    from predictor.twin import dense_twin

    stock_model = dense_twin(lm)
    caches, twin = _filled(lm, context, context + steps + 1)
    models = {name: stock_model if name in (STOCK, STATIC) else lm for name in caches}
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for step in range(steps + 1):
            token = torch.randint(lm.config.vocab_size, (1, 1), generator=generator)
            logits = {}
            names = list(caches)
            for name in names[step % len(names) :] + names[: step % len(names)]:
                started = time.perf_counter()
                logits[name] = models[name](token, **forward_kwargs(caches[name], lm)).logits
                if step:  # the first warms up
                    seconds[name].append(time.perf_counter() - started)
            low = stock_model(token, **forward_kwargs(twin, lm)).logits
            # transformers' own two caches hold the same numbers: how far they are apart is rounding
            rounding = _agree(STATIC, logits.pop(STATIC), logits[STOCK], context, 10 * TOLERANCE)
            for name, got in logits.items():
                _agree(name, got, low if name == LOW else logits[STOCK], context, max(TOLERANCE, 4 * rounding))
    spreads = {name: quantiles([1e3 * one for one in each]) for name, each in seconds.items()}
    return [
        {
            "bench": "decode",
            "context": context,
            "method": name,
            "unit": "ms",
            **spread,
            "of_stock": spreads[STOCK]["p50"] / spread["p50"],
            "of_static": spreads[STATIC]["p50"] / spread["p50"],
            "baseline": STOCK,
            "ratio": spread["p50"] / spreads[STOCK]["p50"],
            "bytes": cache_bytes(caches[name]),
        }
        for name, spread in spreads.items()
    ]


def _filled(lm: Any, context: int, limit: int) -> tuple[dict[str, Any], Any]:
    """Caches of ``context`` tokens that read back the same keys and values, and a DynamicCache of what k4v2 reads."""
    import torch
    from transformers import DynamicCache, StaticCache

    from fade_runtime import FadeConfig, create_tiered_cache
    from fade_runtime.transformers_api import geometry, text_config

    caches = {
        STOCK: DynamicCache(config=lm.config),
        STATIC: StaticCache(config=lm.config, max_cache_len=limit),
        "int4": create_tiered_cache(lm, FadeConfig.safe()),
        "int4+statistics": create_tiered_cache(lm, FadeConfig(int4_budget=1.0, eviction_policy="h2o")),
        LOW: create_tiered_cache(lm, FadeConfig(int4_budget=0, low_budget=None)),
    }
    twin = DynamicCache(config=lm.config)
    heads, dim = geometry(text_config(lm))
    generator = torch.Generator().manual_seed(context)
    for index in range(len(caches["int4"].layers)):
        key, value = torch.randn(2, 1, heads, context, dim, generator=generator)
        key /= 4  # attention that is neither flat nor on one token, where rounding would decide
        for name in ("int4", "int4+statistics", LOW):
            layer = caches[name].layers[index]
            layer.update(key, value, kwargs={})
            layer.compress()
        twin.update(*caches[LOW].layers[index].materialise(), index)
        key, value = caches["int4"].layers[index].materialise()
        for name in (STOCK, STATIC):
            caches[name].update(key, value, index)
    return caches, twin


def _agree(name: str, got: Any, expected: Any, context: int, tolerance: float) -> float:
    """Refuse to report times of caches whose logits differ; returns by how much they do."""
    off = float((got - expected).norm() / expected.norm())
    if not off < tolerance:
        raise FadeError(
            f"bench at {context} tokens: logits of {name} are {off:.1e} away from those of a DynamicCache "
            "of the same values; no times are shown"
        )
    return off


COMMANDS: dict[str, Callable[..., Any]] = {
    "collect": collect,
    "select": select,
    "decode": decode,
    "prefill": prefill,
    "memory": memory,
    "profile": profile,
    "gpu": gpu,
    "tune": tune,
    "guard": guard,
    "compare": compare,
}


def main(argv: list[str] | None = None) -> int:
    """Entry point: the first argument names the benchmark."""
    given = sys.argv[1:] if argv is None else argv
    if not given or given[0] not in COMMANDS:
        print(f"usage: python -m pipelines.bench {{{','.join(COMMANDS)}}} [options]; --help after a name lists them")
        return 0 if given[:1] in (["--help"], ["-h"]) else 2
    command = COMMANDS[given[0]]
    this_commit()
    if len(given) == 1 and command is not compare:  # as it is on a machine without the option parser
        return cli.guarded(lambda _: command(), [])
    return cli.run(command, given[1:], positional=command is compare)


if __name__ == "__main__":
    sys.exit(main())
