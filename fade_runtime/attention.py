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
from fade_runtime.quant import hadamard
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
    steps, heads = query.shape[2], query.shape[1]
    per_query = query.shape[0] * heads * (len(full) + len(packed))
    chunk = max(1, min(steps, SCORES_AT_ONCE // max(per_query, 1)))
    outs, to_full, to_packed = [], None, None
    for at in range(0, steps, chunk):
        part = slice(at, min(at + chunk, steps))
        out, probs, packed_probs = _attend(
            query[:, :, part],
            full,
            packed,
            scaling,
            first + at,
            None if mask is None else mask[:, :, part],
            weights is not None,
        )
        outs.append(out)
        if weights is not None and packed_probs is not None:
            share = weights[part].to(probs.dtype)
            add_full = torch.einsum("bhgqn,q->bhn", probs, share) / probs.shape[2]
            add_packed = torch.einsum("tgq,q->t", packed_probs, share) / probs.shape[2]
            to_full = add_full if to_full is None else to_full + add_full
            to_packed = add_packed if to_packed is None else to_packed + add_packed
    return torch.cat(outs, dim=2), to_full, to_packed


def _attend(
    query: Tensor,
    full: FullTokens,
    packed: PackedTokens,
    scaling: float,
    first: int,
    mask: Tensor | None,
    want_probs: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One chunk of queries: output [B, Hq, Q, D], probabilities [B, H, G, Q, n] and, if wanted, [T, G, Q]."""
    batch, query_heads, steps, dim = query.shape
    heads = full.key.shape[1]
    groups = query_heads // heads
    rows = batch * heads
    grouped = (query * scaling).reshape(rows, groups * steps, dim)
    scores = (grouped @ full.key.reshape(rows, -1, dim).transpose(1, 2)).float()
    scores = scores.view(batch, heads, groups, steps, -1)
    bias, packed_bias = _bias(mask, full, packed, first, steps, heads, query_heads)
    if bias is not None:
        scores = scores + bias
    if packed_bias is not None:
        packed_bias = packed_bias.expand(-1, groups, -1).flatten(1)
    body, body_lse, body_scores = pick_kernel(query.device)(hadamard(grouped), packed, packed_bias)

    lse = scores.flatten(0, 1).flatten(1, 2).logsumexp(-1)  # [R, GQ]
    lse = torch.logaddexp(lse, body_lse).clamp(min=torch.finfo(torch.float32).min)  # finite where nothing is visible
    probs = (scores.view(rows, groups * steps, -1) - lse[..., None]).exp()
    out = probs.to(query.dtype) @ full.value.reshape(rows, -1, dim)
    out = out + hadamard(body) * (body_lse - lse).exp()[..., None].to(query.dtype)
    body_probs = (body_scores - lse[packed.token_row()]).exp() if want_probs else None
    return (
        out.view(batch, query_heads, steps, dim),
        probs.view(batch, heads, groups, steps, -1),
        None if body_probs is None else body_probs.unflatten(1, (groups, steps)),
    )


@functools.cache
def pick_kernel(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Choose the packed-attention kernel of a device, once: the compiled one on a CPU when it builds and agrees.

    ``FADE_KERNEL=reference`` in the environment asks for plain torch.
    """
    if device.type != "cpu" or os.environ.get("FADE_KERNEL") == "reference":
        return reference.packed_attention
    try:
        cpu.self_test()
    except (FadeError, OSError) as problem:
        warnings.warn(f"slow attention over packed tokens: {problem}", RuntimeWarning, stacklevel=2)
        return reference.packed_attention
    return cpu.packed_attention


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
    bias = _additive(visible.gather(-1, index))
    bias = bias.masked_fill((slots < 0)[:, None, None, :], -math.inf)
    per_head = visible.shape[1] == query_heads and query_heads > 1
    bias = bias.unflatten(1, (heads, -1)) if per_head else bias[:, :, None]
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
