"""The storage format in plain torch: rotation, groups, codes. Kernels must agree with this file.

A body token is stored after a Hadamard rotation over the head dim, asymmetrically in 2, 4 or 8 bits: keys share a
scale per channel over a page of up to 64 kept tokens, values share a scale per token over groups of channels. The
scales and zeros of a page's channels are stored in 8 bits themselves.

Parameters (scale and zero of a value's group; largest scale, least zero and spread of zeros of a page) are float16.
Those of a group or page that float16 cannot describe are bfloat16, which reaches as far as float32: the sign bit of the
scale, which has no sign, says so. Numbers up to :data:`LARGEST` can be stored.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

PAGE, PAGE_TOKENS = 64, 32  # kept tokens that share a key scale: at most, and by default
GROUP = 64  # channels of a value that share a scale, at most
LEVELS = {bits: (1 << bits) - 1 for bits in (2, 4, 8)}
PARAMS = torch.float16  # scales and zeros of values, and what those of a page's channels are relative to
LARGEST = 2.0**110  # of a key or value: rotated and multiplied by levels it stays in the range of float32
MARK = -0x8000  # the sign bit of 16: of a scale, says that its bits are those of bfloat16
PARAM_MAX, PARAM_ERROR = torch.finfo(PARAMS).max, 2.0**-25  # largest float16; most that a tiny one is off
COARSE = 1024  # a group is wide where float16 errs by more than 1 / COARSE of its largest number (:func:`_beyond`)
RIM = 32  # with 8 bits, levels reach beyond both ends of a group by 1 / RIM of its range (:func:`_rimmed`)


@functools.lru_cache(maxsize=32)
def _hadamard_matrix(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    power = dim & -dim  # the largest power of two that divides the head dim
    with torch.inference_mode(False):  # it outlives the call that came first
        matrix = torch.ones(1, 1)
        while matrix.shape[0] < power:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
        return torch.block_diag(*[matrix * power**-0.5] * (dim // power)).to(device, dtype)


def hadamard(x: Tensor) -> Tensor:
    """Rotate the last dim of x [..., D] by the orthonormal Hadamard matrix; its own inverse.

    A head dim that is no power of two is rotated in blocks of its largest power-of-two factor.

    Source: Ashkboos et al. 2024, QuaRot (arXiv 2404.00456), section 3.

    Example:
        >>> x = torch.randn(3, 96)
        >>> torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)
        True
    """
    return x @ _hadamard_matrix(x.shape[-1], x.dtype, x.device)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., D] (uint8 below ``2**bits``) into uint8 [..., D * bits / 8].

    The channels are cut into ``8 / bits`` equal parts; byte i holds channel i of each part, the first part in the
    lowest bits.

    Example:
        >>> pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 4).tolist()  # 3 << 4 | 1, 4 << 4 | 2
        [49, 66]
    """
    parts = codes.chunk(8 // bits, dim=-1)
    packed = parts[0].clone()
    for index, part in enumerate(parts[1:], start=1):
        packed |= part << (index * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo :func:`pack`: uint8 [..., D * bits / 8] -> uint8 [..., D]."""
    if bits == 8:
        return packed
    return torch.cat([(packed >> shift) & LEVELS[bits] for shift in range(0, 8, bits)], dim=-1)


def recode(packed: Tensor, bits: int, fewer: int) -> Tensor:
    """Demote packed codes to fewer bits: uint8 [..., D * bits / 8] -> uint8 [..., D * fewer / 8].

    The highest bits stay, so level c of ``fewer`` bits stands for the middle of the levels that share them
    (:func:`middle`), and the result is what quantising the original to those middles at once would have given.

    Example:
        >>> unpack(recode(pack(torch.tensor([0, 3, 4, 15], dtype=torch.uint8), 4), 4, 2), 2).tolist()
        [0, 0, 1, 3]
    """
    return packed if bits == fewer else pack(unpack(packed, bits) >> (bits - fewer), fewer)


def middle(bits: int, fewer: int) -> tuple[int, float]:
    """What level c of ``fewer`` bits is among the levels of ``bits``: ``c * step + rest``.

    From 4 bits to 2, middles err by 2/15 of the range at most; levels at both its ends would by 1/6.

    Returns:
        step and rest.

    Example:
        >>> middle(4, 2), middle(8, 2), middle(4, 4)
        ((4, 1.5), (64, 31.5), (1, 0.0))
    """
    step = 1 << (bits - fewer)
    return step, (step - 1) / 2


def affine(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero of groups that span ``low`` to ``high``: ``x = code * scale + zero`` (:func:`params`).

    Args:
        low, high: [...] float32, of any shape. bits: of the codes.

    Returns:
        scale and zero [...], rounded to :data:`PARAMS`; a group of equal values has the scale 0.
    """
    low, high = _rimmed(low, high, bits)
    wide = _beyond(low, high, high - low, bits)
    zero = _rounded(low, wide, up=False)
    scale = _rounded((high - zero).clamp(min=0) / LEVELS[bits], wide, up=True)
    return _stored(scale, wide, marked=True), _stored(zero, wide)


def params(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Read what :func:`affine` wrote: scale and zero [...] in float32.

    Example:
        >>> low, high = torch.tensor([1.0, 1e6, 1e-9]), torch.tensor([2.0, 2e6, 2e-9])
        >>> scale, zero = params(*affine(low, high, 4))
        >>> torch.allclose(zero + 15 * scale, high, rtol=0.01)
        True
    """
    wide = is_wide(scale)
    return _read(scale, wide, marked=True), _read(zero, wide)


def is_wide(scale: Tensor) -> Tensor:
    """[...] bool: of which scales [...] (:data:`PARAMS`) the bits are those of bfloat16, as those of their zeros.

    Example:
        >>> is_wide(affine(torch.tensor([1.0, 1e6]), torch.tensor([2.0, 2e6]), 4)[0]).tolist()
        [False, True]
    """
    bits = scale.view(torch.int16)
    return (bits < 0) & (bits != MARK)  # -0.0 is 0


def _beyond(least: Tensor, most: Tensor, span: Tensor, bits: int) -> Tensor:
    """Which groups float16 cannot describe: from ``least`` to ``most``, in which no channel spans more than ``span``.

    Beyond half of its range a difference may leave it. Near its smallest numbers, which are multiples of 2^-24, a scale
    may err by 2^-25 and the last level by :data:`LEVELS` times that. Wide are groups where this is more than half a
    step, and more than a thousandth of their largest number.
    """
    size, error = torch.maximum(least.abs(), most.abs()), LEVELS[bits] * PARAM_ERROR
    coarse = (span < 2 * LEVELS[bits] * error) & (size < COARSE * error) & (size > 0)
    return (size > PARAM_MAX / 2) | coarse


def _rounded(x: Tensor, wide: Tensor, up: bool) -> Tensor:
    """The nearest float16 of x; where ``wide``, the next bfloat16 above or below. In float32."""
    bits = x.view(torch.int32)
    away = (x > 0) if up else (x < 0)  # from zero
    coarse = (bits + away.int() * 0xFFFF) & ~0xFFFF
    return torch.where(wide, coarse.view(torch.float32), x.to(PARAMS).float())


def _stored(x: Tensor, wide: Tensor, marked: bool = False) -> Tensor:
    """Bits of numbers that :func:`_rounded` returned; ``marked``: they are no less than 0 and say which are wide."""
    coarse, plain = (x.view(torch.int32) >> 16).to(torch.int16), x.to(PARAMS).view(torch.int16)
    if marked:
        coarse, plain = coarse.clamp(min=1) | MARK, plain & ~MARK  # 0 would look like -0.0
    return torch.where(wide, coarse, plain).view(PARAMS)


def _read(x: Tensor, wide: Tensor, marked: bool = False) -> Tensor:
    """Undo :func:`_stored`, in float32."""
    coarse = x.view(torch.int16).int()
    if marked:
        coarse = coarse & ~MARK
    return torch.where(wide, (coarse << 16).view(torch.float32), x.float())


def _rimmed(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """What the levels of a group are to span: with 8 bits more, so that those of their highest 4 end at both ends."""
    rim = (high - low) / RIM if bits == 8 else 0.0
    return low - rim, high + rim


def page_affine(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and zero of the channels of pages that span ``low`` to ``high`` [P, D], in 8 bits (:func:`page_params`).

    A zero is rounded down and a scale up, so that the levels reach both ends.

    Returns:
        scale and zero [P, D] uint8; reach [P, 3] float16: largest scale, smallest zero, largest zero less that.

    Example:
        >>> low, high = torch.tensor([[-1.0, 0.0, 2.0]]), torch.tensor([[2.0, 0.0, 2.3]])
        >>> scale, zero = page_params(*page_affine(low, high, 4))
        >>> [[round(x, 2) for x in each.flatten().tolist()] for each in (zero, zero + 15 * scale)]
        [[-1.0, 0.0, 2.0], [2.0, 0.0, 2.31]]
    """
    low, high = _rimmed(low, high, bits)
    least, top = low.amin(-1, keepdim=True), low.amax(-1, keepdim=True)
    wide = _beyond(least, high.amax(-1, keepdim=True), (high - low).amax(-1, keepdim=True), bits)
    least = _rounded(least, wide, up=False)
    spread = _rounded((top - least).clamp(min=0), wide, up=True)
    zero = _in_bytes(low - least, spread).floor().clamp_(0, 255)
    start = least + zero * (spread / 255)
    step = (high - start).clamp(min=0) / LEVELS[bits]
    most = _rounded(step.amax(-1, keepdim=True), wide, up=True)
    scale = _in_bytes(step, most).ceil().clamp_(0, 255)
    reach = _stored(most, wide, marked=True), _stored(least, wide), _stored(spread, wide)
    return scale.to(torch.uint8), zero.to(torch.uint8), torch.cat(reach, dim=-1)


def _in_bytes(x: Tensor, whole: Tensor) -> Tensor:
    """Parts of 255 that x is of the whole; 0 of nothing."""
    return x * 255 / torch.where(whole > 0, whole, torch.inf)


def page_params(scale: Tensor, zero: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Read what :func:`page_affine` wrote: scale and zero [P, D] uint8 and reach [P, 3] to both [P, D] float32."""
    most, least, spread = read_reach(reach)
    return scale * (most / 255), zero * (spread / 255) + least


def read_reach(reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest scale, smallest zero, and largest zero less that, of pages' reach [P, 3]: each [P, 1] float32."""
    wide = is_wide(reach[:, :1])
    most, least, spread = reach.split(1, -1)
    return _read(most, wide, marked=True), _read(least, wide), _read(spread, wide)


def encode(x: Tensor, scale: Tensor, zero: Tensor, bits: int, group: Tensor | None = None) -> Tensor:
    """Nearest codes of float ``x`` under ``scale`` and ``zero``, as uint8 of the shape of ``x``.

    Args:
        x: [..., D] float32, or [T, D] with ``group``.
        scale, zero: float32 that broadcasts to ``x``, or, with ``group``, [groups, D].
        bits: of a code. group: [T] int64 group of each row of ``x``, or None.
    """
    step = torch.where(scale > 0, scale, 1.0)
    if group is not None:
        step, zero = step[group], zero[group]
    return (x - zero).div_(step).round_().clamp_(0, LEVELS[bits]).to(torch.uint8)


def value_groups(dim: int) -> int:
    """Number of channel groups of a value: the fewest equal groups of at most :data:`GROUP` channels.

    Example:
        >>> value_groups(64), value_groups(96), value_groups(128)
        (1, 2, 2)
    """
    return next(count for count in range(1, dim + 1) if dim % count == 0 and dim // count <= GROUP)


def quantise_values(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise values [T, D], each token by itself.

    Returns:
        packed codes uint8 [T, D * bits / 8], scale and zero [T, value_groups(D)].

    Example:
        >>> x = torch.randn(5, 64)
        >>> codes, scale, zero = quantise_values(x, 4)
        >>> scale, zero = params(scale, zero)
        >>> back = unpack(codes, 4) * scale + zero
        >>> bool((back - x).abs().max() <= 0.51 * scale.max())
        True
    """
    grouped = x.unflatten(-1, (value_groups(x.shape[-1]), -1))  # [T, groups, D / groups]
    scale, zero = affine(grouped.amin(-1), grouped.amax(-1), bits)
    by, rest = params(scale, zero)
    codes = encode(grouped, by[..., None], rest[..., None], bits)
    return pack(codes.flatten(-2), bits), scale, zero


def quantise_keys(x: Tensor, page: Tensor, pages: int, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise keys [T, D], each channel of a page by itself.

    Args:
        x: [T, D] float. page: [T] which page a token belongs to. pages: their number. bits: 2, 4 or 8.

    Returns:
        packed codes uint8 [T, D * bits / 8]; scale, zero and reach of the pages, as of :func:`page_affine`.
    """
    where = page[:, None].expand_as(x)
    low = x.new_full((pages, x.shape[1]), torch.inf).scatter_reduce_(0, where, x, "amin")
    high = x.new_full((pages, x.shape[1]), -torch.inf).scatter_reduce_(0, where, x, "amax")
    stored = page_affine(low, high, bits)
    scale, zero = page_params(*stored)
    return pack(encode(x, scale, zero, bits, page), bits), *stored
