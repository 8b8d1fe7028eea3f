"""Making a tiered cache for a model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers.cache_utils import CacheLayerMixin

from fade_runtime import transformers_api as hf
from fade_runtime.cache import attach, redecode, session
from fade_runtime.cache.accounting import predictor_tensors, stored_bytes
from fade_runtime.cache.assistant import find_assistant
from fade_runtime.cache.attach import Hold
from fade_runtime.cache.tiered_cache import TieredCache
from fade_runtime.config import FadeConfig, MemoryController, target_bytes
from fade_runtime.guard import Guard
from fade_runtime.layer import LayerSetup, TieredLayer
from fade_runtime.layer.allocation import GlobalAllocation
from fade_runtime.layer.sequences import Shared
from fade_runtime.policies import POLICIES, Policy
from fade_runtime.policies.text import SeenText, find_tokenizer, table_for
from fade_runtime.storage.codebook import CodebookSet, load_codebook
from predictor.cache_layers import evictable_layers, kv_heads
from predictor.errors import FadeError
from predictor.rope import find_rotary


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
        >>> _ = model.generate(prompt, **cache.kwargs, max_new_tokens=4, eos_token_id=None)
        >>> cache.get_seq_length(), cache.memory_report()["tokens"]
        (67, {'FULL': 30, 'HIGH': 32, 'LOW': 0, 'PQ': 0, 'EVICTED': 72})
    """
    config, wrapper, model = FadeConfig.of(config), model, hf.language_model(model)
    policy = POLICIES[config.eviction_policy](config)
    if policy.predictor is not None:
        policy.predictor.check(model, strict=config.strict)
        policy.check(evictable_layers(hf.text_config(model)), kv_heads(hf.text_config(model)))
    seen = _seen_text(model, config, policy)
    hold_model = partial(_holds, weakref.ref(model), weakref.ref(wrapper), config, listens=seen is not None)
    holds = hold_model()
    text, codebook = hf.text_config(model), _codebook(model, config)
    rotary, sharers, stock = find_rotary(model), hf.kv_sharers(text), hf.stock_layers(text)
    tiered = sum(map(hf.can_tier, stock))
    memory = _controller(model, config, policy, seen) if config.has_target else None
    guard = None if config.guard == "off" else Guard(config, tiered, memory)
    takers = [index for index, layer in enumerate(stock) if isinstance(layer, CacheLayerMixin)]
    shared = Shared(max(takers))
    spill = None if guard is None else guard.spill
    allocation = GlobalAllocation() if config.allocation == "global" and config.ranks else None
    setup = LayerSetup(
        config, policy, weakref.ref(text), rotary, text=seen, memory=memory, allocation=allocation, spill=spill
    )
    _say_what_stays(text.model_type, stock, config)
    layers: list[Any] = []
    for index, layer in enumerate(stock):
        own, window = replace(setup, index=index, kv_sharers=sharers[index]), _packed_window(layer, config)
        if hf.can_tier(layer):
            own = own if codebook is None else replace(own, codebook=codebook.layers[index])
            layer = TieredLayer(own, None if guard is None else guard.watch(index), shared)
        elif window is not None:
            layer = TieredLayer(own.sliding(window), None if guard is None else guard.bystander(), shared)
        layers.append(layer)
    parts: Any = dict(codebook=codebook, text=seen, memory=memory, allocation=allocation, guard=guard)
    return TieredCache(layers, config, policy, model, hold_model, holds, **parts)


def load_session(model: nn.Module, path: str | Path, config: FadeConfig | None = None, **options: Any) -> TieredCache:
    """Make a cache that goes on where :func:`save_session` left one.

    A session says what a cache was like, not what a process reads, loads or writes: options that name a file, a folder,
    a hub id or a registry (:data:`fade_runtime.cache.session.PLACES`) are never taken from it.

    Args:
        model: the one that filled it, in the same dtype; on any device.
        path: of the session.
        config: options of the new cache, which must be those of the stored one; None: taken from the session.
        options: in place of the config's or the session's: ``predictor="smollm2-135m-instruct"``,
            ``spill_dir="scratch"``.

    Raises:
        FadeError: not there, damaged, of another model, or other options, predictor or codebook; or the session was
            made with a predictor, codebook, tokenizer, assistant or spill_dir, and none is given.
    """
    state, what = session.read_session(Path(path)), f"session {path}"
    config = session.stored_config(state["facts"], options, what) if config is None else config.with_options(**options)
    cache = create_tiered_cache(model, config)
    session.load_cache_state_dict(cache, state, what)
    return cache


def _holds(
    model_ref: Callable[[], nn.Module | None],
    wrapper_ref: Callable[[], nn.Module | None],
    config: FadeConfig,
    *,
    listens: bool,
) -> list[Hold]:
    """Holds on all that a cache needs of its model, and of what wraps it; that may be the model itself.

    Raises:
        FadeError: the model is gone, or cannot be tiered.
    """
    model = model_ref()
    if model is None:
        raise FadeError("this cache's model is gone; keep it while you use the cache")
    holds = attach.attach(model)
    if config.on_rollback == "redecode":
        stock = hf.stock_layers(hf.text_config(model))
        croppable = all(hf.can_tier(layer) or _packed_window(layer, config) for layer in stock)
        holds.append(redecode.attach(model, croppable))
    if listens:
        wrapper = wrapper_ref()  # not `or model`: a compiled module has no truth value
        modules = {id(module): module for module in (model, wrapper) if module is not None}
        holds += [attach.listen(module) for module in modules.values()]
    return holds


def _packed_window(layer: Any, config: FadeConfig) -> int | None:
    """The window of a stock layer that is to be packed; None: it is not."""
    window = hf.window_of(layer) if config.sliding == "packed" else None
    return window if window is not None and window > config.n_sink + config.recent_window else None


def _say_what_stays(name: str, stock: Sequence[Any], config: FadeConfig) -> None:
    """Warn of windows that are too short to be packed, and of a model none of whose layers is compressed."""
    windows = {index: window for index, layer in enumerate(stock) if (window := hf.window_of(layer)) is not None}
    packed = [hf.can_tier(layer) or _packed_window(layer, config) is not None for layer in stock]
    short = {index: window for index, window in windows.items() if config.sliding == "packed" and not packed[index]}
    if short:
        warnings.warn(
            f"{name}: the window of layers {', '.join(map(str, short))} is {min(short.values())} tokens, and n_sink "
            f"{config.n_sink} + recent_window {config.recent_window} stay exact anyway: nothing of it is packed; lower "
            "them",
            RuntimeWarning,
            stacklevel=3,
        )
    elif not any(packed):
        warnings.warn(
            f"{name} has no full-attention layer: its sliding-window layers stay transformers' own, nothing will be "
            "compressed",
            RuntimeWarning,
            stacklevel=3,
        )
    elif config.ranks and not any(map(hf.can_tier, stock)):
        warnings.warn(
            f"{name} has no full-attention layer, so nothing can be evicted: budgets, targets and predictors have no "
            "use; its sliding windows are stored in 4 bits",
            RuntimeWarning,
            stacklevel=3,
        )


def _seen_text(model: nn.Module, config: FadeConfig, policy: Policy) -> SeenText | None:
    if not policy.reads_text and config.assistant is None and config.shadow_every is None:
        return None
    table = table_for(model, find_tokenizer(model, config.tokenizer)) if policy.reads_text else None
    if config.assistant is None:
        return SeenText(table)
    assistant = find_assistant(
        model,
        config.assistant,
        weight=config.assist_weight,
        tail=config.assist_tail,
        tokenizer=config.tokenizer,
        make_cache=create_tiered_cache,
    )
    return SeenText(table, assistant)


def _controller(model: nn.Module, config: FadeConfig, policy: Policy, text: SeenText | None) -> MemoryController:
    predictor = [] if policy.predictor is None else predictor_tensors(policy.predictor)
    extra = stored_bytes(*predictor, *(text.tensors() if text is not None else []))
    target = None if config.memory is None else target_bytes(config.memory, next(model.parameters()).device)
    return MemoryController(
        target,
        config.target_compression,
        extra,
        exact=config.n_sink + config.recent_window,
        every=config.reassign_every,
        least=config.min_budget,
    )


def _codebook(model: nn.Module, config: FadeConfig) -> CodebookSet | None:
    if config.codebook is None:
        return None
    codebook = config.codebook if isinstance(config.codebook, CodebookSet) else load_codebook(config.codebook)
    codebook.check(model, strict=config.strict)
    return codebook.to(next(model.parameters()).device)
