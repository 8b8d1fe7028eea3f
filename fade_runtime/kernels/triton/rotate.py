"""Triton functions for keys that are stored un-rotated and turned to their positions when they are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fade_runtime.kernels.triton.codes import (
    CHUNK,
    EXACT,
    load_params,
    load_units,
    middles,
    plain_codes,
    signs,
)


class Turn(NamedTuple):
    """How keys that are stored un-rotated are rotated when they are read (:class:`predictor.rope.Table`).

    Attributes:
        cos, sin: [L, width] float32. positions: [T] int64.
        on: whether they are. width: channels that turn. interleaved: as in the table.
        tile: columns of a key's tile. power: block of the Hadamard rotation.
    """

    cos: Any
    sin: Any
    positions: Any
    on: Any
    width: Any
    interleaved: Any
    tile: Any
    power: Any


@triton.jit
def page_keys(stored, page, high, low, many, count, keys, turn):
    """Keys [page, tile] of a page, channel by channel, rotated back by Hadamard; zero past ``count``."""
    steps = tl.arange(0, keys.page)
    is_low = (steps >= many) & (steps < count)
    out = tl.zeros((keys.page, turn.tile), tl.float32)
    unit, least, zero_unit = load_units(stored.key_reach, page)
    for at in tl.range(0, keys.dim, CHUNK, num_stages=1):
        channel = at + tl.arange(0, CHUNK)
        some = tl.zeros((keys.page, CHUNK), tl.float32)
        if keys.high:
            some += plain_codes(stored.key_codes, high, steps, steps < many, channel, keys.dim, keys.bits, keys.levels)
        if keys.low:
            few = plain_codes(
                stored.low_key_codes, low, steps - many, is_low, channel, keys.dim, keys.low_bits, keys.low_levels
            )
            some += middles(few, is_low, keys.levels, keys.low_levels)
        beside, real = page * keys.dim + channel, channel < keys.dim
        scale = load_params(stored.key_scale + beside, real, unit, 0.0)
        zero = load_params(stored.key_zero + beside, real, zero_unit, least)
        some = some * scale[None, :] + zero[None, :]
        entries = signs(channel, tl.arange(0, turn.tile), turn.power).to(keys.short)
        out = tl.dot(some.to(keys.short), entries, out, input_precision=EXACT)
    return out / tl.sqrt(turn.power * 1.0)


@triton.jit
def turned(key, t, there, turn):
    """Keys [n, tile] of the tokens ``t`` [n] at their positions: see :func:`predictor.rope.rotate`."""
    channel = tl.arange(0, turn.tile)
    half: tl.constexpr = turn.width // 2
    if turn.interleaved:
        partner, second = channel ^ 1, (channel & 1) == 1
    else:
        partner = tl.where(channel < half, channel + half, channel - half)
        second = channel >= half
    turns = channel < turn.width
    partner = tl.where(turns, partner, channel)
    other = tl.gather(key, tl.broadcast_to(partner[None, :], (key.shape[0], turn.tile)), axis=1)
    at = tl.load(turn.positions + t, mask=there, other=0)[:, None] * turn.width + channel[None, :]
    mask = there[:, None] & turns[None, :]
    cos, sin = tl.load(turn.cos + at, mask=mask, other=1.0), tl.load(turn.sin + at, mask=mask, other=0.0)
    return key * cos + tl.where(second[None, :], other, -other) * sin


@triton.jit
def turned_scores(query, stored, page, high, low, many, count, t, there, keys, turn):
    """Dot products [q, page] of queries [q, tile], not rotated by Hadamard, with a page's keys at their positions."""
    key = turned(page_keys(stored, page, high, low, many, count, keys, turn), t, there, turn)
    return tl.dot(query, tl.trans(key.to(keys.short)), input_precision=EXACT)
