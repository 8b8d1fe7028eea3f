"""Attention over the tiers of one layer, and the statistics that come out of the same pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fade_runtime.kernels import reference
from fade_runtime.packed import PackedTokens
from fade_runtime.quant import hadamard
from fade_runtime.tiers import rank_in_row

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
            query[:, :, part], full, packed, scaling, first + at, None if mask is None else mask[:, :, part]
        )
        outs.append(out)
        if weights is not None:
            share = weights[part].to(probs.dtype)
            add_full = torch.einsum("bhgqn,q->bhn", probs, share) / probs.shape[2]
            add_packed = torch.einsum("tgq,q->t", packed_probs, share) / probs.shape[2]
            to_full = add_full if to_full is None else to_full + add_full
            to_packed = add_packed if to_packed is None else to_packed + add_packed
    return torch.cat(outs, dim=2), to_full, to_packed


def _attend(
    query: Tensor, full: FullTokens, packed: PackedTokens, scaling: float, first: int, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk of queries: output [B, Hq, Q, D], probabilities [B, H, G, Q, n] and [T, G, Q] in float32."""
    batch, query_heads, steps, dim = query.shape
    heads = full.key.shape[1]
    groups = query_heads // heads
    rows = batch * heads
    grouped = (query * scaling).reshape(rows, groups * steps, dim)
    row, column = packed.token_row(), rank_in_row(packed.token_row())
    width = int(column.max()) + 1 if len(packed) else 0

    dense = (grouped @ full.key.reshape(rows, -1, dim).transpose(1, 2)).float()  # [R, GQ, n]
    scores = dense.new_full((rows, width, groups * steps), -math.inf)  # packed part, ragged rows padded
    scores[row, column] = reference.packed_scores(hadamard(grouped), packed).float()
    scores = torch.cat((dense, scores.transpose(1, 2)), dim=2).view(batch, heads, groups, steps, -1)

    bias_full, bias_packed = _bias(mask, full, packed, first, steps, heads, query_heads)
    if bias_full is not None:
        scores[..., : len(full)] += bias_full
    if bias_packed is not None:  # [T, G or 1, Q]
        padded = scores.new_zeros(rows, width, *bias_packed.shape[1:])
        padded[row, column] = bias_packed
        scores[..., len(full) :] += padded.permute(0, 2, 3, 1).view(batch, heads, -1, steps, width)

    probs = scores.softmax(-1)
    if bias_full is not None:
        probs = probs.nan_to_num(0.0)  # a padding query sees nothing
    flat = probs.view(rows, groups * steps, -1)
    dense_probs, packed_probs = flat[..., : len(full)], flat[..., len(full) :].transpose(1, 2)[row, column]
    out = dense_probs.to(query.dtype) @ full.value.reshape(rows, -1, dim)
    out = out + hadamard(reference.packed_values(packed_probs.to(query.dtype), packed, rows))
    return (
        out.view(batch, query_heads, steps, dim),
        probs[..., : len(full)],
        packed_probs.unflatten(1, (groups, steps)),
    )


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
        return bias, _additive(grouped.permute(0, 3, 1, 2)[row, slot])
    return bias, _additive(visible[:, 0].transpose(1, 2)[row // heads, slot])[:, None]


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)
