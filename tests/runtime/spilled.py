"""Packed tokens to spill, and what is found of them afterwards."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fade_runtime.storage.packed import PackedTokens, pack_tokens
from fade_runtime.storage.spill import Spill

CPU = torch.device("cpu")


def tokens(lengths: list[int], first: int = 0, dim: int = 16, low: float = 0.0) -> PackedTokens:
    """Packed tokens of rows of several lengths, from a slot on."""
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    slots = torch.cat([torch.arange(length) + first for length in lengths])
    key, value = torch.randn(2, len(rows), dim, generator=torch.Generator().manual_seed(first))
    is_low = torch.rand(len(rows), generator=torch.Generator().manual_seed(1)) < low
    return pack_tokens(key, value, rows, slots, slots.float(), low=is_low)


def spill(where: str, folder: Path, limit: int | None = None) -> Spill:
    return Spill(where, folder if where == "disk" else None, limit)


def contents(bodies: list[list[PackedTokens]] | list[PackedTokens]) -> dict[tuple[int, int], tuple[Tensor, ...]]:
    """Tier, codes and scales of each token by row and slot."""
    found = {}
    flat = [body for each in bodies for body in (each if isinstance(each, list) else [each])]
    for body in flat:
        low, page = body.low(), body.token_page()
        at_high, at_low = (~low).cumsum(0) - 1, low.cumsum(0) - 1
        for t, (row, slot) in enumerate(zip(body.token_row().tolist(), body.slots().tolist())):
            codes = body.low_key_codes[at_low[t]] if low[t] else body.key_codes[at_high[t]]
            assert (row, slot) not in found
            found[row, slot] = (low[t], codes, body.key_scale[page[t]], body.value_zero[t], body.attention_stats[t])
    return found


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, y) for key in a for x, y in zip(a[key], b[key]))
