"""Tiers, and the plan that assigns tokens to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from predictor.errors import FadeError


class Tier(IntEnum):
    """Where a token is; FP16 means the model's own dtype."""

    FP16 = 0
    INT4 = 1
    EVICTED = 2


@dataclass(frozen=True)
class TierPlan:
    """One tier for each body token of a layer: a partition by construction.

    Attributes:
        tiers: [T] int8, values of :class:`Tier`, tokens in storage order.
        rows: [T] int64, the row (batch x kv head) that a token belongs to.
    """

    tiers: Tensor
    rows: Tensor

    def kept(self) -> Tensor:
        """[T] bool: the tokens that stay."""
        return self.tiers != Tier.EVICTED

    def check(self, budgets: Tensor | None) -> None:
        """Hold the plan to its budgets.

        Args:
            budgets: [R] tokens that a row may keep, or None for all.

        Raises:
            FadeError: a row keeps more than its budget, or a token has no body tier.
        """
        if self.tiers.shape != self.rows.shape or bool((self.tiers < Tier.INT4).any()):
            raise FadeError("a tier plan must give each body token exactly one of INT4 and EVICTED")
        if budgets is None:
            return
        kept = torch.bincount(self.rows[self.kept()], minlength=len(budgets))
        if bool((kept > budgets).any()):
            row = int((kept > budgets).nonzero()[0])
            raise FadeError(f"row {row} keeps {int(kept[row])} tokens, over its budget of {int(budgets[row])}")


def rank_in_row(rows: Tensor) -> Tensor:
    """Position of each element within its row, for ``rows`` [T] sorted ascending.

    Example:
        >>> rank_in_row(torch.tensor([0, 0, 2, 2, 2])).tolist()
        [0, 1, 0, 1, 2]
    """
    counts = torch.bincount(rows) if len(rows) else rows
    starts = counts.cumsum(0) - counts
    return torch.arange(len(rows), device=rows.device) - (starts[rows] if len(rows) else 0)


def plan_tiers(scores: Tensor | None, rows: Tensor, budgets: Tensor | None) -> TierPlan:
    """Keep the best tokens of each row within its budget; ties go to the later token.

    Args:
        scores: [T] importance scores, higher = keep; None only when nothing is evicted.
        rows: [T] row of each token, sorted ascending, slots ascending within a row.
        budgets: [R] tokens that a row may keep, or None for all.

    Example:
        >>> plan = plan_tiers(torch.tensor([.1, .9, .5, .2]), torch.tensor([0, 0, 0, 1]), torch.tensor([2, 1]))
        >>> plan.kept().tolist()
        [False, True, True, True]
    """
    tiers = torch.full_like(rows, Tier.INT4, dtype=torch.int8)
    if budgets is not None and bool((torch.bincount(rows, minlength=len(budgets)) > budgets).any()):
        if scores is None:
            raise FadeError("tokens exceed the budget but no policy scored them; set eviction_policy")
        later_first = torch.arange(len(rows) - 1, -1, -1, device=rows.device)
        order = later_first[scores[later_first].argsort(descending=True, stable=True)]
        order = order[rows[order].argsort(stable=True)]  # by row, best first
        tiers[order[rank_in_row(rows[order]) >= budgets[rows[order]]]] = Tier.EVICTED
    return TierPlan(tiers, rows)
