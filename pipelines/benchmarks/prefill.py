"""`python -m pipelines.bench prefill`: what reading a prompt costs with each cache."""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from pipelines import cli
from pipelines.benchmarks.ledger import quantiles
from predictor.errors import FadeError

if TYPE_CHECKING:
    from torch import Tensor

    from fade_runtime import FadeConfig

STOCK = "stock"
TOLERANCE = 1e-3  # largest relative difference of the prompt's last logits from stock's


def prefill(
    model: str = "artefacts/models/smollm2-135m-instruct",
    predictor: str | None = None,
    contexts: list[int] = [2048],  # noqa: B006
    repeats: int = 5,
    budget: float = 0.25,
    assistant: int | None = None,
    threads: int = 1,
    out: str | None = None,
    ledger: str | None = None,
) -> None:
    """Time the forward of a whole prompt with each cache, in turn, and print medians and their ratio to stock's.

    The prompt is read by plain SDPA whatever the cache, so the last logits must agree, and nothing is printed when
    they do not; what a tiered cache adds is its first statistics and the packing. Caches: stock (DynamicCache, SDPA),
    safe (all in 4 bits, no statistics), then those that evict: position (no statistics), ema (last 64 queries),
    h2o (all queries), fastgen (last 64 queries and a profile), learned with a predictor, and assisted (ema, with the
    help of the model's first layers) with an assistant.

    Args:
        model: directory or hub id of a causal language model, loaded in float32.
        predictor: bundle directory, `models:/NAME@alias` or hub id; adds the learned cache.
        contexts: tokens of the prompt, which are random.
        repeats: timed prompts of each cache, after one that warms up.
        budget: share of the context that evicting caches keep.
        assistant: so many first layers of the model read the prompt's end too, and add the assisted cache.
        threads: of torch.
        out: JSON lines file to add the rows to.
        ledger: CSV file to add the rows to, for `pipelines.bench compare`.
    """
    import torch

    from data.lm import load_lm
    from pipelines.evaluation.report import keep

    cli.at_least_one(("repeats", repeats), ("threads", threads), ("contexts", min(contexts, default=0)))
    configs = _configs(budget, predictor, assistant)
    torch.set_num_threads(threads)
    lm, _ = load_lm(model, "float32")
    rows = [row for context in contexts for row in _rows(lm, configs, context, repeats)]
    keep(rows, model, out, ledger)
    print(f"{'prompt':>8} {'cache':<10} {'ms':>9} {'of stock':>9} {'packing, ms':>12}")
    for row in rows:
        print(
            f"{row['context']:>8,} {row['method']:<10} {row['p50']:>9.0f} {row['ratio']:>8.3f}x "
            f"{row['packing_ms']:>12.0f}"
        )


def _configs(budget: float, predictor: str | None, assistant: int | None) -> dict[str, FadeConfig | None]:
    from fade_runtime import FadeConfig
    from predictor.registry import load_predictor

    configs: dict[str, FadeConfig | None] = {STOCK: None, "safe": FadeConfig.safe()}
    for name in ("position", "ema", "h2o", "fastgen"):
        configs[name] = FadeConfig(int4_budget=budget, eviction_policy=name)
    if predictor is not None:
        configs["learned"] = FadeConfig(
            int4_budget=budget, eviction_policy="learned", predictor=load_predictor(predictor)
        )
    if assistant is not None:
        configs["assisted"] = FadeConfig(int4_budget=budget, eviction_policy="ema", assistant=assistant)
    return configs


def _rows(lm: Any, configs: dict[str, FadeConfig | None], context: int, repeats: int) -> list[dict[str, Any]]:
    """Read one prompt with each cache in turn; who comes first rotates."""
    import torch

    from predictor.twin import dense_twin

    tokens = torch.randint(
        lm.config.get_text_config().vocab_size, (1, context), generator=torch.Generator().manual_seed(context)
    )
    twin = dense_twin(lm)
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in configs}
    names = list(configs)
    for turn in range(repeats + 1):
        logits = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            config = configs[name]
            logits[name], seconds, packing = _read(twin if config is None else lm, config, tokens)
            if turn:  # the first warms up
                timed[name].append((1e3 * seconds, packing))
        _agree(logits, context)
    spreads = {name: quantiles([ms for ms, _ in each]) for name, each in timed.items()}
    return [
        {
            "bench": "prefill",
            "context": context,
            "method": name,
            "unit": "ms",
            **spread,
            "baseline": STOCK,
            "ratio": spread["p50"] / spreads[STOCK]["p50"],
            "packing_ms": median(packing for _, packing in timed[name]),
        }
        for name, spread in spreads.items()
    ]


def _read(model: Any, config: FadeConfig | None, tokens: Tensor) -> tuple[Tensor, float, float]:
    """Last logits [V] of a prompt read into a fresh cache, seconds, and milliseconds of it that packing took."""
    import torch
    from transformers import DynamicCache

    from fade_runtime import create_tiered_cache
    from fade_runtime.transformers_api import forward_kwargs

    packing: list[float] = []
    if config is None:
        cache: Any = DynamicCache(config=model.config)
    else:
        cache = create_tiered_cache(model, config)
        for layer in cache.tiered:
            layer.observer = lambda _, ms: packing.append(ms)
    with torch.inference_mode():
        started = time.perf_counter()
        logits = model(tokens, logits_to_keep=1, use_cache=True, **forward_kwargs(cache, model)).logits
        return logits[0, -1], time.perf_counter() - started, sum(packing)


def _agree(logits: dict[str, Tensor], context: int) -> None:
    """Refuse to report times of caches that change what the prompt says."""
    expected = logits[STOCK]
    for name, got in logits.items():
        off = float((got - expected).norm() / expected.norm())
        if not off < TOLERANCE:
            raise FadeError(
                f"prompt of {context} tokens: logits of {name} are {off:.1e} away from {STOCK}; no times are shown"
            )


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(prefill, argv)


if __name__ == "__main__":
    sys.exit(main())
