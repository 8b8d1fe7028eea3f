"""`python -m pipelines.bench prefill`: what reading a prompt costs with each cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines.benchmarks.settings import ContextSettings
from pipelines.benchmarks.timing import STOCK, relative_error, rotated, rows_beside
from predictor.errors import FadeError
from predictor.registry import load_predictor
from predictor.twin import dense_twin

EVICTING = ("position", "ema", "h2o", "fastgen")  # by what they read of the prompt's queries
TOLERANCE = 1e-3  # largest relative difference of the prompt's last logits from stock's


@dataclass(frozen=True)
class PrefillSettings(ContextSettings):
    """Options of `pipelines.bench prefill`.

    Args:
        contexts: tokens of the prompt, which are random.
        predictor: bundle directory, `models:/NAME@alias` or hub id; adds the learned cache.
        repeats: timed prompts of each cache, after one that warms up.
        budget: share of the context that evicting caches keep.
        assistant: so many first layers of the model read the prompt's end too, and add the assisted cache.
    """

    predictor: str | None = None
    repeats: int = 5
    budget: float = 0.25
    assistant: int | None = None

    def configs(self) -> dict[str, FadeConfig | None]:
        """One configuration for each cache; None: transformers' own."""
        configs: dict[str, FadeConfig | None] = {STOCK: None, "safe": FadeConfig.safe()}
        for name in EVICTING:
            configs[name] = FadeConfig(int4_budget=self.budget, eviction_policy=name)
        if self.predictor is not None:
            loaded = load_predictor(self.predictor)
            configs["learned"] = FadeConfig(int4_budget=self.budget, eviction_policy="learned", predictor=loaded)
        if self.assistant is not None:
            configs["assisted"] = FadeConfig(int4_budget=self.budget, eviction_policy="ema", assistant=self.assistant)
        return configs


def prefill(settings: PrefillSettings) -> None:
    """Time the forward of a whole prompt with each cache, in turn, and print medians and their ratio to stock's.

    The prompt is read by plain SDPA whatever the cache, so the last logits must agree, and nothing is printed when
    they do not; what a tiered cache adds is its first statistics and the packing. Caches: stock (DynamicCache, SDPA),
    safe (all in 4 bits, no statistics), then those that evict: position (no statistics), ema (last 64 queries),
    h2o (all queries), fastgen (last 64 queries and a profile), learned with a predictor, and assisted (ema, with the
    help of the model's first layers) with an assistant.
    """
    settings.at_least_one(repeats=settings.repeats)
    configs = settings.configs()
    lm, _ = settings.load()
    rows = [row for context in settings.contexts for row in _rows(lm, configs, context, settings.repeats)]
    settings.keep(rows)
    print(f"{'prompt':>8} {'cache':<10} {'ms':>9} {'of stock':>9} {'packing, ms':>12}")
    for row in rows:
        print(
            f"{row['context']:>8,} {row['method']:<10} {row['p50']:>9.0f} {row['ratio']:>8.3f}x "
            f"{row['packing_ms']:>12.0f}"
        )


def _rows(lm: Any, configs: dict[str, FadeConfig | None], context: int, repeats: int) -> list[dict[str, Any]]:
    """Read one prompt with each cache in turn; who comes first rotates."""
    size = lm.config.get_text_config().vocab_size
    tokens = torch.randint(size, (1, context), generator=torch.Generator().manual_seed(context))
    twin = dense_twin(lm)
    milliseconds: dict[str, list[float]] = {name: [] for name in configs}
    packing: dict[str, list[float]] = {name: [] for name in configs}
    for turn in range(repeats + 1):
        logits = {}
        for name in rotated(list(configs), turn):
            config = configs[name]
            logits[name], seconds, packing_ms = _read(twin if config is None else lm, config, tokens)
            if turn:  # the first warms up
                milliseconds[name].append(1e3 * seconds)
                packing[name].append(packing_ms)
        _agree(logits, context)
    rows = rows_beside(STOCK, "prefill", context, milliseconds)
    return [{**row, "packing_ms": median(packing[row["method"]])} for row in rows]


def _read(model: Any, config: FadeConfig | None, tokens: Tensor) -> tuple[Tensor, float, float]:
    """Last logits [V] of a prompt [1, S] read into a fresh cache, seconds, and milliseconds of it that packing took."""
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
    """Refuse to report times of caches that change what the prompt says: the last logits [V] of each."""
    for name, each in logits.items():
        off = relative_error(each, logits[STOCK])
        if not off < TOLERANCE:
            raise FadeError(
                f"prompt of {context} tokens: logits of {name} are {off:.1e} away from {STOCK}; no times are shown"
            )
