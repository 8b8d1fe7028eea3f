"""Compressed caches against the full cache, on one text: loss, memory and speed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.hf import forward_kwargs, hand_over
from fade_runtime.layer import TieredLayer

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
        seconds: of each step's forward; empty if it was not timed.
        resident_bytes, full_bytes: at the last step, had the model been of two-byte floats.
    """

    name: str
    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    resident_bytes: int = 0
    full_bytes: int = 0

    def add(self, full: Tensor, other: Tensor) -> None:
        """Take in steps, whose logits [n, V] are the full cache's and this one's."""
        self.kl += [kl_divergence(*each) for each in zip(full, other)]
        self.agree += (full.argmax(-1) == other.argmax(-1)).tolist()


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
    timed: bool = True,
) -> list[Measured]:
    """Prefill each cache with a text's head, then feed its last ``steps`` tokens to each (teacher forcing).

    Timed, tokens come one at a time, and the methods take turns within each step, so that a machine that slows down
    slows all of them; who comes first in a step rotates. Otherwise tokens come ``reassign_every`` at a time, after
    which a cache compresses anyway: the same losses and bytes, several times sooner.

    Args:
        model: the language model; it is switched to tiered attention; the full cache runs on a twin.
        methods: the first one must be the full cache, which the others are compared with.
        tokens: [1, context + steps] token ids.
        steps: number of tokens to decode.
        on_step: called after each prefill, and for each method and step.
        timed: fill in ``seconds``.

    Returns:
        What was measured for each method, in order. The first step is left out of ``seconds``: it warms up.
    """
    if not methods or methods[0].config is not None:
        raise ValueError(f"the first method must be {FULL}")
    head, tail = tokens.split([tokens.shape[1] - steps, steps], dim=1)
    twin = dense_twin(model)
    measured = [Measured(method.name) for method in methods]
    runs = [_Run(twin if method.config is None else model, method.config) for method in methods]
    with torch.inference_mode():
        _read_prompt(runs, head, on_step)
        (_in_turn if timed else _one_by_one)(runs, tail, measured, on_step)
    for row, run in zip(measured, runs):
        row.resident_bytes, row.full_bytes = run.half_precision_bytes()
    return measured


def _read_prompt(runs: Sequence[_Run], head: Tensor, on_step: Callable[[], None]) -> None:
    """Fill each cache; tiered caches see the same prompt, so that one forward fills them all where it can."""
    compressed = [run for run in runs if run.compressed]
    layers = [layer for run in compressed for layer in run.cache.layers]
    together = len(compressed) > 1 and all(isinstance(layer, TieredLayer) for layer in layers)
    for run in compressed if together else ():
        run.cache.note_ids(head)  # the model is called with a cache of all of them
    for run in runs:
        if run.compressed and together:
            if run is compressed[0]:
                run.feed(
                    head,
                    Cache(layers=[_Fan(each) for each in zip(*(one.cache.layers for one in compressed))]),
                )
        else:
            run.feed(head)
        on_step()


def _in_turn(
    runs: Sequence[_Run], tail: Tensor, measured: Sequence[Measured], on_step: Callable[[], None]
) -> None:
    for step, token in enumerate(tail.split(1, dim=1)):
        logits: dict[int, Tensor] = {}
        for turn in range(len(runs)):
            index = (step + turn) % len(runs)
            started = time.perf_counter()
            logits[index] = runs[index].feed(token)
            if step > 0:
                measured[index].seconds.append(time.perf_counter() - started)
            on_step()
        for index, row in enumerate(measured):
            row.add(logits[0], logits[index])


def _one_by_one(
    runs: Sequence[_Run], tail: Tensor, measured: Sequence[Measured], on_step: Callable[[], None]
) -> None:
    expected = tail.new_empty(0)
    for run, row in zip(runs, measured):
        logits = torch.cat([run.feed(piece) for piece in tail.split(run.stride, dim=1)])
        expected = logits if row is measured[0] else expected
        row.add(expected, logits)
        for _ in range(tail.shape[1]):
            on_step()


def dense_twin(model: Any) -> Any:
    """A second model on the same weights whose attention can be switched without the first one noticing."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


class _Fan(TieredLayer):
    """The same layer of several tiered caches, as one: the first, in whose steps the others follow.

    While a prompt is read, all of them answer the same: what plain attention does.
    """

    def __init__(self, layers: Sequence[TieredLayer]) -> None:
        self.layers = layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layers[0], name)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            layer.update(key_states, value_states, kwargs={})
        return hand_over(self, key_states, kwargs.get("kwargs")), value_states

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        first, *_ = [layer.attend(*args, **kwargs) for layer in self.layers]
        return first


class _Run:
    """A model and one cache, fed with tokens.

    Attributes:
        stride: tokens that may come in one call and leave the cache as they would one at a time.
    """

    def __init__(self, model: Any, config: FadeConfig | None) -> None:
        self.model, self.compressed, self.cache = model, config is not None, DynamicCache(config=model.config)
        self.stride = 64
        if config is not None:
            self.cache = create_tiered_cache(model, config)
            self.stride = 1 if config.chunked_prefill else config.reassign_every

    def feed(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Return the logits after each of the tokens [1, n], or after the last of a prompt: [n or 1, V]."""
        keep = tokens.shape[1] if tokens.shape[1] <= self.stride else 1
        kwargs = forward_kwargs(self.cache if cache is None else cache, self.model)
        return self.model(tokens, logits_to_keep=keep, use_cache=True, **kwargs).logits[0]

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
