"""Attention over the tiers of one layer, and the statistics that come out of the same pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fade_runtime.kernels import reference
from fade_runtime.kernels.dispatch import pick_kernel
from fade_runtime.kernels.reference import Part
from fade_runtime.transformers_api import SCORES_AT_ONCE


@dataclass(frozen=True)
class FullTokens:
    """Full-precision tokens of a layer: sinks first, then the newest.

    Attributes:
        key, value: [B, H, n, D] in the model's dtype.
        slots: [B, n] int32 slots (places among the tokens of a row), ascending; -1 where a row has no token.
        attention_stats: [B, H, n] float32 statistics of the policy, or None.
    """

    key: Tensor
    value: Tensor
    slots: Tensor
    attention_stats: Tensor | None = None

    def __len__(self) -> int:
        """Columns, holes included."""
        return self.key.shape[2]

    def taken(self, columns: Tensor) -> FullTokens:
        """A copy of the tokens at ``columns`` [B, n] int64; -1 is a hole."""
        index = columns.clamp(min=0)
        wide = index[:, None, :, None].expand(-1, self.key.shape[1], -1, -1)
        key, value = (t.gather(2, wide.expand(-1, -1, -1, t.shape[3])) for t in (self.key, self.value))
        slots = self.slots.gather(1, index).masked_fill(columns < 0, -1)
        stats = None if self.attention_stats is None else self.attention_stats.gather(2, wide[..., 0])
        return FullTokens(key, value, slots, stats)

    @functools.cached_property
    def holes(self) -> bool:
        """Whether a row has fewer tokens than columns."""
        return bool((self.slots < 0).any())

    @functools.cached_property
    def oldest(self) -> int:
        """The first slot of any row, where there are no holes."""
        return int(self.slots.min())


class AttentionCall(NamedTuple):
    """The queries of one call of a layer's attention.

    Attributes:
        query: [B, Hq, Q, D] of the newest columns.
        mask: [B or 1, 1 or Hq, Q, S] over columns, bool (True = visible) or additive; None where it hides nothing but
            what is later and what is padding.
        scaling: factor on the scores. softcap: of the scores, or None.
        window: tokens of its row that a query attends to, itself included; None: all. A mask, if there is one, hides
            the others already.
        sinks: [Hq] learned sinks (:mod:`predictor.learned_sinks`), or None.
    """

    query: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    def queries(self, some: slice) -> AttentionCall:
        """The same of some queries, over the same columns."""
        mask = None if self.mask is None else self.mask[:, :, some]
        return self._replace(query=self.query[:, :, some], mask=mask)

    def newest(self, most: int) -> AttentionCall:
        """The same of the last ``most`` queries."""
        return self.queries(slice(-most, None))

    def without(self, count: int) -> AttentionCall:
        """The same as if the last ``count`` columns had not come."""
        mask = None if self.mask is None else self.mask[:, :, :-count, :-count]
        return self._replace(query=self.query[:, :, :-count], mask=mask)

    def selected(self, index: Tensor) -> AttentionCall:
        """The same for rows [n] of the batch."""
        mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[index]
        return self._replace(query=self.query[index], mask=mask)

    def of_row(self, row: int, real: Tensor, columns: Tensor) -> AttentionCall:
        """The same for one row: its queries where ``real`` [Q] bool is true, over its tokens, ``columns`` [S] bool."""
        mask = self.mask
        if mask is not None:
            row_mask = mask[min(row, len(mask) - 1)]
            mask = row_mask[None, :, real][..., columns]
        return self._replace(query=self.query[row : row + 1, :, real], mask=mask)

    def joined(self, other: AttentionCall, columns: int) -> AttentionCall:
        """This call, after which ``columns`` had been seen, and the next one as one call."""
        query = torch.cat((self.query, other.query), dim=2)
        if self.mask is None and other.mask is None:
            return self._replace(query=query)
        mine, theirs = self._written_out(columns), other._written_out(columns + other.query.shape[2])
        hidden = False if mine.dtype == torch.bool else torch.finfo(mine.dtype).min
        mine = torch.nn.functional.pad(mine, (0, theirs.shape[3] - columns), value=hidden)
        rows = max(len(mine), len(theirs))
        mask = torch.cat([each.expand(rows, -1, -1, -1).to(mine.dtype) for each in (mine, theirs)], dim=2)
        return self._replace(query=query, mask=mask)

    def _written_out(self, columns: int) -> Tensor:
        """The mask [B or 1, 1 or Hq, Q, columns], also where nothing but what is later or has left is hidden."""
        if self.mask is not None:
            return self.mask
        steps = self.query.shape[2]
        causal = torch.ones(steps, columns, dtype=torch.bool, device=self.query.device).tril(columns - steps)
        return (causal if self.window is None else causal.triu(columns - steps - self.window + 1))[None, None]


def tiered_attention(
    call: AttentionCall,
    full: FullTokens,
    parts: Sequence[Part],
    *,
    first: int | Tensor,
    weights: Tensor | None = None,
    into: Sequence[Tensor] = (),
    decay: float = 1.0,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Attend to full-precision and stored tokens at once.

    Args:
        call: queries [B, Hq, Q, D], of which query i is at slot ``first + i`` of its row; its mask is over slots here.
        full: full-precision tokens. parts: the other tiers; their rows are batch x kv head, their biases are set here.
        first: slot of the first query, in all rows or [B].
        weights: [Q] weight of each query in the statistics, or None for no statistics.
        into: older statistics of the full tokens [B, H, n] and of each part [T], contiguous; they are multiplied by
            ``decay``, the new ones are added to them, and they are what is returned.
        decay: of the older statistics.

    Returns:
        output [B, Hq, Q, D]; weighted attention that each full token [B, H, n] and each token of each part [T]
        received, averaged over the query group, or None and an empty list.
    """
    batch, query_heads, steps, _ = call.query.shape
    columns = len(full) + sum(len(part.tokens) for part in parts)
    chunk = max(2, SCORES_AT_ONCE // max(batch * query_heads * columns, 1))  # 1: only the newest is alone
    if steps <= chunk:
        return _at_once(call, full, parts, first, weights, into, decay)
    results = []
    for at in range(0, steps, chunk):
        some = slice(at, at + chunk)
        weighs = None if weights is None else weights[some]
        results.append(_at_once(call.queries(some), full, parts, first + at, weighs, into, 1.0 if at else decay))
    outs, fulls, bodies = zip(*results)
    if weights is None or into:
        return torch.cat(outs, dim=2), fulls[-1], bodies[-1]
    add = functools.partial(functools.reduce, torch.add)
    return torch.cat(outs, dim=2), add(fulls), [add(each) for each in zip(*bodies)]


def _at_once(
    call: AttentionCall,
    full: FullTokens,
    parts: Sequence[Part],
    first: int | Tensor,
    weights: Tensor | None,
    into: Sequence[Tensor],
    decay: float,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """All queries of ``tiered_attention`` in one call of the kernel."""
    batch, query_heads, steps, dim = call.query.shape
    heads = full.key.shape[1]
    groups, rows = query_heads // heads, batch * heads
    mask = None if call.mask is None else call.mask.expand(batch, -1, -1, -1)
    window = None if mask is not None else call.window
    bias = _full_bias(mask, full, first, steps, heads, window)
    if bias is not None:
        bias = bias.expand(batch, heads, groups, steps, -1).reshape(rows, groups * steps, -1)
    biased = parts
    if mask is not None:
        biased = [_with_bias(part, mask, heads, groups) for part in parts]
    elif window is not None:
        since = _since(first, steps, batch, heads, groups, window, call.query.device)
        biased = [Part(part.tokens, part.table, part.positions, since=since) for part in parts]
    key, value = (t.reshape(rows, -1, t.shape[3]) for t in (full.key, full.value))
    query_weights = None if weights is None else _grouped(weights, groups)
    grouped = (call.query * call.scaling).reshape(rows, groups * steps, dim)  # [R, G x Q, D]
    sinks = None if call.sinks is None else _of_queries(call.sinks, batch, heads, steps)
    older = [stats.view(rows, -1) if stats.ndim > 1 else stats for stats in into]
    kernel = reference.attend if wants_gradients(grouped, key, value, sinks) else pick_kernel(call.query.device)
    out, mass, masses = kernel(grouped, key, value, biased, query_weights, bias, call.softcap, sinks, older, decay)
    out = out.view(batch, query_heads, steps, -1)
    return out, None if mass is None else mass.view(batch, heads, -1), masses


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd is to see what is computed from these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _of_queries(sinks: Tensor, batch: int, heads: int, steps: int) -> Tensor:
    """Sinks [Hq] as a kernel takes them, [R, G x Q] float32."""
    return sinks.float().view(1, heads, -1, 1).expand(batch, -1, -1, steps).reshape(batch * heads, -1)


@functools.lru_cache(maxsize=8)
def _grouped(weights: Tensor, groups: int) -> Tensor:
    """Weight [G x Q] of each query of a group. Kept, since a policy's weights are the same tensor in each step."""
    with torch.inference_mode(False):
        return (weights / groups).repeat(groups)


def _full_bias(
    mask: Tensor | None, full: FullTokens, first: int | Tensor, steps: int, heads: int, window: int | None = None
) -> Tensor | None:
    """Additive bias [B, H or 1, G or 1, Q, n] of the full-precision tokens, or None if all are visible.

    Args:
        mask: [B, 1 or Hq, Q, S] or None = causal.
        full: n tokens. first: slot of the first of ``steps`` queries, in all rows or [B]. heads: kv heads.
        window: tokens that a query attends to, if there is no mask; None: all.
    """
    newest = mask is None and steps == 1 and not full.holes
    if newest and (window is None or (isinstance(first, int) and full.oldest > first - window)):
        return None  # the newest token sees all
    slots = full.slots.long()
    hole = slots < 0
    if mask is None:
        since = first[:, None] if isinstance(first, Tensor) else first
        at = (since + torch.arange(steps, device=slots.device)).view(-1, steps, 1)
        hidden = (slots[:, None, :] > at) | hole[:, None, :]  # [B, Q, n]; stored tokens are older than any query
        if window is not None:
            hidden = hidden | (slots[:, None, :] <= at - window)
        return _additive(~hidden[:, None, None]) if bool(hidden.any()) else None
    index = slots.clamp(min=0)[:, None, None, :].expand(-1, mask.shape[1], steps, -1)
    chosen, hole = mask.gather(-1, index), hole[:, None, None, :]
    chosen = chosen & ~hole if chosen.dtype == torch.bool else chosen.masked_fill(hole, -math.inf)
    return _unless_plain(chosen.unflatten(1, (heads, -1)) if mask.shape[1] > 1 else chosen[:, :, None])


def _with_bias(part: Part, mask: Tensor, heads: int, groups: int) -> Part:
    """The part with the bias [T, G x Q] of a mask [B, 1 or Hq, Q, S]."""
    row, slot = part.tokens.token_row(), part.tokens.slots()
    if mask.shape[1] > 1:
        grouped = mask.unflatten(1, (heads, -1)).flatten(0, 1)  # [R, G, Q, S]
        bias = _unless_plain(grouped[row, :, :, slot])  # [T, G, Q]
    else:
        bias = _unless_plain(mask[row // heads, 0, :, slot][:, None])
    return part if bias is None else replace(part, bias=bias.expand(-1, groups, -1).flatten(1))


def _since(
    first: int | Tensor, steps: int, batch: int, heads: int, groups: int, window: int, device: torch.device
) -> Tensor:
    """[R, G x Q] int32: the first slot in the window of each of ``steps`` queries from slot ``first`` on."""
    if isinstance(first, int):
        return _since_of_all(first - window + 1, steps, batch * heads, groups, device)
    at = first[:, None] + torch.arange(1 - window, steps + 1 - window, device=device)  # [B, Q]
    return at.to(torch.int32)[:, None, None].expand(-1, heads, groups, -1).reshape(batch * heads, -1)


@functools.lru_cache(maxsize=8)
def _since_of_all(first: int, steps: int, rows: int, groups: int, device: torch.device) -> Tensor:
    """The same where all rows are alike; kept, since the layers of a step ask for the same."""
    return torch.arange(first, first + steps, dtype=torch.int32, device=device).repeat(rows, groups)


def _unless_plain(visible: Tensor) -> Tensor | None:
    """None for a mask that hides nothing: padding is never packed, so this is the usual case."""
    return None if visible.dtype == torch.bool and bool(visible.all()) else _additive(visible)


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)
