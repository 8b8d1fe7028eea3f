"""The structures that C reads, declared as abi.h declares them, and the comparison of both."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from fade_runtime.storage import quant
from fade_runtime.storage.packed import PackedTokens
from predictor.errors import FadeError


def _fields(kind: type, names: Iterable[str]) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class Packed(ctypes.Structure):
    """Packed tokens: their number of pages, their bits and where their tensors are; see abi.h for the shapes."""

    _fields_ = (
        *_fields(ctypes.c_int64, ("pages", "key_bits", "value_bits", "low_key_bits", "low_value_bits", "offset_bytes")),
        *_fields(ctypes.c_void_p, (*PackedTokens.READ, "bias", "since", "mass")),
    )


class Call(ctypes.Structure):
    """One call of ``attend``; see abi.h for the shapes."""

    _fields_ = (
        *_fields(ctypes.c_int64, ("rows", "queries", "dim", "groups", "parts", "full")),
        *_fields(ctypes.c_int64, ("key_stride", "value_stride", "threads")),
        *_fields(ctypes.c_void_p, ("query", "key", "value", "bias", "weights", "sinks", "part", "out", "mass")),
        *_fields(ctypes.c_float, ("softcap", "decay")),
    )


def check(library: ctypes.CDLL) -> None:
    """Compare what a library was compiled with: the tokens of a page, the structures' sizes, names and kinds of fields.

    Raises:
        FadeError: Python and C differ.
    """
    page, packed_size, call_size = (ctypes.c_int64 * 3).in_dll(library, "attend_sizes")
    facts: dict[str, tuple[int | list[str], int | list[str]]] = {
        "the most tokens of a page": (page, quant.PAGE),
        "the fields of packed tokens": (_described(library, "attend_packed_fields"), _declared(Packed)),
        "the fields of a call": (_described(library, "attend_call_fields"), _declared(Call)),
        "the bytes of packed tokens": (packed_size, ctypes.sizeof(Packed)),
        "the bytes of a call": (call_size, ctypes.sizeof(Call)),
    }
    for what, (theirs, ours) in facts.items():
        if theirs != ours:
            raise FadeError(f"C and Python differ in {what}: {theirs} and {ours}; install one release of this package")


def _declared(structure: type[ctypes.Structure]) -> list[str]:
    """Kind and name of each field, as :func:`_described` finds them in C."""
    kinds = {ctypes.c_int64: "int64_t", ctypes.c_float: "float", ctypes.c_void_p: "pointer"}
    return [f"{kinds[kind]} {name}" for name, kind, *_ in structure._fields_]


def _described(library: ctypes.CDLL, symbol: str) -> list[str]:
    """The same of the fields that abi.h lists: "int64_t pages;const int32_t * page_len;"."""
    text = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, symbol))).decode()
    fields = [field.rpartition(" ") for field in text.rstrip(";").split(";")]
    return [f"{'pointer' if kind.endswith('*') else kind} {name}" for kind, _, name in fields]
