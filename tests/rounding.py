"""How far float32 may lie from the exact result: from the unit roundoff, the number of terms and their magnitudes.

No bound here is read off a run. A rounding errs by a number between plus and minus :data:`UNIT` of what is rounded, of
mean zero and independent of the others, so by ``UNIT / sqrt(3)`` in root mean square. A sum of n terms rounds n partial
sums; where terms have independent signs, the k-th of them, in any order, is the root of k / n of the terms' sum of
squares, on average. So a sum errs by ``UNIT * sqrt(n / 6)`` of that root. A number that was rounded m times before it
became a term adds ``UNIT * sqrt(m / 3)``. :data:`DEVIATIONS` times as much is allowed.

Source: Higham and Mary 2019, A new approach to probabilistic rounding error analysis (SIAM J. Sci. Comput. 41(5)),
section 2.3, for roundings; Higham and Mary 2020, Sharper probabilistic backward error analysis for basic linear algebra
kernels with random data (SIAM J. Sci. Comput. 42(5)), section 3, for terms of independent signs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fade_runtime.kernels.reference import Part
from fade_runtime.storage import quant

UNIT = 2.0**-24  # of float32: half the distance from 1 to the next number
DEVIATIONS = 4.0  # few tokens may hold most of the attention, so errors do not average out
MADE = 12  # roundings of a term: parameters of a page, folding, an exponential (five units), merging


def of_sum(terms: int, made: int = MADE, unit: float = UNIT) -> float:
    """Allowed error of a sum of terms, each ``made`` in so many roundings, relative to their root sum of squares."""
    return DEVIATIONS * unit * math.sqrt(terms / 6 + made / 3)


class Call(NamedTuple):
    """Arguments of :func:`fade_runtime.kernels.reference.attend`, which explains them."""

    query: Tensor
    key: Tensor
    value: Tensor
    parts: Sequence[Part]
    weights: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class Exact(NamedTuple):
    """Attention in float64, and the error that float32 may have: root of the sum of squares of each tensor's errors."""

    results: list[Tensor]  # output [R, Q, D], statistics [R, n], and [T] of each part
    errors: list[float]

    def check(self, results: Sequence[Tensor]) -> None:
        """Fail unless results (output alone, or with statistics) lie as near as float32 must."""
        for got, exact, allowed in zip(results, self.results, self.errors):
            assert got.shape == exact.shape
            assert float((got - exact).norm()) <= allowed

    def after(self, older: Sequence[Tensor], decay: float) -> Exact:
        """The same with older statistics, [R, n] and [T] of each part, times ``decay`` added."""
        sums = [new + decay * old.double() for new, old in zip(self.results[1:], older, strict=True)]
        lost = [error + of_sum(1) * float(each.norm()) for error, each in zip(self.errors[1:], sums)]
        return Exact([self.results[0], *sums], [self.errors[0], *lost])


class _Tokens(NamedTuple):
    """Tokens of a row: keys and values as the sums of two parts [t, D] that are multiplied apart, and biases [t, Q]."""

    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    bias: Tensor


def _stored(part: Part, queries: int) -> tuple[Tensor, _Tokens]:
    """The row of each token of a part, and its tokens, Hadamard-rotated."""
    packed, every = part.packed, slice(None)
    assert packed is not None
    codes = [packed.codes(name)(every, torch.float64) for name in ("key", "value")]
    scale, zero = (each[packed.token_page()].double() for each in packed.key_params(every))
    wide = codes[1].shape[1] // packed.value_scale.shape[1]
    by, rest = (each.double().repeat_interleave(wide, 1) for each in packed.value_params(every))
    bias = codes[0].new_zeros(len(packed), queries) if part.bias is None else part.bias.double()
    row = packed.token_row()
    if part.since is not None:
        bias = bias.masked_fill(packed.slots()[:, None] < part.since[row], -math.inf)
    return row, _Tokens((codes[0] * scale, zero), (codes[1] * by, rest), bias)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[Part],
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Exact:
    """Exact attention; arguments as those of :func:`fade_runtime.kernels.reference.attend`."""
    rows, queries, dim = query.shape
    query, key, value = query.double(), key.double(), value.double()
    weights = query.new_zeros(queries) if weights is None else weights.double()
    stored = [_stored(part, queries) for part in parts]
    out, mass = torch.zeros_like(query), query.new_zeros(rows, key.shape[1])
    masses = [query.new_zeros(len(part.tokens)) for part in parts]
    squares = [0.0] * (2 + len(parts))
    for row in range(rows):
        mine = [owner == row for owner, _ in stored]
        none = torch.zeros_like(key[row])
        hidden = query.new_zeros(key.shape[1], queries) if bias is None else bias[row].double().T
        groups = [_Tokens((key[row], none), (value[row], none), hidden)]
        groups += [
            _Tokens(*(tuple(x[of] for x in pair) for pair in tokens[:2]), tokens.bias[of])  # type: ignore[arg-type]
            for of, (_, tokens) in zip(mine, stored)
        ]
        group_queries = [query[row]] + [quant.hadamard(query[row])] * len(parts)
        scores, errors = zip(*(_scores(q, tokens, softcap) for q, tokens in zip(group_queries, groups)))
        counts = [len(each) for each in scores]
        every, error = torch.cat(scores), torch.cat(errors)  # [N, Q]
        sink = query.new_full((queries,), -math.inf) if sinks is None else sinks[row].double()
        top = torch.maximum(every.amax(0), sink).clamp(min=-1e300)
        probs = (every - top).exp()
        beside = (sink - top).exp()
        total = (probs.sum(0) + beside).clamp(min=1e-300)
        probs, beside = probs / total, beside / total
        away = (top - every).masked_fill(probs == 0, 0.0)  # what an exponential loses by its argument's rounding
        sink_error = beside * (2 * of_sum(0) * (top - sink).masked_fill(beside == 0, 0.0) + of_sum(1))
        error = (error.square() + (2 * of_sum(0) * away).square() + of_sum(sum(counts)) ** 2).sqrt()
        error = error.masked_fill(probs == 0, 0.0)
        error = (error.square() + (probs * error).square().sum(0) + sink_error.square()).sqrt()  # of their sum too
        sizes = torch.cat([sum(x.square().sum(1) for x in tokens.value) for tokens in groups])  # type: ignore[misc]
        terms = probs.square() * sizes[:, None] * (error.square() + of_sum(sum(counts) + dim) ** 2)
        squares[0] += float(terms.sum())
        received, lost = probs @ weights, (probs * error) @ weights
        for index, (prob, tokens) in enumerate(zip(probs.split(counts), groups)):
            weighed = prob.T @ sum(tokens.value)  # type: ignore[arg-type]
            out[row] += quant.hadamard(weighed) if index else weighed
        mass[row] = received[: counts[0]]
        for own, of, got in zip(masses, mine, received.split(counts)[1:]):
            own[of] = got
        for index, each in enumerate(lost.split(counts), start=1):
            squares[index] += float(each.square().sum())
    return Exact([out, mass, *masses], [math.sqrt(each) for each in squares])


def _scores(query: Tensor, tokens: _Tokens, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Scores [t, Q] of queries [Q, D], and the error that each may have."""
    terms = sum(x.square() for x in tokens.key) @ query.square().T
    scores = sum(tokens.key) @ query.T  # type: ignore[operator]
    error = of_sum(2 * query.shape[1]) * terms.sqrt()  # a rotation, and a product
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
        error = error + of_sum(0) * softcap
    return scores + tokens.bias, error
