"""Rotary position embedding and its inverse, by the model's own rotary module.

The tables come from the module that the model itself uses, so whatever scheme it implements (default, linear,
llama3, ...) is the scheme that is inverted here. Channels past the width of the table are left alone
(partial rotary).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Table = tuple[Tensor, Tensor]  # cos, sin: [L, Dr] float32


def find_rotary(model: nn.Module) -> nn.Module | None:
    """Return the model's rotary module, or None when positions enter in another way (learned, ALiBi)."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "rotary_emb":
            return module
    return None


@torch.no_grad()
def rotary_table(rotary: nn.Module | None, positions: Tensor) -> Table | None:
    """Tabulate cosine and sine for ``positions`` in float32.

    Args:
        rotary: the model's rotary module, called as ``rotary(x, position_ids)``; None gives None.
        positions: [L] integers.

    Returns:
        cos and sin, each [L, Dr], float32, or None.
    """
    if rotary is None:
        return None
    like = torch.zeros(1, device=positions.device, dtype=torch.float32)
    cos, sin = rotary(like, positions[None])
    return cos[0].float(), sin[0].float()


def _swap_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(x: Tensor, table: Table | None) -> Tensor:
    """Rotate ``x`` [..., L, D] to the positions of ``table``; the identity when the table is None.

    The half-split pairing of Llama, Qwen and their descendants. Attention scaling that a scheme folds into its
    table (yarn, longrope) multiplies here too, as in the model.

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), section 3.2.2, eq. 15, with channels i and i + Dr/2 paired.

    Example:
        >>> angle = torch.tensor([[0.3, 0.3]])
        >>> table = (angle.cos(), angle.sin())
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> torch.allclose(unrotate(rotate(x, table), table), x)
        True
    """
    if table is None:
        return x
    cos, sin = table
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    turned = turned * cos.to(x.dtype) + _swap_halves(turned) * sin.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def unrotate(x: Tensor, table: Table | None) -> Tensor:
    """Undo :func:`rotate`, scaling included: ``unrotate(rotate(x, t), t) == x``."""
    if table is None:
        return x
    cos, sin = table
    scale = cos.square() + sin.square()  # 1, or the square of the scheme's attention scaling
    return rotate(x, (cos / scale, -sin / scale))
