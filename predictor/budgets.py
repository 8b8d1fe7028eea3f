"""Head budgets: how much each kv head must keep so that, for a given total, the least is lost.

Some heads lose almost nothing with a tenth of the context, some (they copy) lose everything unless they keep it all.
What a head loses when it keeps a fraction is read off traces: the attention that dropped tokens would have received,
each token at its *worst* coming step, because one step in which a needed token is missing is what spoils a text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from predictor.cache_layers import in_words
from predictor.errors import FadeError

# Body tokens kept, as a fraction of the prompt: sinks and window are kept anyway and are not counted.
FRACTIONS = (0.0, 0.015, 0.03, 0.05, 0.075, 0.11, 0.16, 0.23, 0.33, 0.47, 0.65, 0.82, 1.0)

# How heads were allocated their fractions when lost attention was measured.
ALLOCATIONS = {
    "max": "by head, learned from the worst step",
    "sum": "by head, learned from the sum over steps",
    "uniform": "all heads alike",
}
LOST = re.compile(r"(?P<kind>\w+)/lost_at_(?P<budget>[\d.]+)")


def lost_attention(
    scores: Tensor, target: Tensor, eligible: Tensor, length: Tensor, fractions: Sequence[float] | Tensor = FRACTIONS
) -> Tensor:
    """Attention that is lost when a row keeps only its best-scored tokens.

    Args:
        scores: [R, S], higher = keep.
        target: [R, S] largest attention that a token receives in any of the coming steps.
        eligible: [R, S] bool, tokens that may be dropped. length: [R] real tokens.
        fractions: kept eligible tokens as fractions of the length: K for all rows, or [R, K] for each row its own.

    Returns:
        [R, K] sum of the targets of the dropped tokens.

    Example:
        >>> yes, target = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0.1, 0.4, 0.2, 0.3]])
        >>> lost_attention(target, target, yes, torch.tensor([4]), fractions=(0.0, 0.5, 1.0))
        tensor([[1.0000, 0.3000, 0.0000]])
    """
    order = scores.float().masked_fill(~eligible, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    mass = (target * eligible).gather(-1, order)
    dropped = mass.flip(-1).cumsum(-1).flip(-1)  # [R, S]: sum of this and all later ones
    dropped = pad(dropped, (0, 1))
    each = torch.as_tensor(fractions, dtype=torch.float32, device=scores.device).expand(len(scores), -1)
    kept = (length[:, None] * each).long().clamp(max=scores.shape[-1])
    return dropped.gather(-1, kept)


@dataclass(frozen=True)
class HeadBudgets:
    """What each kv head loses at each fraction that it may keep, averaged over documents.

    Attributes:
        lost: [L, H, K] expected lost attention of L layers.
        fractions: K kept fractions, ascending from 0 to 1.
        layers: indices of the L layers in the model, ascending; none: 0 .. L - 1.
        weights: of the L layers: what a unit of their lost attention costs the model; none: all the same.

    Example:
        >>> copies, looks_back = [1.0, 0.5, 0.0], [0.1, 0.0, 0.0]  # what two heads lose at none, half, all
        >>> budgets = HeadBudgets(torch.tensor([[copies, looks_back]]), fractions=(0.0, 0.5, 1.0), layers=(5,))
        >>> budgets.allocate(0.5)
        {5: (1.0, 0.0)}
    """

    lost: Tensor
    fractions: tuple[float, ...] = FRACTIONS
    layers: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Name the layers, and weigh them, where they were not."""
        object.__setattr__(self, "layers", self.layers or tuple(range(len(self.lost))))
        object.__setattr__(self, "weights", self.weights or (1.0,) * len(self.lost))

    def allocate(self, fraction: float) -> dict[int, tuple[float, ...]]:
        """Fraction of the context that each kv head keeps, their mean being ``fraction``.

        The lower convex hull of each head's losses is cut into segments; the segments that save most for each token
        are bought first. This is optimal for losses that are convex, and the hull otherwise.

        Returns:
            For each layer of the table, by its index in the model, one fraction in [0, 1] for each kv head.
        """
        return self._allocated(fraction)

    @lru_cache(maxsize=64)  # noqa: B019 (a handful of small tuples)
    def _allocated(self, fraction: float) -> dict[int, tuple[float, ...]]:
        count, heads, _ = self.lost.shape
        segments = []
        cost = self.lost * torch.tensor(self.weights)[:, None, None]
        for head, curve in enumerate(cost.flatten(0, 1).tolist()):
            hull = _hull(self.fractions, curve)
            segments += [
                ((hull[i][1] - hull[i + 1][1]) / (hull[i + 1][0] - hull[i][0]), head, hull[i + 1][0] - hull[i][0])
                for i in range(len(hull) - 1)
            ]
        left, kept = fraction * count * heads, [0.0] * (count * heads)
        for _, head, width in sorted(segments, key=lambda segment: -segment[0]):
            bought = min(width, left)
            kept[head] += bought
            left -= bought
        return {layer: tuple(kept[i * heads : (i + 1) * heads]) for i, layer in enumerate(self.layers)}

    def of_layer(self, layer: int) -> HeadBudgets:
        """The table of one layer, by its index in the model."""
        return HeadBudgets(self.lost[[self.layers.index(layer)]], self.fractions, (layer,))

    def uniform(self, fraction: float) -> dict[int, tuple[float, ...]]:
        """As :meth:`allocate`, with the same fraction for all kv heads."""
        return dict.fromkeys(self.layers, (fraction,) * self.lost.shape[1])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        rounded = [[[float(f"{value:.4g}") for value in head] for head in layer] for layer in self.lost.tolist()]
        named = {} if self.layers == tuple(range(len(self.lost))) else {"layers": list(self.layers)}
        weighed = {} if set(self.weights) == {1.0} else {"weights": [float(f"{each:.4g}") for each in self.weights]}
        return {"shares": list(self.fractions), "lost": rounded} | named | weighed

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> HeadBudgets:
        """Rebuild; refuse what is not a table of finite losses.

        Raises:
            FadeError: a table of another form.
        """
        try:
            lost, fractions = torch.tensor(stored["lost"], dtype=torch.float32), tuple(map(float, stored["shares"]))
            layers = tuple(map(int, stored.get("layers", range(len(lost)))))
            weights = tuple(map(float, stored.get("weights", [1.0] * len(lost))))
        except (KeyError, TypeError, ValueError) as error:
            raise FadeError("the table of head budgets is damaged; make the bundle again") from error
        ascending = len(fractions) > 1 and all(a < b for each in (fractions, (-1, *layers)) for a, b in pairwise(each))
        fits = lost.ndim == 3 and lost.shape[::2] == (len(layers), len(fractions))
        weighs = len(weights) == len(layers) and all(0 < each < math.inf for each in weights)
        spans = weighs and (fractions[0], fractions[-1]) == (0, 1)
        if not (ascending and fits and spans) or not bool(((lost >= 0) & lost.isfinite()).all()):
            raise FadeError("the table of head budgets is damaged; make the bundle again")
        return cls(lost, fractions, layers, weights)

    def refuse_other_heads(self, what: str, layers: Sequence[int], kv_heads: int) -> None:
        """Refuse a table that is not for the heads whose tokens a model's cache can evict.

        Args:
            what: names the table's owner in the message. layers: their indices. kv_heads: of each.

        Raises:
            FadeError: fewer, more or other layers, or other heads.

        Example:
            >>> budgets = HeadBudgets(torch.zeros(2, 3, 2), fractions=(0.0, 1.0), layers=(5, 11))
            >>> budgets.refuse_other_heads("bundle x", [5, 11], kv_heads=3)
        """
        heads = self.lost.shape[1]
        if (self.layers, heads) != (tuple(layers), kv_heads):
            raise FadeError(
                f"{what} has head budgets for {in_words(self.layers)} ({heads} kv heads), and its model can "
                f"evict tokens from {in_words(layers)} ({kv_heads}); make it again "
                "(pipelines.register), or set head_budgets to False"
            )

    def refuse_beyond(self, what: str, layers: int | None, kv_heads: int | None) -> None:
        """Refuse a table of heads that its own model cannot have.

        Args:
            what: names the table's owner in the message. layers, kv_heads: of the model; None where that is not known.

        Raises:
            FadeError: a layer beyond the last, or other heads.
        """
        heads, last = self.lost.shape[1], self.layers[-1]
        if (layers is not None and last >= layers) or kv_heads not in (None, heads):
            raise FadeError(
                f"{what} has head budgets for {in_words(self.layers)} ({heads} kv heads), and its model has "
                f"{layers} layers ({kv_heads}); make it again (pipelines.register)"
            )

    def __hash__(self) -> int:
        """By identity: the table never changes."""
        return id(self)


class LossTable:
    """Sums of what each kv head lost at each fraction, over any number of batches; grows to the heads that it meets.

    Attributes:
        total: [layers, H, K] float64 by the index of a layer in the model; layers that it never meets stay zero.
        rows: [layers, H] float64, how many rows were added.

    Example:
        >>> table, place = LossTable(fractions=(0.0, 1.0)), torch.tensor([0, 0])
        >>> table.add(torch.tensor([[0.4, 0.0], [0.6, 0.0]]), layer=place, head=place)
        >>> table.budgets().lost
        tensor([[[0.5000, 0.0000]]])
    """

    def __init__(self, fractions: tuple[float, ...] = FRACTIONS) -> None:
        self.fractions = fractions
        self.total = torch.zeros(0, 0, len(fractions), dtype=torch.float64)
        self.rows = torch.zeros(0, 0, dtype=torch.float64)

    def add(self, lost: Tensor, layer: Tensor, head: Tensor) -> None:
        """Add R rows: ``lost`` [R, K] from :func:`lost_attention`; ``layer`` and ``head`` [R]."""
        place = layer.cpu().long(), head.cpu().long()
        self._grow(*(1 + int(index.max()) for index in place))
        self.total.index_put_(place, lost.cpu().double(), accumulate=True)
        self.rows.index_put_(place, torch.ones(len(lost), dtype=torch.float64), accumulate=True)

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add what another table has counted.

        Args:
            state: from its :meth:`state`: ``total`` [layers, H, K] and ``rows`` [layers, H].
        """
        self._grow(*state["rows"].shape)
        layers, heads = state["rows"].shape
        self.total[:layers, :heads] += state["total"]
        self.rows[:layers, :heads] += state["rows"]

    def state(self) -> dict[str, Tensor]:
        """Return the sums, ``total`` [layers, H, K] and ``rows`` [layers, H], for a checkpoint or another process."""
        return {"total": self.total, "rows": self.rows}

    def budgets(self) -> HeadBudgets:
        """Return the means, of the layers that were met.

        Raises:
            FadeError: no rows, or a head without any in a layer that has some.
        """
        met = self.rows.any(1)
        if not met.any():
            raise FadeError("no trace rows to learn head budgets from; collect traces first")
        if missing := (met[:, None] & (self.rows == 0)).nonzero().tolist():
            layer, head = missing[0]
            raise FadeError(f"no row of layer {layer}, kv head {head} was seen; collect more traces, or validate later")
        lost = (self.total[met] / self.rows[met][..., None]).float()
        return HeadBudgets(lost, self.fractions, tuple(met.nonzero().flatten().tolist()))

    def _grow(self, layers: int, heads: int) -> None:
        more = max(layers - self.rows.shape[0], 0), max(heads - self.rows.shape[1], 0)
        self.total = pad(self.total, (0, 0, 0, more[1], 0, more[0]))
        self.rows = pad(self.rows, (0, more[1], 0, more[0]))


def learn_budgets(
    score: Callable[[Mapping[str, Tensor]], Tensor],
    batches: Iterable[Mapping[str, Tensor]],
    target: str = "target_max",
) -> HeadBudgets:
    """Tabulate what each kv head loses, over the rows of a trace collection.

    Args:
        score: gives the importance [R, S] of a padded batch's tokens, as the cache will compute it.
        batches: of rows with the target, ``eligible``, ``length``, ``layer`` and ``head``.
        target: what a dropped token would have received: ``target_max`` at its worst step, ``target_sum`` over all.

    Raises:
        FadeError: no rows, or a head without any.
    """
    table = LossTable()
    for batch in batches:
        lost = lost_attention(score(batch), batch[target], batch["eligible"], batch["length"])
        table.add(lost, batch["layer"], batch["head"])
    return table.budgets()


def lost_curves(metrics: Mapping[str, float]) -> dict[str, dict[float, float]]:
    """Sort what was measured of lost attention by allocation and budget; other numbers are left out.

    Example:
        >>> lost_curves({"max/lost_at_0.25": 0.1, "max/lost_at_0.5": 0.02, "loss": 3.0})
        {'max': {0.25: 0.1, 0.5: 0.02}}
    """
    found: dict[str, dict[float, float]] = {}
    for name, value in metrics.items():
        if match := LOST.fullmatch(name):
            found.setdefault(match["kind"], {})[float(match["budget"])] = value
    return found


def _hull(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Lower convex hull of points with ascending ``xs``, made non-increasing.

    Source: Andrew 1979, monotone chain.
    """
    hull: list[tuple[float, float]] = []
    least = float("inf")
    for x, y in zip(xs, ys):
        least = min(least, y)
        point = (x, least)
        while len(hull) > 1 and _above_chord(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _above_chord(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether the middle one of three points lies on or above the line through the others."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
