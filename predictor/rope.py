"""Rotary position embedding and its inverse, by the model's own code.

The angles come from the rotary module that the model itself uses; which channels they rotate, from the function of its
modeling file that rotates keys, which :class:`Rotary` tries out on unit vectors. So every scheme (linear, llama3,
dynamic, yarn, longrope, proportional), pairing (halves or neighbours) and layout of the module's output ends in one
:class:`Table`, which :func:`rotate` and :func:`unrotate` apply. Channels past the width of the table are left alone
(partial rotary).
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from predictor.errors import FadeError

APPLY = "apply_rotary_pos_emb"  # what modeling files call the function that rotates queries and keys
SLIDING_ONLY = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1", "lara_mini")


@dataclass(frozen=True)
class Table:
    """Cosines and sines of some positions, as a model multiplies them.

    Attributes:
        cos, sin: [..., L, Dr] float32, one entry for each channel; attention scaling (yarn, longrope) is inside.
        interleaved: channel 2i is rotated with 2i + 1; else channel i with i + Dr / 2.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def __getitem__(self, index: Any) -> Table:
        """Take some positions: ``table[:5]``, ``table[slots]``, ``table[:, None]``."""
        return Table(self.cos[index], self.sin[index], self.interleaved)


class Rotary:
    """Tabulates positions as one model would; does not keep the model alive.

    Args:
        decoder: the decoder of a language model.
        modules: its rotary modules. One is what this code understands.
    """

    def __init__(self, decoder: nn.Module, modules: list[nn.Module]):
        self.config: Any = decoder.config
        self._decoder = weakref.ref(decoder)
        self._modules = [weakref.ref(module) for module in modules]
        self._apply = _apply_function(decoder)
        self._layouts: dict[int, tuple[list[int], int, bool]] = {}  # by width of the angles

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates at all; some families leave it out of every n-th, or out of full attention."""
        config = self.config
        for each in ("no_rope_layers", "layer_rope_theta"):  # 0: this one does not
            if getattr(config, each, None):
                return bool(getattr(config, each)[layer])
        kinds = getattr(config, "layer_types", None)
        if not kinds:
            return True
        if config.model_type in SLIDING_ONLY and config.sliding_window is not None:
            forced = getattr(config, "prefix_dense_sliding_window_pattern", None) == 1  # Cohere 2 MoE
            return bool(kinds[layer] == "sliding_attention" or (forced and config.mlp_layer_types[layer] == "dense"))
        return (getattr(config, "rope_parameters", None) or {}).get(kinds[layer], kinds) is not None

    @torch.no_grad()
    def table(self, positions: Tensor, layer: int = 0) -> Table | None:
        """Tabulate what the model's next forward pass would use, if its position ids were these.

        Schemes that depend on length (dynamic, longrope) go by the largest position of a pass. To get back keys of
        a long pass, tabulate all its positions and index the table. The model's module is left as it was found.

        Args:
            positions: [...] integers. layer: index of the layer; some schemes differ between layers.

        Returns:
            Table of [..., Dr], rounded as the model rounds it, or None for a layer that does not rotate.

        Raises:
            FadeError: the model rotates in a way that is not understood here, or is gone.

        Example:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
            >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
            >>> table = find_rotary(model).table(torch.tensor([0, 1]))
            >>> table.cos.shape, [round(x, 3) for x in table.cos[:, 0].tolist()]
            (torch.Size([2, 4]), [1.0, 0.54])
        """
        if not self.rotates(layer):
            return None
        count = positions.numel()
        flat = positions.reshape(1, -1) if count else positions.new_zeros(1, 1)
        try:
            table = self._tabulate(flat, layer)
        except FadeError:
            raise
        except Exception as error:  # whatever a modeling file that works differently may raise
            raise self._refusal(f"its modeling file answers {type(error).__name__}: {error}") from error
        cos, sin = (x[:count].view(*positions.shape, x.shape[-1]) for x in (table.cos, table.sin))
        return Table(cos, sin, table.interleaved)

    def _tabulate(self, positions: Tensor, layer: int) -> Table:
        """Table [L, Dr] of positions [1, L]."""
        angles = self._angles(positions, layer)
        if isinstance(angles, Tensor):  # complex numbers multiply neighbours
            cos, sin = (x[0].float().repeat_interleave(2, -1) for x in (angles.real, angles.imag))
            return Table(cos, sin, interleaved=True)
        cos, sin = (x[0].float() for x in angles)
        width = cos.shape[-1]
        if width not in self._layouts:
            self._layouts[width] = self._layout(width, positions.device)
        source, sign, interleaved = self._layouts[width]
        if source != list(range(width)):
            cos, sin = cos[:, source], sin[:, source]
        return Table(cos, sin if sign == 1 else -sin, interleaved)

    def _angles(self, positions: Tensor, layer: int) -> Any:
        """What the model's module returns for positions [1, L], from a copy: some modules change when called."""
        decoder = self._decoder()
        modules = [module() for module in self._modules]
        if decoder is None or None in modules:
            raise FadeError(f"this cache's {self.config.model_type} model is gone; keep it while you use the cache")
        if len(modules) > 1:
            raise self._refusal(f"it has {len(modules)} rotary modules")
        twin: Any = copy.copy(modules[0])
        twin._buffers = {name: None if b is None else b.clone() for name, b in twin._buffers.items()}
        axes = getattr(twin, "mrope_section", None)  # of images; text is at the same place on each
        if isinstance(axes, list):
            positions = positions.expand(len(axes), *positions.shape)
        forward = type(twin).forward
        names = inspect.signature(forward).parameters
        kind = {"layer_type": self.config.layer_types[layer]} if "layer_type" in names else {}
        dtype = next((p.dtype for p in decoder.parameters() if p.is_floating_point()), torch.float32)
        return forward(twin, torch.zeros(1, dtype=dtype, device=positions.device), positions, **kind)

    def _layout(self, width: int, device: torch.device) -> tuple[list[int], int, bool]:
        """What the modeling file does with angles of [L, width]: found by passing unit vectors through it.

        Returns:
            For each channel of a key the channel of the angles that rotates it; the sign of the sine; interleaved.
        """
        units = torch.eye(width, device=device)
        none, every = torch.zeros_like(units), torch.ones(1, width, device=device)
        try:
            dim = width
            kept = self._rotate(torch.ones(1, dim, device=device), units, none)[0]  # [width, Dr]
        except RuntimeError:  # shapes do not fit: angles that are named once for each pair
            dim = 2 * width
            kept = self._rotate(torch.ones(1, dim, device=device), units, none)[0]
        crossed = self._rotate(torch.ones(1, dim, device=device), none, units)[0]
        channels = torch.eye(dim, device=device)
        partners = self._rotate(channels, none[:1], every)[:, 0]  # [Dr, Dr]
        source = kept.argmax(0)
        if torch.equal(kept, units[:, source]) and torch.equal(crossed.abs(), kept):
            for sign, interleaved in itertools.product((1, -1), (False, True)):
                if torch.equal(partners, sign * _swap(channels, interleaved)):
                    return source.tolist(), sign, interleaved
        raise self._refusal(f"its {APPLY} pairs channels in another way")

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Let the modeling file rotate each x [P, Dr] by all angles [L, width]: [P, L, Dr] float32."""
        if self._apply is None:
            raise self._refusal(f"its modeling file has no {APPLY}")
        x = x[None, :, None].expand(-1, -1, len(cos), -1)
        both = (x, x[:, :0]) if "k" in inspect.signature(self._apply).parameters else (x,)
        rotated = self._apply(*both, cos=cos[None], sin=sin[None])
        rotated = rotated if isinstance(rotated, Tensor) else rotated[0]
        if rotated.shape != x.shape:
            raise RuntimeError(f"{APPLY} makes {tuple(rotated.shape)} of {tuple(x.shape)}")
        return rotated[0]

    def _refusal(self, why: str) -> FadeError:
        return FadeError(
            f"cannot tabulate the rotation of model type {self.config.model_type}: {why}; "
            "use options that need no rotation"
        )


def find_rotary(model: Any) -> Rotary | None:
    """Return what tabulates the model's rotation, or None when positions enter in another way (learned, ALiBi)."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    modules = [module for module in decoder.modules() if "rotary" in type(module).__name__.lower()]
    if not modules or getattr(decoder.config, "alibi", False):
        return None
    return Rotary(decoder, modules)


def _apply_function(decoder: nn.Module) -> Callable[..., Any] | None:
    """The function that rotates keys in the file that the decoder, or the class it was made from, is defined in."""
    files = (vars(sys.modules[cls.__module__]) for cls in type(decoder).__mro__)
    return next((file[APPLY] for file in files if APPLY in file), None)


def _swap(x: Tensor, interleaved: bool) -> Tensor:
    """Put each channel's partner in its place, the second of a pair with a minus."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(x: Tensor, table: Table | None) -> Tensor:
    """Rotate ``x`` [..., L, D] to the positions of ``table``; the identity when the table is None.

    Attention scaling that a scheme folds into its table (yarn, longrope) multiplies here too, as in the model.

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), section 3.2.2, eq. 15 (``interleaved``); Llama and its
    descendants pair channels i and i + Dr / 2 instead.

    Example:
        >>> angle = torch.tensor([[0.3, 0.3]])
        >>> table = Table(angle.cos(), angle.sin())
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> torch.allclose(unrotate(rotate(x, table), table), x)
        True
    """
    if table is None:
        return x
    width = table.cos.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    rotated = rotated * table.cos.to(x.dtype) + _swap(rotated, table.interleaved) * table.sin.to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def unrotate(x: Tensor, table: Table | None) -> Tensor:
    """Undo :func:`rotate`, scaling included: ``unrotate(rotate(x, t), t) == x`` but for rounding.

    Args:
        x: [..., L, D] rotated. table: of the L positions, [..., L, Dr]; None for a layer that does not rotate.

    Returns:
        [..., L, D] in the dtype of ``x``.
    """
    if table is None:
        return x
    scale = table.cos.square() + table.sin.square()  # 1, or the square of the scheme's attention scaling
    return rotate(x, Table(table.cos / scale, -table.sin / scale, table.interleaved))
