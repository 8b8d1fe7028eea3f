"""Triton kernels that rotate, quantise and pack tokens, and that unpack, dequantise and rotate them back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fade_runtime.kernels.triton.codes import (
    CHUNK,
    COARSE,
    EXACT,
    MARK,
    PAGE,
    PARAM_ERROR,
    PARAM_MAX,
    RIM,
    launch,
    load_params,
    load_units,
    middles,
    padded,
    plain_codes,
    signs,
    units,
)
from fade_runtime.storage import quant
from fade_runtime.storage.packed import Bits, PackedTokens, Quantised


@triton.jit
def load_tokens(x, first, there, dim: tl.constexpr, tile: tl.constexpr, power: tl.constexpr):
    """Hadamard-rotated rows [64, tile] of x [T, dim], in float32."""
    row = x + first.to(tl.int64) * dim + tl.arange(0, PAGE)[:, None] * dim
    rotated = tl.zeros((PAGE, tile), tl.float32)
    for at in tl.range(0, dim, CHUNK, num_stages=1):
        channel = at + tl.arange(0, CHUNK)
        some = tl.load(row + channel[None, :], mask=there[:, None] & (channel < dim)[None, :], other=0.0)
        entries = signs(channel, tl.arange(0, tile), power).to(some.dtype)
        rotated = tl.dot(some, entries, rotated, input_precision=EXACT)
    return rotated / tl.sqrt(power * 1.0)


@triton.jit
def rimmed(low, high, levels: tl.constexpr):
    """What levels are to span, of low and high [n]: see :func:`fade_runtime.storage.quant._rimmed`."""
    if levels == 255:
        rim = (high - low) / RIM
        low, high = low - rim, high + rim
    return low, high


@triton.jit
def beyond(least, most, span, levels: tl.constexpr):
    """[n] bool: which groups float16 cannot describe: see :func:`fade_runtime.storage.quant._beyond`."""
    size, error = tl.maximum(tl.abs(least), tl.abs(most)), levels * PARAM_ERROR
    coarse = (span < 2 * levels * error) & (size < COARSE * error) & (size > 0)
    return (size > PARAM_MAX / 2) | coarse


@triton.jit
def rounded(x, wide, up: tl.constexpr):
    """The nearest float16 of x [n]; where ``wide``, the next bfloat16: see ``quant._rounded``. In float32."""
    bits = x.to(tl.int32, bitcast=True)
    if up:
        away = x > 0
    else:
        away = x < 0
    coarse = ((bits + away.to(tl.int32) * 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(wide, coarse, x.to(tl.float16).to(tl.float32))


@triton.jit
def stored(x, wide, marked: tl.constexpr):
    """Bits of x [n] that :func:`rounded` returned, as float16: see :func:`fade_runtime.storage.quant._stored`."""
    coarse = (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    plain = x.to(tl.float16).to(tl.int16, bitcast=True)
    if marked:
        coarse, plain = tl.maximum(coarse, 1) | MARK, plain & ~MARK
    return tl.where(wide, coarse, plain).to(tl.float16, bitcast=True)


@triton.jit
def affine(low, high, levels: tl.constexpr):
    """Scale and zero of groups that span ``low`` to ``high`` [n], and which are wide [n]: see ``quant.affine``."""
    low, high = rimmed(low, high, levels)
    wide = beyond(low, high, high - low, levels)
    zero = rounded(low, wide, False)
    scale = rounded(tl.div_rn(tl.maximum(high - zero, 0.0), levels * 1.0), wide, True)
    return scale, zero, wide


@triton.jit
def in_bytes(x, whole):
    """Parts of 255 that x [n] is of the whole [1]; 0 of nothing."""
    return tl.div_rn(x * 255.0, tl.where(whole > 0, whole, float("inf")))


@triton.jit
def page_affine(low, high, real, levels: tl.constexpr):
    """Bytes of scale and zero of ``real`` channels [tile], reach, and whether it is wide.

    See :func:`fade_runtime.storage.quant.page_affine`.
    """
    low, high = rimmed(low, high, levels)  # lines become [1], not numbers, which triton 3.6 cannot compile for sm_100
    least = tl.min(tl.where(real, low, float("inf"))[None, :], axis=1)
    top = tl.max(tl.where(real, low, float("-inf"))[None, :], axis=1)
    largest = tl.max(tl.where(real, high, float("-inf"))[None, :], axis=1)
    wide = beyond(least, largest, tl.max(tl.where(real, high - low, 0.0)[None, :], axis=1), levels)
    least = rounded(least, wide, False)
    spread = rounded(tl.maximum(top - least, 0.0), wide, True)
    zero = tl.floor(in_bytes(low - least, spread))
    zero = tl.minimum(tl.maximum(zero, 0.0), 255.0)
    start = least + zero * tl.div_rn(spread, 255.0)
    step = tl.div_rn(tl.maximum(high - start, 0.0), levels * 1.0)
    most = rounded(tl.max(tl.where(real, step, 0.0)[None, :], axis=1), wide, True)
    scale = tl.minimum(tl.maximum(tl.ceil(in_bytes(step, most)), 0.0), 255.0)
    return scale, zero, most, least, spread, wide


@triton.jit
def store_codes(to, x, scale, zero, first, there, dim: tl.constexpr, bits: tl.constexpr, levels: tl.constexpr):
    """Quantise x [64, tile] under ``scale`` and ``zero`` of its shape, and store packed rows."""
    steps = tl.div_rn(x - zero, tl.where(scale > 0, scale, 1.0))
    steps = tl.minimum(tl.maximum(steps, 0.0), levels * 1.0)
    codes = ((steps + 8388608.0) - 8388608.0).to(tl.int32)  # the nearest, of two the even one
    stride: tl.constexpr = dim * bits // 8
    column = tl.arange(0, x.shape[1] * bits // 8)
    if stride < dim and dim == x.shape[1]:  # byte i holds channels i, i + stride, ...: one line of each field
        fields = tl.reshape(codes, (PAGE, 8 // bits, stride))
        shift = (tl.arange(0, 8 // bits) * bits)[None, :, None]
        codes = tl.sum(fields << shift, axis=1)
    elif stride < dim:
        packed = tl.zeros((PAGE, x.shape[1] * bits // 8), tl.int32)
        for field in tl.static_range(0, 8, bits):
            channel = tl.minimum(column + stride * field // bits, x.shape[1] - 1)
            index = tl.broadcast_to(channel[None, :], (PAGE, x.shape[1] * bits // 8))
            packed = packed | (tl.gather(codes, index, axis=1) << field)
        codes = packed
    row = to + first.to(tl.int64) * stride + tl.arange(0, PAGE)[:, None] * stride
    tl.store(row + column[None, :], codes.to(tl.uint8), mask=there[:, None] & (column < stride)[None, :])


@triton.jit
def pack_keys_kernel(
    key,
    codes,
    scales,
    zeros,
    reach,
    page_first,
    dim: tl.constexpr,
    tile: tl.constexpr,
    power: tl.constexpr,
    bits: tl.constexpr,
    levels: tl.constexpr,
):
    """Pack the keys of a page, which share a scale per channel. Grid: pages.

    Args:
        key: [T, D] to be read. codes, scales, zeros, reach: key codes, scale, zero and reach of
            :class:`fade_runtime.storage.packed.PackedTokens`, to be written. page_first: [P + 1] first token of a page.
        dim, tile, power: D, columns of its tile, block of the Hadamard rotation. bits, levels: of the codes.
    """
    page = tl.program_id(0)
    first = tl.load(page_first + page)
    there = tl.arange(0, PAGE) < tl.load(page_first + page + 1) - first
    x = load_tokens(key, first, there, dim, tile, power)
    low = tl.min(tl.where(there[:, None], x, float("inf")), axis=0)
    high = tl.max(tl.where(there[:, None], x, float("-inf")), axis=0)
    channel = tl.arange(0, tile)
    scale, zero, most, least, spread, wide = page_affine(low, high, channel < dim, levels)
    where = page.to(tl.int64) * dim + channel
    tl.store(scales + where, scale.to(tl.uint8), mask=channel < dim)
    tl.store(zeros + where, zero.to(tl.uint8), mask=channel < dim)
    reach += page * 3 + tl.arange(0, 1)
    tl.store(reach, stored(most, wide, True))
    tl.store(reach + 1, stored(least, wide, False))
    tl.store(reach + 2, stored(spread, wide, False))
    unit, least, zero_unit = units(most, least, spread)
    scale, zero = scale * unit, zero * zero_unit + least
    scale, zero = tl.broadcast_to(scale[None, :], (PAGE, tile)), tl.broadcast_to(zero[None, :], (PAGE, tile))
    store_codes(codes, x, scale, zero, first, there, dim, bits, levels)


@triton.jit(do_not_specialize=["tokens"])
def pack_values_kernel(
    value,
    codes,
    scales,
    zeros,
    tokens,
    groups: tl.constexpr,
    dim: tl.constexpr,
    tile: tl.constexpr,
    power: tl.constexpr,
    bits: tl.constexpr,
    levels: tl.constexpr,
):
    """Pack 64 values, each with a scale per group of channels. Grid: tokens, 64 at a time.

    Args:
        value: [T, D] to be read. codes, scales, zeros: value codes, scale and zero of
            :class:`fade_runtime.storage.packed.PackedTokens`, to be written. tokens: T. groups: of channels.
        dim, tile, power: D, columns of its tile, block of the Hadamard rotation. bits, levels: of the codes.
    """
    first = tl.program_id(0) * PAGE
    steps = tl.arange(0, PAGE)
    there = steps < tokens - first
    x = load_tokens(value, first, there, dim, tile, power)
    group = (tl.arange(0, tile) // (dim // groups))[None, :]
    all_scales, all_zeros = tl.zeros((PAGE, tile), tl.float32), tl.zeros((PAGE, tile), tl.float32)
    for g in tl.static_range(groups):
        low = tl.min(tl.where(group == g, x, float("inf")), axis=1)
        high = tl.max(tl.where(group == g, x, float("-inf")), axis=1)
        scale, zero, wide = affine(low, high, levels)
        where = (first + steps).to(tl.int64) * groups + g
        tl.store(scales + where, stored(scale, wide, True), mask=there)
        tl.store(zeros + where, stored(zero, wide, False), mask=there)
        all_scales = tl.where(group == g, scale[:, None], all_scales)
        all_zeros = tl.where(group == g, zero[:, None], all_zeros)
    store_codes(codes, x, all_scales, all_zeros, first, there, dim, bits, levels)


@triton.jit
def unpack_kernel(
    out,
    codes,
    low_codes,
    scales,
    zeros,
    reach,
    page_first,
    low_first,
    by_page: tl.constexpr,
    groups: tl.constexpr,
    dim: tl.constexpr,
    tile: tl.constexpr,
    power: tl.constexpr,
    bits: tl.constexpr,
    levels: tl.constexpr,
    low_bits: tl.constexpr,
    low_levels: tl.constexpr,
    has_low: tl.constexpr,
):
    """Write the keys (scales ``by_page``) or the values of a page's tokens into [T, dim], rotated back. Grid: pages."""
    page = tl.program_id(0)
    first, low = tl.load(page_first + page), tl.load(low_first + page)
    count = tl.load(page_first + page + 1) - first
    n_high = count - (tl.load(low_first + page + 1) - low)
    steps, column = tl.arange(0, PAGE), tl.arange(0, tile)
    x = tl.zeros((PAGE, tile), tl.float32)
    for at in tl.range(0, dim, CHUNK, num_stages=1):
        channel = at + tl.arange(0, CHUNK)
        some = plain_codes(codes, first - low, steps, steps < n_high, channel, dim, bits, levels)
        if has_low:
            is_low = (steps >= n_high) & (steps < count)
            low_tile = plain_codes(low_codes, low, steps - n_high, is_low, channel, dim, low_bits, low_levels)
            some += middles(low_tile, is_low, levels, low_levels)
        if by_page:
            unit, least, zero_unit = load_units(reach, page)
            where, real = page * dim + channel, channel < dim
            scale = load_params(scales + where, real, unit, 0.0)[None, :]
            zero = load_params(zeros + where, real, zero_unit, least)[None, :]
        else:
            where = (first + steps).to(tl.int64)[:, None] * groups + (channel // (dim // groups))[None, :]
            mask = (steps < count)[:, None] & (channel < dim)[None, :]
            scale = tl.load(scales + where, mask=mask, other=0.0).to(tl.float32)
            zero = tl.load(zeros + where, mask=mask, other=0.0).to(tl.float32)
        some = some * scale + zero
        entries = signs(channel, column, power)
        if out.dtype.element_ty != tl.float32:
            some, entries = some.to(tl.float16), entries.to(tl.float16)
        x = tl.dot(some, entries, x, input_precision=EXACT)
    x = x / tl.sqrt(power * 1.0)
    row = out + first.to(tl.int64) * dim + steps[:, None] * dim
    mask = (steps < count)[:, None] & (column < dim)[None, :]
    tl.store(row + column[None, :], x.to(out.dtype.element_ty), mask=mask)


def quantise(key: Tensor, value: Tensor, page_len: Tensor, bits: Bits) -> Quantised:
    """Same as :func:`fade_runtime.storage.packed.quantise`, in Triton: rotation, quantisation and packing in one pass.

    Args:
        key, value: [T, D], of any float dtype. page_len: [P] int32 tokens of each page. bits: those of the high tier.

    Returns:
        codes of the high tier with their scales: of keys by page, of values by token.
    """
    tokens, dim, value_dim, pages = len(key), key.shape[1], value.shape[1], len(page_len)
    codes, value_codes = (
        torch.empty(tokens, width * count // 8, dtype=torch.uint8, device=key.device)
        for width, count in ((dim, bits.key), (value_dim, bits.value))
    )
    scale, zero = torch.empty(2, pages, dim, dtype=torch.uint8, device=key.device)
    reach = torch.empty(pages, 3, dtype=quant.PARAMS, device=key.device)
    groups = quant.value_groups(value_dim)
    value_scale, value_zero = torch.empty(2, tokens, groups, dtype=quant.PARAMS, device=key.device)
    launch(
        pack_keys_kernel,
        (pages,),
        key,
        key=key.contiguous(),
        codes=codes,
        scales=scale,
        zeros=zero,
        reach=reach,
        page_first=_starts(page_len),
        **_sizes(dim, bits.key),
    )
    launch(
        pack_values_kernel,
        (triton.cdiv(tokens, quant.PAGE),),
        value,
        value=value.contiguous(),
        codes=value_codes,
        scales=value_scale,
        zeros=value_zero,
        tokens=tokens,
        groups=groups,
        **_sizes(value_dim, bits.value),
    )
    return Quantised(codes, scale, zero, reach, value_codes, value_scale, value_zero)


def dequantise(packed: PackedTokens, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Same as :func:`fade_runtime.kernels.reference.dequantise`, in Triton: keys and values [T, D]; none are wide."""
    page_first, low_first, bits = _starts(packed.page_len), _starts(packed.page_low), packed.bits
    outs = []
    for name, high, low, groups in (
        ("key", bits.key, bits.low_key, 1),
        ("value", bits.value, bits.low_value, packed.value_scale.shape[1]),
    ):
        codes, low_codes = getattr(packed, f"{name}_codes"), getattr(packed, f"low_{name}_codes")
        dim = codes.shape[1] * 8 // high
        out = torch.empty(len(packed), dim, dtype=dtype, device=codes.device)
        launch(
            unpack_kernel,
            (len(packed.page_len),),
            out,
            out=out,
            codes=codes,
            low_codes=low_codes,
            scales=getattr(packed, f"{name}_scale"),
            zeros=getattr(packed, f"{name}_zero"),
            reach=packed.key_reach,
            page_first=page_first,
            low_first=low_first,
            by_page=name == "key",
            groups=groups,
            low_bits=low,
            low_levels=quant.LEVELS[low],
            has_low=len(low_codes) > 0,
            **_sizes(dim, high),
        )
        outs.append(out)
    return outs[0], outs[1]


def _starts(lengths: Tensor) -> Tensor:
    """[P + 1] int32 sums of what comes before."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _sizes(dim: int, bits: int) -> dict[str, int]:
    """Constants of a kernel by name: columns of a tile, block of the rotation, levels; and its warps."""
    warps = 4 if dim <= 64 else 8
    return dict(dim=dim, tile=padded(dim), power=dim & -dim, bits=bits, levels=quant.LEVELS[bits], num_warps=warps)
