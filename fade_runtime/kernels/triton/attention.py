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
from fade_runtime.kernels.triton import launch_table
from fade_runtime.kernels.triton.codes import ChannelParts, PackedTensors, constants, launch, padded
from fade_runtime.kernels.triton.dense import dense
from fade_runtime.kernels.triton.launch_table import Launch
from fade_runtime.kernels.triton.merge_kernel import Partials, mass_kernel, merge_kernel
from fade_runtime.kernels.triton.rotate import Rotation
from fade_runtime.kernels.triton.split_kernel import FullTensors, Queries, attend_kernel
from fade_runtime.storage import quant
from fade_runtime.storage.packed import PackedTokens

BLOCK = 16  # queries of a program; tensor cores take no fewer
MERGED = 16  # splits that are united at once
SUMMED = 64  # tokens of a program that sums their statistics
WIDEST, WIDEST_ROTATED = 256, 128  # head dim, of keys that are rotated when they are read too


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
    """Same as :func:`fade_runtime.kernels.reference.attend`, in Triton: queries [R, Q, D] over [R, n, D] and others.

    Product quantisation, values of another width than keys, head dims above 256, or above 128 where keys are rotated
    when they are read, and numbers that float16 cannot describe go to the reference, with all parts beside. Many
    queries, that is a prompt that follows an earlier one, go to SDPA over the layer's dequantised tokens where the
    launch table says that this is faster; no copy of them outlives the call.
    """
    if not parts or not all(_fits(part, query.shape[2]) for part in parts):
        return reference.attend(query, key, value, parts, weights, bias, softcap, sinks, into, decay)
    launches = [launch_of(query, part) for part in parts]
    if len(parts) == 1 and weights is None and softcap is None:  # what SDPA can do
        tokens = key.shape[1] + len(parts[0].tokens) / max(len(query), 1)
        if query.shape[1] >= launches[0].dense_from(tokens):
            return dense(query, key, value, parts[0], bias, sinks), None, []
    out, mass, masses = fused(query, key, value, parts, weights, bias, softcap, sinks, launches)
    return out, *((mass, masses) if mass is None else reference.accumulate(mass, masses, into, decay))


def launch_of(query: Tensor, part: Part) -> Launch:
    """How the kernel is started for queries [R, Q, D] and packed tokens, by the launch table."""
    assert part.packed is not None
    packed = part.packed
    name = launch_table.name_of(query.device)
    return launch_table.choose(name, query.shape[2], packed.bits.key, kind_of(part, query.dtype))


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[Part],
    weights: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    launches: Sequence[Launch],
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The fused kernel. Full-precision tokens and the first part are walked in one launch, each further part in one.

    Args:
        query: [R, Q, D]. key, value: [R, n, D]. parts: packed tokens in R rows. weights: [Q] or None.
        bias: [R, Q, n] or None. softcap: or None. sinks: [R, Q] or None.
        launches: how the kernel is started for each part.

    Returns:
        output [R, Q, D]; with weights, the statistics [R, n] and [T] of each part, else None and an empty list.
    """
    rows, n_queries, dim = query.shape
    length, blocks, cores = key.shape[1], triton.cdiv(n_queries, BLOCK), launch_table.processors(query.device)
    query, key, value = query.contiguous(), _rows(key), _rows(value)
    stored = [part.packed for part in parts if part.packed is not None]
    spans = [started.span(len(packed.page_len) * blocks, cores) for packed, started in zip(stored, launches)]
    splits, starts = zip(*(make_splits(packed, rows, span) for packed, span in zip(stored, spans)))
    full_splits = triton.cdiv(length, spans[0] * quant.PAGE)
    first_splits = list(itertools.accumulate((each.shape[1] for each in splits), initial=rows * full_splits))
    floats: Any = dict(dtype=torch.float32, device=query.device)
    tops, totals = torch.empty(2, first_splits[-1], n_queries, **floats)
    outs, scores, packed_scores = torch.empty(first_splits[-1], n_queries, dim, **floats), query, [query] * len(parts)
    if weights is not None:
        scores = torch.empty(rows, length, n_queries, **floats)
        packed_scores = [torch.empty(len(packed), n_queries, **floats) for packed in stored]
    partials, exact = Partials(tops, totals, outs, scores, query), query.dtype == torch.float32
    queries = _queries(query, bias, softcap, keep_scores=weights is not None)
    full = FullTensors(key=key, value=value, **constants(dim=dim, columns=padded(dim), exact=exact))
    for index, (part, packed, started) in enumerate(zip(parts, stored, launches)):
        first = first_splits[index] if index else 0
        launch(
            attend_kernel,
            (first_splits[index + 1] - first, blocks),
            query,
            queries=_of_part(queries, part),
            full=full,
            packed=PackedTensors.of(packed),
            keys=ChannelParts.of(packed, "key", exact),
            values=ChannelParts.of(packed, "value", exact),
            rotation=_rotation(part, query),
            partials=partials._replace(packed_scores=packed_scores[index]),
            splits=splits[index],
            first_split=first,
            n_splits=splits[index].shape[1],
            rows=rows,
            span=spans[index],
            full_splits=0 if index else full_splits,
            n_queries=n_queries,
            length=length,
            key_step=key.stride(0) // dim,
            value_step=value.stride(0) // dim,
            num_warps=started.warps,
            num_stages=started.stages,
        )
    out, top, total = _merge(query, sinks, partials, starts, first_splits, full_splits)
    if weights is None:
        return out, None, []
    weights = weights.float().contiguous()
    mass = _mass(scores, weights, top, total, row_of=None)
    rows_of = [packed.token_row().to(torch.int32) for packed in stored]
    masses = [_mass(each, weights, top, total, row_of) for each, row_of in zip(packed_scores, rows_of)]
    return out, mass, masses


def _queries(query: Tensor, bias: Tensor | None, softcap: float | None, *, keep_scores: bool) -> Queries:
    """The queries [R, Q, D] as the kernel takes them, for packed tokens without a bias; what is absent is not read."""
    fixed = constants(
        has_bias=bias is not None,
        has_packed_bias=False,
        has_since=False,
        has_softcap=softcap is not None,
        block=BLOCK,
        keep_scores=keep_scores,
    )
    return Queries(
        query=query,
        hadamard_query=quant.hadamard(query.float()),
        bias=query if bias is None else bias.float().contiguous(),
        packed_bias=query,
        since=query,
        softcap=float(softcap or 0),
        **fixed,
    )


def _of_part(queries: Queries, part: Part) -> Queries:
    """The same with the bias [T, Q] of a part, and the first slots [R, Q] that are read of it, if it has them."""
    if part.bias is not None:
        queries = queries._replace(packed_bias=part.bias.float().contiguous(), **constants(has_packed_bias=True))
    if part.since is not None:
        queries = queries._replace(since=part.since.contiguous(), **constants(has_since=True))
    return queries


def _merge(
    query: Tensor,
    sinks: Tensor | None,
    partials: Partials,
    starts: Sequence[Tensor],
    first_splits: Sequence[int],
    full_splits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Unite the splits of each row.

    Args:
        query: [R, Q, D], for its shape and dtype. sinks: [R, Q] or None. partials: what all splits left.
        starts: [R + 1] int32 of each part, as of :func:`make_splits`. first_splits: place of each part's splits.
        full_splits: splits of a row's full-precision tokens, which come before.

    Returns:
        output [R, Q, D]; largest score and sum of exponentials, each [R, Q] float32.
    """
    rows, n_queries, dim = query.shape
    split_start = starts[0]
    if len(starts) > 1:
        split_start = torch.stack([start + (first - first_splits[0]) for start, first in zip(starts, first_splits)])
    out = torch.empty_like(query)
    top, total = torch.empty(2, rows, n_queries, dtype=torch.float32, device=query.device)
    launch(
        merge_kernel,
        (rows, n_queries),
        query,
        out=out,
        top_out=top,
        total_out=total,
        sinks=query if sinks is None else sinks.float().contiguous(),  # what is not there is not read
        has_sinks=sinks is not None,
        partials=partials,
        split_start=split_start,
        parts=len(starts),
        first_split=first_splits[0],
        rows=rows,
        full_splits=full_splits,
        n_queries=n_queries,
        dim=dim,
        columns=padded(dim),
        power=dim & -dim,
        at_once=MERGED,
    )
    return out, top, total


def _mass(scores: Tensor, weights: Tensor, top: Tensor, total: Tensor, row_of: Tensor | None) -> Tensor:
    """Attention that tokens received, float32: [R, n] from scores [R, n, Q], or, by the rows [T] of tokens, [T].

    Args:
        scores: [R, n, Q] or [T, Q] float32. weights: [Q] float32. top, total: [R, Q] float32 of the softmax.
        row_of: [T] int32 or None.
    """
    mass = torch.empty(scores.shape[:-1], dtype=torch.float32, device=scores.device)
    launch(
        mass_kernel,
        (triton.cdiv(mass.numel(), SUMMED),),
        scores,
        mass=mass,
        scores=scores,
        weights=weights,
        row_of=top if row_of is None else row_of,  # what is not there is not read
        top=top,
        total=total,
        tokens=mass.numel(),
        per_row=scores.shape[1] if row_of is None else 0,
        n_queries=scores.shape[-1],
        block=SUMMED,
        at_once=16,
    )
    return mass


def _fits(part: Part, dim: int) -> bool:
    """Whether tokens are packed, in float16 alone, values as wide as keys, and a tile of them fits into a program."""
    packed = part.packed
    if packed is None or packed.wide:
        return False
    same = packed.value_codes.shape[1] * packed.bits.key == packed.key_codes.shape[1] * packed.bits.value
    return same and dim <= (WIDEST if part.table is None else WIDEST_ROTATED)


def kind_of(part: Part, dtype: torch.dtype) -> str:
    """What a launch is chosen by, of :data:`fade_runtime.kernels.triton.launch_table.KINDS`."""
    assert part.packed is not None
    if part.table is not None:
        return "rotated"
    if dtype == torch.float32:
        return "float32"
    return "tiered" if len(part.packed.key_codes) and len(part.packed.low_key_codes) else "plain"


def _rows(x: Tensor) -> Tensor:
    """[R, n, D] whose rows are dense, and a whole number of tokens apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % x.shape[2] == 0 else x.contiguous()


def _rotation(part: Part, query: Tensor) -> Rotation:
    """How keys of a part are rotated when they are read by queries [R, Q, D]."""
    dim, table = query.shape[2], part.table
    sizes = dict(tile=padded(dim), power=dim & -dim)
    if table is None or part.positions is None:
        none = constants(on=False, width=2, interleaved=False, **sizes)
        return Rotation(cos=query, sin=query, positions=query, **none)
    cos, sin = table.cos.float().contiguous(), table.sin.float().contiguous()
    fixed = constants(on=True, width=cos.shape[-1], interleaved=table.interleaved, **sizes)
    return Rotation(cos=cos, sin=sin, positions=part.positions.contiguous(), **fixed)


def make_splits(packed: PackedTokens, rows: int, span: int) -> tuple[Tensor, Tensor]:
    """Cut each row's pages into splits of ``span``; computed once for the tokens, without waiting for the device.

    Returns:
        splits: [5, N] int32: row, first page, pages, first token, first token among the low ones. N is large enough
            for any rows; pages is 0 in those that are not needed.
        starts: [rows + 1] int32 first split of each row.
    """
    name = f"splits of {span} in {rows}"
    if name not in packed.derived:
        pages, device = len(packed.page_len), packed.page_len.device
        bounds = torch.searchsorted(packed.page_row, torch.arange(rows + 1, dtype=torch.int32, device=device))
        starts = torch.nn.functional.pad(((bounds.diff() + span - 1) // span).cumsum(0), (1, 0))
        index = torch.arange(pages // span + rows, device=device)
        row = torch.searchsorted(starts[1:], index, right=True).clamp(max=rows - 1)
        first = bounds[row] + (index - starts[row]) * span
        before = [
            torch.nn.functional.pad(each.cumsum(0), (1, 0))[first.clamp(max=pages)]
            for each in (packed.page_len, packed.page_low)
        ]
        splits = torch.stack((row, first, (bounds[row + 1] - first).clamp(0, span), *before))
        packed.derived[name] = splits.to(torch.int32)
        packed.derived[f"starts of {name}"] = starts.to(torch.int32)
    return packed.derived[name], packed.derived[f"starts of {name}"]
