"""The Triton kernel of attention over a layer's tokens, piece by piece.

A program takes one piece of one row and all of the row's queries, up to a block: some pages of packed tokens, or as
many full-precision tokens. It leaves a softmax of its own, that is the largest score, the sum of exponentials and the
weighted values, which :mod:`fade_runtime.kernels.triton.merge_kernel` unites. A page's key scale is folded into the
query, a token's value scale into its probability. The storage format is that of :mod:`fade_runtime.storage.quant` and
:mod:`fade_runtime.storage.packed`.

Source: Dao, Haziza, Massa and Sizov 2023, Flash-Decoding for long-context inference (PyTorch blog, 13 October 2023),
for the pieces; Milakov and Gimelshein 2018, Online normalizer calculation for softmax (arXiv 1805.02867), section 3,
for the softmax of one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fade_runtime.kernels.triton.codes import (
    EXACT,
    LEAST,
    PAGE,
    capped,
    load_codes,
    load_params,
    load_rows,
    load_units,
    online_softmax,
)
from fade_runtime.kernels.triton.rotate import turned_scores


class Asked(NamedTuple):
    """What is asked of a row's tokens.

    Attributes:
        query: [R, Q, D] in the model's dtype. rotated: the same after the Hadamard rotation, float32.
        bias, packed_bias: [R, Q, n] and [T, Q] float32. softcap: float.
        masked, packed_masked, cap: whether there is a bias, a cap.
        block: queries of a program. scored: whether scores are wanted.
    """

    query: Any
    rotated: Any
    bias: Any
    packed_bias: Any
    softcap: Any
    masked: Any
    packed_masked: Any
    cap: Any
    block: Any
    scored: Any


class Full(NamedTuple):
    """Full-precision tokens: key and value [R, n, D] with dense rows, D, columns of a tile, whether to use float32."""

    key: Any
    value: Any
    dim: Any
    columns: Any
    exact: Any


@triton.jit
def finish(scores, bias, seen, ask, masked: tl.constexpr):
    """Cap, then bias, then what is not there."""
    if ask.cap:
        scores = capped(scores, ask.softcap)
    if masked:
        scores += tl.load(bias, mask=seen, other=0.0)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def full_piece(row, first, last, number, queries, length, key_step, value_step, ask, full, left):
    """Softmax over full-precision tokens ``first`` to ``last`` of a row; keys of rows are ``key_step`` tokens apart."""
    d = tl.arange(0, full.columns)
    q = tl.program_id(1) * ask.block + tl.arange(0, ask.block)
    real, inside = q < queries, d < full.dim
    both = real[:, None] & inside[None, :]
    query = tl.load(ask.query + (row * queries + q)[:, None] * full.dim + d[None, :], mask=both, other=0.0)
    top = tl.full((ask.block,), LEAST, tl.float32)
    total = tl.zeros((ask.block,), tl.float32)
    acc = tl.zeros((ask.block, full.columns), tl.float32)
    key = full.key + row.to(tl.int64) * key_step * full.dim
    value = full.value + row.to(tl.int64) * value_step * full.dim
    for at in range(first, tl.minimum(last, length), PAGE):
        t = at + tl.arange(0, PAGE)
        there = t < length
        where, mask = t[:, None] * full.dim + d[None, :], there[:, None] & inside[None, :]
        keys = tl.load(key + where, mask=mask, other=0.0)
        if full.exact:
            scores = tl.dot(query.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision=EXACT)
        else:
            scores = tl.dot(query.to(keys.dtype), tl.trans(keys))
        seen = real[:, None] & there[None, :]
        bias = ask.bias + (row * queries + q).to(tl.int64)[:, None] * length + t[None, :]
        scores = finish(scores, bias, seen, ask, ask.masked)
        if ask.scored:
            to = left.scores + (row * length + t).to(tl.int64)[None, :] * queries + q[:, None]
            tl.store(to, scores, mask=seen)
        probs, factor, top, total = online_softmax(scores, top, total)
        values = tl.load(value + where, mask=mask, other=0.0)
        if full.exact:
            more = tl.dot(probs, values.to(tl.float32), input_precision=EXACT)
        else:
            more = tl.dot(probs.to(values.dtype), values)
        acc = acc * factor[:, None] + more
    to = number * queries + q
    tl.store(left.top + to, top, mask=real)
    tl.store(left.total + to, total, mask=real)
    tl.store(left.out + to[:, None] * full.dim + d[None, :], acc, mask=both)


@triton.jit
def page_scores(query, codes, stored, page, keys):
    """Dot products [q, page] of rotated queries, a tuple of parts [q, tile], with a page's keys."""
    scores = tl.zeros((query[0].shape[0], keys.page), tl.float32)
    unit, least, zero_unit = load_units(stored.key_reach, page)
    for f in tl.static_range(keys.parts):
        column = tl.arange(0, keys.tile)
        at, real = page * keys.dim + f * keys.width + column, column < keys.width
        scale = load_params(stored.key_scale + at, real, unit, 0.0).to(keys.short)
        zero = load_params(stored.key_zero + at, real, zero_unit, least).to(keys.short)
        zeros = tl.broadcast_to(zero[:, None], (keys.tile, keys.page))  # a product costs less than a sum over threads
        scores = tl.dot(query[f] * scale[None, :], tl.trans(codes[f]), scores, input_precision=EXACT)
        scores = tl.dot(query[f], zeros, scores, input_precision=EXACT)
    return scores


@triton.jit
def weigh_values(acc, offsets, probs, factor, codes, stored, token, there, gain, values):
    """Add a page's values, weighted by ``probs`` [q, page], to what was summed before.

    Args:
        acc: of codes times scale and ``gain``, a tuple of parts [q, tile]. offsets: of zeros, a tuple of groups [q].
        gain: keeps products of small scales and small probabilities in the range of float16.
    """
    steps = tl.arange(0, values.page)
    scales = stored.value_scale + token.to(tl.int64) * values.groups + steps * values.groups
    zeros = stored.value_zero + token.to(tl.int64) * values.groups + steps * values.groups
    weights, new_offsets, new = (), (), ()
    for g in tl.static_range(values.groups):
        scale = tl.load(scales + g, mask=there, other=0.0).to(tl.float32) * gain
        zero = tl.load(zeros + g, mask=there, other=0.0).to(tl.float32)
        weights = weights + (probs.to(values.short) * scale.to(values.short)[None, :],)
        new_offsets = new_offsets + (offsets[g] * factor + tl.sum(probs * zero[None, :], axis=1),)
    for f in tl.static_range(values.parts):
        mine = weights[f * values.groups // values.parts]
        new = new + (tl.dot(mine, codes[f], acc[f] * factor[:, None], input_precision=EXACT),)
    return new, new_offsets


@triton.jit
def packed_piece(row, page, pages, token, low, number, queries, ask, stored, keys, values, turn, left):
    """Softmax over some pages of a row, whose first token is ``token``, the ``low``-th of the low tier."""
    q = tl.program_id(1) * ask.block + tl.arange(0, ask.block)
    real = q < queries
    if turn.on:
        channel = tl.arange(0, turn.tile)
        where = (row * queries + q)[:, None] * keys.dim + channel[None, :]
        mask = real[:, None] & (channel < keys.dim)[None, :]
        query = tl.load(ask.query + where, mask=mask, other=0.0).to(keys.short)
    else:
        query = load_rows(ask.rotated + (row * queries + q) * keys.dim, real, tl.load(stored.limits), keys)
    top = tl.full((ask.block,), LEAST, tl.float32)
    total = tl.zeros((ask.block,), tl.float32)
    acc, offsets, gain = (), (), tl.load(stored.limits + 1)
    for _ in tl.static_range(values.parts):
        acc = acc + (tl.zeros((ask.block, values.tile), tl.float32),)
    for _ in tl.static_range(values.groups):
        offsets = offsets + (tl.zeros((ask.block,), tl.float32),)
    for at in range(page, page + pages):
        count, few = tl.load(stored.page_len + at), tl.load(stored.page_low + at)
        many, high = count - few, token - low
        steps = tl.arange(0, keys.page)
        t, there = token + steps, steps < count
        if turn.on:
            scores = turned_scores(query, stored, at, high, low, many, count, t, there, keys, turn)
        else:
            codes = load_codes(stored.key_codes, stored.low_key_codes, high, low, many, count, keys)
            scores = page_scores(query, codes, stored, at, keys)
        seen = real[:, None] & there[None, :]
        beside = t.to(tl.int64)[None, :] * queries + q[:, None]
        scores = finish(scores, ask.packed_bias + beside, seen, ask, ask.packed_masked)
        if ask.scored:
            tl.store(left.packed_scores + beside, scores, mask=seen)
        probs, factor, top, total = online_softmax(scores, top, total)
        codes = load_codes(stored.value_codes, stored.low_value_codes, high, low, many, count, values)
        acc, offsets = weigh_values(acc, offsets, probs, factor, codes, stored, token, there, gain, values)
        token += count
        low += few
    to = number * queries + q
    tl.store(left.top + to, top, mask=real)
    tl.store(left.total + to, total, mask=real)
    columns = tl.arange(0, values.tile)
    mask = real[:, None] & (columns < values.width)[None, :]
    for f in tl.static_range(values.parts):
        out = acc[f] / gain + offsets[f * values.groups // values.parts][:, None]
        tl.store(left.out + to[:, None] * values.dim + f * values.width + columns[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["base", "most", "rows", "span", "pieces", "queries", "length", "key_step", "value_step"])
def attend_kernel(
    ask,
    full,
    stored,
    keys,
    values,
    turn,
    left,
    cut,
    base,
    most,
    rows,
    span,
    pieces,
    queries,
    length,
    key_step,
    value_step,
):
    """Softmax of each piece: ``pieces`` a row of full-precision tokens, then those of packed tokens, ``cut`` [5, most].

    Numbers that change from step to step are not specialised, or each would have to be compiled for.
    Grid: pieces, blocks of queries. The first piece is the ``base``-th of all.
    """
    at = tl.program_id(0)
    ahead, number = rows * pieces, at + base
    if at < ahead:
        row = at // pieces
        first = (at % pieces) * span * PAGE
        last = first + span * PAGE
        full_piece(row, first, last, number, queries, length, key_step, value_step, ask, full, left)
    else:
        piece = cut + at - ahead
        row, page, count = tl.load(piece), tl.load(piece + most), tl.load(piece + 2 * most)
        token, low = tl.load(piece + 3 * most), tl.load(piece + 4 * most)
        if count > 0:
            packed_piece(row, page, count, token, low, number, queries, ask, stored, keys, values, turn, left)
