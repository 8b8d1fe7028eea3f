"""`python -m pipelines.bench collect`: what recording attention adds to reading a document."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.record import record_forward, recording_twin
from fade_runtime.transformers_api import text_config
from pipelines.benchmarks.settings import ContextSettings
from pipelines.benchmarks.timing import STOCK, rotated, rows_beside
from predictor.cache_layers import evictable_layers, kv_heads
from predictor.errors import FadeError
from predictor.features import FeatureSpec

METHODS = {STOCK: None, "recorded": False, "recorded+h2o": True}  # whether traces carry what h2o needs


@dataclass(frozen=True)
class CollectBenchSettings(ContextSettings):
    """Options of `pipelines.bench collect`.

    Args:
        contexts: tokens of the prompt, which are random.
        future: tokens after it, whose attention is the target.
        repeats: timed documents of each kind, after one that warms up.
    """

    future: int = 128
    repeats: int = 5


def collect(settings: CollectBenchSettings) -> None:
    """Time one forward over a document while its attention is recorded, against the same with SDPA, in turn.

    Recording computes the features of the prompt's tokens and the attention of the tokens after it; with h2o also the
    attention of the whole prompt. Rows that are missing or not finite end the benchmark, and nothing is printed.
    """
    settings.at_least_one(future=settings.future, repeats=settings.repeats)
    lm, _ = settings.load()
    rows = [row for context in settings.contexts for row in _rows(lm, context, settings.future, settings.repeats)]
    settings.keep(rows)
    print(f"{'prompt':>8} {'read':<14} {'ms':>9} {'of stock':>9}")
    for row in rows:
        print(f"{row['context']:>8,} {row['method']:<14} {row['p50']:>9.0f} {row['ratio']:>8.3f}x")


def _rows(lm: Any, context: int, future: int, repeats: int) -> list[dict[str, Any]]:
    """Read one document each way in turn; which comes first rotates."""
    recording = recording_twin(lm)
    size = lm.config.get_text_config().vocab_size
    tokens = torch.randint(size, (context + future,), generator=torch.Generator().manual_seed(context))
    milliseconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in range(repeats + 1):
        for name in rotated(list(METHODS), turn):
            started = time.perf_counter()
            model = lm if METHODS[name] is None else recording
            rows = _read(model, tokens, context, METHODS[name], FeatureSpec(horizon=future))
            if turn:  # the first warms up
                milliseconds[name].append(1e3 * (time.perf_counter() - started))
            if rows is not None:
                _check(lm, name, rows)
    return rows_beside(STOCK, "collect", context, milliseconds)


def _read(lm: Any, tokens: Tensor, prompt: int, h2o: bool | None, spec: FeatureSpec) -> list[dict[str, Any]] | None:
    """Read a document [S + T]; its trace rows, unless ``h2o`` is None: then it is only read."""
    if h2o is not None:
        return record_forward(lm, tokens, prompt, spec, h2o)
    with torch.inference_mode():
        lm.base_model(input_ids=tokens[None], use_cache=False)
    return None


def _check(lm: Any, name: str, rows: list[dict[str, Any]]) -> None:
    """Refuse to report the time of traces that are not whole."""
    config = text_config(lm)
    expected = len(evictable_layers(config)) * kv_heads(config)
    finite = all(np.isfinite(each).all() for row in rows for each in row.values() if isinstance(each, np.ndarray))
    if len(rows) != expected or not finite:
        raise FadeError(f"{name}: {len(rows)} rows of {expected}, finite: {finite}; no times are shown")
