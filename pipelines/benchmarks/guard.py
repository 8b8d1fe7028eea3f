"""`python -m pipelines.bench guard`: what the guard's probes of true attention cost beside the decoding they watch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from fade_runtime import FadeConfig
from fade_runtime.transformers_api import forward_kwargs
from pipelines.benchmarks.caches import filled
from pipelines.benchmarks.settings import ContextSettings
from pipelines.benchmarks.timing import quantiles


@dataclass(frozen=True)
class GuardBenchSettings(ContextSettings):
    """Options of `pipelines.bench guard`.

    Args:
        contexts: tokens in the cache before the first step.
        budget: share of the context that is kept.
        spill: where evicted tokens are: host or disk.
        spill_dir: for disk.
        monitor_every: as in FadeConfig; its default if not given.
        steps: timed steps.
    """

    contexts: list[int] = field(default_factory=lambda: [2048, 8192])
    budget: float = 0.2
    spill: str = "host"
    spill_dir: str | None = None
    monitor_every: int | None = None
    steps: int = 128

    def config(self) -> FadeConfig:
        """A guard that probes and never acts."""
        options: dict[str, Any] = dict(spill=self.spill, spill_dir=self.spill_dir, kl_target=1e9, kl_alarm=1e9)
        if self.monitor_every is not None:
            options["monitor_every"] = self.monitor_every
        return FadeConfig(int4_budget=self.budget, guard="warn", **options)


def guard(settings: GuardBenchSettings) -> None:
    """Decode over caches of random keys and values, and time the guard within each step.

    All evicted tokens are in the spill store, so each probe reads as many tokens as there are.
    """
    steps = settings.steps
    settings.at_least_one(steps=steps)
    config = settings.config()
    lm, _ = settings.load()
    rows = [_row(lm, config, context, steps) for context in settings.contexts]
    settings.keep(rows)
    titles = f"{'context':>8} {'ms/step':>8} {'guard, ms/step':>15} {'share':>7} {'probes':>6} {'ms/probe':>8}"
    print(f"{titles} {'spilled':>9}")
    for row in rows:
        print(
            f"{row['context']:>8,} {row['p50']:>8.1f} {row['guard_ms']:>15.2f} {row['share']:>7.2%} {row['probes']:>6} "
            f"{row['guard_ms'] * steps / max(row['probes'], 1):>8.2f} {row['spilled']:>9,}"
        )


def _row(lm: Any, config: FadeConfig, context: int, steps: int) -> dict[str, Any]:
    """Fill a cache, and take its steps."""
    cache, generator = filled(lm, config, context)
    whole, guarding = [], []  # milliseconds of each step, and of the guard in it
    with torch.inference_mode():
        for step in range(steps + 1):
            token = torch.randint(lm.config.vocab_size, (1, 1), generator=generator)
            before, started = cache.monitor.ms, time.perf_counter()
            lm(token, **forward_kwargs(cache, lm))
            if step:  # the first warms up
                whole.append(1e3 * (time.perf_counter() - started))
                guarding.append(cache.monitor.ms - before)
    unguarded = quantiles([step - in_guard for step, in_guard in zip(whole, guarding)])
    fraction = sum(guarding) / steps / unguarded["p50"]
    report = cache.monitor.report()
    return {
        "bench": "guard",
        "context": context,
        "method": config.spill,
        "unit": "ms",
        **unguarded,
        "guard_ms": sum(guarding) / steps,
        "share": fraction,
        "baseline": "decode",
        "ratio": fraction,
        "probes": report["probes"],
        "spilled": report["spilled"]["tokens"],
        "monitor_every": config.monitor_every,
    }
