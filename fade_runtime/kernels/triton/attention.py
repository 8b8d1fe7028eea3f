"""The GPU kernel: fused attention over full-precision and packed tokens in Triton, checked against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from fade_runtime.kernels import reference
from fade_runtime.kernels.reference import Part
from fade_runtime.kernels.triton import launch_table as launches
from fade_runtime.kernels.triton.codes import Parts, Stored, constants, launch, padded
from fade_runtime.kernels.triton.dense import dense
from fade_runtime.kernels.triton.launch_table import Launch
from fade_runtime.kernels.triton.merge_kernel import Result, mass_kernel, merge_kernel
from fade_runtime.kernels.triton.rotate import Turn
from fade_runtime.kernels.triton.split_kernel import Asked, Full, attend_kernel
from fade_runtime.storage import quant
from fade_runtime.storage.packed import PackedTokens

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
    into: Sequence[Tensor] = (),
    decay: float = 1.0,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Same as :func:`fade_runtime.kernels.reference.attend`, in Triton.

    Product quantisation, values of another width than keys, head dims above 256, or above 128 where keys are rotated
    when they are read, and numbers that float16 cannot describe go to the reference, with all parts beside. Many
    queries, that is a prompt that follows an earlier one, go to SDPA over the layer's dequantised tokens where the
    launch table says that this is faster; no copy of them outlives the call.
    """
    if not parts or not all(_fits(part, query.shape[2]) for part in parts):
        return reference.attend(query, key, value, parts, weights, bias, softcap, into, decay)
    hows = [launch_of(query, part) for part in parts]
    if len(parts) == 1 and weights is None and softcap is None:  # what SDPA can do
        tokens = key.shape[1] + len(parts[0].tokens) / max(len(query), 1)
        if query.shape[1] >= hows[0].dense_from(tokens):
            return dense(query, key, value, parts[0], bias), None, []
    out, mass, masses = fused(query, key, value, parts, weights, bias, softcap, hows)
    return out, *((mass, masses) if mass is None else reference.accumulate(mass, masses, into, decay))


def launch_of(query: Tensor, part: Part) -> Launch:
    """How the kernel is started for queries [R, Q, D] and packed tokens, by the launch table."""
    packed: Any = part.tokens
    name = launches.name_of(query.device)
    return launches.choose(name, query.shape[2], packed.bits.key, kind_of(part, query.dtype))


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[Part],
    weights: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    hows: Sequence[Launch],
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The fused kernel; arguments as those of :func:`attend`, with parts of packed tokens and a launch for each.

    Full-precision tokens and the first part are walked in one launch, every further part in one more.
    """
    rows, queries, dim = query.shape
    length, blocks, cores = key.shape[1], triton.cdiv(queries, BLOCK), launches.processors(query.device)
    query, key, value = query.contiguous(), _rows(key), _rows(value)
    bias = None if bias is None else bias.float().contiguous()
    rotated, exact = quant.hadamard(query.float()), query.dtype == torch.float32
    stored: list[Any] = [part.tokens for part in parts]
    spans = [how.span(len(packed.page_len) * blocks, cores) for packed, how in zip(stored, hows)]
    cuts, starts = zip(*(pieces_of(packed, rows, span) for packed, span in zip(stored, spans)))
    pieces = triton.cdiv(length, spans[0] * quant.PAGE)
    bases = list(itertools.accumulate((cut.shape[1] for cut in cuts), initial=rows * pieces))  # first piece of a part
    floats: Any = dict(dtype=torch.float32, device=query.device)
    tops, totals = torch.empty(2, bases[-1], queries, **floats)
    outs, scores, packed_scores = torch.empty(bases[-1], queries, dim, **floats), query, [query] * len(parts)
    if weights is not None:
        scores = torch.empty(rows, length, queries, **floats)
        packed_scores = [torch.empty(len(packed), queries, **floats) for packed in stored]
    full = Full(key, value, *constants(dim, padded(dim), exact))
    for index, (part, packed, how) in enumerate(zip(parts, stored, hows)):
        own = None if part.bias is None else part.bias.float().contiguous()
        wanted = (bias is not None, own is not None, softcap is not None, BLOCK, weights is not None)
        there: list[Any] = [query if each is None else each for each in (bias, own)]  # what is not is not read
        ask = Asked._make([query, rotated, *there, float(softcap or 0), *constants(*wanted)])
        forms = Stored.of(packed), Parts.of(packed, "key", exact), Parts.of(packed, "value", exact), _turn(part, query)
        left = Result(tops, totals, outs, scores, packed_scores[index])
        first, count, here = (0, bases[1], pieces) if index == 0 else (bases[index], cuts[index].shape[1], 0)
        numbers = first, cuts[index].shape[1], rows, spans[index], here, queries, length
        steps = key.stride(0) // dim, value.stride(0) // dim
        given: tuple[Any, ...] = (ask, full, *forms, left, cuts[index], *numbers, *steps)
        launch(attend_kernel, (count, blocks), query, *given, num_warps=how.warps, num_stages=how.stages)
    begins = starts[0]
    if len(parts) > 1:
        begins = torch.stack([start + (base - bases[0]) for start, base in zip(starts, bases)])
    out, top, total = torch.empty_like(query), *torch.empty(2, rows, queries, **floats)
    given = out, top, total, left, begins, len(parts), bases[0], rows, pieces, queries
    launch(merge_kernel, (rows, queries), query, *given, dim, padded(dim), dim & -dim, MERGED)
    if weights is None:
        return out, None, []
    weights, rows_of = weights.float().contiguous(), [packed.token_row().to(torch.int32) for packed in stored]
    every = zip((scores, *packed_scores), (top, *rows_of), (length, *[0] * len(parts)))
    mass, *masses = (_mass(each, weights, row_of, top, total, per_row) for each, row_of, per_row in every)
    return out, mass, masses


def _mass(scores: Tensor, weights: Tensor, row_of: Tensor, top: Tensor, total: Tensor, per_row: int) -> Tensor:
    """Attention that tokens received: [R, n] from scores [R, n, Q] with ``per_row`` n, [T] from scores [T, Q]."""
    mass = torch.empty(scores.shape[:-1], dtype=torch.float32, device=scores.device)
    given = mass, scores, weights, row_of, top, total, mass.numel(), per_row, scores.shape[-1], SUMMED, 16
    launch(mass_kernel, (triton.cdiv(mass.numel(), SUMMED),), scores, *given)
    return mass


def _fits(part: Part, dim: int) -> bool:
    """Whether tokens are packed, in float16 alone, values as wide as keys, and a tile of them fits into a program."""
    packed = part.packed
    if packed is None or packed.wide:
        return False
    same = packed.value_codes.shape[1] * packed.bits.key == packed.key_codes.shape[1] * packed.bits.value
    return same and dim <= (WIDEST if part.table is None else WIDEST_TURNED)


def kind_of(part: Part, dtype: torch.dtype) -> str:
    """What a launch is chosen by, of :data:`fade_runtime.kernels.triton.launch_table.KINDS`."""
    packed: Any = part.tokens
    if part.table is not None:
        return "turned"
    if dtype == torch.float32:
        return "float32"
    return "tiered" if len(packed.key_codes) and len(packed.low_key_codes) else "plain"


def _rows(x: Tensor) -> Tensor:
    """[R, n, D] whose rows are dense, and a whole number of tokens apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % x.shape[2] == 0 else x.contiguous()


def _turn(part: Part, query: Tensor) -> Turn:
    """How keys of a part are rotated when they are read by queries [R, Q, D]."""
    dim = query.shape[2]
    sizes = padded(dim), dim & -dim
    if part.table is None or part.positions is None:
        return Turn(query, query, query, *constants(False, 2, False, *sizes))
    cos, sin = part.table.cos.float().contiguous(), part.table.sin.float().contiguous()
    fixed = constants(True, cos.shape[-1], part.table.interleaved, *sizes)
    return Turn(cos, sin, part.positions.contiguous(), *fixed)


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
