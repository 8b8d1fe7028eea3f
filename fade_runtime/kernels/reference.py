"""Attention over packed tokens in plain torch, a few pages at a time.

Scales never touch the codes: a page's key scale is folded into the query, a token's value scale into its probability.
Only the codes of :data:`PAGES_AT_ONCE` pages are unpacked at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fade_runtime import quant
from fade_runtime.packed import BITS, PackedTokens

PAGES_AT_ONCE = 48


def _page_chunks(packed: PackedTokens) -> Iterator[tuple[slice, Tensor | None, Tensor, slice]]:
    """Cut the pages into chunks: pages, index [p, 64] into the tokens (None: dense), real [p, 64], tokens."""
    lengths = packed.page_len.long()
    ends = lengths.cumsum(0).tolist()
    steps = torch.arange(quant.PAGE, device=lengths.device)
    for first in range(0, len(ends), PAGES_AT_ONCE):
        pages = slice(first, min(first + PAGES_AT_ONCE, len(ends)))
        tokens = slice(ends[first - 1] if first else 0, ends[pages.stop - 1])
        real = steps < lengths[pages, None]
        dense = tokens.stop - tokens.start == real.numel()
        begins = (lengths.cumsum(0) - lengths)[pages, None]
        yield pages, None if dense else (begins + steps).clamp(max=tokens.stop - 1), real, tokens


def _unpack(codes: Tensor, index: Tensor | None, tokens: slice, dtype: torch.dtype) -> Tensor:
    chosen = codes[tokens].unflatten(0, (-1, quant.PAGE)) if index is None else codes[index]
    return quant.unpack(chosen, BITS).to(dtype)  # [p, 64, D]


def packed_scores(query: Tensor, packed: PackedTokens) -> Tensor:
    """Dot products of each row's queries with the row's packed keys.

    Args:
        query: [R, Q, D] float, Hadamard-rotated, already scaled; Q is query heads of the group x steps.
        packed: T tokens.

    Returns:
        [T, Q] in the query's dtype.
    """
    scores = query.new_empty(len(packed), query.shape[1])
    for pages, index, real, tokens in _page_chunks(packed):
        mine = query[packed.page_row[pages].long()]  # [p, Q, D]
        folded = mine * packed.key_scale[pages, None].to(query.dtype)
        offset = mine @ packed.key_zero[pages, :, None].to(query.dtype)  # [p, Q, 1]
        codes = _unpack(packed.key_codes, index, tokens, query.dtype)
        block = (folded @ codes.transpose(1, 2) + offset).transpose(1, 2)  # [p, 64, Q]
        scores[tokens] = block.flatten(0, 1) if index is None else block[real]
    return scores


def packed_values(probs: Tensor, packed: PackedTokens, rows: int) -> Tensor:
    """Sums of each row's packed values, weighted by attention.

    Args:
        probs: [T, Q] float. packed: T tokens. rows: R.

    Returns:
        [R, Q, D] in the dtype of ``probs``, Hadamard-rotated.
    """
    dim = packed.key_scale.shape[1]
    groups = packed.value_scale.shape[1]
    out = probs.new_zeros(rows, probs.shape[1], groups, dim // groups)
    for pages, index, real, tokens in _page_chunks(packed):
        chosen = tokens if index is None else index
        weights, scale, zero = (
            t[chosen].to(probs.dtype).unflatten(0, (-1, quant.PAGE)) if index is None else t[chosen].to(probs.dtype)
            for t in (probs, packed.value_scale, packed.value_zero)
        )
        if index is not None:
            weights = weights * real[..., None]
        codes = _unpack(packed.value_codes, index, tokens, probs.dtype).unflatten(-1, (groups, -1))
        folded = torch.einsum("ptq,ptn->pnqt", weights, scale)
        block = folded @ codes.permute(0, 2, 1, 3)  # [p, groups, Q, D / groups]
        block = block + torch.einsum("ptq,ptn->pnq", weights, zero)[..., None]
        out.index_add_(0, packed.page_row[pages].long(), block.transpose(1, 2))
    return out.flatten(2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedTokens,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    packed_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of each row's queries over the row's full-precision and packed tokens, under one softmax.

    Args:
        query: [R, Q, D] float, already scaled; Q is query heads of the group x steps.
        key, value: [R, n, D] full-precision tokens.
        packed: T tokens in R rows (a row may have none).
        weights: [Q] weight of each query in the statistics, or None for no statistics.
        bias: [R, Q, n] added to the scores of full-precision tokens, or None.
        packed_bias: [T, Q] added to the scores of packed tokens, or None.

    Returns:
        output [R, Q, D] in the query's dtype, zero where nothing is visible; attention that each full-precision
        token [R, n] and each packed token [T] received, summed over queries by weight, float32, or None.

    Source: Milakov and Gimelshein 2018, Online normalizer calculation for softmax (arXiv 1805.02867), section 3,
    for the merging of parts.

    Example:
        >>> from fade_runtime.packed import pack_tokens
        >>> packed = pack_tokens(torch.randn(5, 16), torch.ones(5, 16), torch.zeros(5).long(), torch.arange(5), None)
        >>> out, _, _ = attend(torch.randn(1, 2, 16), torch.randn(1, 3, 16), torch.ones(1, 3, 16), packed)
        >>> torch.allclose(out, torch.ones(1, 2, 16), atol=1e-3)  # a mean of equal values
        True
    """
    least = torch.finfo(torch.float32).min
    row = packed.token_row()
    scores = (query @ key.transpose(1, 2)).float()  # [R, Q, n]
    body = packed_scores(quant.hadamard(query), packed).float()  # [T, Q]
    scores = scores if bias is None else scores + bias
    body = body if packed_bias is None else body + packed_bias
    top = scores.amax(-1).clamp(min=least)  # [R, Q], finite also where nothing is visible
    top = top.scatter_reduce(0, row[:, None].expand_as(body), body, "amax")
    shares, body = (scores - top[..., None]).exp(), (body - top[row]).exp()
    total = (shares.sum(-1).index_add(0, row, body)).clamp(min=torch.finfo(torch.float32).tiny)
    shares, body = shares / total[..., None], body / total[row]
    out = shares.to(query.dtype) @ value
    out = out + quant.hadamard(packed_values(body.to(query.dtype), packed, query.shape[0]))
    if weights is None:
        return out, None, None
    weights = weights.float()
    return out, torch.einsum("rqn,q->rn", shares, weights), body @ weights


def dequantise(packed: PackedTokens, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of all packed tokens, rotated back: each [T, D]. For checks and for foreign attention."""
    page = packed.token_page()
    keys = quant.unpack(packed.key_codes, BITS).float() * packed.key_scale.float()[page]
    keys = keys + packed.key_zero.float()[page]
    groups = packed.value_scale.shape[1]
    values = quant.unpack(packed.value_codes, BITS).float().unflatten(-1, (groups, -1))
    values = values * packed.value_scale.float()[..., None] + packed.value_zero.float()[..., None]
    return quant.hadamard(keys).to(dtype), quant.hadamard(values.flatten(-2)).to(dtype)
