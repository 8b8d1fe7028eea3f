"""The CPU kernel as Python calls it: attention in C, checked against the reference."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from fade_runtime.kernels import reference
from fade_runtime.kernels.cpu import layout
from fade_runtime.kernels.cpu.library import build as build
from fade_runtime.kernels.cpu.library import load
from fade_runtime.kernels.reference import Part
from fade_runtime.storage.packed import Bits, PackedTokens, pack_tokens
from predictor.errors import FadeError

RESULTS = ("output", "statistics", "packed statistics", "packed statistics")
PARALLEL = 1 << 22  # multiplications below which a thread costs more than it saves
TEST = 1e-3  # of the self-test: twenty times what sums of 96 products may lose in float32; wrong codes differ by tenths
DESCRIBED = "cpu"  # the name in PackedTokens.derived


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return load()


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
    """Same as :func:`fade_runtime.kernels.reference.attend`, in C: queries [R, Q, D] over [R, n, D] and stored tokens.

    Product quantisation, keys that are to be rotated, and odd head dims go to the reference, with all parts beside.
    """
    described = [each for each in map(_describe, parts) if each is not None]
    dense = all(each.is_contiguous() for each in into)
    if len(described) < len(parts) or len({each.groups for each in described}) != 1 or not dense:
        return reference.attend(query, key, value, parts, weights, bias, softcap, sinks, into, decay)
    rows, queries, dim = query.shape
    full, tokens = key.shape[1], sum(each.tokens for each in described)
    query32, key32, value32 = query.float().contiguous(), _rows(key), _rows(value)
    bias32, weights32, sinks32 = _dense(bias), _dense(weights), _dense(sinks)
    out, mass, masses = torch.empty_like(query32), None, []
    if weights is not None:
        statistics = into or [query32.new_empty(rows, full), *(query32.new_empty(each.tokens) for each in described)]
        mass, masses = statistics[0], list(statistics[1:])
    part_biases = [_dense(part.bias) for part in parts]
    since = [None if part.since is None else part.since.contiguous() for part in parts]
    structs = (layout.Packed * len(parts))(*(each.struct for each in described))
    for struct, part_bias, first, part_mass in zip_longest(structs, part_biases, since, masses):
        struct.bias, struct.since, struct.mass = _address(part_bias), _address(first), _address(part_mass)
    call = layout.Call(
        rows=rows,
        queries=queries,
        dim=dim,
        groups=described[0].groups,
        parts=len(parts),
        full=full,
        key_stride=key32.stride(0),
        value_stride=value32.stride(0),
        threads=torch.get_num_threads() if (rows * full + tokens) * queries * dim >= PARALLEL else 1,
        query=query32.data_ptr(),
        key=key32.data_ptr(),
        value=value32.data_ptr(),
        bias=_address(bias32),
        weights=_address(weights32),
        sinks=_address(sinks32),
        part=ctypes.addressof(structs),
        out=out.data_ptr(),
        mass=_address(mass),
        softcap=softcap or 0.0,
        decay=decay if into else 0.0,
    )
    if _library().attend(ctypes.byref(call)):
        raise MemoryError("the CPU kernel could not allocate its buffers")
    return out if out.dtype == query.dtype else out.to(query.dtype), mass, masses


class _Described(NamedTuple):
    """Packed tokens as C reads them: ``tensors`` are what ``struct`` points to."""

    struct: layout.Packed
    tokens: int
    groups: int
    tensors: list[Tensor]


def _describe(part: Part) -> _Described | None:
    """What C reads of a part, or None if it cannot; found once for each set of tokens and kept with it."""
    packed = part.packed
    if part.table is not None or packed is None:
        return None
    known = packed.derived.get(DESCRIBED)
    if known is not None or not _fits(packed):
        return known
    stored = [getattr(packed, name) for name in PackedTokens.READ]
    tensors = [tensor.contiguous() for tensor in stored]
    addresses = {name: tensor.data_ptr() for name, tensor in zip(PackedTokens.READ, tensors)}
    bits = {f"{name}_bits": count for name, count in packed.bits._asdict().items()}
    struct = layout.Packed(pages=len(packed.page_len), offset_bytes=packed.offset.itemsize, **bits, **addresses)
    described = _Described(struct, len(packed), packed.value_scale.shape[1], tensors)
    if all(map(operator.is_, tensors, stored)):  # else copies would live as long as the tokens
        packed.derived[DESCRIBED] = described
    return described


def _fits(packed: PackedTokens) -> bool:
    """Whether values are as wide as keys, and vectors of 8 channels fit the head dim and its groups."""
    dim, groups = packed.key_scale.shape[1], packed.value_scale.shape[1]
    same = packed.value_codes.shape[1] * 8 == dim * packed.bits.value
    return same and dim % 16 == 0 and dim // groups % 8 == 0


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _rows(x: Tensor) -> Tensor:
    """[R, n, D] float32 whose rows are dense."""
    x = x.float()
    return x if x.is_contiguous() or x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def self_test() -> None:
    """Compare the compiled kernel with the reference on ragged rows.

    Raises:
        FadeError: it cannot be built, or its results differ.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([0] * 70 + [2] * 5)
    body_key, body_value = torch.randn(2, 75, 96, generator=generator)
    low = torch.rand(75, generator=generator) < 0.5
    key, value = torch.randn(2, 3, 70, 96, generator=generator)
    query, weights = torch.randn(3, 5, 96, generator=generator), torch.rand(5, generator=generator)
    bias, packed_bias = torch.randn(3, 5, 70, generator=generator), torch.randn(75, 5, generator=generator)
    sinks = 2 * torch.randn(3, 5, generator=generator)
    since = torch.randint(75, (3, 5), generator=generator, dtype=torch.int32)
    for bits, cap, sink in ((Bits(), None, None), (Bits(8, 4, 4, 2), 2.0, None), (Bits(4, 2, 2, 2), 2.0, sinks)):
        packed = pack_tokens(body_key, body_value, rows, torch.arange(75), None, low=low, bits=bits)
        parts = [Part(packed, bias=packed_bias), Part(packed.keep(low), since=since)]
        sizes = (3, 70), *((len(part.tokens),) for part in parts)
        older = [torch.rand(size, generator=generator) for size in sizes]
        ours, theirs = (
            kernel(query, key, value, parts, weights, bias, cap, sink, [each.clone() for each in older], decay=0.5)
            for kernel in (attend, reference.attend)
        )
        for name, mine, other in zip(RESULTS, (*ours[:2], *ours[2]), (*theirs[:2], *theirs[2])):
            if mine is None or other is None or not torch.allclose(mine, other, atol=TEST, rtol=TEST):
                raise FadeError(f"the compiled CPU kernel disagrees with the reference in its {name}")
