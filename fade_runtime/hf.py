"""Everything that touches the API of transformers (5.17 to the newest).

The attention function and the mask function are registered under the name "fade". A tiered layer is handed to
the attention function with the call it belongs to, so caches, models and threads cannot mix: through the ``kwargs``
dict that ``update`` receives (5.24 and newer), and otherwise with the returned key.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from predictor.errors import FadeError
from predictor.provenance import head_dim

NAME = "fade"
HANDLE = "fade_layer"
# Model types whose attention modules call torch's SDPA themselves instead of a registered attention function.
CALL_SDPA = {"falcon"}
# Arguments that reach an attention function and do not change what it computes.
HARMLESS = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "num_items_in_batch", "is_causal", "dropout", "logits_to_keep", "sliding_window", "cache",
    "past_key_values", "return_shared_kv_states",
}  # fmt: skip
SWALLOWED_BY_SDPA = {"s_aux"}  # arguments that transformers' SDPA takes and forgets
SCORES_AT_ONCE = 1 << 24  # elements of the score matrix of one chunk of queries


class Attending(Protocol):
    """A cache layer that computes attention over what it holds.

    Attributes:
        sharers: layers of the model that attend to this layer's tokens after its own attention has.
    """

    sharers: int

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Attention of the queries [B, Hq, Q, D] that came with the last update: [B, Q, Hq, D]."""


class HandedKey(Tensor):
    """A key that brings its layer along, also to a model that calls torch's SDPA itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attend over the tiers in place of SDPA; anything else as ever."""
        if func is F.scaled_dot_product_attention:
            return _sdpa_over_tiers(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def _sdpa_over_tiers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Stand in for ``scaled_dot_product_attention``: [B, Hq, Q, D]."""
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    return getattr(key, HANDLE).attend(torch.nn.Module(), query, attn_mask, scaling).transpose(1, 2)


def fade_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # before scaling, as in transformers' SDPA: kvpress passes it by place
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a tiered layer, or over the given keys when the call brings none (another cache, or no cache).

    Returns:
        output [B, Q, Hq, D] and no weights, as transformers expects.

    Raises:
        FadeError: an argument that neither understands (attention sinks, a position bias).
    """
    layer = kwargs.pop(HANDLE, None) or getattr(key, HANDLE, None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    for name, given in kwargs.items():
        if given is not None and (name in SWALLOWED_BY_SDPA if layer is None else name not in HARMLESS):
            raise FadeError(
                f"attention argument {name!r} of {type(module).__name__} is not supported by the tiered cache; "
                "use transformers' own cache and attention for this model"
            )
    if layer is None:
        out = dense_attention(module, query, key, value, attention_mask, scaling, softcap, dropout, **kwargs)
    else:
        positions = kwargs.get("position_ids")
        out = layer.attend(module, query, attention_mask, scaling, softcap=softcap, position_ids=positions)
    return out, None


def dense_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    """Full keys and values: transformers' own SDPA, which knows no softcap, or the same with one: [B, Q, Hq, D].

    Args:
        module: the attention module. query: [B, Hq, Q, D]. key, value: [B, H, S, D].
        mask: [B or 1, 1 or Hq, Q, S], bool (True = visible) or additive; None: causal, or one query that sees all.
        scaling: factor on the scores. softcap: scores are bent into (-softcap, softcap). dropout: of probabilities.
    """
    if softcap is None:
        options = dict(dropout=dropout, scaling=scaling, **kwargs)
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    steps, slots = query.shape[2], key.shape[2]
    if mask is None and steps > 1:  # aligned with the first key, as SDPA does
        mask = torch.ones(1, 1, steps, slots, dtype=torch.bool, device=query.device).tril()
    chunk = max(1, SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * slots))
    parts = []
    for at in range(0, steps, chunk):
        visible = None if mask is None else mask[:, :, at : at + chunk]
        shares = _softcapped(query[:, :, at : at + chunk], key, visible, scaling, softcap)
        parts.append(F.dropout(shares, dropout) @ value[:, :, None])
    return torch.cat(parts, dim=3).flatten(1, 2).transpose(1, 2)


def _softcapped(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, softcap: float) -> Tensor:
    """Probabilities [B, H, G, Q, S] of scores that are bent by ``softcap * tanh(score / softcap)`` before the mask.

    Source: Gemma Team 2024, Gemma 2 (arXiv 2408.00118), section 2, "Logit soft-capping".
    """
    heads = key.shape[1]
    grouped = query.unflatten(1, (heads, -1))  # [B, H, G, Q, D]
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).float() * scaling
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        mask = mask.unflatten(1, (heads, -1)) if mask.shape[1] == query.shape[1] > 1 else mask[:, :, None]
        plain = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if plain else scores + mask
    return scores.softmax(-1).to(query.dtype)


def fade_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """The mask of SDPA, written out where layers share keys: transformers cuts their queries, and the mask along."""
    if getattr(config, "num_kv_shared_layers", None):
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, config=config, **kwargs)


def hand_over(layer: Attending, key: Tensor, call: dict[str, Any] | None) -> Tensor:
    """Let the attention function of this very call find ``layer``; returns the key to give back from ``update``.

    Layers that share the tokens have calls of their own, and only the key in common.
    """
    if call is not None and not layer.sharers:
        call[HANDLE] = layer
        return key
    handed = key.as_subclass(HandedKey)
    setattr(handed, HANDLE, layer)
    return handed


@runtime_checkable
class Noting(Protocol):
    """A cache that wants to know the token ids of the calls it comes with."""

    def note_ids(self, ids: Tensor | None) -> None:
        """Take in the token ids [B, Q] of the call that begins; None: it has embeddings only."""


class Listener:
    """A hook on a model that tells each call's cache the token ids, for as long as somebody holds this.

    The hook knows no cache: it looks for one among the arguments of the very call. Get one by :func:`listen`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        handle = module.register_forward_pre_hook(_note_ids, with_kwargs=True)
        weakref.finalize(self, handle.remove).atexit = False

    def __deepcopy__(self, memo: object) -> Listener:
        """Copies of a cache hold the same."""
        return self


_listeners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Listener]] = weakref.WeakKeyDictionary()
_listening = threading.Lock()


def listen(model: Any) -> Listener:
    """The model's one hook on its calls; calls of its parts are not heard."""
    with _listening:
        there = _listeners.get(model)
        listener = None if there is None else there()
        if listener is None:
            listener = Listener(model)
            _listeners[model] = weakref.ref(listener)
        return listener


def _note_ids(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for given in (*args, *kwargs.values()):
        if isinstance(given, Noting):
            given.note_ids(kwargs.get("input_ids", args[0] if args else None))


def is_attached(config: Any) -> bool:
    """Whether the model's attention goes over the tiers now."""
    try:  # asked in each layer of each step: past the attribute map, whose lookups take 12 us
        given = object.__getattribute__(config, "_attn_implementation_internal")
    except AttributeError:
        given = config._attn_implementation
    return given == _implementation(config)


def _implementation(config: Any) -> str:
    return "sdpa" if object.__getattribute__(config, "model_type") in CALL_SDPA else NAME


def attach(model: Any) -> None:
    """Switch a model to the "fade" attention; anything but a tiered cache still runs dense attention there.

    Raises:
        FadeError: an architecture whose cache cannot be tiered (MLA, attention sinks, recurrent, no attention
            interface, an encoder).
    """
    config = text_config(model)
    reason = _refusal(model, config)
    if reason:
        raise FadeError(f"{config.model_type} {reason}; use transformers' own cache")
    if not any(map(can_tier, stock_layers(config))):
        warnings.warn(
            f"{config.model_type} has no full-attention layer: its sliding-window layers stay transformers' own, "
            "nothing will be compressed",
            RuntimeWarning,
            stacklevel=3,
        )
    AttentionInterface.register(NAME, fade_attention)
    AttentionMaskInterface.register(NAME, fade_mask)
    wanted = _implementation(config)
    if not is_attached(config):
        model.set_attn_implementation(wanted)
    if not is_attached(config):
        raise FadeError(
            f"{type(model).__name__} cannot change its attention from {config._attn_implementation!r} to {wanted!r}"
            + (
                "; load it with attn_implementation='sdpa'"
                if wanted == "sdpa"
                else "; use transformers' own cache"
            )
        )


def _refusal(model: Any, config: Any) -> str | None:
    """Why this model's cache cannot be tiered, or None."""
    if config.is_encoder_decoder:
        return "has an encoder, and this is a cache for decoders"
    if getattr(config, "kv_lora_rank", None):
        return "uses multi-head latent attention (kv_lora_rank), whose cache is already compressed"
    if any(getattr(module, "sinks", None) is not None for module in model.modules()):
        return "uses attention sinks (s_aux), which the tiered attention does not support"
    layers = stock_layers(config)
    hides_state = getattr(model, "_is_stateful", False) and not _any_of(
        LinearAttentionCacheLayerMixin, layers
    )
    if hides_state or not _any_of(CacheLayerMixin, layers):
        return "is a recurrent model and keeps a state instead of keys and values"
    if not any(map(can_tier, layers)) and not any(getattr(layer, "is_sliding", False) for layer in layers):
        return f"has no full-attention layer but {sorted({type(layer).__name__ for layer in layers})}"
    if "reuse" in (getattr(config, "kv_sharing_modes", None) or ()) and not sum(sharers(config)):
        return "shares keys and values between layers in an unknown way (kv_sharing_modes)"
    if sum(sharers(config)) and len({parameter.device for parameter in model.parameters()}) > 1:
        return "shares keys and values between layers, which is not supported over several devices"
    return None


def _any_of(kind: type, layers: list[Any]) -> bool:
    return any(isinstance(layer, kind) for layer in layers)


def text_config(model: Any) -> Any:
    """The config of the language model proper."""
    return model.config.get_text_config(decoder=True)


def stock_layers(config: Any) -> list[Any]:
    """The layers of transformers' own cache for a model, in order."""
    return list(DynamicCache(config=config).layers)


def can_tier(layer: Any) -> bool:
    """Whether a stock layer is plain full attention; sliding windows, convolutions and states are left as they are."""
    return type(layer) is DynamicLayer


def sharers(config: Any) -> list[int]:
    """How many later layers attend to each layer's keys and values instead of their own (Gemma 3n, Gemma 4).

    Example:
        >>> from types import SimpleNamespace
        >>> kinds = ["sliding_attention", "full_attention"] * 3
        >>> sharers(SimpleNamespace(num_hidden_layers=6, num_kv_shared_layers=3, layer_types=kinds))
        [0, 2, 1, 0, 0, 0]
    """
    counts = [0] * config.num_hidden_layers
    own = len(counts) - (getattr(config, "num_kv_shared_layers", None) or 0)
    for kind in config.layer_types[own:] if own < len(counts) else ():
        counts[max(index for index in range(own) if config.layer_types[index] == kind)] += 1
    return counts


def geometry(config: Any) -> tuple[int, int]:
    """Kv heads and head dim."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads, head_dim(config)


def forward_kwargs(cache: Any, model: Any) -> dict[str, Any]:
    """Name the cache as this model's ``forward`` does: ``cache`` on new transformers, ``past_key_values`` before.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM, DynamicCache
        >>> tiny = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16,
        ...                    vocab_size=8)
        >>> model = LlamaForCausalLM(tiny)
        >>> out = model(torch.tensor([[1, 2, 3]]), **forward_kwargs(DynamicCache(config=tiny), model))
        >>> out.logits.shape
        torch.Size([1, 3, 8])
    """
    forward = inspect.unwrap(type(model).forward)
    name = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
    return {name: cache}
