"""The codes of packed tokens as numbers again, some tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fade_runtime.storage import quant


class TwoTierCodes:
    """Codes of T tokens in two tiers, in units of the high tier's scale.

    Args:
        high: [T4, D * bits / 8] uint8 packed codes of the high tier's tokens, in their order.
        low: [T2, D * low_bits / 8] uint8 of the low tier's.
        bits, low_bits: of a code in each.
        is_low: [T] bool; not read where there are no low tokens.
    """

    def __init__(self, high: Tensor, low: Tensor, bits: int, low_bits: int, is_low: Tensor) -> None:
        self.high, self.low, self.bits, self.low_bits = high, low, bits, low_bits
        self.is_low = is_low if len(low) else None
        if self.is_low is not None:
            self.place = torch.where(self.is_low, self.is_low.cumsum(0), (~self.is_low).cumsum(0)) - 1

    def __call__(self, tokens: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Levels [t, D] of some tokens in a float dtype."""
        if self.is_low is None:
            return quant.unpack(self.high[tokens], self.bits).to(dtype)
        is_low, place = self.is_low[tokens], self.place[tokens]
        low_levels = quant.unpack(self.low[place[is_low]], self.low_bits).to(dtype)
        levels = low_levels.new_empty(len(place), low_levels.shape[1])
        step, rest = quant.middle(self.bits, self.low_bits)
        levels[is_low] = low_levels * step + rest
        levels[~is_low] = quant.unpack(self.high[place[~is_low]], self.bits).to(dtype)
        return levels
