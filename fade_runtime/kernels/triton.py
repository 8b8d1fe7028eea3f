"""The GPU kernel: fused attention over full-precision and packed tokens in Triton, checked against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fade_runtime import quant
from fade_runtime.kernels import launches, reference
from fade_runtime.kernels.launches import Launch
from fade_runtime.kernels.reference import Part
from fade_runtime.kernels.triton_attend import Asked, Full, attend_kernel
from fade_runtime.kernels.triton_codes import Parts, Stored, launch, padded
from fade_runtime.kernels.triton_dense import dense
from fade_runtime.kernels.triton_merge import Result, mass_kernel, merge_kernel
from fade_runtime.kernels.triton_turn import Turn
from fade_runtime.packed import PackedTokens

BLOCK = 16  # queries of a program; tensor cores take no fewer
MERGED = 16  # pieces that are united at once
SUMMED = 64  # tokens of a program that sums their statistics
WIDEST, WIDEST_TURNED = 256, 128  # head dim, of keys that are rotated when they are read too


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[Part],
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Same as :func:`fade_runtime.kernels.reference.attend`, in Triton.

    Several parts, product quantisation, values of another width than keys, and head dims above 256, or above 128 where
    keys are rotated when they are read, go to the reference.
    Many queries, that is a prompt that follows an earlier one, go to SDPA over the layer's dequantised tokens where the
    launch table says that this is faster; no copy of them outlives the call.
    """
    packed = parts[0].tokens if len(parts) == 1 else None
    rows, queries, dim = query.shape
    if not isinstance(packed, PackedTokens) or not _fits(parts[0], dim):
        return reference.attend(query, key, value, parts, weights, bias, softcap)
    how = launches.choose(launches.name_of(query.device), dim, packed.bits.key, kind_of(parts[0], query.dtype))
    tokens = key.shape[1] + len(packed) / max(rows, 1)
    if weights is None and softcap is None and queries >= how.dense_from(tokens):
        return dense(query, key, value, parts[0], bias), None, []
    return fused(query, key, value, parts[0], weights, bias, softcap, how)


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    weights: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    how: Launch,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The fused kernel; arguments as those of :func:`attend`, with one part, of packed tokens."""
    packed = part.tokens
    assert isinstance(packed, PackedTokens)
    rows, queries, dim = query.shape
    length, tokens = key.shape[1], len(packed)
    blocks = triton.cdiv(queries, BLOCK)
    span = how.span(len(packed.page_len) * blocks, launches.processors(query.device))
    cut, piece_start = pieces_of(packed, rows, span)
    pieces = triton.cdiv(length, span * quant.PAGE)
    count = rows * pieces + cut.shape[1]
    query, key, value = query.contiguous(), _rows(key), _rows(value)
    exact, power, scored = query.dtype == torch.float32, dim & -dim, weights is not None
    floats: Any = dict(dtype=torch.float32, device=query.device)
    left = Result(
        torch.empty(count, queries, **floats),
        torch.empty(count, queries, **floats),
        torch.empty(count, queries, dim, **floats),
        torch.empty(rows, length, queries, **floats) if scored else query,
        torch.empty(tokens, queries, **floats) if scored else query,
    )
    ask = Asked(
        query,
        quant.hadamard(query.float()),
        query if bias is None else bias.float().contiguous(),
        query if part.bias is None else part.bias.float().contiguous(),
        float(softcap or 0),
        *map(tl.constexpr, (bias is not None, part.bias is not None, softcap is not None, BLOCK, scored)),
    )
    sizes = map(tl.constexpr, (dim, padded(dim), exact))
    full = Full(key, value, *sizes)
    forms = Stored.of(packed), Parts.of(packed, "key", exact), Parts.of(packed, "value", exact)
    numbers = cut.shape[1], rows, span, pieces, queries, length, key.stride(0) // dim, value.stride(0) // dim
    given: tuple[Any, ...] = (ask, full, *forms, _turn(part, query, padded(dim), power), left, cut, *numbers)
    launch(attend_kernel, (count, blocks), query, *given, num_warps=how.warps, num_stages=how.stages)
    out, top, total = torch.empty_like(query), *torch.empty(2, rows, queries, **floats)
    given = out, top, total, left, piece_start, rows, pieces, queries, dim, padded(dim), power, MERGED
    launch(merge_kernel, (rows, queries), query, *given)
    if weights is None:
        return out, None, []
    weights, row_of = weights.float().contiguous(), packed.token_row().to(torch.int32)
    mass, masses = torch.empty(rows, length, **floats), torch.empty(tokens, **floats)
    for to, scores, per_row in ((mass, left.scores, length), (masses, left.packed_scores, 0)):
        given = to, scores, weights, row_of, top, total, to.numel(), per_row, queries, SUMMED, 16
        launch(mass_kernel, (triton.cdiv(to.numel(), SUMMED),), query, *given)
    return out, mass, [masses]


def _fits(part: Part, dim: int) -> bool:
    """Whether values are as wide as keys, and a tile of them is no larger than a program can hold."""
    packed: Any = part.tokens
    same = packed.value_codes.shape[1] * packed.bits.key == packed.key_codes.shape[1] * packed.bits.value
    return same and dim <= (WIDEST if part.table is None else WIDEST_TURNED)


def kind_of(part: Part, dtype: torch.dtype) -> str:
    """What a launch is chosen by, of :data:`fade_runtime.kernels.launches.KINDS`."""
    packed: Any = part.tokens
    if part.table is not None:
        return "turned"
    if dtype == torch.float32:
        return "float32"
    return "tiered" if len(packed.key_codes) and len(packed.low_key_codes) else "plain"


def _rows(x: Tensor) -> Tensor:
    """[R, n, D] whose rows are dense, and a whole number of tokens apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % x.shape[2] == 0 else x.contiguous()


def _turn(part: Part, unused: Tensor, tile: int, power: int) -> Turn:
    """How keys of a part are rotated when they are read."""
    if part.table is None or part.positions is None:
        return Turn(unused, unused, unused, *map(tl.constexpr, (False, 2, False, tile, power)))
    cos, sin = part.table.cos.float().contiguous(), part.table.sin.float().contiguous()
    fixed = (True, cos.shape[-1], part.table.interleaved, tile, power)
    return Turn(cos, sin, part.positions.contiguous(), *map(tl.constexpr, fixed))


def pieces_of(packed: PackedTokens, rows: int, span: int) -> tuple[Tensor, Tensor]:
    """Cut each row's pages into pieces of ``span``; computed once for the tokens, without waiting for the device.

    Returns:
        cut: [5, N] int32: row, first page, pages, first token, first token among the low ones. N is large enough for
            any rows; pages is 0 in those that are not needed.
        starts: [rows + 1] int32 first piece of each row.
    """
    name = f"pieces of {span} in {rows}"
    if name not in packed.derived:
        pages, device = len(packed.page_len), packed.page_len.device
        bounds = torch.searchsorted(packed.page_row, torch.arange(rows + 1, dtype=torch.int32, device=device))
        starts = torch.nn.functional.pad(((bounds.diff() + span - 1) // span).cumsum(0), (1, 0))
        number = torch.arange(pages // span + rows, device=device)
        row = torch.searchsorted(starts[1:], number, right=True).clamp(max=rows - 1)
        first = bounds[row] + (number - starts[row]) * span
        before = [
            torch.nn.functional.pad(each.cumsum(0), (1, 0))[first.clamp(max=pages)]
            for each in (packed.page_len, packed.page_low)
        ]
        cut = torch.stack((row, first, (bounds[row + 1] - first).clamp(0, span), *before))
        packed.derived[name] = cut.to(torch.int32)
        packed.derived[f"starts of {name}"] = starts.to(torch.int32)
    return packed.derived[name], packed.derived[f"starts of {name}"]
