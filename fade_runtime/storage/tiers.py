"""Tiers, and the plan that assigns tokens to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from predictor.errors import FadeError


class Tier(IntEnum):
    """Where a token is; FULL means the model's own dtype. A token only ever moves to a higher number.

    HIGH has 4-bit codes unless the options say otherwise, LOW the same codes cut to fewer bits.
    """

    FULL = 0
    HIGH = 1
    LOW = 2
    PQ = 3
    EVICTED = 4


@dataclass(frozen=True)
class Budgets:
    """What each row may keep in the body.

    Attributes:
        high, low: [R] int64 tokens in the high tier and in the low tier.
        tau, low_tau: a row keeps no more tokens in the high tier than hold the fraction ``tau`` of its score, and no
            more in both tiers than hold ``low_tau``; 1 for no such limit.
    """

    high: Tensor
    low: Tensor
    tau: float = 1.0
    low_tau: float = 1.0


@dataclass(frozen=True)
class TierPlan:
    """One tier for each body token of a layer: a partition by construction.

    Attributes:
        tiers: [T] int8, values of :class:`Tier`, tokens in storage order.
        rows: [T] int64, the row (batch x kv head) that a token belongs to.
    """

    tiers: Tensor
    rows: Tensor

    def count(self, tier: Tier, rows: int) -> Tensor:
        """[R] tokens of each row in a tier."""
        return torch.bincount(self.rows[self.tiers == tier], minlength=rows)


def rank_in_row(rows: Tensor) -> Tensor:
    """Position of each element within its row, for ``rows`` [T] sorted ascending.

    Example:
        >>> rank_in_row(torch.tensor([0, 0, 2, 2, 2])).tolist()
        [0, 1, 0, 1, 2]
    """
    counts = torch.bincount(rows) if len(rows) else rows
    starts = counts.cumsum(0) - counts
    return torch.arange(len(rows), device=rows.device) - (starts[rows] if len(rows) else 0)


def plan_tiers(
    scores: Tensor | None,
    rows: Tensor,
    budgets: Budgets | None,
    *,
    slots: Tensor | None = None,
    tiers: Tensor | None = None,
    low_tier: Tier = Tier.LOW,
) -> TierPlan:
    """Keep the best tokens of each row: first in the high tier, then in the low tier; evict the rest.

    Demotion is one way, so a token that is low already competes for the low tier only.

    Args:
        scores: [T] importance scores, higher = keep; None only when every token fits the high tier.
        rows: [T] row of each token.
        budgets: of the rows, or None: all in the high tier.
        slots: [T] logical slots: equal scores go to the later token; None: the order given is the order in time.
        tiers: [T] where the tokens are now; None: none is low yet.
        low_tier: what the low tier is, LOW or PQ.

    Returns:
        the plan: [T] tiers, of which none is higher than before.

    Raises:
        FadeError: tokens exceed the budgets and have no scores; fractions are asked of negative scores.

    Example:
        >>> plan = plan_tiers(torch.tensor([.1, .9, .5, .2]), torch.tensor([0, 0, 0, 1]),
        ...                   Budgets(high=torch.tensor([1, 1]), low=torch.tensor([1, 0])))
        >>> [Tier(t).name for t in plan.tiers.tolist()]
        ['EVICTED', 'HIGH', 'LOW', 'HIGH']
    """
    now = torch.full_like(rows, Tier.HIGH, dtype=torch.int8) if tiers is None else tiers.to(torch.int8)
    if budgets is None:
        return TierPlan(now, rows)
    can_stay = now <= Tier.HIGH
    limited = budgets.tau < 1 or budgets.low_tau < 1
    counts = torch.bincount(rows[can_stay], minlength=len(budgets.high))
    if bool(can_stay.all()) and bool((counts <= budgets.high).all()) and not limited:
        return TierPlan(now, rows)
    if scores is None:
        raise FadeError("tokens exceed the budget but no policy scored them; set eviction_policy")
    order = _best_first(scores, rows, torch.arange(len(rows), device=rows.device) if slots is None else slots)
    row, ranked = rows[order], scores[order]
    within = _fraction_before(ranked, row, len(budgets.high)) if limited else torch.zeros_like(ranked)
    fits = can_stay[order] & (within < budgets.tau)
    high = fits & (_rank_among(fits, row) < budgets.high[row])
    planned = torch.full_like(now, Tier.EVICTED)
    planned[order[high]] = int(Tier.HIGH)
    if bool(budgets.low.any()):
        rest = ~high & (within < budgets.low_tau)
        low = rest & (_rank_among(rest, row) < budgets.low[row])
        planned[order[low]] = int(low_tier)
    return TierPlan(planned, rows)


def _best_first(scores: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Indices by row, best first, the later of equals first."""
    order = slots.argsort(descending=True, stable=True)
    bits = (scores[order].float() + 0.0).view(torch.int32)  # 0 added to -0 is 0
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # in the order of the floats that they are the bits of
    return order[((rows[order].long() << 32) - rising).argsort(stable=True)]  # one sort by row and score


def _rank_among(chosen: Tensor, rows: Tensor) -> Tensor:
    """[T] how many chosen elements of the same row come before each, for sorted ``rows``."""
    before = chosen.long().cumsum(0) - chosen.long()
    return before - before[torch.arange(len(rows), device=rows.device) - rank_in_row(rows)]


def _fraction_before(scores: Tensor, rows: Tensor, count: int) -> Tensor:
    """[T] fraction of its row's score that the better tokens hold, for tokens best first in sorted ``rows``.

    Raises:
        FadeError: scores that are negative.
    """
    if bool((scores < 0).any()):
        raise FadeError("tau needs a score that is a share of attention: use eviction_policy h2o, ema or learned")
    sums = torch.zeros(count, dtype=torch.float64, device=scores.device).index_add_(0, rows, scores.double())
    before = scores.double().cumsum(0) - scores.double()
    start = before[torch.arange(len(rows), device=rows.device) - rank_in_row(rows)] if len(rows) else before
    return ((before - start) / sums[rows].clamp(min=torch.finfo(torch.float64).tiny)).float()
