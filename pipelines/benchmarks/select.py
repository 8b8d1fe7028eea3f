"""`python -m pipelines.bench select`: what choosing tokens costs beside the decoding it serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from pipelines import cli
from pipelines.benchmarks.ledger import quantiles
from predictor.errors import FadeError

if TYPE_CHECKING:
    from fade_runtime import FadeConfig, TieredCache


def select(
    model: str = "artefacts/models/smollm2-135m-instruct",
    predictor: str | None = None,
    contexts: list[int] = [2048],  # noqa: B006
    budget: float = 0.25,
    steps: int = 256,
    threads: int = 1,
    out: str | None = None,
    ledger: str | None = None,
) -> None:
    """Decode over caches that evict, and time scoring and planning within the same steps.

    Keys and values of the context are random. Every 64 tokens each layer scores its body, plans tiers within the
    budgets and moves what must move; the moving is left out of the time. Policies: position, h2o, ema, adaptive, and
    learned with a predictor.

    Args:
        model: directory or hub id of a causal language model, loaded in float32.
        predictor: bundle directory, `models:/NAME@alias` or hub id; adds the learned policy.
        contexts: tokens in the cache before the first step.
        budget: share of the context that is kept.
        steps: decoded tokens; at least 64, after which tokens are chosen again.
        threads: of torch.
        out: JSON lines file to add the rows to.
        ledger: CSV file to add the rows to, for `pipelines.bench compare`.
    """
    import torch

    from data.lm import load_lm
    from pipelines.evaluation.report import keep

    cli.at_least_one(("threads", threads), ("contexts", min(contexts, default=0)))
    configs = _configs(budget, predictor)
    every = max(config.reassign_every for config in configs.values())
    if steps < every:
        raise FadeError(f"steps {steps} is too small; tokens are chosen every {every}")
    torch.set_num_threads(threads)
    lm, _ = load_lm(model, "float32")
    rows = [_row(lm, name, config, context, steps) for context in contexts for name, config in configs.items()]
    keep(rows, model, out, ledger)
    print(f"{'context':>8} {'policy':<10} {'ms/step':>8} {'ms/choice':>10} {'choices':>8} {'share of decoding':>18}")
    for row in rows:
        print(
            f"{row['context']:>8,} {row['method']:<10} {row['step_ms']:>8.1f} {row['p50']:>10.2f} {row['choices']:>8} "
            f"{row['ratio']:>18.3%}"
        )


def _configs(budget: float, predictor: str | None) -> dict[str, FadeConfig]:
    from fade_runtime import FadeConfig
    from predictor.registry import load_predictor

    names = ("position", "h2o", "ema", "adaptive")
    configs = {name: FadeConfig(int4_budget=budget, eviction_policy=name) for name in names}
    if predictor is not None:
        loaded = load_predictor(predictor)
        configs["learned"] = FadeConfig(int4_budget=budget, eviction_policy="learned", predictor=loaded)
    return configs


def _row(lm: Any, name: str, config: FadeConfig, context: int, steps: int) -> dict[str, Any]:
    """Fill a cache, and take its steps."""
    import torch

    from fade_runtime.transformers_api import forward_kwargs

    cache, generator = filled(lm, config, context)
    spent = [0.0]
    for layer in cache.tiered:
        layer._reviewed_plan = _timed(layer._reviewed_plan, spent)  # type: ignore[method-assign]
    whole, chosen = [], []
    with torch.inference_mode():
        for step in range(steps + 1):
            token = torch.randint(lm.config.vocab_size, (1, 1), generator=generator)
            spent[0], started = 0.0, time.perf_counter()
            lm(token, **forward_kwargs(cache, lm))
            if step:  # the first warms up
                whole.append(1e3 * (time.perf_counter() - started))
                chosen.append(1e3 * spent[0])
    choices = [ms for ms in chosen if ms]
    return {
        "bench": "select",
        "context": context,
        "method": name,
        "unit": "ms",
        **quantiles(choices),
        "choices": len(choices),
        "step_ms": median(whole),
        "baseline": "decode",
        "ratio": sum(chosen) / sum(whole),
    }


def filled(lm: Any, config: FadeConfig, context: int) -> tuple[TieredCache, Any]:
    """A tiered cache of ``context`` random tokens, compressed, and the generator that drew them."""
    import torch

    from fade_runtime import create_tiered_cache
    from fade_runtime.transformers_api import geometry, text_config

    cache = create_tiered_cache(lm, config)
    heads, dim = geometry(text_config(lm))
    generator = torch.Generator().manual_seed(context)
    for layer in cache.tiered:
        key, value = torch.randn(2, 1, heads, context, dim, generator=generator)
        layer.update(key / 4, value, kwargs={})
        layer.compress()
    return cache, generator


def _timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*given: Any) -> Any:
        started = time.perf_counter()
        result = call(*given)
        spent[0] += time.perf_counter() - started
        return result

    return timed
