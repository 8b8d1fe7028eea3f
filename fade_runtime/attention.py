"""Attention over the tiers of one layer, and the statistics that come out of the same pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fade_runtime import gradients
from fade_runtime.kernels import reference
from fade_runtime.kernels.pick import pick_kernel
from fade_runtime.kernels.reference import Part

SCORES_AT_ONCE = 1 << 24  # elements of the score matrix of one chunk of queries


@dataclass(frozen=True)
class FullTokens:
    """Full-precision tokens of a layer: sinks first, then the newest.

    Attributes:
        key, value: [B, H, n, D] in the model's dtype.
        slots: [B, n] int32 logical slots, ascending; -1 where a short row has no token.
        state: [B, H, n] float32 statistics of the policy, or None.
    """

    key: Tensor
    value: Tensor
    slots: Tensor
    state: Tensor | None = None

    def __len__(self) -> int:
        """Columns, holes included."""
        return self.key.shape[2]

    @functools.cached_property
    def holes(self) -> bool:
        """Whether a row has fewer tokens than columns."""
        return bool((self.slots < 0).any())


def tiered_attention(
    query: Tensor,
    full: FullTokens,
    parts: Sequence[Part],
    *,
    scaling: float,
    first: int,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    softcap: float | None = None,
    into: Sequence[Tensor] = (),
    decay: float = 1.0,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Attend to full-precision and stored tokens at once.

    Args:
        query: [B, Hq, Q, D]; query i is at slot ``first + i``.
        full: full-precision tokens. parts: the other tiers; their rows are batch x kv head, their biases are set here.
        scaling: factor on the scores.
        first: slot of the first query.
        mask: [B or 1, 1 or Hq, Q, S] over logical slots: bool (True = visible) or additive; None = causal.
        weights: [Q] weight of each query in the statistics, or None for no statistics.
        softcap: of the scores, or None.
        into: older statistics of the full tokens [B, H, n] and of each part [T], contiguous; they are multiplied by
            ``decay``, the new ones are added to them, and they are what is returned.

    Returns:
        output [B, Hq, Q, D]; weighted attention that each full token [B, H, n] and each token of each part [T]
        received, averaged over the query group, or None and an empty list.
    """
    steps, columns = query.shape[2], len(full) + sum(len(part.tokens) for part in parts)
    chunk = max(2, SCORES_AT_ONCE // max(query.shape[0] * query.shape[1] * columns, 1))  # 1: only the newest is alone
    if steps <= chunk:
        return _at_once(query, full, parts, scaling, first, mask, weights, softcap, into, decay)
    results = []
    for at in range(0, steps, chunk):
        piece = slice(at, at + chunk)
        seen, share = None if mask is None else mask[:, :, piece], None if weights is None else weights[piece]
        fading = decay if at == 0 else 1.0
        given = scaling, first + at, seen, share, softcap, into, fading
        results.append(_at_once(query[:, :, piece], full, parts, *given))
    outs, fulls, bodies = zip(*results)
    if weights is None or into:
        return torch.cat(outs, dim=2), fulls[-1], bodies[-1]
    add = functools.partial(functools.reduce, torch.add)
    return torch.cat(outs, dim=2), add(fulls), [add(each) for each in zip(*bodies)]


def _at_once(
    query: Tensor,
    full: FullTokens,
    parts: Sequence[Part],
    scaling: float,
    first: int,
    mask: Tensor | None,
    weights: Tensor | None,
    softcap: float | None,
    into: Sequence[Tensor],
    decay: float,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """All queries of ``tiered_attention`` in one call of the kernel."""
    batch, query_heads, steps, dim = query.shape
    heads = full.key.shape[1]
    groups, rows = query_heads // heads, batch * heads
    seen = None if mask is None else mask.expand(batch, -1, -1, -1)
    bias = _full_bias(seen, full, first, steps, heads)
    if bias is not None:
        bias = bias.expand(batch, heads, groups, steps, -1).reshape(rows, groups * steps, -1)
    biased = parts if seen is None else [_with_bias(part, seen, heads, groups) for part in parts]
    key, value = (t.reshape(rows, -1, t.shape[3]) for t in (full.key, full.value))
    share = None if weights is None else _shares(weights, groups)
    grouped = (query * scaling).reshape(rows, groups * steps, dim)
    held = [state.view(rows, -1) if state.ndim > 1 else state for state in into]
    kernel = reference.attend if gradients.needed(grouped, key, value) else pick_kernel(query.device)
    out, mass, masses = kernel(grouped, key, value, biased, share, bias, softcap, held, decay)
    out = out.view(batch, query_heads, steps, -1)
    return out, None if mass is None else mass.view(batch, heads, -1), masses


@functools.lru_cache(maxsize=8)
def _shares(weights: Tensor, groups: int) -> Tensor:
    """Weight [G x Q] of each query of a group. Kept, since a policy's weights are the same tensor in each step."""
    with torch.inference_mode(False):
        return (weights / groups).repeat(groups)


def is_causal(mask: Tensor | None, pad: Tensor) -> bool:
    """Whether the mask of a prompt hides nothing but what is later and what is padding.

    Args:
        mask: [B or 1, 1 or Hq, S, S] over the prompt, or None. pad: [B] slots of left padding.

    Example:
        >>> seen = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
        >>> is_causal(seen, torch.tensor([0])), is_causal(seen, torch.tensor([2])), is_causal(None, torch.tensor([0]))
        (True, False, True)
    """
    if mask is None:
        return not bool(pad.any())
    if mask.dtype != torch.bool or mask.shape[1] > 1 or mask.shape[2] != mask.shape[3]:
        return False
    right = torch.ones(mask.shape[2:], dtype=torch.bool, device=mask.device).tril()
    return all(
        torch.equal(row[0, start:, start:], right[start:, start:]) and not bool(row[0, start:, :start].any())
        for row, start in zip(mask.expand(len(pad), -1, -1, -1), pad.tolist())
    )


def _full_bias(mask: Tensor | None, full: FullTokens, first: int, steps: int, heads: int) -> Tensor | None:
    """Additive bias [B, H or 1, G or 1, Q, n] of the full-precision tokens, or None if all are visible.

    Args:
        mask: [B, 1 or Hq, Q, S] or None = causal.
        full: n tokens. first: slot of the first of ``steps`` queries. heads: kv heads.
    """
    if mask is None and steps == 1 and not full.holes:
        return None  # the newest token sees all
    slots = full.slots.long()
    hole = slots < 0
    if mask is None:
        at = first + torch.arange(steps, device=slots.device)
        hidden = (slots[:, None, :] > at[:, None]) | hole[
            :, None, :
        ]  # [B, Q, n]; stored tokens are older than any query
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


def _unless_plain(visible: Tensor) -> Tensor | None:
    """None for a mask that hides nothing: padding is never packed, so this is the usual case."""
    return None if visible.dtype == torch.bool and bool(visible.all()) else _additive(visible)


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)
