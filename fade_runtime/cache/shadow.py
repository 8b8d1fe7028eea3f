"""Now and then the whole text without a cache: how far next-token distributions under the cache are from it."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fade_runtime.cache.tiered_cache import TieredCache


@dataclass(frozen=True)
class ShadowEvent:
    """One comparison of next-token distributions.

    Attributes:
        time: when it ended, seconds since 1970. seen: logical tokens.
        kl: KL(full precision || cache), nats, of the worst sequence. top1: share of sequences with the same best token.
        ms: milliseconds that it took.
    """

    time: float
    seen: int
    kl: float
    top1: float
    ms: float


def next_token_kl(full: Tensor, ours: Tensor) -> Tensor:
    """KL(full || ours) [...] in nats between distributions given as logits [..., V].

    Example:
        >>> next_token_kl(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0986]))
        tensor(0.1438)
    """
    p, q = full.float().log_softmax(-1), ours.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


class Shadow:
    """Looks on at the calls that a cache comes with, and repeats one in so many of them with everything.

    It takes the time and memory of a prompt of the whole text.

    Args:
        every: decode steps between two looks.
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

    def look(self, cache: TieredCache, given: dict[str, Any], output: Any) -> None:
        """See what came out of a call, whose arguments were ``given``."""
        waited, self._waits = self._waits, False
        seen, first = cache.get_seq_length(), cache.tiered[0].prompt
        if not waited or seen == first or (seen - first) % self.every:
            return
        logits = output.logits if hasattr(output, "logits") else output[0]
        if logits.shape[1] != 1:
            return
        started = time.perf_counter()
        model, text, guard = cache.model, cache.text, cache.guard
        assert text is not None
        assert guard is not None
        asked = dict(attention_mask=given.get("attention_mask"), use_cache=False)
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            asked["logits_to_keep"] = 1
        with torch.no_grad():
            full = model(text.upto(seen).long(), **asked).logits[:, -1]
            ours = logits[:, -1]
            same = (full.argmax(-1) == ours.argmax(-1)).float().mean()
            kl = float(next_token_kl(full, ours).max())
        event = ShadowEvent(time.time(), seen, kl, float(same), 1e3 * (time.perf_counter() - started))
        guard.shadowed = event
        if guard.observer is not None:
            guard.observer(event)
