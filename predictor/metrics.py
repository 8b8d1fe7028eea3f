"""How good a ranking is: pure functions, then torchmetrics classes that average them over rows.

Shapes: R rows (one document, layer, kv head each) of S slots, padded on the right. ``mask`` marks real slots.
``eligible`` marks those a policy may drop; the rest (sinks, recent window) are always kept and count in the
budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from predictor.calibration import INITIAL_TEMPERATURE, N_TEMPERATURES, best_temperature, temperatures, tempered_kl

MAX_LAYERS, MAX_HEADS = 256, 256  # of the sums by layer and kv head; more than any model has


def kept_counts(mask: Tensor, eligible: Tensor, budget: float) -> Tensor:
    """Tokens that each row keeps: ``floor(budget * S)``, but never fewer than the protected ones.

    Args:
        mask, eligible: [R, S] bool.
        budget: fraction of the row's tokens, in (0, 1].

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


def recovery(scores: Tensor, target: Tensor, mask: Tensor, eligible: Tensor, budgets: Sequence[float]) -> Tensor:
    """Fraction of the target's mass that falls on the kept tokens.

    Args:
        scores: [R, S], higher = keep.
        target: [R, S] future attention, non-negative.
        mask, eligible: [R, S] bool.
        budgets: kept fractions of the context.

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


def middle_recovery(scores: Tensor, target: Tensor, mask: Tensor, eligible: Tensor, budget: float) -> Tensor:
    """Fraction of the droppable tokens' mass that is kept: recovery without what every policy keeps anyway.

    Args:
        scores: [R, S], higher = keep. target: [R, S], non-negative. mask, eligible: [R, S] bool.
        budget: kept fraction of the context.

    Returns:
        [R] in [0, 1]; nan where no droppable token receives anything.

    Example:
        >>> yes, scores = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0.0, 1.0, 2.0, 3.0]])
        >>> middle = torch.tensor([[False, True, True, False]])
        >>> middle_recovery(scores, torch.tensor([[0.5, 0.1, 0.3, 0.1]]), yes, middle, budget=0.75)
        tensor([0.7500])
    """
    count, place = (
        kept_counts(mask, eligible, budget)[:, None],
        torch.arange(mask.shape[-1], device=mask.device),
    )
    ranked = (target * eligible).gather(-1, _order(scores, mask, eligible))
    return (ranked * (place < count)).sum(-1) / ranked.sum(-1)


def spearman(scores: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Rank correlation of two rows over the masked-in places; ties share their mean rank.

    Args:
        scores, target: [R, S]. mask: [R, S] bool.

    Returns:
        [R] in [-1, 1]; nan where either row is constant.

    Source: Spearman 1904; as Pearson's correlation of ranks.

    Example:
        >>> yes = torch.ones(1, 3, dtype=torch.bool)
        >>> spearman(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[0.1, 0.3, 0.2]]), yes)
        tensor([0.5000])
    """
    ranks = [_ranks(values, mask) for values in (scores, target)]
    count = mask.sum(-1, keepdim=True)
    x, y = ((rank - rank.sum(-1, keepdim=True) / count) * mask for rank in ranks)
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


def _ranks(values: Tensor, mask: Tensor) -> Tensor:
    """Mean ranks, from 1, of the masked-in places among themselves; 0 elsewhere."""
    values = values.float().masked_fill(~mask, torch.inf).contiguous()
    ranked = values.sort(dim=-1).values
    below, upto = (torch.searchsorted(ranked, values, right=right) for right in (False, True))
    return (below + upto + 1) * mask / 2


def gap_closed(recovered: float, heuristic: float, oracle: float) -> float:
    """How far a predictor goes from the best heuristic to the oracle at one budget; nan when there is no gap.

    Example:
        >>> round(gap_closed(0.93, heuristic=0.92, oracle=0.96), 2)
        0.25
    """
    gap = oracle - heuristic
    return (recovered - heuristic) / gap if gap > 1e-9 else float("nan")


def topk_recall(scores: Tensor, target: Tensor, mask: Tensor, eligible: Tensor, budget: float) -> Tensor:
    """Fraction of the oracle's eligible tokens that the scores keep too, at the same budget.

    Args:
        scores: [R, S], higher = keep. target: [R, S], non-negative. mask, eligible: [R, S] bool.
        budget: kept fraction of the context.

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


class Recovery(Metric):
    """Mean of :func:`recovery` over rows, in all and by layer.

    Args:
        budgets: kept fractions of the context.

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
        places = MAX_LAYERS * MAX_HEADS
        self.add_state("total", torch.zeros(places, len(self.budgets)), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(places), dist_reduce_fx="sum")

    def update(
        self,
        scores: Tensor,
        target: Tensor,
        mask: Tensor,
        eligible: Tensor,
        layer: Tensor,
        head: Tensor | None = None,
    ) -> None:
        """Add R rows.

        Args:
            scores: [R, S], higher = keep. target: [R, S], non-negative. mask, eligible: [R, S] bool.
            layer, head: [R] integers; all of head 0 when ``head`` is None.
        """
        place = layer.long() * MAX_HEADS + (0 if head is None else head.long())
        self.total.index_add_(0, place, recovery(scores, target, mask, eligible, self.budgets))
        self.rows.index_add_(0, place, torch.ones_like(place, dtype=torch.float32))

    def compute(self) -> Tensor:
        """Return the mean at each budget, [len(budgets)]."""
        return self.total.sum(0) / self.rows.sum()

    def by_layer(self) -> dict[int, Tensor]:
        """Return the mean at each budget, [len(budgets)], for each layer seen (of this process)."""
        total, rows = self.total.unflatten(0, (-1, MAX_HEADS)).sum(1), self.rows.view(-1, MAX_HEADS).sum(1)
        return {i: total[i] / rows[i] for i in rows.nonzero().flatten().tolist()}

    def by_head(self) -> dict[tuple[int, int], Tensor]:
        """Return the mean at each budget, [len(budgets)], for each (layer, kv head) seen (of this process)."""
        places = self.rows.nonzero().flatten().tolist()
        return {divmod(i, MAX_HEADS): self.total[i] / self.rows[i] for i in places}


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
        """Add R rows: ``tensors`` [R, ...] are what the function takes."""
        values = self.function(*tensors, **self.options)
        self.total += values.nansum()
        self.rows += values.isfinite().sum()

    def compute(self) -> Tensor:
        """Return the mean, []."""
        return self.total / self.rows


class RowQuantile(Metric):
    """A quantile over rows of one of the functions above: how bad the worst of them are.

    Args:
        function: takes tensors, returns [R] or [R, 1].
        q: of the quantile.
        **options: further arguments of the function.

    Example:
        >>> worst = RowQuantile(lambda values: values, q=0.25)
        >>> worst.update(torch.tensor([0.5, 0.9, 0.1, 0.7, 0.8]))
        >>> worst.compute()
        tensor(0.5000)
    """

    full_state_update = False
    values: list[Tensor]

    def __init__(self, function: Callable[..., Tensor], q: float, **options: Any) -> None:
        super().__init__()
        self.function, self.q, self.options = function, q, options
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, *tensors: Tensor) -> None:
        """Add R rows: ``tensors`` [R, ...] are what the function takes."""
        self.values.append(self.function(*tensors, **self.options).flatten())

    def compute(self) -> Tensor:
        """Return the quantile, [], interpolated between rows."""
        values = torch.cat(list(self.values)) if isinstance(self.values, list) else self.values
        ranked, place = values.sort().values, self.q * (len(values) - 1)
        low = int(place)
        high = min(low + 1, len(values) - 1)
        return torch.lerp(ranked[low], ranked[high], place - low)


class Calibration(Metric):
    """The one temperature with the lowest mean KL from the true attention, over any number of batches and processes.

    It keeps a mean for each of a row of temperatures and puts a parabola through the lowest three, so memory does
    not grow with the data.

    Source: Guo et al. 2017, On Calibration of Modern Neural Networks (arXiv 1706.04599), section 4.2.

    Example:
        >>> metric, logits = Calibration(), torch.randn(64, 20)
        >>> metric.update(logits, (logits / 2).softmax(-1), torch.ones(64, 20, dtype=torch.bool))
        >>> metric.compute().round(decimals=2).abs()
        tensor([2., 0.])
    """

    full_state_update = False
    total: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(N_TEMPERATURES, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: Tensor, mass: Tensor, mask: Tensor) -> None:
        """Add R rows: ``logits`` [R, N], ``mass`` [R, N], non-negative, and ``mask`` [R, N] bool."""
        kl = tempered_kl(logits, mass, mask, temperatures().to(logits.device))
        self.total += kl.double().nansum(0)
        self.rows += kl[:, 0].isfinite().sum()

    def compute(self) -> Tensor:
        """Return the temperature and the mean KL there, [2], in nats.

        The temperature lies within [1 / MAX_TEMPERATURE, MAX_TEMPERATURE]; without rows it is the initial one, and
        KL is nan.
        """
        if self.rows == 0:
            return torch.tensor([INITIAL_TEMPERATURE, float("nan")])
        return torch.tensor(best_temperature((self.total / self.rows).cpu()))


def reset_metrics(module: nn.Module) -> None:
    """Reset every metric inside a module."""
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.reset()
