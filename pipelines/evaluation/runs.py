"""A model and one cache, fed with tokens: ours, the full one, one that knows the future, another project's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.cache.accounting import full_cache_bytes
from fade_runtime.layer.layer import TieredLayer
from fade_runtime.transformers_api import (
    NAME,
    can_tier,
    forward_kwargs,
    geometry,
    hand_over,
    implementation_of,
    register,
    stock_layers,
    text_config,
    window_of,
)
from pipelines.evaluation.oracle import Oracle, foresee, future_attention
from pipelines.evaluation.peer import Peer, peer_errors
from pipelines.evaluation.reachable import resident_bytes
from predictor.errors import FadeError
from predictor.twin import dense_twin


@dataclass(frozen=True)
class Method:
    """One line of the table: a name, and what the cache is to do; None is the full cache."""

    name: str
    config: FadeConfig | Oracle | Peer | None


class CacheBytes(NamedTuple):
    """Bytes of a cache at one moment, had the model been of two-byte floats.

    Attributes:
        resident: of all that is reachable from it. full: of the same tokens in the model's own cache.
        others, others_full: the part of both in layers that evict nothing (sliding windows, recurrent states).
    """

    resident: int
    full: int
    others: int = 0
    others_full: int = 0


class Run:
    """A model and one cache, fed with tokens.

    Attributes:
        tiered: whether the cache is one of ours.
        stride: tokens that may come in one call and leave the cache as they would one at a time.
        stores: while a prompt is read, the cache stores keys and values, and does nothing else.
        seen: tokens so far. since: those that followed the prompt.
    """

    def __init__(self, model: Any, config: FadeConfig | None) -> None:
        self.model, self.tiered, self.cache = model, config is not None, DynamicCache(config=model.config)
        self.stride, self.since, self.seen = 64, 0, 0
        stores = (can_tier(layer) or window_of(layer) is not None for layer in self.cache.layers)
        self.stores = config is not None or all(stores)
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
            call, tokens = tokens.split_with_sizes(self._next_call(tokens.shape[1]), dim=1)
            rows.append(self.feed(call))
            self.since += call.shape[1]
            self.seen += call.shape[1]
        return torch.cat(rows)

    def _next_call(self, waiting: int) -> list[int]:
        """Tokens that may come at once, and the rest."""
        now = min(waiting, self.stride - self.since % self.stride)
        return [now, waiting - now]

    def copied(self) -> Run:
        """The same model with a copy of the cache, to go on in another way."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def half_precision_bytes(self) -> CacheBytes:
        """What the cache holds now.

        Only what is in the model's own precision shrinks with it; codes, scales, slots and statistics are stored the
        same under every model.
        """
        if not self.tiered:
            full, evicting = (full_cache_bytes(layers) for layers in (self.cache.layers, self._evicting()))
            return CacheBytes(full, full, full - evicting, full - evicting)
        self.cache.count_held()
        report = self.cache.memory_report(as_16_bit=True)
        others = report["layers"]["others"]
        return CacheBytes(
            report["resident_bytes"], report["full_bytes"], others["resident_bytes"], others["full_bytes"]
        )

    def _evicting(self) -> list[Any]:
        return [layer for layer in self.cache.layers if can_tier(layer)]


class OracleRun(Run):
    """A model and a tiered cache whose policy knows what is to come."""

    def __init__(self, model: Any, oracle: Oracle) -> None:
        super().__init__(model, oracle.config)
        self.knows = False

    def know(self, future: dict[int, Tensor]) -> None:
        """Take in :func:`pipelines.evaluation.oracle.future_attention`: layer -> [H, S]."""
        foresee(self.cache, future)
        self.knows = True

    def feed(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """As any run: [n or 1, V].

        Raises:
            FadeError: it does not know the future, as in a task whose answers are not known.
        """
        if not self.knows:
            raise FadeError("an oracle needs a text whose continuation is known; leave it out here")
        return super().feed(tokens, cache)


class PeerRun(Run):
    """A model and another project's cache, fed with tokens."""

    def __init__(self, model: Any, peer: Peer) -> None:
        self.model, self.tiered, self.peer = model, False, peer
        with peer_errors(peer, 0):
            self.cache = peer.cache(model)
        self.stride, self.since, self.seen, self.stores = peer.stride, 0, 0, peer.stores

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take in a layer's keys and values [1, H, S, D] of a prompt.

        Raises:
            PeerError: the peer failed.
        """
        with peer_errors(self.peer, key.shape[2]):
            super().store(layer, key, value)

    def listen(self, model: Any) -> AbstractContextManager[None]:
        """What the peer does while a prompt is read."""
        return self.peer.listen(model, self.cache)

    def feed(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Read the prompt as the peer wants it, then the tokens after it: [n or 1, V].

        Raises:
            PeerError: the peer failed.
        """
        positions = {}
        if self.peer.keeps_positions:
            positions = {"position_ids": torch.arange(self.seen, self.seen + tokens.shape[1])[None]}
        with peer_errors(self.peer, tokens.shape[1]):
            if self.seen == 0:
                return self.peer.read(self.model, tokens, self.cache)
            kwargs = forward_kwargs(self.cache, self.model)
            return self.model(tokens, use_cache=True, **positions, **kwargs).logits[0]

    def copied(self) -> Run:
        """The same model with a copy of the cache, made as the peer's can be."""
        other = copy.copy(self)
        with peer_errors(self.peer, self.seen):
            other.cache = self.peer.copied(self.cache)
        return other

    def half_precision_bytes(self) -> CacheBytes:
        """What is reachable from the cache, and what a full cache of the same text holds."""
        return CacheBytes(resident_bytes(self.cache, self.model.dtype), bytes_in_full(self.model, self.seen))


def bytes_in_full(model: Any, seen: int) -> int:
    """Bytes of so many tokens in a full cache of two-byte floats: keys and values of all layers, as far as they look.

    Recurrent states are not counted.
    """
    config = text_config(model)
    heads, dim = geometry(config)
    windows = [window_of(layer) for layer in stock_layers(config) if isinstance(layer, CacheLayerMixin)]
    columns = sum(seen if window is None else min(seen, window - 1) for window in windows)
    return 2 * 2 * columns * heads * dim


def full_twin(model: Any) -> Any:
    """A twin of a model for the full cache, and for those of other projects.

    It is as the model, but that a model which transformers' SDPA cannot serve (learned sinks: gpt-oss) does not write
    down all scores at once, as eager attention does: 8,192 tokens and 64 heads would take 17 GB. It is computed by
    :func:`fade_runtime.transformers_api.dense_attention`.
    """
    twin = dense_twin(model)
    if implementation_of(text_config(twin)) == "eager" and not getattr(twin, "_supports_sdpa", True):
        register()
        twin.set_attn_implementation(NAME)
    return twin


def start(methods: Sequence[Method], model: Any, twin: Any) -> list[Run]:
    """Give each method an empty cache: a tiered one on the model, any other on its twin."""
    runs: list[Run] = []
    for config in (method.config for method in methods):
        if isinstance(config, Peer):
            runs.append(PeerRun(twin, config))
        elif isinstance(config, Oracle):
            runs.append(OracleRun(model, config))
        else:
            runs.append(Run(twin if config is None else model, config))
    return runs


def show_future(runs: Sequence[Run], tokens: Tensor, prompt: int) -> None:
    """Tell oracles what is to come: tokens [1, prompt + T]."""
    if oracles := [run for run in runs if isinstance(run, OracleRun)]:
        future = future_attention(oracles[0].model, tokens[0], prompt)
        for run in oracles:
            run.know(future)


def read_prompt(runs: Sequence[Run], prompt: Tensor, on_step: Callable[[], None] = lambda: None) -> None:
    """Fill each cache with a prompt [1, S]; those that only store it are filled by one forward."""
    with ExitStack() as listening:
        _read_prompt(runs, prompt, on_step, listening)
    for run in runs:
        run.seen = prompt.shape[1]


def _read_prompt(runs: Sequence[Run], prompt: Tensor, on_step: Callable[[], None], listening: ExitStack) -> None:
    tiered = [run for run in runs if run.tiered]
    together = bool(tiered) and all(isinstance(layer, TieredLayer) for run in tiered for layer in run.cache.layers)
    for run in tiered if together else ():
        run.cache.note_ids(prompt)  # the model is called with a cache of all of them
    for run in runs:
        if not (together and run.stores):
            run.feed(prompt)
        elif run is tiered[0]:
            others = [other for other in runs if other.stores and not other.tiered]
            for other in others:
                listening.enter_context(other.listen(run.model))
            layers = zip(*(each.cache.layers for each in tiered))
            run.feed(prompt, Cache(layers=[_ManyLayers(same, others) for same in layers]))
        on_step()


class _ManyLayers(TieredLayer):
    """The same layer of several tiered caches, as one: the first, in whose steps the others follow.

    While a prompt is read, all of them answer the same: what plain attention does. Other runs' caches, which only
    store keys and values, are filled along.
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
