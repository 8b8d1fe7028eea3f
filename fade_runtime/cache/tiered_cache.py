"""The tiered cache: transformers' cache interface over tiered layers."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from fade_runtime.cache import accounting, session, telemetry
from fade_runtime.cache.attach import Hold
from fade_runtime.cache.parts import CacheParts
from fade_runtime.cache.shadow import Shadow
from fade_runtime.cache.sizes import layer_sizes
from fade_runtime.config import FadeConfig, LayerSize, MemoryController
from fade_runtime.guard import Guard
from fade_runtime.layer import TieredLayer
from fade_runtime.layer.allocation import GlobalAllocation
from fade_runtime.layer.sequences import Shared
from fade_runtime.policies import Policy
from fade_runtime.policies.text import SeenText
from fade_runtime.storage.codebook import CodebookSet
from predictor.errors import FadeError


class TieredCache(Cache, CacheParts):
    """A drop-in cache for ``generate``: ``model.generate(**inputs, **cache.kwargs)``.

    Made by :func:`create_tiered_cache`. Its length is the number of tokens seen; it compresses itself at the end of
    the prompt and then each ``reassign_every`` tokens.
    """

    def __init__(
        self,
        layers: list[Any],
        config: FadeConfig,
        policy: Policy,
        model: nn.Module,
        hold_model: Callable[[], list[Hold]],
        holds: list[Hold],
        *,
        codebook: CodebookSet | None = None,
        text: SeenText | None = None,
        memory: MemoryController | None = None,
        allocation: GlobalAllocation | None = None,
        guard: Guard | None = None,
    ) -> None:
        """See :class:`CacheParts`; ``hold_model`` changes the model for the cache again, as ``holds`` say it is now."""
        super().__init__(layers=layers)
        self.config, self.policy, self.codebook, self.text = config, policy, codebook, text
        self.memory, self.allocation, self.guard = memory, allocation, guard
        self._model, self._hold_model = weakref.ref(model), hold_model
        self._holds = holds  # on what is changed in the model, which goes with the last cache that holds it
        self.shadow = None if config.shadow_every is None else Shadow(config.shadow_every)
        self.shared = self.own[0].shared if self.own else Shared()
        self._changing = False  # what changes all layers is on its way, or did not end
        self._bind()

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        """A copy that goes on by itself."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        copied._bind()
        return copied

    def _bind(self) -> None:
        """Let guard, memory target and allocation know the layers, without keeping the cache alive."""
        if self.guard is not None:
            self.guard.resident = partial(_resident_fraction, weakref.ref(self))
        if self.memory is not None:
            self.memory.sizes = partial(_sizes, weakref.ref(self))
        if self.allocation is not None:
            self.allocation.layers = partial(_tiered, weakref.ref(self))

    def attach(self) -> None:
        """Change the model for this cache again, after :meth:`detach` or after somebody else changed its attention."""
        self._holds = self._hold_model()

    def detach(self) -> None:
        """Let go of the model: when no other cache holds it either, its attention is what it was before, at once.

        It happens by itself when the cache goes, and at the end of ``with create_tiered_cache(...) as cache``.
        """
        self._holds = []

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *problem: object) -> None:
        self.detach()

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Take in the new tokens [B, H, Q, D] of a layer; a call that is refused leaves all layers as they were.

        Raises:
            FadeError: refused; or an earlier call did not end, and its part of the cache cannot be taken back.
        """
        shared = self.shared
        if layer_idx >= len(self.layers):
            shared.running = shared.last  # the call had seemed to be at its end
            self.settle()
            raise FadeError(
                f"the model has a layer {layer_idx}, this cache {len(self.layers)} layers; use the model that it is of"
            )
        if shared.running is None or layer_idx <= shared.running:
            self.settle()
            shared.before = self.get_seq_length()
        try:
            self._check_attended()
            shared.running = layer_idx
            out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except FadeError:
            self.settle()
            raise
        if not isinstance(self.layers[layer_idx], TieredLayer):
            shared.ended(layer_idx)
        return out

    def _check_attended(self) -> None:
        """Refuse a model whose attention did not take the tokens of the layer before."""
        running = self.shared.running
        if running is not None and not getattr(self.layers[running], "attended", True):
            raise FadeError(
                "this model's attention does not go over this cache; make one for it with create_tiered_cache(model)"
            )

    def count_held(self) -> None:
        """Make final what may still be taken back; else a call of a few tokens is counted when the next one comes."""
        with self._all_or_broken():
            for layer in self.own:
                layer.count_held()

    def settle(self) -> None:
        """Take back what a call of the model left behind that did not end: an exception, an interrupt.

        The cache does so by itself before the next call, a crop, a session.

        Raises:
            FadeError: it cannot be taken back, since tokens have entered statistics or left full precision.
        """
        shared, whole = self.shared, not self._changing and all(layer.whole for layer in self.own)
        running, before = shared.running, shared.before
        if running is not None and before == 0:
            self.reset()
        elif running is not None or not whole:
            self._changing = True
            taken_back = [whole and _taken_back(layer, before) for layer in self.layers[: (running or 0) + 1]]
            if all(taken_back):
                self._changing, shared.running = False, None
                if self.text is not None:
                    self.text.crop(before)
        if self._changing:
            raise FadeError(
                "a call of the model, or of this cache, did not end, and what it had changed by then cannot be taken "
                "back; call cache.reset(), or go on from a copy or a session"
            )

    def reset(self) -> None:
        """Forget everything: what is left is a new cache."""
        self._changing = True
        super().reset()
        self._changing = False
        for each in (self.shared, self.text, self.memory, self.allocation, self.guard, self.shadow):
            if each is not None:
                each.reset()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen; those of a call that has not ended are no part of it."""
        return super().get_seq_length(layer_idx) if self.shared.running is None else self.shared.before

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the mask of a call that begins."""
        self.settle()
        return super().get_mask_sizes(query_length, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest ``-tokens_to_remove`` tokens in all layers, or in none.

        Raises:
            FadeError: some of them have entered statistics or left full precision already.
        """
        self.settle()
        for layer in self.own:
            layer.check_crop(tokens_to_remove)
        with self._all_or_broken():
            super().crop(tokens_to_remove)
            if self.text is not None:
                self.text.crop(self.get_seq_length())

    @contextlib.contextmanager
    def _all_or_broken(self) -> Iterator[None]:
        """A change of all layers: if it does not end, the cache is of no use until it is reset."""
        self.settle()
        self._changing = True
        yield
        self._changing = False

    def note_ids(self, ids: Tensor | None) -> None:
        """Take in the token ids [B, Q] of the next call; a call of the model does so by itself."""
        self.settle()
        if self.text is not None:
            self.text.note(ids, self.get_seq_length())
        if self.shadow is not None:
            self.shadow.begin()

    def note_output(self, kwargs: dict[str, Any], output: Any) -> None:
        """See what came out of the call with these keyword arguments; a call of the model shows it."""
        if self.shadow is None or self.text is None or self.guard is None:
            return
        seen = self.get_seq_length()
        logits = self.shadow.awaited(output, seen, self.tiered[0].prompt)
        if logits is not None:
            self.guard.note_shadow(self.shadow.compare(self.model, self.text.upto(seen), kwargs, logits))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch by row numbers [B] (beam search)."""
        with self._all_or_broken():
            super().reorder_cache(beam_idx)
            if self.text is not None:
                self.text.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows of the batch by number [n], in that order, as often as named."""
        with self._all_or_broken():
            super().batch_select_indices(indices)
            if self.text is not None:
                self.text.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        with self._all_or_broken():
            super().batch_repeat_interleave(repeats)
            if self.text is not None:
                self.text.repeat(repeats)

    @property
    def monitor(self) -> Guard:
        """The guard, whose ``report()`` says how far the forecast of attention is off, and what was done.

        Raises:
            FadeError: this cache has none.
        """
        if self.guard is None:
            raise FadeError("this cache has no guard; create it with FadeConfig(guard='warn') or guard='rollback'")
        return self.guard

    def memory_report(self, as_16_bit: bool = False) -> dict[str, Any]:
        """See :func:`fade_runtime.cache.accounting.memory_report`."""
        return accounting.memory_report(self, as_16_bit)

    def cache_state_dict(self) -> dict[str, Any]:
        """See :func:`fade_runtime.cache.session.cache_state_dict`."""
        return session.cache_state_dict(self)

    def load_cache_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :func:`fade_runtime.cache.session.load_cache_state_dict`."""
        session.load_cache_state_dict(self, state)

    def save_session(self, path: str | Path) -> Path:
        """See :func:`fade_runtime.cache.session.save_session`."""
        return session.save_session(self, path)

    def load_session(self, path: str | Path) -> None:
        """See :func:`fade_runtime.cache.session.resume_session`."""
        session.resume_session(self, path)

    def dump_debug(self, path: str | Path, *, slots: bool = False) -> Path:
        """See :func:`fade_runtime.cache.telemetry.dump_debug`."""
        return telemetry.dump_debug(self, path, slots=slots)


def _resident_fraction(which: Callable[[], TieredCache | None]) -> float | None:
    """Bytes that a cache holds, as a fraction of those of a full one; None if the cache is gone."""
    cache = which()
    return None if cache is None else 1 / cache.memory_report()["compression"]


def _sizes(which: Callable[[], TieredCache | None]) -> list[LayerSize]:
    """What the layers of a cache take; nothing if the cache is gone."""
    cache = which()
    return [] if cache is None else layer_sizes(cache)


def _tiered(which: Callable[[], TieredCache | None]) -> list[TieredLayer]:
    """The layers of a cache whose tokens are chosen; none if the cache is gone."""
    cache = which()
    return [] if cache is None else cache.tiered


def _taken_back(layer: Any, before: int) -> bool:
    """Whether what a layer took in after ``before`` columns could be taken back."""
    if not isinstance(layer, CacheLayerMixin):
        return False  # a recurrent state, which may have changed
    extra = layer.get_seq_length() - before
    if extra > 0 and (not isinstance(layer, TieredLayer) or extra > layer.seen - layer.final):
        return False
    if extra > 0:
        layer.take_back(extra)
    return extra >= 0
