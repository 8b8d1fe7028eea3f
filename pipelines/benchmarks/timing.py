"""What benchmarks share: turns, quantiles, ratios to a baseline, and whether caches that are timed agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

STOCK = "stock"  # transformers' DynamicCache


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, another one first in each turn.

    Example:
        >>> rotated(["stock", "safe", "h2o"], turn=4)
        ['safe', 'h2o', 'stock']
    """
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Quantiles .2, .5 and .8 of measurements, each one of them.

    Example:
        >>> quantiles([5.0, 1.0, 4.0, 2.0, 3.0])
        {'p20': 2.0, 'p50': 3.0, 'p80': 4.0}
    """
    ordered = sorted(values)
    return {f"p{percent}": ordered[round(percent / 100 * (len(ordered) - 1))] for percent in (20, 50, 80)}


def ratio(x: float, base: float) -> float | None:
    """How many times base x is; None where nothing was measured to divide by.

    Example:
        >>> ratio(3, 2), ratio(3, 0)
        (1.5, None)
    """
    return x / base if base else None


def rows_beside(
    baseline: str, bench: str, context: int, milliseconds: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """One row for each method: quantiles of its times, and their median as a ratio to the baseline's.

    Args:
        baseline: one of the methods. bench: the benchmark. context: tokens. milliseconds: method -> times.

    Example:
        >>> rows = rows_beside("stock", "decode", 64, {"stock": [2.0, 2.0, 2.0], "safe": [1.0, 1.0, 1.0]})
        >>> [(row["method"], row["p50"], row["ratio"]) for row in rows]
        [('stock', 2.0, 1.0), ('safe', 1.0, 0.5)]
    """
    spreads = {name: quantiles(times) for name, times in milliseconds.items()}
    return [
        {
            "bench": bench,
            "context": context,
            "method": name,
            "unit": "ms",
            **spread,
            "baseline": baseline,
            "ratio": spread["p50"] / spreads[baseline]["p50"],
        }
        for name, spread in spreads.items()
    ]


def add_time(call: Callable[..., Any], seconds: dict[str, float], part: str) -> Callable[..., Any]:
    """The same function, which adds the time of each call to ``seconds[part]``."""

    def timed(*args: Any) -> Any:
        started = time.perf_counter()
        result = call(*args)
        seconds[part] += time.perf_counter() - started
        return result

    return timed


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Norm of the difference of logits [..., V] and those expected, divided by the norm of the expected ones."""
    return float((logits - expected).norm() / expected.norm())
