"""The tiered cache: transformers' cache interface over tiered layers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fade_runtime import attach, hf, redecode
from fade_runtime.config import FadeConfig
from fade_runtime.guard import Guard
from fade_runtime.layer import TieredLayer
from fade_runtime.memory import MemoryController, target_bytes
from fade_runtime.policy import POLICIES, Policy
from fade_runtime.shadow import Shadow
from fade_runtime.text import SeenText, find_tokenizer, table_for
from fade_runtime.tiers import Tier
from predictor.errors import FadeError
from predictor.rope import find_rotary

if TYPE_CHECKING:
    from fade_runtime.pq import CodebookSet
    from predictor.bundle import Predictor


TIERS = tuple(tier.name for tier in Tier if tier < Tier.EVICTED)
KINDS = {
    "full.key": "FP16", "full.value": "FP16",
    "packed.key_codes": "INT4", "packed.value_codes": "INT4",
    "packed.low_key_codes": "INT2", "packed.low_value_codes": "INT2",
    "packed.pq_codes": "PQ", "pq.codes": "PQ",
}  # fmt: skip
OTHER = "scales and slots"


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
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Take in the new tokens of a layer; a call that is refused leaves all layers as they were before it."""
        try:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except FadeError:
            self._take_back(layer_idx)
            raise

    def _take_back(self, refused: int) -> None:
        seen = [layer.seen for layer in self.tiered if layer.index >= refused]
        for layer in self.tiered:
            extra = layer.seen - min(seen)
            if layer.index < refused and extra > 0:
                layer.reset() if extra == layer.seen else layer.crop(-extra)

    def note_ids(self, ids: Tensor | None) -> None:
        """Take in the token ids [B, Q] of the next call; a call of the model does so by itself."""
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
        super().reorder_cache(beam_idx)
        if self.text is not None:
            self.text.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows of the batch, in the given order, as often as named."""
        super().batch_select_indices(indices)
        if self.text is not None:
            self.text.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
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
        """Count what the cache holds now.

        Returns:
            resident_bytes: every tensor that is reachable from the cache, scales, slots, statistics, the predictor's
            weights, the text's token classes and what is spilled to the memory of the same device included; full_bytes:
            the same tokens in an uncompressed cache of the model's dtype; compression: their ratio; tiers: bytes by
            tier, with "statistics", "predictor", "text", "codebook", "spilled" and "other layers"; tokens: tokens kept
            per tier, summed over rows and layers; seen: logical tokens.
        """
        tiers = dict.fromkeys((*TIERS, OTHER, "statistics", "predictor", "codebook", "spilled", "other layers"), 0)
        tokens = dict.fromkeys((*TIERS, Tier.EVICTED.name), 0)
        in_full = 0
        for layer in self.tiered:
            if layer.store is None:
                continue
            stored = layer.resident()
            for kind in set(map(_kind, stored)):
                tiers[kind] += stored_bytes(
                    *(tensor for name, tensor in stored.items() if _kind(name) == kind)
                )
            in_full += full_bytes(layer)
            for name, count in layer.store.counts().items():
                tokens[name] += count
            if layer.store.spilled is not None and layer.device.type == "cpu":
                tiers["spilled"] += stored_bytes(*layer.store.spilled.tensors())
        others = [
            t
            for layer in self.layers
            if not isinstance(layer, TieredLayer)
            for t in reachable_tensors(vars(layer))
        ]
        tiers["other layers"] = stored_bytes(*others)
        if self.policy.predictor is not None:
            tiers["predictor"] = stored_bytes(*_reachable(self.policy.predictor))
        tiers["text"] = stored_bytes(*(self.text.tensors() if self.text is not None else []))
        tiers["codebook"] = stored_bytes(*(self.codebook.tensors() if self.codebook is not None else []))
        resident = sum(tiers.values())
        in_full += tiers["other layers"]
        return {
            "resident_bytes": resident,
            "full_bytes": in_full,
            "compression": in_full / resident if resident else 1.0,
            "tiers": tiers,
            "tokens": tokens,
            "seen": self.get_seq_length(),
        }

    def cache_state_dict(self) -> dict[str, Any]:
        """See :func:`fade_runtime.session.cache_state_dict`."""
        from fade_runtime import session

        return session.cache_state_dict(self)

    def load_cache_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :func:`fade_runtime.session.load_cache_state_dict`."""
        from fade_runtime import session

        session.load_cache_state_dict(self, state)

    def save_session(self, path: str | Path) -> Path:
        """See :func:`fade_runtime.session.save_session`."""
        from fade_runtime import session

        return session.save_session(self, path)

    def load_session(self, path: str | Path) -> None:
        """See :func:`fade_runtime.session.resume_session`."""
        from fade_runtime import session

        session.resume_session(self, path)

    def dump_debug(self, path: str | Path, *, slots: bool = False) -> Path:
        """See :func:`fade_runtime.telemetry.dump_debug`."""
        from fade_runtime import telemetry

        return telemetry.dump_debug(self, path, slots=slots)


def _reachable(predictor: Predictor) -> list[Tensor]:
    budgets = [] if predictor.budgets is None else [predictor.budgets.lost]
    return [*predictor.parameters(), *predictor.buffers(), *budgets]


def _kind(name: str) -> str:
    """What a tensor of a layer is counted as."""
    return "statistics" if name.endswith((".state", "queries")) else KINDS.get(name, OTHER)


def reachable_tensors(thing: Any) -> Iterator[Tensor]:
    """Tensors in nested dicts, lists and tuples."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for each in thing.values():
            yield from reachable_tensors(each)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from reachable_tensors(each)


def full_bytes(layer: TieredLayer) -> int:
    """Bytes of a layer's tokens, padding included, in an uncompressed cache of the model's dtype."""
    if layer.store is None:
        return 0
    full = layer.store.full
    width = (full.key.shape[3] + full.value.shape[3]) * full.key.element_size()
    return full.key.shape[0] * layer.store.heads * layer.seen * width


def stored_bytes(*tensors: Tensor) -> int:
    """Bytes of the storages behind ``tensors``, each once, whether or not a view covers its storage."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def create_tiered_cache(
    model: nn.Module, config: FadeConfig | Mapping[str, Any] | str | None = None
) -> TieredCache:
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
        (67, {'FP16': 30, 'INT4': 32, 'INT2': 0, 'PQ': 0, 'EVICTED': 72})
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
    from fade_runtime.assist import find_assistant

    asked = config.assistant, config.assist_weight, config.assist_tail, config.tokenizer
    return SeenText(table, find_assistant(model, *asked))


def _controller(
    model: nn.Module, config: FadeConfig, policy: Policy, text: SeenText | None, layers: int
) -> MemoryController:
    assert config.memory is not None
    predictor = [] if policy.predictor is None else _reachable(policy.predictor)
    extra = stored_bytes(*predictor, *(text.tensors() if text is not None else []))
    target = target_bytes(config.memory, next(model.parameters()).device)
    return MemoryController(target, layers, extra, config.n_sink + config.recent_window, config.reassign_every)


def _codebook(model: nn.Module, config: FadeConfig) -> CodebookSet | None:
    if config.codebook is None:
        return None
    from fade_runtime.pq import CodebookSet, load_codebook

    codebook = config.codebook if isinstance(config.codebook, CodebookSet) else load_codebook(config.codebook)
    codebook.check(model, strict=config.strict)
    return codebook.to(next(model.parameters()).device)
