"""Attention over the tiers of one layer, and the statistics that come out of the same pass."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fade_runtime.kernels import cpu, reference
from fade_runtime.packed import PackedTokens
from predictor.errors import FadeError

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


def tiered_attention(
    query: Tensor,
    full: FullTokens,
    packed: PackedTokens,
    *,
    scaling: float,
    first: int,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend to full-precision and packed tokens at once.

    Args:
        query: [B, Hq, Q, D]; query i is at slot ``first + i``.
        full, packed: the tiers; rows of ``packed`` are batch x kv head.
        scaling: factor on the scores.
        first: slot of the first query.
        mask: [B or 1, 1 or Hq, Q, S] over logical slots: bool (True = visible) or additive; None = causal.
        weights: [Q] weight of each query in the statistics, or None for no statistics.

    Returns:
        output [B, Hq, Q, D]; weighted attention that each full token [B, H, n] and each packed token [T] received,
        averaged over the query group, or None.
    """
    batch, query_heads, steps, dim = query.shape
    heads = full.key.shape[1]
    groups, rows = query_heads // heads, batch * heads
    kernel = pick_kernel(query.device)
    key, value = full.key.reshape(rows, -1, dim), full.value.reshape(rows, -1, dim)
    chunk = max(1, min(steps, SCORES_AT_ONCE // max(batch * query_heads * (len(full) + len(packed)), 1)))
    outs, masses = [], []
    for at in range(0, steps, chunk):
        part = slice(at, min(at + chunk, steps))
        size = part.stop - at
        bias, packed_bias = _bias(
            None if mask is None else mask[:, :, part], full, packed, first + at, size, heads, query_heads
        )
        if bias is not None:
            bias = bias.expand(batch, heads, groups, size, -1).reshape(rows, groups * size, -1)
        if packed_bias is not None:
            packed_bias = packed_bias.expand(-1, groups, -1).flatten(1)
        share = None if weights is None else (weights[part] / groups).repeat(groups)
        grouped = (query[:, :, part] * scaling).reshape(rows, groups * size, dim)
        out, mass, packed_mass = kernel(grouped, key, value, packed, share, bias, packed_bias)
        outs.append(out.view(batch, query_heads, size, dim))
        if mass is not None:
            masses.append((mass.view(batch, heads, -1), packed_mass))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    if not masses:
        return out, None, None
    to_full, to_packed = (functools.reduce(torch.add, each) for each in zip(*masses))
    return out, to_full, to_packed


@functools.cache
def pick_kernel(device: torch.device) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    """Choose the attention kernel of a device, once: the compiled one on a CPU when it builds and agrees.

    ``FADE_KERNEL=reference`` in the environment asks for plain torch.
    """
    if device.type != "cpu" or os.environ.get("FADE_KERNEL") == "reference":
        return reference.attend
    try:
        cpu.self_test()
    except (FadeError, OSError) as problem:
        warnings.warn(f"slow attention over packed tokens: {problem}", RuntimeWarning, stacklevel=2)
        return reference.attend
    return cpu.attend


def _bias(
    mask: Tensor | None, full: FullTokens, packed: PackedTokens, first: int, steps: int, heads: int, query_heads: int
) -> tuple[Tensor | None, Tensor | None]:
    """Additive bias on the full part [B, H or 1, G or 1, Q, n] and on the packed part [T, G or 1, Q], or None."""
    slots = full.slots.long()
    batch = slots.shape[0]
    if mask is None:
        at = first + torch.arange(steps, device=slots.device)
        hidden = (slots[:, None, :] > at[:, None]) | (slots < 0)[:, None, :]  # [B, Q, n]
        if not bool(hidden.any()):
            return None, None  # packed tokens are older than every query
        return _additive(~hidden[:, None, None]), None
    visible = mask.expand(batch, -1, -1, -1)
    index = slots.clamp(min=0)[:, None, None, :].expand(-1, visible.shape[1], steps, -1)
    chosen = visible.gather(-1, index)
    hole = (slots < 0)[:, None, None, :]
    chosen = chosen & ~hole if chosen.dtype == torch.bool else chosen.masked_fill(hole, -math.inf)
    per_head = visible.shape[1] == query_heads and query_heads > 1
    bias = _unless_plain(chosen.unflatten(1, (heads, -1)) if per_head else chosen[:, :, None])
    row, slot = packed.token_row(), packed.slots()
    if per_head:
        grouped = visible.unflatten(1, (heads, -1)).flatten(0, 1)  # [R, G, Q, S]
        return bias, _unless_plain(grouped.permute(0, 3, 1, 2)[row, slot])
    return bias, _unless_plain(visible[:, 0].transpose(1, 2)[row // heads, slot][:, None])


def _unless_plain(visible: Tensor) -> Tensor | None:
    """None for a mask that hides nothing: padding is never packed, so this is the usual case."""
    return None if visible.dtype == torch.bool and bool(visible.all()) else _additive(visible)


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)
