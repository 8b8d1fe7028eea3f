"""Which columns of a batch's attention mask are tokens, and at which position ids they came."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from predictor.errors import FadeError

AT_ONCE = 1 << 26  # elements of masks that are compared together


@dataclass(frozen=True, eq=False)
class Sequences:
    """The rows of a batch: which columns are tokens, which padding; all layers of a cache share one, nobody changes it.

    A *column* is a place along the attention mask. A *slot* is a token's place among the tokens of its own row: 0 is
    its first token wherever padding stands, so a row is treated as it would be alone.

    Attributes:
        seen: columns so far.
        batch: rows. device: of the tensors.
        real: [B, seen] bool, False where a column is padding; None: no padding so far.
        positions: [B, seen] int32 position id of each column, or None if they are not needed.
        new: columns of the last call. plain: its mask hid nothing but what is later, padding, and what has
            left the window of a sliding-window layer.

    Example:
        >>> mask = torch.tensor([[[[True, False], [True, False]]], [[[True, False], [True, True]]]])  # right padding
        >>> both = Sequences(0, 2, torch.device("cpu")).extended(2, mask)
        >>> both.lengths.tolist(), both.newest_slots().tolist()
        ([1, 2], [[0, -1], [0, 1]])
    """

    seen: int
    batch: int
    device: torch.device
    real: Tensor | None = None
    positions: Tensor | None = None
    new: int = 0
    plain: bool = True

    def extended(
        self,
        new: int,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        keep_positions: bool = False,
        window: int | None = None,
    ) -> Sequences:
        """The same rows with ``new`` columns more.

        Args:
            mask: [B or 1, 1 or Hq, new, seen + new] of the call, bool (True = visible) or additive; None: no padding.
                A column that its own query may not look at is padding.
            position_ids: [B or 1, new], or [n, B or 1, new] with the same ids in each of the n (text among images).
            keep_positions: keep them; None then stands for the columns' own numbers.
            window: tokens that a query of a sliding-window layer attends to, itself included.

        Raises:
            FadeError: a mask of other columns, one that shows what was padding before, or position ids of images.
        """
        fresh = None if mask is None else self._tokens_in(mask, new)
        real = self.real
        if fresh is not None or real is not None:
            old = self._all(self.seen) if real is None else real
            real = torch.cat((old, self._all(new) if fresh is None else fresh), dim=1)
        positions = self.positions
        if keep_positions:
            ids = self._ids(new, position_ids)
            positions = ids if positions is None else torch.cat((positions, ids), dim=1)
        after = Sequences(self.seen + new, self.batch, self.device, real, positions, new)
        return after if mask is None else replace(after, plain=after._hides_no_more(mask, window))

    def _all(self, columns: int) -> Tensor:
        return torch.ones(self.batch, columns, dtype=torch.bool, device=self.device)

    def _tokens_in(self, mask: Tensor, new: int) -> Tensor | None:
        """[B, new] bool, which new columns are tokens; None if all are."""
        if mask.shape[2:] != (new, self.seen + new):
            raise FadeError(
                f"the attention mask is over {mask.shape[2]} queries and {mask.shape[3]} columns, and the cache holds "
                f"{self.seen} with {new} new ones; give a mask over all of them"
            )
        own = mask[:, :, :, self.seen :].diagonal(dim1=2, dim2=3)  # [B or 1, 1 or Hq, new]
        fresh = visible(own).any(1).expand(self.batch, -1)
        if self.real is not None:
            shown = visible(mask[:, :, :, : self.seen]).any(1) & ~self.real[:, None]
            if bool(shown.any()):
                row, _, column = shown.nonzero()[0].tolist()
                raise FadeError(
                    f"the attention mask shows column {column} of row {row}, which was padding when it came and was "
                    "not stored; keep it masked"
                )
        return None if bool(fresh.all()) else fresh

    def _ids(self, new: int, position_ids: Tensor | None) -> Tensor:
        """[B, new] int32 position ids of new columns."""
        if position_ids is None or position_ids.shape[-1] != new:
            ids = torch.arange(self.seen, self.seen + new, device=self.device)[None]
        else:
            axes = position_ids.reshape(-1, *position_ids.shape[-2:])
            if len(axes) > 1 and bool((axes != axes[0]).any()):
                raise FadeError(
                    "position ids differ between their axes, as those of images do; use positions='original' and no "
                    "product quantisation, which rotate keys by one axis"
                )
            ids = axes[0].to(self.device)
        return ids.to(torch.int32).expand(self.batch, -1)

    # -- facts ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def padded(self) -> bool:
        """Whether the last call had padding: then not all rows gained as many tokens."""
        return self.real is not None and not bool(self.real[:, self.seen - self.new :].all())

    @property
    def lengths(self) -> Tensor:
        """[B] int64 tokens of each row."""
        if self.real is None:
            return torch.full((self.batch,), self.seen, dtype=torch.long, device=self.device)
        return self._lengths

    @functools.cached_property
    def _lengths(self) -> Tensor:
        assert self.real is not None
        return self.real.sum(1)

    @functools.cached_property
    def counts(self) -> list[int]:
        """The same as numbers."""
        return [self.seen] * self.batch if self.real is None else self.lengths.tolist()

    @functools.cached_property
    def gained(self) -> list[int]:
        """Tokens of each row in the last call."""
        if not self.padded or self.real is None:
            return [self.new] * self.batch
        return self.real[:, self.seen - self.new :].sum(1).tolist()

    @functools.cached_property
    def begins(self) -> list[bool]:
        """Whether the last call brought a row's first tokens."""
        return [0 < gained == count for gained, count in zip(self.gained, self.counts)]

    @functools.cached_property
    def columns(self) -> Tensor | None:
        """[B, n] int64 column of each slot up to the longest row's (beyond a row's end: padding); None: the same."""
        if self.real is None:
            return None
        return (~self.real).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(self.counts)]

    def newest_slots(self) -> Tensor:
        """[B, new] int64 slots of the columns of the last call, -1 for padding."""
        if self.real is None:
            return torch.arange(self.seen - self.new, self.seen, device=self.device).expand(self.batch, -1)
        tail = self.real[:, self.seen - self.new :]
        before = self.lengths[:, None] - tail.sum(1, keepdim=True)
        return torch.where(tail, before + tail.cumsum(1) - 1, -1)

    def first_of(self, queries: int) -> int | Tensor:
        """Slot of the first of so many newest queries, in all rows or [B]; for a call without padding."""
        return self.seen - queries if self.real is None else self.lengths - queries

    def tokens_of(self, row: int, first: int = 0) -> slice | Tensor:
        """Columns of a row that are tokens, from ``first`` on: a slice where they stand together, else [n] int64."""
        if self.real is None:
            return slice(first, self.seen)
        found = self.real[row, first:].nonzero()[:, 0] + first
        if len(found) and int(found[-1] - found[0]) + 1 == len(found):
            return slice(int(found[0]), int(found[-1]) + 1)
        return found

    def by_slot(self, values: Tensor) -> Tensor:
        """What stands along columns [B, ..., seen], along slots [B, ..., n] instead."""
        columns = self.columns
        if columns is None:
            return values
        shape = columns.shape[0], *[1] * (values.ndim - 2), columns.shape[1]
        return values.expand(self.batch, *values.shape[1:]).gather(
            -1, columns.view(shape).expand(-1, *values.shape[1:-1], -1)
        )

    @functools.cached_property
    def distinct(self) -> tuple[Tensor, Tensor]:
        """Position ids that occur, ascending [U], and which of them each slot has [B, n]."""
        assert self.positions is not None
        return torch.unique(self.by_slot(self.positions).long(), return_inverse=True)

    def _hides_no_more(self, mask: Tensor, window: int | None) -> bool:
        """Whether a mask [B or 1, 1 or Hq, new, seen] hides nothing but what is later, padding, and beyond a window."""
        if mask.dtype != torch.bool or mask.shape[1] > 1:
            return False
        causal = torch.ones(self.new, self.seen, dtype=torch.bool, device=mask.device).tril(self.seen - self.new)
        if window is not None:
            causal = causal.triu(self.seen - self.new - window + 1)
            if not all(isinstance(self.tokens_of(row), slice) for row in range(self.batch)):
                return False  # padding among a row's tokens: a window of columns is none of slots
        if self.real is None:
            return bool((mask[:, 0] == causal).all())
        together = max(1, AT_ONCE // causal.numel())
        for first in range(0, self.batch, together):
            real = self.real[first : first + together]
            visible_now = mask[first : first + together, 0] if len(mask) > 1 else mask[:, 0]
            differs = (visible_now != causal & real[:, None]) & real[:, self.seen - self.new :, None]  # what tokens ask
            if bool(differs.any()):
                return False
        return True

    # -- the same with other rows or fewer columns -----------------------------------------------------------------

    def cropped(self, count: int) -> Sequences:
        """Without the newest ``count`` columns."""
        left = self.seen - count
        real = None if self.real is None else self.real[:, :left]
        if real is not None and bool(real.all()):
            real = None
        positions = None if self.positions is None else self.positions[:, :left]
        return replace(self, seen=left, real=real, positions=positions, new=max(self.new - count, 0))

    def selected(self, index: Tensor) -> Sequences:
        """Rows [n] by number, in the given order and as often as named."""
        index = index.to(self.device)
        real, positions = (None if each is None else each[index] for each in (self.real, self.positions))
        return replace(self, batch=len(index), real=real, positions=positions)

    def row(self, row: int) -> Sequences:
        """One row by itself, as if there had never been padding."""
        count, new = self.counts[row], self.gained[row]
        positions = None if self.positions is None else self.by_slot(self.positions)[row : row + 1, :count]
        return Sequences(count, 1, self.device, None, positions, new, self.plain)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor [B, S] that it holds, by its name, with what was derived from them and is kept."""
        held = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        if "distinct" in vars(self):
            held |= {"distinct.ids": self.distinct[0], "distinct.index": self.distinct[1]}
        return held


def visible(mask: Tensor) -> Tensor:
    """A mask [...] as bool: True where a query may attend."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


class Shared:
    """What the layers of one cache share: steps from one :class:`Sequences` to the next, and the running call.

    The first layer of a call computes its step; the others come with the same rows, mask and ids and get the same.

    Attributes:
        last: index of the last layer that takes keys.
        running: index of the layer that took keys last in the running call, None between calls.
        before: columns before the running call.
    """

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.reset()

    def __deepcopy__(self, memo: object) -> Shared:
        """A copy of a cache has rows of its own."""
        copied = Shared(self.last)
        copied.running, copied.before = self.running, self.before
        return copied

    def reset(self) -> None:
        """Forget the running call."""
        self.running: int | None = None
        self.before = 0
        self._steps: dict[int | None, _Step] = {}  # the last one of each kind of layer

    def ended(self, layer: int) -> None:
        """A layer has done its part of the running call."""
        if layer == self.last:
            self.running = None

    def step(
        self,
        before: Sequences,
        new: int,
        do: Callable[[], Sequences],
        tensor: Tensor | None = None,
        other: Tensor | None = None,
        kind: int | None = None,
    ) -> Sequences:
        """What ``do`` gives, once for the same rows, new columns and tensors [...] of layers of the same kind.

        Args:
            before: rows before the step; at first each layer has its own. new: columns that it adds.
            do: makes the rows after it. tensor, other: what it is made of. kind: the layers' window.
        """
        last = self._steps.get(kind)
        if (
            last is None
            or last.value.seen != before.seen + new
            or not (last.before() is before or (before.seen == 0 and last.start == (before.batch, before.device)))
            or last.tensor() is not tensor
            or last.other() is not other
        ):
            start = None if before.seen else (before.batch, before.device)
            last = self._steps[kind] = _Step(do(), _weak(before), _weak(tensor), _weak(other), start)
        return last.value


class _Step(NamedTuple):
    """A step from one :class:`Sequences` to the next, and what it came from."""

    value: Sequences
    before: Callable[[], Any]
    tensor: Callable[[], Any]
    other: Callable[[], Any]
    start: tuple[int, torch.device] | None  # batch and device of rows that had no columns


def _nothing() -> None:
    """What there is no reference to."""


def _weak(thing: Any) -> Callable[[], Any]:
    """A reference that does not keep a mask alive."""
    return _nothing if thing is None else weakref.ref(thing)
