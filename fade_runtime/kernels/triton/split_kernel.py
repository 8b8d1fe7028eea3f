"""The Triton kernel of attention over a layer's tokens, split by split.

A program takes one split of one row and all of the row's queries, up to a block: some pages of packed tokens, or as
many full-precision tokens. It leaves a softmax of its own, that is the largest score, the sum of exponentials and the
weighted values, which :mod:`fade_runtime.kernels.triton.merge_kernel` unites. A page's key scale is folded into the
query, a token's value scale into its probability. The storage format is that of :mod:`fade_runtime.storage.quant` and
:mod:`fade_runtime.storage.packed`.

Source: Dao, Haziza, Massa and Sizov 2023, Flash-Decoding for long-context inference (PyTorch blog, 13 October 2023),
for the splits; Milakov and Gimelshein 2018, Online normalizer calculation for softmax (arXiv 1805.02867), section 3,
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
from fade_runtime.kernels.triton.rotate import rotated_scores


class Queries(NamedTuple):
    """The queries of all rows, and what is done to their scores.

    Attributes:
        query: [R, Q, D] in the model's dtype. hadamard_query: the same after the Hadamard rotation, float32.
        bias, packed_bias: [R, Q, n] and [T, Q] float32. since: [R, Q] int32 first slot that is read. softcap: float.
        has_bias, has_packed_bias, has_since, has_softcap: constants: whether the four are there.
        block: constant: queries of a program. keep_scores: constant: whether scores are written for the statistics.
    """

    query: Any
    hadamard_query: Any
    bias: Any
    packed_bias: Any
    since: Any
    softcap: Any
    has_bias: Any
    has_packed_bias: Any
    has_since: Any
    has_softcap: Any
    block: Any
    keep_scores: Any


class FullTensors(NamedTuple):
    """Full-precision tokens.

    Attributes:
        key, value: [R, n, D] with dense rows.
        dim, columns, exact: constants: D, the columns of a tile, whether to multiply in float32.
    """

    key: Any
    value: Any
    dim: Any
    columns: Any
    exact: Any


@triton.jit
def cap_and_bias(scores, bias, seen, queries, has_bias: tl.constexpr):
    """Scores [q, n] with the cap, then the bias at pointers [q, n]; -inf where not ``seen`` [q, n]."""
    if queries.has_softcap:
        scores = capped(scores, queries.softcap)
    if has_bias:
        scores += tl.load(bias, mask=seen, other=0.0)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def full_split(row, first, last, index, n_queries, length, key_step, value_step, queries, full, partials):
    """Softmax over full-precision tokens ``first`` to ``last`` of a row, left at ``index`` of ``partials`` [N, Q, ...].

    Keys of rows are ``key_step`` tokens apart, values ``value_step``.
    """
    d = tl.arange(0, full.columns)
    q = tl.program_id(1) * queries.block + tl.arange(0, queries.block)
    real, inside = q < n_queries, d < full.dim
    both = real[:, None] & inside[None, :]
    query = tl.load(queries.query + (row * n_queries + q)[:, None] * full.dim + d[None, :], mask=both, other=0.0)
    top = tl.full((queries.block,), LEAST, tl.float32)
    total = tl.zeros((queries.block,), tl.float32)
    acc = tl.zeros((queries.block, full.columns), tl.float32)
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
        bias = queries.bias + (row * n_queries + q).to(tl.int64)[:, None] * length + t[None, :]
        scores = cap_and_bias(scores, bias, seen, queries, queries.has_bias)
        if queries.keep_scores:
            to = partials.scores + (row * length + t).to(tl.int64)[None, :] * n_queries + q[:, None]
            tl.store(to, scores, mask=seen)
        probs, factor, top, total = online_softmax(scores, top, total)
        values = tl.load(value + where, mask=mask, other=0.0)
        if full.exact:
            more = tl.dot(probs, values.to(tl.float32), input_precision=EXACT)
        else:
            more = tl.dot(probs.to(values.dtype), values)
        acc = acc * factor[:, None] + more
    to = index * n_queries + q
    tl.store(partials.top + to, top, mask=real)
    tl.store(partials.total + to, total, mask=real)
    tl.store(partials.out + to[:, None] * full.dim + d[None, :], acc, mask=both)


@triton.jit
def page_scores(query, codes, packed, page, keys):
    """Dot products [q, page] of rotated queries, a tuple of parts [q, tile], with a page's keys."""
    scores = tl.zeros((query[0].shape[0], keys.page), tl.float32)
    unit, least, zero_unit = load_units(packed.key_reach, page)
    for f in tl.static_range(keys.parts):
        column = tl.arange(0, keys.tile)
        at, real = page * keys.dim + f * keys.width + column, column < keys.width
        scale = load_params(packed.key_scale + at, real, unit, 0.0).to(keys.short)
        zero = load_params(packed.key_zero + at, real, zero_unit, least).to(keys.short)
        zeros = tl.broadcast_to(zero[:, None], (keys.tile, keys.page))  # a product costs less than a sum over threads
        scores = tl.dot(query[f] * scale[None, :], tl.trans(codes[f]), scores, input_precision=EXACT)
        scores = tl.dot(query[f], zeros, scores, input_precision=EXACT)
    return scores


@triton.jit
def weigh_values(acc, offsets, probs, factor, codes, packed, token, there, gain, values):
    """Add a page's values, weighted by ``probs`` [q, page], to what was summed before.

    Args:
        acc: of codes times scale and ``gain``, a tuple of parts [q, tile]. offsets: of zeros, a tuple of groups [q].
        gain: keeps products of small scales and small probabilities in the range of float16.
    """
    steps = tl.arange(0, values.page)
    scales = packed.value_scale + token.to(tl.int64) * values.groups + steps * values.groups
    zeros = packed.value_zero + token.to(tl.int64) * values.groups + steps * values.groups
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
def packed_split(row, page, pages, token, low, index, n_queries, queries, packed, keys, values, rotation, partials):
    """Softmax over some pages of a row, left at ``index`` of ``partials`` [N, Q, ...].

    The first token of the first page is ``token``; ``low`` tokens of the low tier come before it.
    """
    q = tl.program_id(1) * queries.block + tl.arange(0, queries.block)
    real = q < n_queries
    if rotation.on:
        channel = tl.arange(0, rotation.tile)
        where = (row * n_queries + q)[:, None] * keys.dim + channel[None, :]
        mask = real[:, None] & (channel < keys.dim)[None, :]
        query = tl.load(queries.query + where, mask=mask, other=0.0).to(keys.short)
    else:
        query = load_rows(queries.hadamard_query + (row * n_queries + q) * keys.dim, real, tl.load(packed.limits), keys)
    top = tl.full((queries.block,), LEAST, tl.float32)
    total = tl.zeros((queries.block,), tl.float32)
    acc, offsets, gain = (), (), tl.load(packed.limits + 1)
    for _ in tl.static_range(values.parts):
        acc = acc + (tl.zeros((queries.block, values.tile), tl.float32),)
    for _ in tl.static_range(values.groups):
        offsets = offsets + (tl.zeros((queries.block,), tl.float32),)
    for at in range(page, page + pages):
        count, n_low = tl.load(packed.page_len + at), tl.load(packed.page_low + at)
        n_high, high = count - n_low, token - low
        steps = tl.arange(0, keys.page)
        t, there = token + steps, steps < count
        if rotation.on:
            scores = rotated_scores(query, packed, at, high, low, n_high, count, t, there, keys, rotation)
        else:
            codes = load_codes(packed.key_codes, packed.low_key_codes, high, low, n_high, count, keys)
            scores = page_scores(query, codes, packed, at, keys)
        seen = real[:, None] & there[None, :]
        beside = t.to(tl.int64)[None, :] * n_queries + q[:, None]
        scores = cap_and_bias(scores, queries.packed_bias + beside, seen, queries, queries.has_packed_bias)
        if queries.has_since:
            since = tl.load(queries.since + row * n_queries + q, mask=real, other=0)
            hidden = since - tl.load(packed.page_slot + at)  # offsets below it
            offset = tl.load(packed.offset + t, mask=there, other=0).to(tl.int32)
            scores = tl.where(offset[None, :] < hidden[:, None], float("-inf"), scores)
        if queries.keep_scores:
            tl.store(partials.packed_scores + beside, scores, mask=seen)
        probs, factor, top, total = online_softmax(scores, top, total)
        codes = load_codes(packed.value_codes, packed.low_value_codes, high, low, n_high, count, values)
        acc, offsets = weigh_values(acc, offsets, probs, factor, codes, packed, token, there, gain, values)
        token += count
        low += n_low
    to = index * n_queries + q
    tl.store(partials.top + to, top, mask=real)
    tl.store(partials.total + to, total, mask=real)
    columns = tl.arange(0, values.tile)
    mask = real[:, None] & (columns < values.width)[None, :]
    for f in tl.static_range(values.parts):
        out = acc[f] / gain + offsets[f * values.groups // values.parts][:, None]
        tl.store(partials.out + to[:, None] * values.dim + f * values.width + columns[None, :], out, mask=mask)


@triton.jit(
    do_not_specialize=[
        "first_split",
        "n_splits",
        "rows",
        "span",
        "full_splits",
        "n_queries",
        "length",
        "key_step",
        "value_step",
    ]
)
def attend_kernel(
    queries,
    full,
    packed,
    keys,
    values,
    rotation,
    partials,
    splits,
    first_split,
    n_splits,
    rows,
    span,
    full_splits,
    n_queries,
    length,
    key_step,
    value_step,
):
    """Softmax of each split: ``full_splits`` a row of full-precision tokens, then those of packed tokens.

    Numbers that change from step to step are not specialised, or each would have to be compiled for.

    Args:
        queries: :class:`Queries`. full: :class:`FullTensors`. packed: ``PackedTensors``.
        keys, values: ``ChannelParts``. rotation: ``Rotation``. partials: ``Partials`` that are written.
        splits: [5, n_splits] int32 of :func:`fade_runtime.kernels.triton.attention.make_splits`.
        first_split: place in ``partials`` of what the first program writes. rows: R. span: pages of a split.
        n_queries: Q. length: n full-precision tokens of a row. key_step, value_step: tokens from a row to the next.

    Grid: splits, blocks of queries.
    """
    at = tl.program_id(0)
    before, index = rows * full_splits, at + first_split
    if at < before:
        row = at // full_splits
        first = (at % full_splits) * span * PAGE
        last = first + span * PAGE
        full_split(row, first, last, index, n_queries, length, key_step, value_step, queries, full, partials)
    else:
        split = splits + at - before
        row, page, count = tl.load(split), tl.load(split + n_splits), tl.load(split + 2 * n_splits)
        token, low = tl.load(split + 3 * n_splits), tl.load(split + 4 * n_splits)
        if count > 0:
            packed_split(
                row, page, count, token, low, index, n_queries, queries, packed, keys, values, rotation, partials
            )
