"""The CPU kernel: a small C file, compiled with the machine's own compiler and checked against the reference."""

from __future__ import annotations

import ctypes
import functools
import operator
import weakref
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from fade_runtime.kernels import reference
from fade_runtime.kernels.cpu.library import build as build
from fade_runtime.kernels.cpu.library import load
from fade_runtime.kernels.reference import Part
from fade_runtime.storage.packed import Bits, PackedTokens, pack_tokens
from predictor.errors import FadeError

RESULTS = ("output", "statistics", "packed statistics", "packed statistics")
PARALLEL = 1 << 22  # multiplications below which a thread costs more than it saves
TEST = 1e-3  # of the self-test: twenty times what sums of 96 products may lose in float32; wrong codes differ by tenths

_TABLES = (
    "page_len", "page_low", "page_row", "key_codes", "value_codes", "low_key_codes", "low_value_codes",
    "key_scale", "key_zero", "key_reach", "value_scale", "value_zero",
)  # fmt: skip


def _sizes(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


class _Packed(ctypes.Structure):
    _fields_ = (
        *_sizes("pages", "key_bits", "value_bits", "low_key_bits", "low_value_bits"),
        *_pointers(*_TABLES, "bias", "mass"),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *_sizes("rows", "queries", "dim", "groups", "parts", "full", "key_stride", "value_stride", "threads"),
        *_pointers("query", "key", "value", "bias", "weights", "part", "out", "mass"),
        ("softcap", ctypes.c_float),
        ("decay", ctypes.c_float),
    )


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
    into: Sequence[Tensor] = (),
    decay: float = 1.0,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Same as :func:`fade_runtime.kernels.reference.attend`, in C.

    Product quantisation, keys that are to be rotated, and odd head dims go to the reference, with all parts beside.
    """
    stored = [each for each in map(_stored, parts) if each is not None]
    dense = all(each.is_contiguous() for each in into)
    if len(stored) < len(parts) or len({each.groups for each in stored}) != 1 or not dense:
        return reference.attend(query, key, value, parts, weights, bias, softcap, into, decay)
    rows, queries, dim = query.shape
    full, tokens = key.shape[1], 0
    asked, keys, values = query.float().contiguous(), _rows(key), _rows(value)
    given = asked, keys, values, _dense(bias), _dense(weights)
    out, mass, masses = torch.empty_like(asked), None, []
    if weights is not None:
        made = into or [asked.new_empty(rows, full), *(asked.new_empty(each.tokens) for each in stored)]
        mass, masses = made[0], list(made[1:])
    biases = [_dense(part.bias) for part in parts]
    described = (_Packed * len(parts))(*(each.struct for each in stored))
    for one, each, own, received in zip_longest(described, stored, biases, masses):
        one.bias, one.mass, tokens = _address(own), _address(received), tokens + each.tokens
    threads = torch.get_num_threads() if (rows * full + tokens) * queries * dim >= PARALLEL else 1
    call = _Call(
        rows, queries, dim, stored[0].groups, len(parts), full, keys.stride(0), values.stride(0), threads,
        *map(_address, given), ctypes.addressof(described), *map(_address, (out, mass)), softcap or 0.0,
        decay if into else 0.0,
    )  # fmt: skip
    if _library().attend(ctypes.byref(call)):
        raise MemoryError("the CPU kernel could not allocate its buffers")
    return out if out.dtype == query.dtype else out.to(query.dtype), mass, masses


class _Stored(NamedTuple):
    """Packed tokens as C reads them; ``tables`` are what ``struct`` points to, ``owner`` the tokens."""

    struct: _Packed
    tokens: int
    groups: int
    tables: list[Tensor]
    owner: weakref.ref[PackedTokens]


_KNOWN: dict[int, _Stored] = {}  # by id of the tokens, which never change; an entry goes with its owner


def _stored(part: Part) -> _Stored | None:
    """What C reads of a part, or None if it cannot; found once for each set of tokens."""
    packed = part.packed
    if part.table is not None or packed is None:
        return None
    known, at = _KNOWN.get(id(packed)), id(packed)
    if known is not None or not _fits(packed):
        return known
    held = [getattr(packed, name) for name in _TABLES]
    tables = [table.contiguous() for table in held]
    struct = _Packed(len(packed.page_len), *packed.bits, *map(_address, tables))
    owner = weakref.ref(packed, lambda _: _KNOWN.pop(at, None))
    stored = _Stored(struct, len(packed), packed.value_scale.shape[1], tables, owner)
    if all(map(operator.is_, tables, held)):  # else a copy would live as long as the tokens
        _KNOWN[at] = stored
    return stored


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
    for bits, cap in ((Bits(), None), (Bits(8, 4, 4, 2), 2.0), (Bits(4, 2, 2, 2), 2.0)):
        packed = pack_tokens(body_key, body_value, rows, torch.arange(75), None, low=low, bits=bits)
        parts = [Part(packed, bias=packed_bias), Part(packed.keep(low))]
        given = query, key, value, parts, weights, bias, cap
        sizes = (3, 70), *((len(part.tokens),) for part in parts)
        older = [torch.rand(size, generator=generator) for size in sizes]
        ours, theirs = (kernel(*given, [each.clone() for each in older], 0.5) for kernel in (attend, reference.attend))
        for name, mine, other in zip(RESULTS, (*ours[:2], *ours[2]), (*theirs[:2], *theirs[2])):
            if mine is None or other is None or not torch.allclose(mine, other, atol=TEST, rtol=TEST):
                raise FadeError(f"the compiled CPU kernel disagrees with the reference in its {name}")
