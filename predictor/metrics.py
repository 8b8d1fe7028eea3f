"""How good a ranking is: pure functions, then torchmetrics classes that average them over rows.

Shapes: R rows (one document, layer, kv head each) of S slots, padded on the right. ``mask`` marks real slots.
``eligible`` marks those a policy may drop; the rest (sinks, recent window) are always kept and count in the
budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

MAX_LAYERS = 512  # rows of the per-layer sums; more than any model has


def kept_counts(mask: Tensor, eligible: Tensor, budget: float) -> Tensor:
    """Tokens that each row keeps: ``floor(budget * S)``, but never fewer than the protected ones.

    Args:
        mask, eligible: [R, S] bool.
        budget: share of the row's tokens, in (0, 1].

    Returns:
        [R] integers.
    """
    length, protected = mask.sum(-1), (mask & ~eligible).sum(-1)
    return torch.maximum((length * budget + 1e-6).long(), protected)


def _order(scores: Tensor, mask: Tensor, eligible: Tensor) -> Tensor:
    """Slots of each row from the first kept to the last: protected, then eligible by score, then padding."""
    inf = float("inf")
    ranked = scores.float().masked_fill(~eligible, inf).masked_fill(~mask, -inf)
    return ranked.argsort(dim=-1, descending=True, stable=True)


def recovery(
    scores: Tensor, target: Tensor, mask: Tensor, eligible: Tensor, budgets: Sequence[float]
) -> Tensor:
    """Share of the target's mass that falls on the kept tokens.

    Args:
        scores: [R, S], higher = keep.
        target: [R, S] future attention, non-negative.
        mask, eligible: [R, S] bool.
        budgets: kept shares of the context.

    Returns:
        [R, len(budgets)] in [0, 1].

    Example:
        >>> yes = torch.ones(1, 4, dtype=torch.bool)
        >>> scores, target = torch.tensor([[4.0, 1.0, 2.0, 3.0]]), torch.tensor([[0.4, 0.3, 0.2, 0.1]])
        >>> recovery(scores, target, yes, yes, [0.25, 0.5])
        tensor([[0.4000, 0.5000]])
    """
    target = target * mask
    running = target.gather(-1, _order(scores, mask, eligible)).cumsum(-1)
    last = torch.stack([kept_counts(mask, eligible, budget) for budget in budgets], dim=-1) - 1
    kept = running.gather(-1, last.clamp(min=0)) * (last >= 0)
    return (kept / target.sum(-1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)


def gap_closed(recovered: float, heuristic: float, oracle: float) -> float:
    """How far a predictor goes from the best heuristic to the oracle at one budget; nan when there is no gap.

    Example:
        >>> round(gap_closed(0.93, heuristic=0.92, oracle=0.96), 2)
        0.25
    """
    gap = oracle - heuristic
    return (recovered - heuristic) / gap if gap > 1e-9 else float("nan")


def topk_recall(scores: Tensor, target: Tensor, mask: Tensor, eligible: Tensor, budget: float) -> Tensor:
    """Share of the oracle's eligible tokens that the scores keep too, at the same budget.

    Returns:
        [R] in [0, 1]; nan where the budget leaves no eligible token to choose.
    """
    count = kept_counts(mask, eligible, budget)[:, None]
    place = torch.arange(scores.shape[-1], device=scores.device)
    kept = [
        torch.zeros_like(mask).scatter(-1, _order(s, mask, eligible), place < count) & eligible
        for s in (scores, target)
    ]
    return (kept[0] & kept[1]).sum(-1) / kept[1].sum(-1)


def masked_log_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Log of a distribution over the masked-in places of the last axis; exactly 0 elsewhere."""
    return logits.float().masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)


def masked_share(mass: Tensor, mask: Tensor) -> Tensor:
    """Non-negative mass over the masked-in places of the last axis, normalised to 1; zeros if none."""
    mass = mass.float() * mask
    return mass / mass.sum(-1, keepdim=True).clamp(min=1e-30)


def kl_divergence(logits: Tensor, mass: Tensor, mask: Tensor) -> Tensor:
    """KL(mass || softmax(logits)) over the masked-in places, in nats.

    Args:
        logits, mass, mask: [R, N].

    Returns:
        [R].

    Example:
        >>> p = torch.tensor([[0.25, 0.75]])
        >>> float(kl_divergence(p.log(), p, torch.ones(1, 2, dtype=torch.bool)).abs().round(decimals=5))
        0.0
    """
    share = masked_share(mass, mask)
    return (torch.xlogy(share, share) - share * masked_log_softmax(logits, mask)).sum(-1)


class Recovery(Metric):
    """Mean of :func:`recovery` over rows, in all and by layer.

    Args:
        budgets: kept shares of the context.

    Example:
        >>> metric = Recovery([0.5, 1.0])
        >>> yes = torch.ones(1, 2, dtype=torch.bool)
        >>> metric.update(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.9, 0.1]]), yes, yes, torch.tensor([3]))
        >>> metric.compute(), metric.by_layer()
        (tensor([0.9000, 1.0000]), {3: tensor([0.9000, 1.0000])})
    """

    full_state_update = False
    higher_is_better = True
    total: Tensor
    rows: Tensor

    def __init__(self, budgets: Sequence[float]) -> None:
        super().__init__()
        self.budgets = list(budgets)
        self.add_state("total", torch.zeros(MAX_LAYERS, len(self.budgets)), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(MAX_LAYERS), dist_reduce_fx="sum")

    def update(self, scores: Tensor, target: Tensor, mask: Tensor, eligible: Tensor, layer: Tensor) -> None:
        """Add R rows; ``layer`` is [R]."""
        layer = layer.long()
        self.total.index_add_(0, layer, recovery(scores, target, mask, eligible, self.budgets))
        self.rows.index_add_(0, layer, torch.ones_like(layer, dtype=torch.float32))

    def compute(self) -> Tensor:
        """Return the mean at each budget, [len(budgets)]."""
        return self.total.sum(0) / self.rows.sum()

    def by_layer(self) -> dict[int, Tensor]:
        """Return the mean at each budget for each layer seen (of this process)."""
        return {i: self.total[i] / self.rows[i] for i in self.rows.nonzero().flatten().tolist()}


class RowMean(Metric):
    """Mean over rows of one of the functions above, rows that are nan left out.

    Args:
        function: takes tensors, returns [R].
        **options: further arguments of the function.

    Example:
        >>> recall = RowMean(topk_recall, budget=0.5)
        >>> yes = torch.ones(1, 4, dtype=torch.bool)
        >>> target = torch.tensor([[0.4, 0.1, 0.2, 0.1]])
        >>> recall.update(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), target, yes, yes)
        >>> recall.compute()
        tensor(0.5000)
    """

    full_state_update = False
    total: Tensor
    rows: Tensor

    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, *tensors: Tensor) -> None:
        """Add R rows."""
        values = self.function(*tensors, **self.options)
        self.total += values.nansum()
        self.rows += values.isfinite().sum()

    def compute(self) -> Tensor:
        """Return the mean."""
        return self.total / self.rows
