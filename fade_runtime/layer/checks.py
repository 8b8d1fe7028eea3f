"""What a layer of the cache refuses to take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fade_runtime.storage.quant import LARGEST
from predictor.errors import FadeError


def check_tokens(layer: int, held: Tensor | None, key: Tensor, value: Tensor) -> None:
    """Refuse keys and values [B, H, Q, D] that a layer cannot take.

    Args:
        layer: its index. held: keys that it has, or None at the start.

    Raises:
        FadeError: another batch size, device or dtype than before, numbers that are not finite, or too large to pack.
    """
    if not key.shape[2]:
        raise FadeError(f"layer {layer} was given no tokens; call the model with at least one")
    if held is not None and (key.shape[1], key.shape[3]) != (held.shape[1], held.shape[3]):
        raise FadeError(
            f"layer {layer} holds {held.shape[1]} kv heads of dim {held.shape[3]}, the model now gives {key.shape[1]} "
            f"of {key.shape[3]}; use the model that the cache was made for"
        )
    if held is not None and key.shape[0] != held.shape[0]:
        raise FadeError(
            f"the batch size changed from {held.shape[0]} to {key.shape[0]}; call cache.reset() before another batch"
        )
    for name in () if held is None else ("device", "dtype"):
        before, now = getattr(held, name), getattr(key, name)
        if before != now:
            raise FadeError(
                f"layer {layer} holds tokens of {name} {before}, the model now gives {now}; call cache.reset()"
            )
    # a GPU would have to be waited for in each layer of each step
    if key.device.type != "cpu" or _surely_fine(key, value):
        return
    for name, tensor in (("keys", key), ("values", value)):
        most = float(tensor.abs().amax()) if tensor.numel() else 0.0
        if not math.isfinite(most):
            raise FadeError(f"layer {layer} was given {name} that are not finite; check the model's dtype and input")
        if most > LARGEST:  # else only their sum is out of range
            raise FadeError(
                f"layer {layer} was given {name} of up to {most:.0e}, and no more than {LARGEST:.0e} can be packed; "
                "check the model's weights, or use compression='off'"
            )


def _surely_fine(key: Tensor, value: Tensor) -> bool:
    """Whether a number that every infinity, every NaN and all that cannot be packed would show in is small enough."""
    if key.dtype == torch.float16:  # which holds nothing that is too large, and few squares
        total = key.flatten().dot(value.flatten()) if key.shape == value.shape else key.sum() + value.sum()
        return math.isfinite(total.item())
    return all(each.flatten().dot(each.flatten()).item() < LARGEST for each in (key, value))
