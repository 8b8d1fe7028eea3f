"""Triton kernels that unite the softmaxes of pieces, and that turn their scores into statistics.

Source: Milakov and Gimelshein 2018, Online normalizer calculation for softmax (arXiv 1805.02867), section 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fade_runtime.kernels.triton.codes import LEAST, walsh


class Result(NamedTuple):
    """What pieces leave: top and total [N, Q], out [N, Q, D]; scores [R, n, Q] and [T, Q], if wanted; all float32."""

    top: Any
    total: Any
    out: Any
    scores: Any
    packed_scores: Any


@triton.jit
def fold_pieces(top, total, acc, first, last, base, q, queries, d, left, dim: tl.constexpr, at_once: tl.constexpr):
    """Unite a softmax (largest score, sum, weighted values [1, columns]) with those of pieces ``first`` to ``last``."""
    for at in range(first, last, at_once):
        number = at + tl.arange(0, at_once)
        there = number < last
        to = (base + number) * queries + q
        tops = tl.load(left.top + to, mask=there, other=LEAST)
        totals = tl.load(left.total + to, mask=there, other=0.0)
        outs = tl.load(left.out + to[:, None] * dim + d[None, :], mask=there[:, None] & (d < dim)[None, :], other=0.0)
        new = tl.maximum(top, tl.max(tops, axis=0))
        shares, factor = tl.exp(tops - new), tl.exp(top - new)
        total = total * factor + tl.sum(shares * totals, axis=0)
        acc = acc * factor + tl.sum(shares[:, None] * outs, axis=0)[None, :]
        top = new
    return top, total, acc


@triton.jit(do_not_specialize=["parts", "base", "rows", "pieces", "queries"])
def merge_kernel(
    out,
    top_out,
    total_out,
    left,
    piece_start,
    parts,
    base,
    rows,
    pieces,
    queries,
    dim: tl.constexpr,
    columns: tl.constexpr,
    power: tl.constexpr,
    at_once: tl.constexpr,
):
    """Unite the pieces of a row, rotate what came from packed values back, and write [R, Q, D]. Grid: rows, queries.

    The row's first pieces of each part of packed tokens are ``piece_start`` [parts, rows + 1] after ``base``.
    Also writes the largest score and the sum of exponentials [R, Q] that statistics need.
    """
    row, q = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, columns)
    none = tl.max(tl.full((1,), LEAST, tl.float32), axis=0)
    zero, zeros = none * 0.0, tl.zeros((1, columns), tl.float32)
    top, total, acc = fold_pieces(none, zero, zeros, 0, pieces, row * pieces, q, queries, d, left, dim, at_once)
    top2, total2, acc2 = none, zero, zeros
    for part in range(parts):
        start = piece_start + part * (rows + 1) + row
        first, last = tl.load(start), tl.load(start + 1)
        top2, total2, acc2 = fold_pieces(top2, total2, acc2, first, last, base, q, queries, d, left, dim, at_once)
    new = tl.maximum(top, top2)
    share, share2 = tl.exp(top - new), tl.exp(top2 - new)
    total = tl.maximum(total * share + total2 * share2, 1.1754943508222875e-38)
    acc = (acc * share + walsh(acc2, 1, columns, power) * share2) / total
    where = row * queries + q
    to = out + where * dim + d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(d < dim)[None, :])
    tl.store(top_out + where, new)
    tl.store(total_out + where, total)


@triton.jit(do_not_specialize=["tokens", "per_row", "queries"])
def mass_kernel(
    mass, scores, weights, row_of, top, total, tokens, per_row, queries, block: tl.constexpr, at_once: tl.constexpr
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
    for at in range(0, queries, at_once):
        q = at + tl.arange(0, at_once)
        real = q < queries
        mask = there[:, None] & real[None, :]
        each = row[:, None] * queries + q[None, :]
        mine = tl.load(scores + t.to(tl.int64)[:, None] * queries + q[None, :], mask=mask, other=float("-inf"))
        probs = tl.exp(mine - tl.load(top + each, mask=mask, other=0.0))
        probs = probs / tl.load(total + each, mask=mask, other=1.0)
        sums += tl.sum(probs * tl.load(weights + q, mask=real, other=0.0)[None, :], axis=1)
    tl.store(mass + t, sums, mask=there)
