"""What a layer of the cache refuses to take."""

from __future__ import annotations

import math

from torch import Tensor

from predictor.errors import FadeError


def check_tokens(layer: int, held: Tensor | None, key: Tensor, value: Tensor) -> None:
    """Refuse keys and values [B, H, Q, D] that a layer cannot take.

    Args:
        layer: its index. held: keys that it has, or None at the start.

    Raises:
        FadeError: another batch size, device or dtype than before, or numbers that are not finite.
    """
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
    if key.device.type != "cpu" or _surely_finite(key, value):
        return
    for name, tensor in (("keys", key), ("values", value)):
        if not bool(tensor.isfinite().all()):  # else only their sum is out of range
            raise FadeError(f"layer {layer} was given {name} that are not finite; check the model's dtype and input")


def _surely_finite(key: Tensor, value: Tensor) -> bool:
    """Whether one number that every infinity and every NaN would show in is finite; it may also overflow."""
    if key.shape == value.shape:
        return math.isfinite(key.flatten().dot(value.flatten()).item())
    return math.isfinite(key.sum().item() + value.sum().item())
