"""Evicted tokens that come back before they are missed: those that are looked at as much as kept ones are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fade_runtime.monitor import BLOCK, pooled

if TYPE_CHECKING:
    from fade_runtime.layer import TieredLayer


def needed(attention: Tensor, gone: Tensor, kept: Tensor, most: int, block: int = BLOCK) -> Tensor:
    """Evicted tokens whose block is looked at as much as the mean kept token of the body: that is what they are
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


@dataclass
class Wanted:
    """Tokens on their way back.

    Attributes:
        chosen: [R, S] bool. attention: [R, S] share that each slot received.
        reading: done when they have been read.
    """

    chosen: Tensor
    attention: Tensor
    reading: Future[None]

    def ready(self) -> bool:
        """Whether they have been read."""
        return self.reading.done()

    def __deepcopy__(self, memo: object) -> Wanted:
        """The same: nothing of it changes."""
        return self

    def fetch(self, layer: TieredLayer) -> int:
        """Join them to the layer's body, with the attention that they received as their statistic; their number."""
        store, width = layer.tokens, self.chosen.shape[1]
        if store.spilled is None or len(self.chosen) != len(store.pad) * store.heads:
            return 0  # another batch by now

        def mine(tokens: Any) -> Tensor:
            slots = tokens.slots()
            return self.chosen[tokens.token_row(), slots.clamp(max=width - 1)] & (slots < width)

        bodies = store.spilled.take(mine)
        return store.take_in([self._scored(layer, body) for body in bodies])

    def _scored(self, layer: TieredLayer, body: Any) -> Any:
        if body.state is None or not len(body):
            return body
        slots = body.slots()
        unit = layer.policy.score(torch.ones_like(body.state), slots, layer.seen, layer.prompt)  # linear in the state
        return replace(body, state=self.attention[body.token_row(), slots] / unit)


def expected(layer: TieredLayer, attentions: Sequence[Tensor], gone: Tensor) -> Wanted | None:
    """What a look at a layer says will be needed; it is being read from now on. None: nothing.

    Args:
        attentions: [R, S] each. gone: [R, S] bool, spilled tokens.
    """
    store = layer.tokens
    if store.spilled is None or not len(store.spilled):
        return None
    attention = torch.stack(list(attentions)).amax(0)
    kept = torch.zeros_like(gone)
    for body in store.body():
        kept[body.token_row(), body.slots()] = True
    chosen = needed(attention, gone, kept, layer.config.reassign_every)
    return Wanted(chosen, attention, store.spilled.read_ahead()) if bool(chosen.any()) else None
