"""Evicted tokens that come back before they are missed: those that are attended as much as kept ones are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fade_runtime.guard.probe import BLOCK, pooled
from fade_runtime.layer import CompressedLayer


def needed(attention: Tensor, gone: Tensor, kept: Tensor, most: int, block: int = BLOCK) -> Tensor:
    """Evicted tokens whose block is attended as much as the mean kept token of the body: that is what they are
    expected to be in the next steps, since attention over blocks persists.

    Args:
        attention: [R, S] share that each token received. gone: [R, S] bool, evicted. kept: [R, S] bool, kept body.
        most: tokens of a row, at most; the blocks with most attention a token come first. block: tokens of a block.

    Returns:
        [R, S] bool.

    Source: Yang et al. 2025, AttentionPredictor (arXiv 2502.04077), section 3, on the persistence of attention.

    Example:
        >>> attention = torch.tensor([[.3, .2, .0, .1, .2, .4]])
        >>> gone = torch.tensor([[True, True, True, True, False, False]])
        >>> needed(attention, gone, kept=~gone, most=2, block=2).tolist()
        [[False, False, False, False, False, False]]
        >>> needed(attention, gone, kept=torch.arange(6)[None] == 4, most=2, block=2).tolist()
        [[True, True, False, False, False, False]]
    """
    sums, counts = pooled(attention * gone, block), pooled(gone.to(attention), block)
    mean = sums / counts.clamp(min=1)  # [R, N]
    usual = (attention * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
    wanted = (counts > 0) & (mean >= usual) & (mean > 0)
    order = torch.where(wanted, mean, -1.0).argsort(1, descending=True)
    taken = (counts * wanted).gather(1, order).cumsum(1) <= most
    wanted = wanted & torch.zeros_like(wanted).scatter(1, order, taken)
    return wanted.repeat_interleave(block, 1)[:, : attention.shape[1]] & gone


def fetch(layer: CompressedLayer, attentions: Sequence[Tensor], gone: Tensor) -> int:
    """Bring back what a probe of a layer says will be needed, with the attention that it received as its statistic.

    It is back when the probe ends, however slow the disk is: what a text becomes never depends on time.

    Args:
        attentions: [R, S] each. gone: [R, S] bool, spilled tokens.

    Returns:
        the number of tokens.
    """
    store = layer.tokens
    if store.spilled is None or not len(store.spilled):
        return 0
    attention = torch.stack(list(attentions)).amax(0)
    kept = torch.zeros_like(gone)
    for body in store.body():
        kept[body.token_row(), body.slots()] = True
    chosen = needed(attention, gone, kept, layer.config.reassign_every)
    if not bool(chosen.any()):
        return 0
    bodies = store.spilled.take(lambda tokens: chosen[tokens.token_row(), tokens.slots()])
    return store.take_in([_scored(layer, body, attention) for body in bodies])


def _scored(layer: CompressedLayer, body: Any, attention: Tensor) -> Any:
    if body.attention_stats is None or not len(body):
        return body
    slots = body.slots()
    unit = layer.scores(torch.ones_like(body.attention_stats), body.token_row(), slots)  # linear in the statistics
    return replace(body, attention_stats=attention[body.token_row(), slots] / unit)
