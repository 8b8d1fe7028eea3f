"""How far the attention that a cache gives is from the attention that it would give with everything kept.

A policy says which tokens leave, and its scores say how much attention it expects them to have received: that is a
forecast of attention. The monitor looks at true attention, over evicted tokens too, and measures how wrong it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16  # tokens pooled together
FLOOR = 0.01  # share of attention that evicted tokens may receive under any forecast
TOP = 64  # tokens that recall asks for
QUERIES = 16  # newest queries of a call that are looked at


@dataclass(frozen=True)
class Look:
    """What one look at a layer found, for each kv head, of the worst sequence of the batch.

    Attributes:
        kl: [H] KL(true attention over blocks || forecast), nats.
        recovery: [H] share of true attention on tokens that are kept.
        recall: [H] share of the :data:`TOP` tokens with most attention that are kept.
    """

    kl: Tensor
    recovery: Tensor
    recall: Tensor


def forecast_attention(
    attention: Tensor, gone: Tensor, scores: Tensor | None, floor: float = FLOOR
) -> Tensor:
    """What a cache takes attention to be: true among kept tokens, and on evicted ones what the policy expects.

    Args:
        attention: [..., S] true attention, which sums to 1. gone: [..., S] bool, evicted tokens.
        scores: [..., S] shares of attention that the policy expects, of any sum; None: it expects none on evicted ones.
        floor: least share on all evicted tokens together, spread evenly.

    Returns:
        [..., S], which sums to 1; ``attention`` itself where nothing is gone.

    Example:
        >>> true, gone = torch.tensor([.6, .2, .2]), torch.tensor([False, False, True])
        >>> forecast_attention(true, gone, torch.tensor([1., 0., 1.]), floor=0.)
        tensor([0.3750, 0.1250, 0.5000])
    """
    zeros = torch.zeros_like(attention)
    expected = zeros if scores is None else torch.where(gone, scores, zeros)
    everything = zeros.sum(-1, keepdim=True) if scores is None else scores.sum(-1, keepdim=True)
    expected = expected / everything.clamp(min=torch.finfo(attention.dtype).tiny)
    count = gone.sum(-1, keepdim=True)
    expected = (1 - floor) * expected + floor * gone.to(expected) / count.clamp(min=1)
    kept = torch.where(gone, zeros, attention)
    share = kept / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(attention.dtype).tiny)
    return torch.where(count > 0, expected + (1 - expected.sum(-1, keepdim=True)) * share, attention)


def block_kl(true: Tensor, forecast: Tensor, gone: Tensor | None = None, block: int = BLOCK) -> Tensor:
    """KL(true || forecast) [...] in nats between two distributions [..., S], pooled to blocks of tokens.

    The evicted tokens of a block, ``gone`` [..., S] bool, are pooled by themselves: what a block loses must not hide
    behind what is kept of it.

    Source: Yang et al. 2025, AttentionPredictor (arXiv 2502.04077), which compares attention over blocks; here the
    forecast is completed by the cache's own attention, so that the divergence is that of what eviction changed.

    Example:
        >>> block_kl(torch.tensor([.5, 0., .5, 0.]), torch.tensor([0., .25, .5, .25]), block=2)
        tensor(0.1438)
    """
    extra = -true.shape[-1] % block
    masks = [torch.ones_like(true)] if gone is None else [~gone, gone]
    cells = [[torch.nn.functional.pad(each * mask, (0, extra)) for mask in masks] for each in (true, forecast)]
    p, q = (torch.cat(each, -1).unflatten(-1, (-1, block)).sum(-1) for each in cells)
    tiny = torch.finfo(p.dtype).tiny
    return (p * (p.clamp(min=tiny) / q.clamp(min=tiny)).log()).sum(-1).clamp(min=0)


def measure(attention: Tensor, gone: Tensor, scores: Tensor | None, heads: int, top: int = TOP) -> Look:
    """Measure what eviction changes.

    Args:
        attention: [R, S] share that each slot received from the newest queries; rows are batch x kv head.
        gone: [R, S] bool, evicted slots. scores: [R, S] what the policy expects, or None. heads: H.
        top: tokens that recall asks for.

    Example:
        >>> attention = torch.tensor([[.5, .25, .25, 0.]])
        >>> look = measure(attention, attention == .25, None, heads=1, top=2)
        >>> look.recovery.item(), look.recall.item(), round(look.kl.item(), 1)
        (0.5, 0.5, 1.6)
    """
    attention = attention / attention.sum(-1, keepdim=True).clamp(min=torch.finfo(attention.dtype).tiny)
    kl = block_kl(attention, forecast_attention(attention, gone, scores), gone)
    best = attention.topk(min(top, attention.shape[-1])).indices
    recall = (~gone.gather(-1, best)).float().mean(-1)
    recovery = 1 - torch.where(gone, attention, 0.0).sum(-1)
    return Look(kl.view(-1, heads).amax(0), recovery.view(-1, heads).amin(0), recall.view(-1, heads).amin(0))
