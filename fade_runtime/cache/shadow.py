"""Now and then the whole text without a cache: how far next-token distributions under the cache are from it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fade_runtime.events import ShadowEvent


def next_token_kl(full: Tensor, ours: Tensor) -> Tensor:
    """KL(full || ours) [...] in nats between next-token distributions given as logits [..., V].

    In float32, or in float64 where the logits are.

    Example:
        >>> next_token_kl(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0986]))
        tensor(0.1438)
    """
    dtype = torch.promote_types(full.dtype, torch.float32)
    p, q = full.to(dtype).log_softmax(-1), ours.to(dtype).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


class Shadow:
    """Looks on at the calls that a cache comes with, and compares one in so many of them with full precision.

    It takes the time and memory of a prompt of the whole text.

    Args:
        every: decode steps between two comparisons.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._waits = False  # a call has begun whose end was not seen; a wrapper shows each call twice

    def reset(self) -> None:
        """Forget the running call."""
        self._waits = False

    def begin(self) -> None:
        """A call begins."""
        self._waits = True

    def awaited(self, output: Any, seen: int, prompt: int) -> Tensor | None:
        """Logits [B, 1, V] of a decode step after which it is time to compare; None: it is not.

        Args:
            output: of the model's call. seen: columns after it. prompt: tokens of the longest first prompt.
        """
        waited, self._waits = self._waits, False
        if not waited or seen == prompt or (seen - prompt) % self.every:
            return None
        logits = output.logits if hasattr(output, "logits") else output[0]
        return logits if logits.shape[1] == 1 else None

    def compare(self, model: Any, ids: Tensor, kwargs: Mapping[str, Any], logits: Tensor) -> ShadowEvent:
        """Run the whole text without a cache, and measure how far the cache's next-token distributions are from it.

        Args:
            model: the causal language model. ids: [B, S] of the text. kwargs: of the call that gave ``logits``.
            logits: [B, 1, V] under the cache.
        """
        started = time.perf_counter()
        options = dict(attention_mask=kwargs.get("attention_mask"), use_cache=False)
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = 1
        with torch.no_grad():
            full = model(ids.long(), **options).logits[:, -1]
            ours = logits[:, -1]
            same = (full.argmax(-1) == ours.argmax(-1)).float().mean()
            kl = float(next_token_kl(full, ours).max())
        return ShadowEvent(time.time(), ids.shape[1], kl, float(same), 1e3 * (time.perf_counter() - started))
