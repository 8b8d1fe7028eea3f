"""How far the attention that a cache gives is from the attention that it would give with everything kept.

A policy says which tokens leave, and its scores say how much attention it expects them to have received: that is a
forecast of attention. A probe computes true attention, over evicted tokens too, and measures how wrong it was.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fade_runtime.layer import AttentionCall, CompressedLayer, TokenStore
from fade_runtime.layer.attention import tiered_attention
from fade_runtime.layer.tiered import RowCall, rows_alone

BLOCK = 16  # tokens pooled together
FLOOR = 0.01  # share of attention that evicted tokens may receive under any forecast
TOP = 64  # tokens that recall asks for
QUERIES = 32  # newest queries of a call that are probed


@dataclass(frozen=True)
class Probe:
    """What one probe of a layer found, for each kv head, of the worst sequence of the batch.

    Attributes:
        kl: [H] KL(true attention over blocks || forecast), nats.
        recovery: [H] share of true attention on tokens that are kept.
        recall: [H] share of the :data:`TOP` tokens with most attention that are kept.
    """

    kl: Tensor
    recovery: Tensor
    recall: Tensor


def eviction_kl(
    attention: Tensor, gone: Tensor, scores: Tensor | None, floor: float = FLOOR, block: int = BLOCK
) -> Tensor:
    """KL(true attention over blocks || forecast) in nats.

    The forecast gives evicted tokens together the share of all scores that they have, and each its share of it; the
    rest goes to kept tokens as the cache's own attention has it. The evicted tokens of a block are pooled by
    themselves, so that what a block loses cannot hide behind what is kept of it.

    Args:
        attention: [..., S] true attention. It sums to 1; to less where a learned sink, which nothing evicts, has the
            rest. gone: [..., S] bool, evicted tokens.
        scores: [..., S] shares of attention that the policy expects, of any sum; None: it expects none on evicted ones.
        floor: least share on all evicted tokens together, spread evenly. block: tokens pooled together.

    Returns:
        [...], 0 where nothing is gone.

    Source: Yang et al. 2025, AttentionPredictor (arXiv 2502.04077), which compares attention over blocks; here the
    forecast is completed by the cache's own attention, so that the divergence is that of what eviction changed.

    Example:
        >>> true, gone = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([False, True, False])
        >>> eviction_kl(true, gone, true, floor=0.0).item(), eviction_kl(true, gone, None, floor=0.01)
        (0.0, tensor(0.5965))
    """
    tiny = torch.finfo(attention.dtype).tiny
    lost, count = pooled(attention * gone, block), pooled(gone.to(attention), block)
    expected = floor * count / count.sum(-1, keepdim=True).clamp(min=1)
    if scores is not None:
        total = scores.sum(-1, keepdim=True).clamp(min=tiny)
        on_tokens = attention.sum(-1, keepdim=True)
        expected = expected + (1 - floor) * on_tokens * pooled(scores * gone, block) / total
    kept, left = ((1 - each.sum(-1)).clamp(min=tiny) for each in (lost, expected))
    split = (lost * (lost.clamp(min=tiny) / expected.clamp(min=tiny)).log()).sum(-1)
    return torch.where(count.sum(-1) > 0, (kept * (kept / left).log() + split).clamp(min=0), 0.0)


def pooled(x: Tensor, block: int) -> Tensor:
    """Sums [..., N] of blocks of [..., S], the last one short.

    Example:
        >>> pooled(torch.tensor([1.0, 2.0, 3.0]), block=2)
        tensor([3., 3.])
    """
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block)).sum(-1)


def measure(attention: Tensor, gone: Tensor, scores: Tensor | None, heads: int, top: int = TOP) -> Probe:
    """Measure what eviction changes.

    Args:
        attention: [R, S] share that each slot received from the newest queries; rows are batch x kv head.
        gone: [R, S] bool, evicted slots. scores: [R, S] what the policy expects, or None. heads: H.
        top: tokens that recall asks for.

    Example:
        >>> attention = torch.tensor([[.5, .25, .25, 0.]])
        >>> probe = measure(attention, attention == .25, None, heads=1, top=2)
        >>> probe.recovery.item(), probe.recall.item(), round(probe.kl.item(), 1)
        (0.5, 0.5, 1.6)
    """
    attention = attention / attention.sum(-1, keepdim=True).clamp(min=1)  # more than 1 by rounding alone
    kl = eviction_kl(attention, gone, scores)
    best = attention.topk(min(top, attention.shape[-1])).indices
    recall = (~gone.gather(-1, best)).float().mean(-1)
    recovery = 1 - (attention * gone).sum(-1)
    return Probe(kl.view(-1, heads).amax(0), recovery.view(-1, heads).amin(0), recall.view(-1, heads).amin(0))


def worst(probes: Sequence[Probe]) -> Probe:
    """The largest divergence and the least recovery and recall of each kv head."""
    return Probe(
        torch.stack([probe.kl for probe in probes]).amax(0),
        torch.stack([probe.recovery for probe in probes]).amin(0),
        torch.stack([probe.recall for probe in probes]).amin(0),
    )


def true_attention(
    layer: CompressedLayer, call: AttentionCall, together: int = QUERIES
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Attention of a layer's newest queries over all its tokens, the spilled ones included.

    Args:
        layer: holds the tokens. call: the queries [B, Hq, Q, D]. together: queries whose attention is averaged.

    Returns:
        for each ``together`` queries, [R, n] share of attention that each slot received, the mean of those queries
        and of their group (0 in a row that had none); [R, n] the policy's scores, None if it has none that are shares;
        [R, n] bool, spilled. n: tokens of the longest row.
    """
    store = layer.tokens.whole()
    steps, rows, width = call.query.shape[2], store.batch * store.heads, max(store.sequences.counts)
    scores, *attentions = torch.zeros(1 + -(-steps // together), rows, width, device=call.query.device)
    everything = torch.ones(steps, dtype=torch.bool, device=call.query.device)
    padded = store.sequences.padded
    for alone in rows_alone(store, call) if padded else [RowCall(0, store, call, everything)]:
        view, first_row = alone.store, alone.row * store.heads
        query, full, parts = layer.positions.read(view, alone.call.query)
        mask = None if alone.call.mask is None else view.sequences.by_slot(alone.call.mask)
        start, over_slots = view.sequences.first_of(query.shape[2]), alone.call._replace(query=query, mask=mask)
        for attention, at in zip(attentions, range(0, query.shape[2], together)):
            some = over_slots.queries(slice(at, at + together))
            weights = _even(some.query.shape[2], query.device)
            _, to_full, to_parts = tiered_attention(some, full, parts, first=start + at, weights=weights)
            assert to_full is not None
            real, row, slot = _full_tokens(view)
            attention[first_row + row, slot] = to_full.flatten(0, 1)[real]
            for tokens, received in zip((tokens for tokens in view.body() if len(tokens)), to_parts):
                attention[first_row + tokens.token_row(), tokens.slots()] = received
    gone = torch.zeros_like(scores, dtype=torch.bool)
    for tokens in store.back:
        gone[tokens.token_row(), tokens.slots()] = True
    if store.full.attention_stats is None:
        return attentions, None, gone
    real, row, slot = _full_tokens(store)
    for rows_of, slots, stats in (
        (row, slot, store.full.attention_stats.flatten(0, 1)[real]),
        *((tokens.token_row(), tokens.slots(), tokens.attention_stats) for tokens in store.body()),
    ):
        if stats is not None:
            scores[rows_of, slots] = layer.scores(stats, rows_of, slots)
    return attentions, scores, gone


def _full_tokens(store: TokenStore) -> tuple[Tensor, Tensor, Tensor]:
    """Which full-precision columns are tokens [R, n] bool; row and slot of each, [T]."""
    slots = store.full.slots.repeat_interleave(store.heads, 0).long()
    real = slots >= 0
    return real, real.nonzero()[:, 0], slots[real]


@functools.lru_cache(maxsize=8)
def _even(count: int, device: torch.device) -> Tensor:
    """Equal weights of so many queries, always the same tensor."""
    with torch.inference_mode(False):
        return torch.full((count,), 1 / count, device=device)
