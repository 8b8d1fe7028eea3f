"""One budget for all layers and kv heads of a sequence: whose tokens it goes to is decided by comparing all of them.

At the end of a prompt a layer knows itself and the layers before it. It keeps what it would have if they shared their
part of the budget, and :data:`MARGIN` more; when the last layer has moved its tokens, all rows get their part, and what
is beyond it leaves. So no layer's tokens wait in full precision for those of another. Each time that all layers have
moved, tokens compete anew for the budget of the next time, those among them that will have left the window by then.

Source: Feng et al. 2024, Ada-KV (arXiv 2407.11550), section 3, for the kv heads of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fade_runtime.storage.tiers import Budgets, Tier, plan_tiers

MARGIN = 0.05  # more than its part that a layer may keep until the last layer has been read


class Contenders(NamedTuple):
    """Body tokens of one layer, T of all rows, that compete with those of other layers.

    Attributes:
        scores: [T] comparable between rows and layers, higher = keep.
        rows, slots, tiers: [T] int64, as in :class:`fade_runtime.layer.store.BodyTokens`.
        budgets: what each row would have by itself; their sum is what is shared out.
        lengths: [B] tokens of each sequence.
        low: what the low tier is.
    """

    scores: Tensor
    rows: Tensor
    slots: Tensor
    tiers: Tensor
    budgets: Budgets
    lengths: Tensor
    low: Tier = Tier.LOW

    @property
    def heads(self) -> int:
        """Kv heads."""
        return len(self.budgets.high) // len(self.lengths)

    def counted(self, tiers: Tensor) -> Budgets:
        """How many tokens each row has in the high and in the low tier, by tiers [T]."""
        rows = len(self.budgets.high)
        high, low = (torch.bincount(self.rows[tiers == tier], minlength=rows) for tier in (Tier.HIGH, self.low))
        return Budgets(high, low)

    def kept(self, tiers: Tensor) -> Contenders:
        """Those that tiers [T] keep, in these tiers."""
        stay = tiers != Tier.EVICTED
        scores, rows, slots, tiers = (each[stay] for each in (self.scores, self.rows, self.slots, tiers.long()))
        return self._replace(scores=scores, rows=rows, slots=slots, tiers=tiers)


class Contender(Protocol):
    """A layer whose tokens compete."""

    @property
    def index(self) -> int:
        """Of the layer in the model."""

    def settle(self, budgets: Budgets, due: Tensor) -> None:
        """Let go what is beyond the budgets in due rows of the batch, [B] bool."""

    def next_contenders(self) -> Contenders:
        """Its body tokens as they will be when tokens move again."""

    def expect(self, given: Budgets, own: Budgets, due: Tensor) -> None:
        """Take in what each due row will be given when tokens move again, and what it would have by itself."""


def share_out(layers: Sequence[Contenders], margin: float = 0.0) -> list[Budgets]:
    """Give each row as many tokens as it has among the best of its sequence, over all layers.

    Args:
        layers: tokens of the same sequences. margin: how much more than the budget is shared out.

    Example:
        >>> def layer(scores):  # two kv heads of two tokens, of which each would keep one
        ...     rows, slots, ones = torch.tensor([0, 0, 1, 1]), torch.tensor([4, 5, 4, 5]), torch.ones(2).long()
        ...     return Contenders(torch.tensor(scores), rows, slots, torch.ones(4).long(), Budgets(ones, 0 * ones),
        ...                       torch.tensor([8]))
        >>> [budgets.high.tolist() for budgets in share_out([layer([9.0, 8, 1, 2]), layer([3.0, 7, 2, 1])])]
        [[2, 0], [2, 0]]
    """
    return [layer.counted(tiers) for layer, tiers in zip(layers, _compete(layers, margin))]


def _compete(layers: Sequence[Contenders], margin: float) -> Sequence[Tensor]:
    """Tiers [T] of each layer's tokens."""
    high, low = (
        (sum(each.view(-1, layer.heads).sum(1) for layer, each in zip(layers, budgets)) * (1 + margin)).long()
        for budgets in zip(*((layer.budgets.high, layer.budgets.low) for layer in layers))
    )
    scores, rows, slots, tiers = (
        torch.cat(each)
        for each in zip(*((layer.scores, layer.rows // layer.heads, layer.slots, layer.tiers) for layer in layers))
    )
    order = rows.argsort(stable=True)  # a plan wants its tokens row after row; here a row is a sequence
    planned = plan_tiers(
        scores[order], rows[order], Budgets(high, low), slots=slots[order], tiers=tiers[order], low_tier=layers[0].low
    )
    given = torch.empty_like(planned.tiers)
    given[order] = planned.tiers
    return given.split([len(layer.rows) for layer in layers])


@dataclass
class GlobalAllocation:
    """What the layers of a cache share so that their tokens compete for one budget.

    Attributes:
        layers: gives the layers whose tokens compete; the cache sets it.
        reading: contenders of the layers that have moved the tokens of a prompt, until all have.
        moved: contenders for the next time, of the layers that have moved, until all have.
    """

    layers: Callable[[], Sequence[Contender]] = tuple
    reading: dict[int, Contenders] = field(default_factory=dict)
    moved: dict[int, Contenders] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget the text."""
        self.reading, self.moved = {}, {}

    def read(self, layer: int, own: Contenders) -> Budgets:
        """What each row of a layer may keep at the end of a prompt, until the last layer has been read."""
        self.reading = _of_one_call(self.reading, layer, own)
        *_, tiers = _compete([*self.reading.values(), own], MARGIN)
        self.reading[layer] = own.kept(tiers)
        return own.counted(tiers)

    def settle(self, due: Tensor, reads: Tensor) -> None:
        """A layer has moved the tokens of a prompt; once all have, what is beyond the budget of all leaves.

        Args:
            due: [B] bool, sequences that took part. reads: [B] bool, those at the end of a prompt.
        """
        layers = self.layers()
        if not all(layer.index in self.reading for layer in layers):
            return
        shared = share_out([self.reading[layer.index] for layer in layers])
        self.reading = {}
        for layer, budgets in zip(layers, shared):
            layer.settle(budgets, reads)
            self.share_next(layer.index, layer.next_contenders(), due)

    def share_next(self, layer: int, own: Contenders, due: Tensor) -> None:
        """Take in the contenders of a layer that has moved; once all have, share out what they will have next time.

        Args:
            layer: its index. own: as they will be then. due: [B] bool, sequences that took part.
        """
        self.moved = {**_of_one_call(self.moved, layer, own), layer: own}
        layers = self.layers()
        if not all(each.index in self.moved for each in layers):
            return
        contenders = [self.moved[each.index] for each in layers]
        self.moved = {}
        for each, its, given in zip(layers, contenders, share_out(contenders)):
            each.expect(given, its.budgets, due)

    def tensors(self) -> list[Tensor]:
        """Every tensor `[...]` that it holds: between two calls none, but where layers do not move in one call."""
        held = [*self.reading.values(), *self.moved.values()]
        named = [(*each[:4], each.budgets.high, each.budgets.low, each.lengths) for each in held]
        return [tensor for each in named for tensor in each]


def _of_one_call(found: dict[int, Contenders], layer: int, own: Contenders) -> dict[int, Contenders]:
    """Those of other layers; none if they are of a call that did not end."""
    if any(not torch.equal(each.lengths, own.lengths) for each in found.values()):
        return {}
    return {index: each for index, each in found.items() if index != layer}
