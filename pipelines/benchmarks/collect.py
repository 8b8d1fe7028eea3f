"""`python -m pipelines.bench collect`: what recording attention adds to reading a document."""

from __future__ import annotations

import time
from typing import Any

from pipelines import cli
from pipelines.benchmarks.ledger import quantiles
from predictor.errors import FadeError

STOCK = "stock"
METHODS = {STOCK: None, "recorded": False, "recorded+h2o": True}  # whether traces carry what h2o needs


def collect(
    model: str = "artefacts/models/smollm2-135m-instruct",
    contexts: list[int] = [2048],  # noqa: B006
    future: int = 128,
    repeats: int = 5,
    threads: int = 1,
    out: str | None = None,
    ledger: str | None = None,
) -> None:
    """Time one forward over a document while its attention is recorded, against the same with SDPA, in turn.

    Recording computes the features of the prompt's tokens and the attention of the tokens after it; with h2o also the
    attention of the whole prompt. Rows that are missing or not finite end the benchmark, and nothing is printed.

    Args:
        model: directory or hub id of a causal language model, loaded in float32.
        contexts: tokens of the prompt, which are random.
        future: tokens after it, whose attention is the target.
        repeats: timed documents of each kind, after one that warms up.
        threads: of torch.
        out: JSON lines file to add the rows to.
        ledger: CSV file to add the rows to, for `pipelines.bench compare`.
    """
    import torch

    from data.lm import load_lm
    from pipelines.evaluation.report import keep

    numbers = ("future", future), ("repeats", repeats), ("threads", threads)
    cli.at_least_one(*numbers, ("contexts", min(contexts, default=0)))
    torch.set_num_threads(threads)
    lm, _ = load_lm(model, "float32")
    rows = [row for context in contexts for row in _rows(lm, context, future, repeats)]
    keep(rows, model, out, ledger)
    print(f"{'prompt':>8} {'read':<14} {'ms':>9} {'of stock':>9}")
    for row in rows:
        print(f"{row['context']:>8,} {row['method']:<14} {row['p50']:>9.0f} {row['ratio']:>8.3f}x")


def _rows(lm: Any, context: int, future: int, repeats: int) -> list[dict[str, Any]]:
    """Read one document each way in turn; which comes first rotates."""
    import torch

    from data.record import watched
    from predictor.features import FeatureSpec

    seen = watched(lm)
    size = lm.config.get_text_config().vocab_size
    tokens = torch.randint(size, (context + future,), generator=torch.Generator().manual_seed(context))
    names = list(METHODS)
    spent: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            which = lm if METHODS[name] is None else seen
            rows = _read(which, tokens, context, METHODS[name], FeatureSpec(horizon=future))
            if turn:  # the first warms up
                spent[name].append(1e3 * (time.perf_counter() - started))
            if rows is not None:
                _check(lm, name, rows)
    spreads = {name: quantiles(each) for name, each in spent.items()}
    return [
        {
            "bench": "collect",
            "context": context,
            "method": name,
            "unit": "ms",
            **spread,
            "baseline": STOCK,
            "ratio": spread["p50"] / spreads[STOCK]["p50"],
        }
        for name, spread in spreads.items()
    ]


def _read(lm: Any, tokens: Any, prompt: int, h2o: bool | None, spec: Any) -> list[dict[str, Any]] | None:
    """Read a document [S + T]; its trace rows, unless ``h2o`` is None: then it is only read."""
    import torch

    from data.record import record_forward

    if h2o is not None:
        return record_forward(lm, tokens, prompt, spec, h2o)
    with torch.inference_mode():
        lm.base_model(input_ids=tokens[None], use_cache=False)
    return None


def _check(lm: Any, name: str, rows: list[dict[str, Any]]) -> None:
    """Refuse to report the time of traces that are not whole."""
    import numpy as np

    from fade_runtime.transformers_api import geometry, text_config

    config = text_config(lm)
    expected = config.num_hidden_layers * geometry(config)[0]
    finite = all(np.isfinite(each).all() for row in rows for each in row.values() if isinstance(each, np.ndarray))
    if len(rows) != expected or not finite:
        raise FadeError(f"{name}: {len(rows)} rows of {expected}, finite: {finite}; no times are shown")
