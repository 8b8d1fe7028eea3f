"""Compressed caches against the full cache, on one text: loss, memory and speed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.cache.telemetry import ListExporter, attach_telemetry
from fade_runtime.layer.layer import TieredLayer
from fade_runtime.transformers_api import forward_kwargs, geometry, hand_over, text_config
from pipelines.evaluation.oracle import Oracle, foresee, future_attention
from pipelines.evaluation.peers import Peer, blamed, resident_bytes
from pipelines.reporting.rows import FULL
from predictor.errors import FadeError
from predictor.twin import dense_twin


@dataclass(frozen=True)
class Method:
    """One line of the table: a name, and what the cache is to do; None is the full cache."""

    name: str
    config: FadeConfig | Oracle | Peer | None


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

    @property
    def compression(self) -> float:
        """Bytes of a full cache divided by what was resident."""
        return self.full_bytes / self.resident_bytes

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
    told: dict[str, ListExporter] | None = None,
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
        told: takes the telemetry of each tiered cache, which costs time, by name of the method.

    Returns:
        What was measured for each method, in order. The first step is left out of ``seconds``: it warms up.
    """
    if not methods or methods[0].config is not None:
        raise ValueError(f"the first method must be {FULL}")
    head, tail = tokens.split([tokens.shape[1] - steps, steps], dim=1)
    measured = [Measured(method.name) for method in methods]
    runs = start(methods, model, dense_twin(model))
    for method, run in zip(methods, runs):
        if told is not None and run.tiered:
            told[method.name] = ListExporter()
            attach_telemetry(run.cache, told[method.name])
    with torch.inference_mode():
        show_future(runs, tokens, head.shape[1])
        read_prompt(runs, head, on_step)
        (_in_turn if timed else _one_by_one)(runs, tail, measured, on_step)
    for row, run in zip(measured, runs):
        row.resident_bytes, row.full_bytes = run.half_precision_bytes()
    return measured


def start(methods: Sequence[Method], model: Any, twin: Any) -> list[Run]:
    """Give each method an empty cache: a tiered one on the model, any other on its dense twin."""
    made: list[Run] = []
    for config in (method.config for method in methods):
        if isinstance(config, Peer):
            made.append(PeerRun(twin, config))
        elif isinstance(config, Oracle):
            made.append(OracleRun(model, config))
        else:
            made.append(Run(twin if config is None else model, config))
    return made


def show_future(runs: Sequence[Run], tokens: Tensor, prompt: int) -> None:
    """Tell oracles what is to come: tokens [1, prompt + T]."""
    if oracles := [run for run in runs if isinstance(run, OracleRun)]:
        future = future_attention(oracles[0].model, tokens[0], prompt)
        for run in oracles:
            run.know(future)


def read_prompt(runs: Sequence[Run], head: Tensor, on_step: Callable[[], None] = lambda: None) -> None:
    """Fill each cache; those that only store a prompt while the model reads it are filled by one forward."""
    with ExitStack() as listening:
        _read_prompt(runs, head, on_step, listening)
    for run in runs:
        run.seen = head.shape[1]


def _read_prompt(runs: Sequence[Run], head: Tensor, on_step: Callable[[], None], listening: ExitStack) -> None:
    tiered = [run for run in runs if run.tiered]
    together = bool(tiered) and all(isinstance(layer, TieredLayer) for run in tiered for layer in run.cache.layers)
    for run in tiered if together else ():
        run.cache.note_ids(head)  # the model is called with a cache of all of them
    for run in runs:
        if not (together and run.stores):
            run.feed(head)
        elif run is tiered[0]:
            others = [other for other in runs if other.stores and not other.tiered]
            for other in others:
                listening.enter_context(other.listen(run.model))
            columns = zip(*(one.cache.layers for one in tiered))
            run.feed(head, Cache(layers=[_Fan(layers, others) for layers in columns]))
        on_step()


def _in_turn(runs: Sequence[Run], tail: Tensor, measured: Sequence[Measured], on_step: Callable[[], None]) -> None:
    for step, token in enumerate(tail.split(1, dim=1)):
        logits: dict[int, Tensor] = {}
        for turn in range(len(runs)):
            index = (step + turn) % len(runs)
            started = time.perf_counter()
            logits[index] = runs[index].follow(token)
            if step > 0:
                measured[index].seconds.append(time.perf_counter() - started)
            on_step()
        for index, row in enumerate(measured):
            row.add(logits[0], logits[index])


def _one_by_one(runs: Sequence[Run], tail: Tensor, measured: Sequence[Measured], on_step: Callable[[], None]) -> None:
    expected = tail.new_empty(0)
    for run, row in zip(runs, measured):
        logits = run.follow(tail)
        expected = logits if row is measured[0] else expected
        row.add(expected, logits)
        for _ in range(tail.shape[1]):
            on_step()


class _Fan(TieredLayer):
    """The same layer of several tiered caches, as one: the first, in whose steps the others follow.

    While a prompt is read, all of them answer the same: what plain attention does. Other runs' caches, which only
    store what they are given, are filled along.
    """

    def __init__(self, layers: Sequence[TieredLayer], others: Sequence[Run] = ()) -> None:
        self.layers, self.others = layers, others

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layers[0], name)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            layer.update(key_states, value_states, kwargs={})
        for other in self.others:
            other.store(self.layers[0].index, key_states, value_states)
        return hand_over(self, key_states, kwargs.get("kwargs")), value_states

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        first, *_ = [layer.attend(*args, **kwargs) for layer in self.layers]
        return first


class Run:
    """A model and one cache, fed with tokens.

    Attributes:
        tiered: whether the cache is one of ours.
        stride: tokens that may come in one call and leave the cache as they would one at a time.
        stores: while a prompt is read, the cache stores what it is given, and does nothing else.
        seen: tokens so far. since: those that followed the prompt.
    """

    def __init__(self, model: Any, config: FadeConfig | None) -> None:
        self.model, self.tiered, self.cache = model, config is not None, DynamicCache(config=model.config)
        self.stride, self.since, self.seen = 64, 0, 0
        self.stores = config is not None or all(type(layer) is DynamicLayer for layer in self.cache.layers)
        if config is not None:
            self.cache = create_tiered_cache(model, config)
            self.stride = 1 if config.chunked_prefill else config.reassign_every

    def feed(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Return the logits after each of the tokens [1, n], or after the last of a prompt: [n or 1, V]."""
        keep = tokens.shape[1] if tokens.shape[1] <= self.stride else 1
        kwargs = forward_kwargs(self.cache if cache is None else cache, self.model)
        return self.model(tokens, logits_to_keep=keep, use_cache=True, **kwargs).logits[0]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take in a layer's keys and values [1, H, S, D] of a prompt that another run's model reads."""
        self.cache.layers[layer].update(key, value)

    def listen(self, model: Any) -> AbstractContextManager[None]:
        """What this run does besides while another run's model reads its prompt."""
        return nullcontext()

    def follow(self, tokens: Tensor) -> Tensor:
        """Return the logits after each of the tokens [1, n] that come after a prompt: [n, V].

        They come in calls that leave the cache as single ones would.
        """
        rows = []
        while tokens.shape[1]:
            piece, tokens = tokens.split_with_sizes(self._next(tokens.shape[1]), dim=1)
            rows.append(self.feed(piece))
            self.since += piece.shape[1]
            self.seen += piece.shape[1]
        return torch.cat(rows)

    def _next(self, waiting: int) -> list[int]:
        """Tokens that may come at once, and the rest."""
        now = min(waiting, self.stride - self.since % self.stride)
        return [now, waiting - now]

    def copied(self) -> Run:
        """The same model with a copy of the cache, to go on in another way."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def half_precision_bytes(self) -> tuple[int, int]:
        """Resident bytes and those of a full cache, had the model been of two-byte floats.

        Only tensors of the model's own dtype shrink with it; codes, scales, slots and statistics are stored the
        same under every model.
        """
        width = self.model.dtype.itemsize
        if not self.tiered:
            full = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
            return full * 2 // width, full * 2 // width
        self.cache.count_held()
        report = self.cache.memory_report()
        exact = [t for layer in self.cache.tiered for t in (layer.tokens.full.key, layer.tokens.full.value)]
        stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in exact}
        spared = sum(stored.values()) * (width - 2) // width
        return report["resident_bytes"] - spared, report["full_bytes"] * 2 // width


class OracleRun(Run):
    """A model and a tiered cache that is told what is to come."""

    def __init__(self, model: Any, oracle: Oracle) -> None:
        super().__init__(model, oracle.config)
        self.knows = False

    def know(self, future: dict[int, Tensor]) -> None:
        """Take in :func:`pipelines.evaluation.oracle.future_attention`."""
        foresee(self.cache, future)
        self.knows = True

    def feed(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """As any run.

        Raises:
            FadeError: nobody told it the future, as in a task whose answers are not known.
        """
        if not self.knows:
            raise FadeError("an oracle needs a text whose continuation is known; leave it out here")
        return super().feed(tokens, cache)


class PeerRun(Run):
    """A model and another project's cache, fed with tokens."""

    def __init__(self, model: Any, peer: Peer) -> None:
        self.model, self.tiered, self.peer = model, False, peer
        with blamed(peer, 0):
            self.cache = peer.cache(model)
        self.stride, self.since, self.seen, self.stores = peer.stride, 0, 0, peer.stores

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take in a layer's keys and values of a prompt.

        Raises:
            PeerError: the peer failed.
        """
        with blamed(self.peer, key.shape[2]):
            super().store(layer, key, value)

    def listen(self, model: Any) -> AbstractContextManager[None]:
        """What the peer does while a prompt is read."""
        return self.peer.listen(model, self.cache)

    def feed(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Read the prompt as the peer wants it, then the tokens after it: [n or 1, V].

        Raises:
            PeerError: the peer failed.
        """
        where = {}
        if self.peer.keeps_positions:
            where = {"position_ids": torch.arange(self.seen, self.seen + tokens.shape[1])[None]}
        with blamed(self.peer, tokens.shape[1]):
            if self.seen == 0:
                return self.peer.read(self.model, tokens, self.cache)
            return self.model(tokens, use_cache=True, **where, **forward_kwargs(self.cache, self.model)).logits[0]

    def copied(self) -> Run:
        """The same model with a copy of the cache, made as the peer's can be."""
        other = copy.copy(self)
        with blamed(self.peer, self.seen):
            other.cache = self.peer.copied(self.cache)
        return other

    def half_precision_bytes(self) -> tuple[int, int]:
        """What is reachable from the cache, and what a full cache of the same text holds."""
        config = text_config(self.model)
        heads, dim = geometry(config)
        full = 2 * 2 * config.num_hidden_layers * heads * dim * self.seen
        return resident_bytes(self.cache, self.model.dtype), full
