"""The heuristics that a predictor must beat, computed from the same traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from predictor import scores
from predictor.batches import Batch
from predictor.features import FEATURES

GATE = 0.25  # the budget at which a predictor is chosen and promoted


def _feature(batch: Batch, name: str) -> Tensor:
    return batch["tokens"][..., FEATURES.index(name)]


# name -> scores [R, S] of a batch, higher = keep
HEURISTICS: dict[str, Callable[[Batch], Tensor]] = {
    "position": lambda batch: scores.position(batch["mask"].cumsum(-1)),
    "h2o": lambda batch: batch["h2o"],
    "ema": lambda batch: _feature(batch, "log_ema"),
    "snapkv": lambda batch: _feature(batch, "log_snap"),
    "ea": lambda batch: _feature(batch, "log_ea"),
    "ema_ea": lambda batch: scores.ema_ea(_feature(batch, "log_ema"), _feature(batch, "log_ea")),
}


def measured(table: Mapping[str, Mapping[float, float]]) -> list[str]:
    """Names of the heuristics in a table: traces without the ``h2o`` column lack that one."""
    return [name for name in HEURISTICS if name in table]


def best_heuristic(table: Mapping[str, Mapping[float, float]], budget: float = GATE) -> tuple[str, float]:
    """Name and recovery of the best heuristic at a budget.

    Args:
        table: name -> budget -> recovery. budget: fraction of the context that is kept.

    Example:
        >>> best_heuristic({name: {0.25: i / 10} for i, name in enumerate(HEURISTICS)})
        ('ema_ea', 0.5)
    """
    name = max(measured(table), key=lambda heuristic: table[heuristic][budget])
    return name, table[name][budget]
