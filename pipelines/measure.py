"""Compressed caches against the full cache, on one text: loss, memory and speed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.hf import forward_kwargs

FULL = "full"


@dataclass(frozen=True)
class Method:
    """One line of the table: a name, and what the cache is to do; None is the full cache."""

    name: str
    config: FadeConfig | None


@dataclass
class Measured:
    """One method on one text.

    Attributes:
        name: of the method.
        kl: KL(full || method) of each step's next-token distribution, nats.
        agree: whether the most likely next token is the full cache's, at each step.
        seconds: of each step's forward.
        resident_bytes, full_bytes: at the last step, had the model been of two-byte floats.
    """

    name: str
    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    resident_bytes: int = 0
    full_bytes: int = 0


def kl_divergence(full: Tensor, other: Tensor) -> float:
    """KL(full || other) of two next-token distributions given as logits [V], in nats, computed in float64.

    Example:
        >>> kl_divergence(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 5.0]))  # logits have no level
        0.0
    """
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return max(0.0, float((p.exp() * (p - q)).sum()))


def compare(
    model: Any,
    methods: Sequence[Method],
    tokens: Tensor,
    steps: int,
    on_step: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Prefill each cache with a text's head, then feed its last ``steps`` tokens to each, one at a time.

    Every cache sees the same tokens (teacher forcing). The methods take turns within each step, so that a
    machine that slows down slows all of them; who comes first in a step rotates.

    Args:
        model: the language model; it is switched to tiered attention; the full cache runs on a twin.
        methods: the first one must be the full cache, which the others are compared with.
        tokens: [1, context + steps] token ids.
        steps: number of tokens to decode.
        on_step: called after each prefill and each step.

    Returns:
        What was measured for each method, in order. The first step is left out of ``seconds``: it warms up.
    """
    if not methods or methods[0].config is not None:
        raise ValueError(f"the first method must be {FULL}")
    context = tokens.shape[1] - steps
    twin = dense_twin(model)
    measured = [Measured(method.name) for method in methods]
    runs = []
    with torch.inference_mode():
        for method in methods:
            runs.append(_Run(twin if method.config is None else model, method.config))
            runs[-1].feed(tokens[:, :context])
            on_step()
        for step in range(steps):
            logits: dict[int, Tensor] = {}
            for turn in range(len(runs)):
                index = (step + turn) % len(runs)
                started = time.perf_counter()
                logits[index] = runs[index].feed(tokens[:, context + step : context + step + 1])
                if step > 0:
                    measured[index].seconds.append(time.perf_counter() - started)
            for index, row in enumerate(measured):
                row.kl.append(kl_divergence(logits[0], logits[index]))
                row.agree.append(bool(logits[0].argmax() == logits[index].argmax()))
            on_step()
    for row, run in zip(measured, runs):
        row.resident_bytes, row.full_bytes = run.half_precision_bytes()
    return measured


def dense_twin(model: Any) -> Any:
    """A second model on the same weights whose attention can be switched without the first one noticing."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


class _Run:
    """A model and one cache, fed token by token."""

    def __init__(self, model: Any, config: FadeConfig | None) -> None:
        from transformers import DynamicCache

        self.model, self.compressed, self.cache = model, config is not None, DynamicCache(config=model.config)
        if config is not None:
            self.cache = create_tiered_cache(model, config)

    def feed(self, tokens: Tensor) -> Tensor:
        """Return the logits [V] after the last token."""
        kwargs = forward_kwargs(self.cache, self.model)
        return self.model(tokens, logits_to_keep=1, use_cache=True, **kwargs).logits[0, -1]

    def half_precision_bytes(self) -> tuple[int, int]:
        """Resident bytes and those of a full cache, had the model been of two-byte floats.

        Only tensors of the model's own dtype shrink with it; codes, scales, slots and statistics are stored the
        same under every model.
        """
        width = self.model.dtype.itemsize
        if not self.compressed:
            full = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
            return full * 2 // width, full * 2 // width
        report = self.cache.memory_report()
        exact = [t for layer in self.cache.tiered for t in (layer.tokens.full.key, layer.tokens.full.value)]
        stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in exact}
        spared = sum(stored.values()) * (width - 2) // width
        return report["resident_bytes"] - spared, report["full_bytes"] * 2 // width
