"""`python -m pipelines.bench guard`: what the guard's looks at true attention cost beside the decoding they watch."""

from __future__ import annotations

import time
from typing import Any

from pipelines import cli
from pipelines.benchmarks.ledger import quantiles
from pipelines.benchmarks.select import filled


def guard(
    model: str = "artefacts/models/smollm2-135m-instruct",
    contexts: list[int] = [2048, 8192],  # noqa: B006
    budget: float = 0.2,
    spill: str = "host",
    spill_dir: str | None = None,
    monitor_every: int | None = None,
    steps: int = 128,
    threads: int = 1,
    out: str | None = None,
    ledger: str | None = None,
) -> None:
    """Decode over caches of random keys and values, and time the guard within each step.

    All evicted tokens are in the spill store, so each look is at as many tokens as there are.

    Args:
        model: directory or hub id of a causal language model, loaded in float32.
        contexts: tokens in the cache before the first step.
        budget: share of the context that is kept.
        spill: where evicted tokens are: host or disk. spill_dir: for disk.
        monitor_every: as in FadeConfig; its default if not given.
        steps: timed steps.
        threads: of torch.
        out: JSON lines file to add the rows to.
        ledger: CSV file to add the rows to, for `pipelines.bench compare`.
    """
    import torch

    from data.lm import load_lm
    from fade_runtime import FadeConfig
    from pipelines.evaluation.report import keep

    cli.at_least_one(("steps", steps), ("threads", threads), ("contexts", min(contexts, default=0)))
    torch.set_num_threads(threads)
    options: dict[str, Any] = {} if monitor_every is None else {"monitor_every": monitor_every}
    config = FadeConfig(
        int4_budget=budget, guard="warn", spill=spill, spill_dir=spill_dir, kl_target=1e9, kl_alarm=1e9, **options
    )
    lm, _ = load_lm(model, "float32")
    rows = [_row(lm, config, context, steps) for context in contexts]
    keep(rows, model, out, ledger)
    titles = f"{'context':>8} {'ms/step':>8} {'guard, ms/step':>15} {'share':>7} {'looks':>6} {'ms/look':>8}"
    print(f"{titles} {'spilled':>9}")
    for row in rows:
        print(
            f"{row['context']:>8,} {row['p50']:>8.1f} {row['guard_ms']:>15.2f} {row['share']:>7.2%} {row['looks']:>6} "
            f"{row['guard_ms'] * steps / max(row['looks'], 1):>8.2f} {row['spilled']:>9,}"
        )


def _row(lm: Any, config: Any, context: int, steps: int) -> dict[str, Any]:
    """Fill a cache, and take its steps."""
    import torch

    from fade_runtime.transformers_api import forward_kwargs

    cache, generator = filled(lm, config, context)
    whole, watched = [], []
    with torch.inference_mode():
        for step in range(steps + 1):
            token = torch.randint(lm.config.vocab_size, (1, 1), generator=generator)
            before, started = cache.monitor.ms, time.perf_counter()
            lm(token, **forward_kwargs(cache, lm))
            if step:  # the first warms up
                whole.append(1e3 * (time.perf_counter() - started))
                watched.append(cache.monitor.ms - before)
    plain = quantiles([all_of - of_guard for all_of, of_guard in zip(whole, watched)])
    share = sum(watched) / steps / plain["p50"]
    report = cache.monitor.report()
    return {
        "bench": "guard",
        "context": context,
        "method": config.spill,
        "unit": "ms",
        **plain,
        "guard_ms": sum(watched) / steps,
        "share": share,
        "baseline": "decode",
        "ratio": share,
        "looks": report["looks"],
        "spilled": report["spilled"]["tokens"],
        "monitor_every": config.monitor_every,
    }
