"""Now and then the whole text without a cache: how far next-token distributions under the cache are from it."""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fade_runtime.cache import TieredCache


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
    """Looks on at the calls of a model, and repeats one in so many of them with everything.

    It takes the time and memory of a prompt of the whole text; it goes with the cache.

    Args:
        model: a causal language model. cache: whose calls are looked at; it knows the ids of its tokens.
        every: decode steps between two looks.
    """

    def __init__(self, model: nn.Module, cache: TieredCache, every: int) -> None:
        self.every = every
        self._cache: Callable[[], TieredCache | None] = weakref.ref(cache)
        handle = model.register_forward_hook(self._look, with_kwargs=True)
        weakref.finalize(cache, handle.remove)

    def _look(self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        cache = self._cache()
        if cache is None or not any(each is cache for each in (*args, *given.values())):
            return
        seen, first = cache.get_seq_length(), cache.tiered[0].prompt
        if seen == first or (seen - first) % self.every or output.logits.shape[1] != 1:
            return
        started = time.perf_counter()
        text, guard = cache.text, cache.guard
        assert text is not None
        assert guard is not None
        asked = dict(attention_mask=given.get("attention_mask"), use_cache=False)
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            asked["logits_to_keep"] = 1
        with torch.no_grad():
            full = model(text.upto(seen).long(), **asked).logits
        ours = output.logits[:, -1]
        same = (full[:, -1].argmax(-1) == ours.argmax(-1)).float().mean()
        kl = float(next_token_kl(full[:, -1], ours).max())
        event = ShadowEvent(time.time(), seen, kl, float(same), 1e3 * (time.perf_counter() - started))
        guard.shadowed = event
        if guard.observer is not None:
            guard.observer(event)
