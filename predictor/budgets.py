"""Head budgets: how much each kv head must keep so that, for a given total, the least is lost.

Some heads lose almost nothing with a tenth of the context, a few (they copy) lose everything unless they keep it all.
What a head loses at a share is read off traces: the attention that dropped tokens would have received, each token at
its *worst* coming step, because one step in which a needed token is missing is what spoils a text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from predictor.errors import FadeError

# Body tokens kept, as a share of the prompt: sinks and window are kept anyway and are not counted.
SHARES = (0.0, 0.015, 0.03, 0.05, 0.075, 0.11, 0.16, 0.23, 0.33, 0.47, 0.65, 0.82, 1.0)


def lost_attention(
    scores: Tensor, target: Tensor, eligible: Tensor, length: Tensor, shares: Sequence[float] = SHARES
) -> Tensor:
    """Attention that is lost when a row keeps only its best-scored tokens.

    Args:
        scores: [R, S], higher = keep.
        target: [R, S] largest attention that a token receives in any of the coming steps.
        eligible: [R, S] bool, tokens that may be dropped. length: [R] real tokens.
        shares: kept eligible tokens as shares of the length.

    Returns:
        [R, len(shares)] sum of the targets of the dropped tokens.

    Example:
        >>> yes, target = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0.1, 0.4, 0.2, 0.3]])
        >>> lost_attention(target, target, yes, torch.tensor([4]), shares=(0.0, 0.5, 1.0))
        tensor([[1.0000, 0.3000, 0.0000]])
    """
    order = scores.float().masked_fill(~eligible, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    mass = (target * eligible).gather(-1, order)
    dropped = mass.flip(-1).cumsum(-1).flip(-1)  # [R, S]: sum of this and all later ones
    dropped = torch.nn.functional.pad(dropped, (0, 1))
    kept = torch.stack([(length * share).long().clamp(max=scores.shape[-1]) for share in shares], dim=-1)
    return dropped.gather(-1, kept)


@dataclass(frozen=True)
class HeadBudgets:
    """What each kv head loses at each share, averaged over documents.

    Attributes:
        lost: [layers, H, K] expected lost attention.
        shares: K kept shares, ascending from 0 to 1.

    Example:
        >>> copies, looks_back = [1.0, 0.5, 0.0], [0.1, 0.0, 0.0]  # what two heads lose at none, half, all
        >>> budgets = HeadBudgets(torch.tensor([[copies, looks_back]]), shares=(0.0, 0.5, 1.0))
        >>> budgets.allocate(0.5)
        ((1.0, 0.0),)
    """

    lost: Tensor
    shares: tuple[float, ...] = SHARES

    @lru_cache(maxsize=64)  # noqa: B019 (a handful of small tuples)
    def allocate(self, share: float) -> tuple[tuple[float, ...], ...]:
        """Share of the context that each kv head keeps, their mean being ``share``.

        The lower convex hull of each head's losses is cut into segments; the segments that save most for each token
        are bought first. This is optimal for losses that are convex, and the hull otherwise.

        Returns:
            For each layer, one share in [0, 1] for each kv head.
        """
        layers, heads, _ = self.lost.shape
        segments = []
        for head, curve in enumerate(self.lost.flatten(0, 1).tolist()):
            hull = _hull(self.shares, curve)
            segments += [
                ((hull[i][1] - hull[i + 1][1]) / (hull[i + 1][0] - hull[i][0]), head, hull[i + 1][0] - hull[i][0])
                for i in range(len(hull) - 1)
            ]
        left, kept = share * layers * heads, [0.0] * (layers * heads)
        for _, head, width in sorted(segments, key=lambda segment: -segment[0]):
            bought = min(width, left)
            kept[head] += bought
            left -= bought
        return tuple(tuple(kept[i * heads : (i + 1) * heads]) for i in range(layers))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        rounded = [[[float(f"{value:.4g}") for value in head] for head in layer] for layer in self.lost.tolist()]
        return {"shares": list(self.shares), "lost": rounded}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> HeadBudgets:
        """Rebuild; refuse what is not a table of finite losses.

        Raises:
            FadeError: a table of another form.
        """
        try:
            lost, shares = torch.tensor(stored["lost"], dtype=torch.float32), tuple(map(float, stored["shares"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FadeError("the table of head budgets is damaged; make the bundle again") from error
        ascending = all(a < b for a, b in pairwise(shares))
        if lost.ndim != 3 or lost.shape[2] != len(shares) or not ascending or not bool(lost.isfinite().all()):
            raise FadeError("the table of head budgets is damaged; make the bundle again")
        return cls(lost, shares)

    def __hash__(self) -> int:
        """By identity: the table never changes."""
        return id(self)


def learn_budgets(
    score: Callable[[Mapping[str, Tensor]], Tensor],
    batches: Iterable[Mapping[str, Tensor]],
    target: str = "target_max",
) -> HeadBudgets:
    """Tabulate what each kv head loses, over the rows of a trace collection.

    Args:
        score: gives [R, S] importance scores of a padded batch, as the cache will compute them.
        batches: of rows with the target, ``eligible``, ``length``, ``layer`` and ``head``.
        target: what a dropped token would have received: ``target_max`` at its worst step, ``target_sum`` over all.

    Raises:
        FadeError: a layer or head without rows.
    """
    total: dict[tuple[int, int], Tensor] = {}
    rows: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        lost = lost_attention(score(batch), batch[target], batch["eligible"], batch["length"])
        for where, row in zip(zip(batch["layer"].tolist(), batch["head"].tolist()), lost.double()):
            total[where] = total[where] + row if where in total else row
            rows[where] += 1
    if not total:
        raise FadeError("no trace rows to learn head budgets from; collect traces first")
    layers, heads = (1 + max(each) for each in zip(*total))
    table = torch.zeros(layers, heads, len(SHARES))
    for layer in range(layers):
        for head in range(heads):
            if not rows[layer, head]:
                raise FadeError(f"the traces have no row of layer {layer}, kv head {head}; collect them again")
            table[layer, head] = total[layer, head] / rows[layer, head]
    return HeadBudgets(table)


def _hull(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Lower convex hull of points with ascending ``xs``, made non-increasing.

    Source: Andrew 1979, monotone chain.
    """
    hull: list[tuple[float, float]] = []
    least = float("inf")
    for x, y in zip(xs, ys):
        least = min(least, y)
        point = (x, least)
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
