"""Attention over stored tokens in plain torch, a few pages at a time.

Scales never touch the codes: a page's key scale is folded into the query, a token's value scale into its probability.
Only the codes of :data:`PAGES_AT_ONCE` pages are unpacked at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fade_runtime.storage import quant
from fade_runtime.storage.codes import TwoTierCodes
from fade_runtime.storage.packed import PackedTokens
from fade_runtime.storage.tokens import StoredTokens
from predictor import rope

PAGES_AT_ONCE = 48
TOKENS_AT_ONCE = 1024


@dataclass(frozen=True)
class Part:
    """Stored tokens as attention is to read them.

    Attributes:
        tokens: T of them.
        table, positions: keys are stored un-rotated; rotate token t to ``table[positions[t]]`` ([T] int64). None:
            keys are read as they are.
        bias: [T, Q] added to the scores, or None.
        since: [R, Q] int32 first slot that each query of a row reads, or None: it reads all.
    """

    tokens: StoredTokens
    table: rope.Table | None = None
    positions: Tensor | None = None
    bias: Tensor | None = None
    since: Tensor | None = None

    @property
    def packed(self) -> PackedTokens | None:
        """The tokens, if they are packed; None if they are to be decoded."""
        return self.tokens if isinstance(self.tokens, PackedTokens) else None

    def hidden(self, scores: Tensor) -> Tensor:
        """Scores [T, Q] with -inf where a token comes before what the query reads."""
        if self.since is None:
            return scores
        return scores.masked_fill(self.tokens.slots()[:, None] < self.since[self.tokens.token_row()], -torch.inf)


def _page_chunks(packed: PackedTokens) -> Iterator[tuple[slice, Tensor | None, Tensor, slice]]:
    """Cut the pages into chunks: pages, index [p, page] into the tokens (None: dense), real [p, page], tokens."""
    lengths = packed.page_len.long()
    ends = lengths.cumsum(0).tolist()
    steps = torch.arange(packed.page_tokens, device=lengths.device)
    for first in range(0, len(ends), PAGES_AT_ONCE):
        pages = slice(first, min(first + PAGES_AT_ONCE, len(ends)))
        tokens = slice(ends[first - 1] if first else 0, ends[pages.stop - 1])
        real = steps < lengths[pages, None]
        dense = tokens.stop - tokens.start == real.numel()
        starts = (lengths.cumsum(0) - lengths)[pages, None]
        yield pages, None if dense else (starts + steps).clamp(max=tokens.stop - 1), real, tokens


def _by_page(codes: TwoTierCodes, index: Tensor | None, tokens: slice, real: Tensor, dtype: torch.dtype) -> Tensor:
    chosen = codes(tokens if index is None else index.flatten(), dtype)
    return chosen.unflatten(0, real.shape)  # [p, page, D]


def packed_scores(query: Tensor, packed: PackedTokens) -> Tensor:
    """Dot products of each row's queries with the row's packed keys.

    Args:
        query: [R, Q, D] float, Hadamard-rotated, already scaled; Q is query heads of the group x steps.
        packed: T tokens.

    Returns:
        [T, Q] in the query's dtype.
    """
    scores = query.new_empty(len(packed), query.shape[1])
    unpacked = packed.codes("key")
    for pages, index, real, tokens in _page_chunks(packed):
        page_query = query[packed.page_row[pages].long()]  # [p, Q, D]
        scale, zero = packed.key_params(pages)
        folded = page_query * scale[:, None].to(query.dtype)
        offset = page_query @ zero[:, :, None].to(query.dtype)  # [p, Q, 1]
        codes = _by_page(unpacked, index, tokens, real, query.dtype)
        block = (folded @ codes.transpose(1, 2) + offset).transpose(1, 2)  # [p, page, Q]
        scores[tokens] = block.flatten(0, 1) if index is None else block[real]
    return scores


def packed_values(probs: Tensor, packed: PackedTokens, rows: int) -> Tensor:
    """Sums of each row's packed values, weighted by attention.

    Args:
        probs: [T, Q] float. packed: T tokens. rows: R.

    Returns:
        [R, Q, D] in the dtype of ``probs``, Hadamard-rotated.
    """
    dim, groups = packed.value_codes.shape[1] * 8 // packed.bits.value, packed.value_scale.shape[1]
    out = probs.new_zeros(rows, probs.shape[1], groups, dim // groups)
    unpacked = packed.codes("value")
    for pages, index, real, tokens in _page_chunks(packed):
        chosen = tokens if index is None else index
        weights, scale, zero = (
            each.to(probs.dtype).unflatten(0, real.shape) if index is None else each.to(probs.dtype)
            for each in (probs[chosen], *packed.value_params(chosen))
        )
        if index is not None:
            weights = weights * real[..., None]
        codes = _by_page(unpacked, index, tokens, real, probs.dtype).unflatten(-1, (groups, -1))
        folded = torch.einsum("ptq,ptn->pnqt", weights, scale)
        block = folded @ codes.permute(0, 2, 1, 3)  # [p, groups, Q, D / groups]
        block = block + torch.einsum("ptq,ptn->pnq", weights, zero)[..., None]
        out.index_add_(0, packed.page_row[pages].long(), block.transpose(1, 2))
    return out.flatten(2)


def part_scores(query: Tensor, part: Part) -> Tensor:
    """Dot products of each row's queries with the row's tokens of a part, its bias left out.

    Args:
        query: [R, Q, D] float, already scaled. part: T tokens.

    Returns:
        [T, Q] in the query's dtype.
    """
    stored = part.tokens
    if part.packed is not None and part.table is None:
        return packed_scores(quant.hadamard(query), part.packed)
    row = stored.token_row()
    scores = query.new_empty(len(stored), query.shape[1])
    decode = stored.key_decoder()
    for at in range(0, len(stored), TOKENS_AT_ONCE):
        tokens = slice(at, at + TOKENS_AT_ONCE)
        key = decode(tokens)  # [t, D] float32
        if part.table is not None:
            assert part.positions is not None
            key = rope.rotate(key, part.table[part.positions[tokens]])
        scores[tokens] = torch.einsum("tqd,td->tq", query[row[tokens]], key.to(query.dtype))
    return scores


def part_values(probs: Tensor, part: Part, rows: int) -> Tensor:
    """Sums of each row's values of a part, weighted by attention.

    Args:
        probs: [T, Q] float. part: T tokens. rows: R.

    Returns:
        [R, Q, D] in the dtype of ``probs``.
    """
    stored = part.tokens
    if part.packed is not None:
        return quant.hadamard(packed_values(probs, part.packed, rows))
    row, decode = stored.token_row(), stored.value_decoder()
    out = probs.new_zeros(rows, probs.shape[1], decode(slice(0, 0)).shape[1])
    for at in range(0, len(stored), TOKENS_AT_ONCE):
        tokens = slice(at, at + TOKENS_AT_ONCE)
        value = decode(tokens).to(probs.dtype)  # [t, D]
        out.index_add_(0, row[tokens], probs[tokens, :, None] * value[:, None])
    return out


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[Part],
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    into: Sequence[Tensor] = (),
    decay: float = 1.0,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Attention of each row's queries over the row's full-precision and stored tokens, under one softmax.

    Args:
        query: [R, Q, D] float, already scaled; Q is query heads of the group x steps.
        key, value: [R, n, D] full-precision tokens.
        parts: stored tokens in R rows (a row may have none).
        weights: [Q] weight of each query in the statistics, or None for no statistics.
        bias: [R, Q, n] added to the scores of full-precision tokens, or None.
        softcap: scores become ``softcap * tanh(score / softcap)`` before any bias; None: no such cap.
        sinks: [R, Q] learned sinks, logits that stand in the softmax's denominator and have no value, or None.
        into: older statistics [R, n] and [T] of each part, contiguous float32. They are multiplied by ``decay``, the
            new ones are added to them, and they are what is returned.

    Returns:
        output [R, Q, D] in the query's dtype, zero where nothing is visible; with weights, the attention that each
        full-precision token [R, n] and each token of each part [T] received, summed over queries by weight, float32;
        without, None and an empty list.

    Source: Milakov and Gimelshein 2018, Online normalizer calculation for softmax (arXiv 1805.02867), section 3,
    for the merging of parts. Gemma Team 2024, Gemma 2 (arXiv 2408.00118), section 2, for the cap.
    :mod:`predictor.learned_sinks` for sinks.

    Example:
        >>> from fade_runtime.storage.packed import pack_tokens
        >>> packed = pack_tokens(torch.randn(5, 16), torch.ones(5, 16), torch.zeros(5).long(), torch.arange(5), None)
        >>> out, _, _ = attend(torch.randn(1, 2, 16), torch.randn(1, 3, 16), torch.ones(1, 3, 16), [Part(packed)])
        >>> torch.allclose(out, torch.ones(1, 2, 16), atol=1e-3)  # a mean of equal values
        True
    """
    if query.dtype != torch.float32 and any(part.packed is not None and part.packed.wide for part in parts):
        out, mass, masses = attend(
            query.float(), key.float(), value.float(), parts, weights, bias, softcap, sinks, into, decay
        )
        return out.to(query.dtype), mass, masses
    scores = _cap_and_bias((query @ key.transpose(1, 2)).float(), bias, softcap)  # [R, Q, n]
    stored_scores = [
        part.hidden(_cap_and_bias(part_scores(query, part).float(), part.bias, softcap)) for part in parts
    ]  # [T, Q] each
    rows = [part.tokens.token_row() for part in parts]  # [T] each
    lowest = torch.finfo(torch.float32).min
    top = torch.nn.functional.pad(scores, (0, 1), value=lowest).amax(-1)  # [R, Q], finite where nothing is visible
    for row, each in zip(rows, stored_scores):
        top = top.scatter_reduce(0, row[:, None].expand_as(each), each, "amax")
    if sinks is not None:
        top = torch.maximum(top, sinks)
    probs = (scores - top[..., None]).exp()
    stored_probs = [(each - top[row]).exp() for row, each in zip(rows, stored_scores)]
    total = probs.sum(-1)
    for row, each in zip(rows, stored_probs):
        total = total.index_add(0, row, each)
    if sinks is not None:
        total = total + (sinks - top).exp()
    total = total.clamp(min=torch.finfo(torch.float32).tiny)
    probs = probs / total[..., None]
    stored_probs = [each / total[row] for row, each in zip(rows, stored_probs)]
    out = probs.to(query.dtype) @ value
    for part, each in zip(parts, stored_probs):
        out = out + part_values(each.to(query.dtype), part, query.shape[0])
    if weights is None:
        return out, None, []
    weights = weights.float()
    mass, masses = torch.einsum("rqn,q->rn", probs, weights), [each @ weights for each in stored_probs]
    return out, *accumulate(mass, masses, into, decay)


def accumulate(mass: Tensor, masses: list[Tensor], into: Sequence[Tensor], decay: float) -> tuple[Tensor, list[Tensor]]:
    """Add new statistics to older ones.

    Args:
        mass: [R, n] float32 of the full-precision tokens. masses: [T] of each part.
        into, decay: as in :func:`attend`.

    Returns:
        statistics [R, n] and [T] of each part: the tensors of ``into``, or the new ones where it is empty.

    Example:
        >>> accumulate(torch.tensor([[1.0]]), [], [torch.tensor([[4.0]])], decay=0.5)
        (tensor([[3.]]), [])
    """
    if not into:
        return mass, masses
    for old, new in zip(into, (mass, *masses)):
        torch.add(new, old, alpha=decay, out=old)
    return into[0], list(into[1:])


def _cap_and_bias(scores: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return scores if bias is None else scores + bias


def dequantise(stored: StoredTokens, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of all stored tokens, each [T, D], as they were before; for checks and foreign attention."""
    every = slice(0, len(stored))
    return stored.key_decoder()(every).to(dtype), stored.value_decoder()(every).to(dtype)


def decoded(part: Part) -> tuple[Tensor, Tensor]:
    """Keys, rotated as the part says, and values of all its tokens: each [T, D] float32."""
    key, value = dequantise(part.tokens, torch.float32)
    if part.table is not None and part.positions is not None:
        key = rope.rotate(key, part.table[part.positions])
    return key, value
