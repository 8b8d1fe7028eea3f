"""The tiered cache: transformers' cache interface over tiered layers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from fade_runtime import transformers_api as hf
from fade_runtime.cache import attach, redecode
from fade_runtime.cache.accounting import memory_report, predictor_tensors, stored_bytes
from fade_runtime.cache.shadow import Shadow
from fade_runtime.config.config import FadeConfig
from fade_runtime.config.memory_target import MemoryController, target_bytes
from fade_runtime.guard.guard import Guard
from fade_runtime.layer.layer import TieredLayer
from fade_runtime.layer.sequences import Shared
from fade_runtime.policies.base import Policy
from fade_runtime.policies.registry import POLICIES
from fade_runtime.policies.text import SeenText, find_tokenizer, table_for
from predictor.errors import FadeError
from predictor.rope import find_rotary

if TYPE_CHECKING:
    from fade_runtime.storage.pq import CodebookSet


class TieredCache(Cache):
    """A drop-in cache for ``generate``: ``model.generate(**inputs, past_key_values=cache)``.

    Made by :func:`create_tiered_cache`. Its length is the number of tokens seen; it compresses itself at the end of
    the prompt and then each ``reassign_every`` tokens.
    """

    def __init__(
        self,
        layers: list[Any],
        config: FadeConfig,
        policy: Policy,
        model: nn.Module,
        codebook: CodebookSet | None = None,
        text: SeenText | None = None,
        memory: MemoryController | None = None,
        guard: Guard | None = None,
        holds: Sequence[attach.Hold] = (),
        wrapper: nn.Module | None = None,
    ) -> None:
        super().__init__(layers=layers)
        self.config, self.policy, self.codebook, self.text = config, policy, codebook, text
        self.memory, self.guard = memory, guard
        self._model, self._wrapper = weakref.ref(model), weakref.ref(model if wrapper is None else wrapper)
        self._holds = list(holds)  # on what is changed in the model, which goes with the last cache that holds it
        self.shadow = None if config.shadow_every is None else Shadow(config.shadow_every)
        self.shared = self.tiered[0].shared if self.tiered else Shared()
        self._changing = False  # what changes all layers is on its way, or did not end

    @property
    def model(self) -> nn.Module:
        """The model that this cache was made for.

        Raises:
            FadeError: it is gone; a cache does not keep it alive.
        """
        model = self._model()
        if model is None:
            raise FadeError("this cache's model is gone; keep it while you use the cache")
        return model

    def attach(self) -> None:
        """Change the model for this cache again, after :meth:`detach` or after somebody else changed its attention."""
        self._holds = _attached(self.model, self.config, self.text is not None, self._wrapper() or self.model)

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
        """Take in the new tokens of a layer; a call that is refused leaves all layers as they were before it.

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
            for layer in self.tiered:
                layer.count_held()

    def settle(self) -> None:
        """Take back what a call of the model left behind that did not end: an exception, an interrupt.

        The cache does so by itself before the next call, a crop, a session.

        Raises:
            FadeError: it cannot be taken back, since tokens have entered statistics or left full precision.
        """
        shared, whole = self.shared, not self._changing and all(layer.whole for layer in self.tiered)
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
        for each in (self.shared, self.text, self.memory, self.guard, self.shadow):
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
        for layer in self.tiered:
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

    def note_output(self, given: dict[str, Any], output: Any) -> None:
        """See what came out of the call, whose keyword arguments were ``given``; a call of the model shows it."""
        if self.shadow is not None:
            self.shadow.look(self, given, output)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch (beam search)."""
        with self._all_or_broken():
            super().reorder_cache(beam_idx)
            if self.text is not None:
                self.text.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows of the batch, in the given order, as often as named."""
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
        self.guard.cache = weakref.ref(self)
        return self.guard

    @property
    def tiered(self) -> list[TieredLayer]:
        """The layers that this cache compresses; the others are transformers' own."""
        return [layer for layer in self.layers if isinstance(layer, TieredLayer)]

    def memory_report(self) -> dict[str, Any]:
        """See :func:`fade_runtime.cache.accounting.memory_report`."""
        return memory_report(self)

    def cache_state_dict(self) -> dict[str, Any]:
        """See :func:`fade_runtime.cache.session.cache_state_dict`."""
        from fade_runtime.cache import session

        return session.cache_state_dict(self)

    def load_cache_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :func:`fade_runtime.cache.session.load_cache_state_dict`."""
        from fade_runtime.cache import session

        session.load_cache_state_dict(self, state)

    def save_session(self, path: str | Path) -> Path:
        """See :func:`fade_runtime.cache.session.save_session`."""
        from fade_runtime.cache import session

        return session.save_session(self, path)

    def load_session(self, path: str | Path) -> None:
        """See :func:`fade_runtime.cache.session.resume_session`."""
        from fade_runtime.cache import session

        session.resume_session(self, path)

    def dump_debug(self, path: str | Path, *, slots: bool = False) -> Path:
        """See :func:`fade_runtime.cache.telemetry.dump_debug`."""
        from fade_runtime.cache import telemetry

        return telemetry.dump_debug(self, path, slots=slots)


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


def create_tiered_cache(model: nn.Module, config: FadeConfig | Mapping[str, Any] | str | None = None) -> TieredCache:
    """Make a cache for a Hugging Face causal language model and switch the model to the "fade" attention.

    The model is as before when the last of its caches is gone, or has been left by ``with`` or ``cache.detach()``.

    Args:
        model: the model that will fill it, or a module that wraps one (adapters, `torch.compile`). Calls without this
            cache go on as before.
        config: :class:`FadeConfig`, its options in a dict, or "safe", "balanced" or "aggressive"; None: "safe".

    Raises:
        FadeError: an architecture that cannot be tiered, or a predictor that is missing, damaged or of another model.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> tiny = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16,
        ...                    vocab_size=8)
        >>> model = LlamaForCausalLM(tiny).eval()
        >>> cache = create_tiered_cache(model, FadeConfig(recent_window=8, int4_budget=16))
        >>> prompt = torch.randint(8, (1, 64))
        >>> _ = model.generate(prompt, past_key_values=cache, max_new_tokens=4, eos_token_id=None)
        >>> cache.get_seq_length(), cache.memory_report()["tokens"]
        (67, {'FP16': 30, 'HIGH': 32, 'LOW': 0, 'PQ': 0, 'EVICTED': 72})
    """
    config, wrapper, model = FadeConfig.of(config), model, hf.language_model(model)
    policy = POLICIES[config.eviction_policy](config)
    if policy.predictor is not None:
        policy.predictor.check(model, strict=config.strict)
        of_cache = [index for index, layer in enumerate(hf.stock_layers(hf.text_config(model))) if hf.can_tier(layer)]
        policy.check(layers=max(of_cache, default=-1) + 1, kv_heads=hf.geometry(hf.text_config(model))[0])
    seen = _seen_text(model, config, policy)
    holds = _attached(model, config, seen is not None, wrapper)
    text, codebook = hf.text_config(model), _codebook(model, config)
    rotary, sharers, stock = find_rotary(model), hf.sharers(text), hf.stock_layers(text)
    tiered = sum(map(hf.can_tier, stock))
    memory = None if config.memory is None else _controller(model, config, policy, seen, tiered)
    guard = None if config.guard == "off" else Guard(config, tiered, memory)
    takers = [index for index, layer in enumerate(stock) if isinstance(layer, CacheLayerMixin)]
    shared = Shared(max(takers))
    layers = [
        TieredLayer(
            config,
            policy,
            text,
            rotary,
            index,
            codebook=None if codebook is None else codebook.layers[index],
            sharers=sharers[index],
            text=seen,
            memory=memory,
            watch=None if guard is None else guard.watch(index),
            shared=shared,
        )
        if hf.can_tier(layer)
        else layer
        for index, layer in enumerate(stock)
    ]
    return TieredCache(layers, config, policy, model, codebook, seen, memory, guard, holds, wrapper)


def _attached(model: nn.Module, config: FadeConfig, listens: bool, wrapper: nn.Module) -> list[attach.Hold]:
    """Holds on all that a cache needs of its model, and of what wraps it; that may be the model itself."""
    holds = attach.attach(model)
    if config.on_rollback == "redecode":
        holds.append(redecode.attach(model, all(map(hf.can_tier, hf.stock_layers(hf.text_config(model))))))
    if listens:
        holds += [attach.listen(module) for module in {id(each): each for each in (model, wrapper)}.values()]
    return holds


def _seen_text(model: nn.Module, config: FadeConfig, policy: Policy) -> SeenText | None:
    if not policy.reads_text and config.assistant is None and config.shadow_every is None:
        return None
    table = table_for(model, find_tokenizer(model, config.tokenizer)) if policy.reads_text else None
    if config.assistant is None:
        return SeenText(table)
    from fade_runtime.cache.assistant import find_assistant

    asked = config.assistant, config.assist_weight, config.assist_tail, config.tokenizer
    return SeenText(table, find_assistant(model, *asked))


def _controller(
    model: nn.Module, config: FadeConfig, policy: Policy, text: SeenText | None, layers: int
) -> MemoryController:
    assert config.memory is not None
    predictor = [] if policy.predictor is None else predictor_tensors(policy.predictor)
    extra = stored_bytes(*predictor, *(text.tensors() if text is not None else []))
    target = target_bytes(config.memory, next(model.parameters()).device)
    return MemoryController(target, layers, extra, config.n_sink + config.recent_window, config.reassign_every)


def _codebook(model: nn.Module, config: FadeConfig) -> CodebookSet | None:
    if config.codebook is None:
        return None
    from fade_runtime.storage.pq import CodebookSet, load_codebook

    codebook = config.codebook if isinstance(config.codebook, CodebookSet) else load_codebook(config.codebook)
    codebook.check(model, strict=config.strict)
    return codebook.to(next(model.parameters()).device)
