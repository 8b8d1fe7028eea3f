"""The storage format in plain torch: rotation, groups, codes. Kernels must agree with this file.

A body token is stored after a Hadamard rotation over the head dim, asymmetrically in 2, 4 or 8 bits: keys share a
scale per channel over a page of up to 64 kept tokens, values share a scale per token over groups of channels.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

PAGE = 64  # kept tokens that share a key scale
GROUP = 64  # channels of a value that share a scale, at most
LEVELS = {bits: (1 << bits) - 1 for bits in (2, 4, 8)}
PARAMS = torch.float16  # scales and zeros


@functools.lru_cache(maxsize=32)
def _hadamard_matrix(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    power = dim & -dim  # the largest power of two that divides the head dim
    with torch.inference_mode(False):  # it outlives the call that asked first
        matrix = torch.ones(1, 1)
        while matrix.shape[0] < power:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
        return torch.block_diag(*[matrix * power**-0.5] * (dim // power)).to(device, dtype)


def hadamard(x: Tensor) -> Tensor:
    """Rotate the last dim by the orthonormal Hadamard matrix; its own inverse.

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

    The highest bits stay, so level c of the few stands for the middle of the levels that share them (:func:`middle`),
    and the result is what quantising the original to those middles at once would have given.

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
    """Scale and zero of groups that span ``low`` to ``high``: ``x = code * scale + zero``.

    Returns:
        scale and zero, rounded to :data:`PARAMS`; a group of equal values has the scale 0.
    """
    zero = low.to(PARAMS)
    return ((high - zero.float()).clamp(min=0) / LEVELS[bits]).to(PARAMS), zero


def encode(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Nearest codes of float ``x`` under broadcast ``scale`` and ``zero``, as uint8 of the shape of ``x``."""
    scale = scale.float()
    steps = (x - zero.float()) / torch.where(scale > 0, scale, 1.0)
    return steps.round_().clamp_(0, LEVELS[bits]).to(torch.uint8)


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
        >>> back = unpack(codes, 4) * scale.float() + zero.float()
        >>> bool((back - x).abs().max() <= 0.51 * scale.max())
        True
    """
    grouped = x.unflatten(-1, (value_groups(x.shape[-1]), -1))  # [T, groups, D / groups]
    scale, zero = affine(grouped.amin(-1), grouped.amax(-1), bits)
    codes = encode(grouped, scale[..., None], zero[..., None], bits)
    return pack(codes.flatten(-2), bits), scale, zero


def quantise_keys(x: Tensor, page: Tensor, pages: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise keys [T, D], each channel of a page by itself.

    Args:
        x: [T, D] float. page: [T] which page a token belongs to. pages: their number. bits: 2, 4 or 8.

    Returns:
        packed codes uint8 [T, D * bits / 8], scale and zero [pages, D].
    """
    where = page[:, None].expand_as(x)
    low = x.new_full((pages, x.shape[1]), torch.inf).scatter_reduce_(0, where, x, "amin")
    high = x.new_full((pages, x.shape[1]), -torch.inf).scatter_reduce_(0, where, x, "amax")
    scale, zero = affine(low, high, bits)
    return pack(encode(x, scale[page], zero[page], bits), bits), scale, zero
