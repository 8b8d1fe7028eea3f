"""Attention over a layer whose tokens are dequantised for one call: for many queries at once."""

from __future__ import annotations

import torch
from torch import Tensor

from fade_runtime.kernels.reference import Part
from fade_runtime.kernels.triton.pack_kernel import dequantise
from fade_runtime.storage.tiers import rank_in_row
from predictor import rope
from predictor.learned_sinks import with_sink_token


def dense(
    query: Tensor, key: Tensor, value: Tensor, part: Part, bias: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """SDPA over the tokens of a layer, dequantised for this call.

    Args:
        query: [R, Q, D], already scaled. key, value: [R, n, D] full-precision tokens. part: T packed tokens in R rows.
        bias: [R, Q, n] added to the scores of full-precision tokens, or None. sinks: [R, Q] learned sinks, or None.

    Returns:
        [R, Q, D] in the query's dtype, zero where nothing is visible.
    """
    packed = part.packed
    assert packed is not None
    length, row = key.shape[1], packed.token_row()
    counts = torch.bincount(row, minlength=len(query))
    longest = int(counts.max()) if len(row) else 0
    place = length + rank_in_row(row)
    keys, values = dequantise(packed, query.dtype)
    if part.table is not None and part.positions is not None:
        keys = rope.rotate(keys.float(), part.table[part.positions]).to(query.dtype)
    all_keys, all_values = (torch.nn.functional.pad(full.to(query.dtype), (0, 0, 0, longest)) for full in (key, value))
    all_keys[row, place], all_values[row, place] = keys, values
    mask = None
    if bias is not None or part.bias is not None or part.since is not None or int(counts.min()) < longest:
        mask = query.new_zeros(*query.shape[:2], length + longest)
        mask[:, :, :length] = 0 if bias is None else bias.to(mask.dtype)
        mask[:, :, length:].masked_fill_(torch.arange(longest, device=row.device) >= counts[:, None, None], -torch.inf)
        if part.bias is not None:
            mask[row, :, place] = part.bias.to(mask.dtype)
        mask[row, :, place] = part.hidden(mask[row, :, place])
        mask = mask[:, None]
    tokens = query[:, None], all_keys[:, None], all_values[:, None], mask
    if sinks is not None:
        tokens = with_sink_token(*tokens, scaling=1.0, sinks=sinks[:, None])
    out = torch.nn.functional.scaled_dot_product_attention(*tokens, scale=1.0)[:, 0, :, : value.shape[2]]
    return out if mask is None else out.masked_fill((mask[:, 0] == -torch.inf).all(-1, keepdim=True), 0)
