"""`python -m pipelines.bench select`: what choosing tokens costs beside the decoding it serves."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from fade_runtime import FadeConfig
from fade_runtime.policies import POLICIES
from fade_runtime.transformers_api import forward_kwargs
from pipelines.benchmarks.caches import filled
from pipelines.benchmarks.settings import ContextSettings
from pipelines.benchmarks.timing import add_time, quantiles
from predictor.errors import FadeError
from predictor.registry import load_predictor

CHOICE = "choice"
PLAIN = tuple(name for name in POLICIES if name not in ("learned", "fastgen"))  # no predictor, no profile


@dataclass(frozen=True)
class SelectSettings(ContextSettings):
    """Options of `pipelines.bench select`.

    Args:
        contexts: tokens in the cache before the first step.
        predictor: bundle directory, `models:/NAME@alias` or hub id; adds the learned policy.
        budget: share of the context that is kept.
        steps: decoded tokens; at least 64, after which tokens are chosen again.
    """

    predictor: str | None = None
    budget: float = 0.25
    steps: int = 256

    def configs(self) -> dict[str, FadeConfig]:
        """One configuration for each policy."""
        configs = {name: FadeConfig(int4_budget=self.budget, eviction_policy=name) for name in PLAIN}
        if self.predictor is not None:
            loaded = load_predictor(self.predictor)
            configs["learned"] = FadeConfig(int4_budget=self.budget, eviction_policy="learned", predictor=loaded)
        return configs


def select(settings: SelectSettings) -> None:
    """Decode over caches that evict, and time scoring and planning within the same steps.

    Keys and values of the context are random. Every 64 tokens each layer scores its body, plans tiers within the
    budgets and moves what must move; the moving is left out of the time. Policies: position, h2o, ema, adaptive, and
    learned with a predictor.
    """
    settings.at_least_one()
    configs, steps = settings.configs(), settings.steps
    every = max(config.reassign_every for config in configs.values())
    if steps < every:
        raise FadeError(f"steps {steps} is too small; tokens are chosen every {every}")
    lm, _ = settings.load()
    rows = [_row(lm, name, config, each, steps) for each in settings.contexts for name, config in configs.items()]
    settings.keep(rows)
    print(f"{'context':>8} {'policy':<10} {'ms/step':>8} {'ms/choice':>10} {'choices':>8} {'share of decoding':>18}")
    for row in rows:
        print(
            f"{row['context']:>8,} {row['method']:<10} {row['step_ms']:>8.1f} {row['p50']:>10.2f} {row['choices']:>8} "
            f"{row['ratio']:>18.3%}"
        )


def _row(lm: Any, name: str, config: FadeConfig, context: int, steps: int) -> dict[str, Any]:
    """Fill a cache, and take its steps."""
    cache, generator = filled(lm, config, context)
    seconds: dict[str, float] = defaultdict(float)  # of choices, in this step
    for layer in cache.tiered:
        layer.reviewed_plan = add_time(layer.reviewed_plan, seconds, CHOICE)  # type: ignore[method-assign]
    whole, choosing = [], []  # milliseconds of each step, and of the choice in it
    with torch.inference_mode():
        for step in range(steps + 1):
            token = torch.randint(lm.config.vocab_size, (1, 1), generator=generator)
            seconds[CHOICE], started = 0.0, time.perf_counter()
            lm(token, **forward_kwargs(cache, lm))
            if step:  # the first warms up
                whole.append(1e3 * (time.perf_counter() - started))
                choosing.append(1e3 * seconds[CHOICE])
    choices = [ms for ms in choosing if ms]
    return {
        "bench": "select",
        "context": context,
        "method": name,
        "unit": "ms",
        **quantiles(choices),
        "choices": len(choices),
        "step_ms": median(whole),
        "baseline": "decode",
        "ratio": sum(choosing) / sum(whole),
    }
