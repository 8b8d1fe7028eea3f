"""What the Triton kernels share: their arguments as named tuples, codes out of bytes, the online softmax.

Channels are worked on in parts, each a tile of its own: part f holds channels ``f * width`` to ``(f + 1) * width``. A
packed byte holds a channel of several parts (see :func:`fade_runtime.storage.quant.pack`), so a part is a shift and a
mask of bytes as they lie, and no tile is ever put together from several. The width of a tile is a power of two; the
columns past the width of the part are zero.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fade_runtime.storage import quant
from fade_runtime.storage.packed import PackedTokens

PAGE, MARK, RIM = tl.constexpr(quant.PAGE), tl.constexpr(quant.MARK), tl.constexpr(quant.RIM)
PARAM_MAX, PARAM_ERROR = tl.constexpr(quant.PARAM_MAX), tl.constexpr(quant.PARAM_ERROR)
COARSE = tl.constexpr(quant.COARSE)
LEAST = tl.constexpr(-3.4028234663852886e38)  # finite where nothing is visible: the difference of two is no NaN
INTERPRETED = bool(triton.knobs.runtime.interpret)
WORDS = not INTERPRETED and torch.version.hip is None
EXACT = tl.constexpr("tf32x3" if WORDS else "ieee")  # products of float32
CHUNK = tl.constexpr(64)  # channels that are rotated at once


@functools.lru_cache(maxsize=1024, typed=True)
def constants(**values: Any) -> dict[str, tl.constexpr]:
    """Values that a kernel is compiled for, by name; kept, since making them takes longer than many a launch."""
    return {name: tl.constexpr(value) for name, value in values.items()}


class PackedTensors(NamedTuple):
    """The tensors of :class:`PackedTokens` that a kernel reads.

    Attributes:
        limits: [2] float32: what a query must not exceed, lest its product with a key scale leaves the range of
            float16, and the power of two that lifts the largest value scale near 1,024.
    """

    page_len: Any
    page_low: Any
    key_codes: Any
    low_key_codes: Any
    value_codes: Any
    low_value_codes: Any
    key_scale: Any
    key_zero: Any
    key_reach: Any
    value_scale: Any
    value_zero: Any
    page_slot: Any
    offset: Any
    limits: Any

    @classmethod
    def of(cls, packed: PackedTokens) -> PackedTensors:
        """Take them from packed tokens, with their shapes; ``limits`` is computed once for the tokens."""
        if "limits" not in packed.derived:
            scales = packed.key_reach[:, 0], packed.value_scale
            key, value = (torch.nn.functional.pad(each.flatten(), (0, 1)).amax().float() for each in scales)
            key, value = key.clamp(min=2**-24), value.clamp(min=2**-24)
            limit, gain = (6e4 / key).clamp(max=6e4), (1024 / value).log2().floor().exp2()
            packed.derived["limits"] = torch.stack((limit, gain))
        tensors = {name: getattr(packed, name).contiguous() for name in cls._fields if name != "limits"}
        return cls(**tensors, limits=packed.derived["limits"])


class ChannelParts(NamedTuple):
    """How the channels of keys, or of values, are cut into parts. Constants of a kernel.

    Attributes:
        dim: channels. parts, width: their number, and channels of each. tile: columns of the tile of a part.
        bits, low_bits: of the codes of both tiers. levels, low_levels: their largest codes.
        high, low: whether there are tokens in each tier.
        groups: channel groups of a value that share a scale; a part lies within one. page: tokens of a page's tile.
        short: dtype that codes are multiplied in: float32 under a float32 model, else float16, which holds any code.
        words: unpack four bytes at once, in PTX.
    """

    dim: Any
    parts: Any
    width: Any
    tile: Any
    bits: Any
    low_bits: Any
    levels: Any
    low_levels: Any
    high: Any
    low: Any
    groups: Any
    page: Any
    short: Any
    words: Any

    @classmethod
    def of(cls, packed: PackedTokens, name: str, exact: bool) -> ChannelParts:
        """ChannelParts of the ``"key"`` or the ``"value"`` codes."""
        codes, low_codes = getattr(packed, f"{name}_codes"), getattr(packed, f"low_{name}_codes")
        bits, low_bits = getattr(packed.bits, name), getattr(packed.bits, f"low_{name}")
        groups = packed.value_scale.shape[1] if name == "value" else 1
        dim = codes.shape[1] * 8 // bits
        parts = math.lcm(groups, 2)
        width = dim // parts
        fixed = constants(
            dim=dim,
            parts=parts,
            width=width,
            tile=padded(width),
            bits=bits,
            low_bits=low_bits,
            levels=quant.LEVELS[bits],
            low_levels=quant.LEVELS[low_bits],
            high=len(codes) > 0,
            low=len(low_codes) > 0,
            groups=groups,
            page=packed.tile,
            short=tl.float32 if exact else tl.float16,
            words=WORDS and not exact,
        )
        return cls(**fixed)


def launch(kernel: Any, grid: tuple[int, ...], beside: torch.Tensor, /, **arguments: Any) -> None:
    """Run a kernel on the device of ``beside``, unless its grid is empty.

    Args:
        kernel: a ``triton.jit`` function. grid: its programs. beside: any tensor of that device.
        arguments: of the kernel by their names, with ``num_warps`` and ``num_stages``.
    """
    if all(grid):
        with torch.cuda.device_of(beside):
            kernel[grid](**arguments)


def padded(width: int) -> int:
    """Columns of a tile of ``width`` channels: a power of two, and no fewer than a product of tiles takes."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def load_rows(rows, real, limit, c):
    """Load rows [n] of pointers to ``dim`` floats as parts [n, tile], within ``limit``; zero where not ``real`` [n].

    ``c``, here and below: :class:`ChannelParts`.
    """
    columns = tl.arange(0, c.tile)
    parts = ()
    for f in tl.static_range(c.parts):
        where = rows[:, None] + f * c.width + columns[None, :]
        tile = tl.load(where, mask=real[:, None] & (columns < c.width)[None, :], other=0.0)
        tile = tile.to(tl.float32)
        if c.short == tl.float16:
            tile = tl.minimum(tl.maximum(tile, -limit), limit)
        parts = parts + (tile.to(c.short),)
    return parts


@triton.jit
def units(most, least, spread):
    """Unit of a page's scales, least of its zeros, their unit, from three float16 numbers or tiles [1].

    See :func:`fade_runtime.storage.quant.page_params`.
    """
    return most.to(tl.float32) / 255.0, least.to(tl.float32), spread.to(tl.float32) / 255.0


@triton.jit
def load_units(reach, page):
    """The same of one page, from ``reach`` [P, 3]."""
    reach += page * 3
    return units(tl.load(reach), tl.load(reach + 1), tl.load(reach + 2))


@triton.jit
def load_params(at, real, unit, least):
    """Scales or zeros at pointers [n], in float32; ``least`` where not ``real``."""
    return tl.load(at, mask=real, other=0).to(tl.float32) * unit + least


@triton.constexpr_function
def unpacking(shift: int, levels: int) -> str:
    """PTX from four bytes to four float16: the bits above ``shift`` become the last ones of 1,024, less 1,024."""
    return f"""{{
        .reg .b32 bits, base;
        shr.b32 bits, $2, {shift};
        and.b32 bits, bits, {levels * 0x01010101:#x};
        prmt.b32 $0, bits, 0x64646464, 0x4140;
        prmt.b32 $1, bits, 0x64646464, 0x4342;
        mov.b32 base, 0x64006400;
        sub.f16x2 $0, $0, base;
        sub.f16x2 $1, $1, base;
    }}"""


@triton.jit
def unpack(tile, shift: tl.constexpr, levels: tl.constexpr, c):
    """Codes above ``shift`` in each byte of a tile [n, tile]."""
    if c.words:
        asm: tl.constexpr = unpacking(shift, levels)
        codes = tl.inline_asm_elementwise(asm, "=r,=r,r", [tile], dtype=tl.float16, is_pure=True, pack=4)
    else:
        codes = ((tile >> shift) & levels).to(c.short)
    return codes


@triton.jit
def load_field(codes, first, steps, real, f: tl.constexpr, bits: tl.constexpr, levels: tl.constexpr, c):
    """Codes of part ``f`` [n, tile] of the tokens ``first + steps`` [n]; zero where not ``real`` [n]."""
    columns = tl.arange(0, c.tile)
    stride: tl.constexpr = c.dim * bits // 8  # bytes of a token; byte i holds channels i, i + stride, ...
    start: tl.constexpr = c.width * f % stride
    field: tl.constexpr = c.width * f // stride
    fields: tl.constexpr = (start + c.width - 1) // stride + 1  # of the bits that the part is in
    column = columns + start
    if fields > 1:
        column = column % stride
    real = real[:, None]
    if c.width < c.tile:
        real = real & (columns < c.width)[None, :]
    row = codes + first.to(tl.int64) * stride
    tile = tl.load(row + steps[:, None] * stride + column[None, :], mask=real, other=0)
    out = unpack(tile, bits * field, levels, c)
    for i in tl.static_range(1, fields):
        out = tl.where((columns >= stride * i - start)[None, :], unpack(tile, bits * (field + i), levels, c), out)
    return out


@triton.jit
def middles(low_codes, is_low, levels: tl.constexpr, low_levels: tl.constexpr):
    """Low codes [page, n] in units of the high tier's scale (see ``quant.middle``); zero where not low."""
    step: tl.constexpr = (levels + 1) // (low_levels + 1)
    return tl.where(is_low[:, None], low_codes * step + (step - 1) * 0.5, 0.0)


@triton.jit
def load_codes(codes, low_codes, high, low, n_high, count, c):
    """Codes of a page, in units of the high tier's scale: parts [page, tile], zero past ``count``.

    Args:
        codes, low_codes: of both tiers. high, low: places of the page's first tokens among those of their tiers.
        n_high: tokens of the page in the high tier, which come first. count: tokens of the page.
    """
    steps = tl.arange(0, c.page)
    is_low = (steps >= n_high) & (steps < count)
    parts = ()
    for f in tl.static_range(c.parts):
        if c.high:
            tile = load_field(codes, high, steps, steps < n_high, f, c.bits, c.levels, c)
        if c.low:
            low_tile = load_field(low_codes, low, steps - n_high, is_low, f, c.low_bits, c.low_levels, c)
            low_tile = middles(low_tile, is_low, c.levels, c.low_levels)
            if c.high:
                tile = tile + low_tile  # one of them is zero
            else:
                tile = low_tile
        parts = parts + (tile,)
    return parts


@triton.jit
def plain_codes(codes, first, steps, there, channel, dim: tl.constexpr, bits: tl.constexpr, levels: tl.constexpr):
    """Codes [t, n] of some channels [n] of the tokens ``first + steps``, in float32; zero where not ``there``."""
    stride: tl.constexpr = dim * bits // 8
    row = codes + first.to(tl.int64) * stride + steps[:, None] * stride
    mask = there[:, None] & (channel < dim)[None, :]
    bytes_ = tl.load(row + (channel % stride)[None, :], mask=mask, other=0).to(tl.int32)
    return ((bytes_ >> (channel // stride * bits)[None, :]) & levels).to(tl.float32)


@triton.jit
def signs(rows, columns, power: tl.constexpr):
    """Entries [n, m] of the Hadamard matrix at ``rows`` [n] and ``columns`` [m], times the root of ``power``."""
    both = (rows[:, None] & columns[None, :]) & (power - 1)
    both = both ^ (both >> 4)  # the parity of the bits they share
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    entry = 1.0 - 2.0 * (both & 1).to(tl.float32)
    return tl.where(rows[:, None] // power == columns[None, :] // power, entry, 0.0)


@triton.jit
def online_softmax(scores, top, total):
    """Fold scores [q, n] into the largest [q] and the sum of exponentials [q] so far.

    Returns:
        exponentials [q, n] relative to the new largest, the factor [q] for whatever was summed before, both sums.
    """
    new = tl.maximum(top, tl.max(scores, axis=1))
    probs = tl.exp(scores - new[:, None])
    factor = tl.exp(top - new)
    return probs, factor, new, total * factor + tl.sum(probs, axis=1)


@triton.jit
def capped(scores, softcap):
    """``softcap * tanh(scores / softcap)`` of scores [q, n]."""
    e = tl.exp(-2.0 * tl.abs(scores) / softcap)
    size = softcap * (1.0 - e) / (1.0 + e)
    return tl.where(scores < 0, -size, size)


@triton.jit
def walsh(x, rows: tl.constexpr, columns: tl.constexpr, power: tl.constexpr):
    """Rotate each row of x [rows, columns] as ``quant.hadamard`` does, in blocks of ``power``."""
    for i in tl.static_range(10):
        if 1 << i < power:
            pairs = tl.reshape(x, (rows, columns >> (i + 1), 2, 1 << i))
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
            x = tl.reshape(pairs, (rows, columns))
    return x * (1.0 / tl.sqrt(power * 1.0))
