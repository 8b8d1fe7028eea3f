"""Head budgets against each other on held-out traces: what is lost when each kv head keeps what it was allocated.

``max`` was learned from each token's worst coming step, ``sum`` from all steps together, ``uniform`` gives all heads
the same. All are judged by the worst step: one step in which a needed token is missing is what spoils a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from predictor.batches import Batch
from predictor.budgets import HeadBudgets, lost_attention
from predictor.cache_layers import in_words
from predictor.errors import FadeError
from predictor.metrics import RowMean, reset_metrics
from predictor.ranking_metrics import BUDGETS
from predictor.scorenet import ScoreNet, token_scores

TARGETS = ("max", "sum")
UNIFORM = "uniform"


Allocation = Mapping[int, Sequence[float]]  # layer -> one fraction of the context for each kv head


def lost_when_kept(fractions: Sequence[Allocation], scores: Tensor, batch: Batch) -> Tensor:
    """Attention that each row loses at the worst step when its kv head keeps these fractions.

    Args:
        fractions: K allocations, which have all the layers of the batch.
        scores: [R, S], higher = keep.
        batch: R rows with ``target_max``, ``eligible``, ``length``, ``layer`` and ``head``.

    Returns:
        [R, K].

    Example:
        >>> yes, target = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0.1, 0.4, 0.2, 0.3]])
        >>> row = {"target_max": target, "eligible": yes, "length": torch.tensor([4]),
        ...        "layer": torch.tensor([0]), "head": torch.tensor([0])}
        >>> lost_when_kept([{0: [0.5]}, {0: [1.0]}], target, row)
        tensor([[0.3000, 0.0000]])
    """
    heads = zip(batch["layer"].tolist(), batch["head"].tolist())
    kept = torch.tensor([[each[layer][head] for each in fractions] for layer, head in heads], device=scores.device)
    return lost_attention(scores, batch["target_max"].float(), batch["eligible"], batch["length"], kept)


class HeadBudgetMetrics(nn.Module):
    """Attention lost at several budgets, head by head as learned and with all heads alike.

    Args:
        budgets: kept fractions of the context, besides sinks and window.
    """

    def __init__(self, budgets: Sequence[float] = BUDGETS) -> None:
        super().__init__()
        self.budgets = sorted(set(budgets), reverse=True)
        self._lost = nn.ModuleDict(
            {kind: nn.ModuleList(RowMean(_itself) for _ in self.budgets) for kind in (UNIFORM, *TARGETS)}
        )

    @property
    def lost(self) -> dict[str, list[RowMean]]:
        """The metrics of each allocation, by budget."""
        return {kind: list(cast("Iterable[RowMean]", each)) for kind, each in self._lost.items()}

    def update(self, net: ScoreNet, batch: Batch, learned: Mapping[str, HeadBudgets]) -> None:
        """Add a batch.

        Args:
            net: scores the tokens. batch: R padded trace rows of S tokens, [R, S].
            learned: a table of head budgets for each target.

        Raises:
            FadeError: a row of a kv head that the tables lack.
        """
        table = learned[TARGETS[0]]
        heads = table.lost.shape[1]
        if not set(batch["layer"].tolist()) <= set(table.layers) or int(batch["head"].max()) >= heads:
            raise FadeError(
                f"training rows of {in_words(table.layers)} with {heads} kv heads were seen, and validation has "
                "more; collect more traces, or validate later (trainer.val_check_interval)"
            )
        scores = token_scores(net, batch, in_cache=True)
        for kind, metrics in self.lost.items():
            allocations = [allocation(learned, kind, budget) for budget in self.budgets]
            for metric, lost in zip(metrics, lost_when_kept(allocations, scores, batch).T):
                metric.update(lost)

    def values(self) -> dict[str, float]:
        """Return every number under its readable name, as a tracking server takes it."""
        return {
            f"{kind}/lost_at_{budget}": float(metric.compute())
            for kind, metrics in self.lost.items()
            for budget, metric in zip(self.budgets, metrics)
        }

    def reset(self) -> None:
        """Forget all batches."""
        reset_metrics(self)


def allocation(learned: Mapping[str, HeadBudgets], kind: str, budget: float) -> Allocation:
    """For each layer, one fraction for each kv head: learned for the target ``kind``, or the same for all."""
    return learned[TARGETS[0]].uniform(budget) if kind == UNIFORM else learned[kind].allocate(budget)


def rows_of_heads(budgets: HeadBudgets, fractions: Sequence[float]) -> list[dict[str, float]]:
    """Return one row a layer and kv head: the fraction that it keeps when ``fractions`` are kept on average."""
    allocations = {fraction: budgets.allocate(fraction) for fraction in fractions}
    return [
        {
            "layer": layer,
            "head": head,
            **{f"kept_at_{fraction}": round(kept[layer][head], 5) for fraction, kept in allocations.items()},
        }
        for layer in budgets.layers
        for head in range(budgets.lost.shape[1])
    ]


def _itself(values: Tensor) -> Tensor:
    return values
