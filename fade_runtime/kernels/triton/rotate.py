"""Triton functions for keys that are stored un-rotated and rotated to their positions when they are read."""

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


class Rotation(NamedTuple):
    """How keys that are stored un-rotated are rotated when they are read (:class:`predictor.rope.Table`).

    Attributes:
        cos, sin: [L, width] float32. positions: [T] int64.
        on: whether they are. width: channels that are rotated. interleaved: as in the table.
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
def page_keys(packed, page, high, low, n_high, count, keys, rotation):
    """Keys [page, tile] of a page, channel by channel, rotated back by Hadamard; zero past ``count``."""
    steps = tl.arange(0, keys.page)
    is_low = (steps >= n_high) & (steps < count)
    out = tl.zeros((keys.page, rotation.tile), tl.float32)
    unit, least, zero_unit = load_units(packed.key_reach, page)
    for at in tl.range(0, keys.dim, CHUNK, num_stages=1):
        channel = at + tl.arange(0, CHUNK)
        some = tl.zeros((keys.page, CHUNK), tl.float32)
        if keys.high:
            some += plain_codes(
                packed.key_codes, high, steps, steps < n_high, channel, keys.dim, keys.bits, keys.levels
            )
        if keys.low:
            low_codes = plain_codes(
                packed.low_key_codes, low, steps - n_high, is_low, channel, keys.dim, keys.low_bits, keys.low_levels
            )
            some += middles(low_codes, is_low, keys.levels, keys.low_levels)
        beside, real = page * keys.dim + channel, channel < keys.dim
        scale = load_params(packed.key_scale + beside, real, unit, 0.0)
        zero = load_params(packed.key_zero + beside, real, zero_unit, least)
        some = some * scale[None, :] + zero[None, :]
        entries = signs(channel, tl.arange(0, rotation.tile), rotation.power).to(keys.short)
        out = tl.dot(some.to(keys.short), entries, out, input_precision=EXACT)
    return out / tl.sqrt(rotation.power * 1.0)


@triton.jit
def rotated_keys(key, t, there, rotation):
    """Keys [n, tile] of the tokens ``t`` [n] at their positions: see :func:`predictor.rope.rotate`."""
    channel = tl.arange(0, rotation.tile)
    half: tl.constexpr = rotation.width // 2
    if rotation.interleaved:
        partner, second = channel ^ 1, (channel & 1) == 1
    else:
        partner = tl.where(channel < half, channel + half, channel - half)
        second = channel >= half
    rotates = channel < rotation.width
    partner = tl.where(rotates, partner, channel)
    other = tl.gather(key, tl.broadcast_to(partner[None, :], (key.shape[0], rotation.tile)), axis=1)
    at = tl.load(rotation.positions + t, mask=there, other=0)[:, None] * rotation.width + channel[None, :]
    mask = there[:, None] & rotates[None, :]
    cos, sin = tl.load(rotation.cos + at, mask=mask, other=1.0), tl.load(rotation.sin + at, mask=mask, other=0.0)
    return key * cos + tl.where(second[None, :], other, -other) * sin


@triton.jit
def rotated_scores(query, packed, page, high, low, n_high, count, t, there, keys, rotation):
    """Dot products [q, page] of queries [q, tile], not rotated by Hadamard, with a page's keys at their positions."""
    key = rotated_keys(page_keys(packed, page, high, low, n_high, count, keys, rotation), t, there, rotation)
    return tl.dot(query, tl.trans(key.to(keys.short)), input_precision=EXACT)
