"""Triton kernels that unite the softmaxes of splits, and that make statistics of their scores.

Source: Milakov and Gimelshein 2018, Online normalizer calculation for softmax (arXiv 1805.02867), section 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fade_runtime.kernels.triton.codes import LEAST, walsh


class Partials(NamedTuple):
    """What splits leave: top and total [N, Q], out [N, Q, D]; scores [R, n, Q] and [T, Q], if wanted; all float32."""

    top: Any
    total: Any
    out: Any
    scores: Any
    packed_scores: Any


@triton.jit
def fold_splits(
    top, total, acc, first, last, first_split, q, n_queries, d, partials, dim: tl.constexpr, at_once: tl.constexpr
):
    """Unite a softmax (largest score, sum, weighted values [1, columns]) with those of splits ``first`` to ``last``.

    They are counted from ``first_split`` on; ``q`` is the query, ``d`` [columns] its channels.
    """
    for at in range(first, last, at_once):
        index = at + tl.arange(0, at_once)
        there = index < last
        to = (first_split + index) * n_queries + q
        tops = tl.load(partials.top + to, mask=there, other=LEAST)
        totals = tl.load(partials.total + to, mask=there, other=0.0)
        outs = tl.load(
            partials.out + to[:, None] * dim + d[None, :], mask=there[:, None] & (d < dim)[None, :], other=0.0
        )
        new = tl.maximum(top, tl.max(tops, axis=0))
        scale, factor = tl.exp(tops - new), tl.exp(top - new)
        total = total * factor + tl.sum(scale * totals, axis=0)
        acc = acc * factor + tl.sum(scale[:, None] * outs, axis=0)[None, :]
        top = new
    return top, total, acc


@triton.jit(do_not_specialize=["parts", "first_split", "rows", "full_splits", "n_queries"])
def merge_kernel(
    out,
    top_out,
    total_out,
    sinks,
    partials,
    split_start,
    parts,
    first_split,
    rows,
    full_splits,
    n_queries,
    has_sinks: tl.constexpr,
    dim: tl.constexpr,
    columns: tl.constexpr,
    power: tl.constexpr,
    at_once: tl.constexpr,
):
    """Unite the splits of a row, rotate what came from packed values back, and write [R, Q, D]. Grid: rows, queries.

    Also writes the largest score and the sum of exponentials [R, Q] that statistics need.

    Args:
        out: [R, Q, D]. top_out, total_out: [R, Q] float32. sinks: [R, Q] float32, read if ``has_sinks``.
        partials: :class:`Partials` of all splits.
        split_start: [parts, rows + 1] int32: a row's first split of each part of packed tokens, after ``first_split``.
        parts, rows: their numbers. full_splits: splits of a row's full-precision tokens, which come first.
        n_queries: Q. dim, columns: D, and columns of its tile. power: block of the Hadamard rotation.
        at_once: splits that are united at once.
    """
    row, q = tl.program_id(0), tl.program_id(1)
    d, where = tl.arange(0, columns), row * n_queries + q
    none = tl.max(tl.full((1,), LEAST, tl.float32), axis=0)
    zero, zeros = none * 0.0, tl.zeros((1, columns), tl.float32)
    top, total = none, zero
    if has_sinks:
        sink = tl.load(sinks + where)
        top = tl.maximum(sink, none)
        total = tl.exp(sink - top)
    top, total, acc = fold_splits(
        top, total, zeros, 0, full_splits, row * full_splits, q, n_queries, d, partials, dim, at_once
    )
    top2, total2, acc2 = none, zero, zeros
    for part in range(parts):
        start = split_start + part * (rows + 1) + row
        first, last = tl.load(start), tl.load(start + 1)
        top2, total2, acc2 = fold_splits(
            top2, total2, acc2, first, last, first_split, q, n_queries, d, partials, dim, at_once
        )
    new = tl.maximum(top, top2)
    scale, scale2 = tl.exp(top - new), tl.exp(top2 - new)
    total = tl.maximum(total * scale + total2 * scale2, 1.1754943508222875e-38)
    acc = (acc * scale + walsh(acc2, 1, columns, power) * scale2) / total
    to = out + where * dim + d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(d < dim)[None, :])
    tl.store(top_out + where, new)
    tl.store(total_out + where, total)


@triton.jit(do_not_specialize=["tokens", "per_row", "n_queries"])
def mass_kernel(
    mass, scores, weights, row_of, top, total, tokens, per_row, n_queries, block: tl.constexpr, at_once: tl.constexpr
):
    """Attention that each of ``tokens`` received [T], summed over queries by weight, from scores [T, Q].

    Token t is of row ``t // per_row``, or of row ``row_of[t]`` where ``per_row`` is 0. Grid: tokens.
    """
    t = tl.program_id(0) * block + tl.arange(0, block)
    there = t < tokens
    if per_row > 0:
        row = t // per_row
    else:
        row = tl.load(row_of + t, mask=there, other=0).to(tl.int32)
    sums = tl.zeros((block,), tl.float32)
    for at in range(0, n_queries, at_once):
        q = at + tl.arange(0, at_once)
        real = q < n_queries
        mask = there[:, None] & real[None, :]
        each = row[:, None] * n_queries + q[None, :]
        mine = tl.load(scores + t.to(tl.int64)[:, None] * n_queries + q[None, :], mask=mask, other=float("-inf"))
        probs = tl.exp(mine - tl.load(top + each, mask=mask, other=0.0))
        probs = probs / tl.load(total + each, mask=mask, other=1.0)
        sums += tl.sum(probs * tl.load(weights + q, mask=real, other=0.0)[None, :], axis=1)
    tl.store(mass + t, sums, mask=there)
