"""Everything that touches the API of transformers (5.17 to the newest).

The attention function and the mask function are registered under the name "fade". A tiered layer is handed to
the attention function with the call it belongs to, so caches, models and threads cannot mix: through the ``kwargs``
dict that ``update`` receives (5.24 and newer), and otherwise with the returned key.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from predictor import learned_sinks
from predictor.cache_layers import can_tier as can_tier
from predictor.cache_layers import stock_layers as stock_layers
from predictor.errors import FadeError
from predictor.provenance import head_dim

NAME = "fade"
HANDLE = "fade_layer"
MASKS = "fade_masks"  # attribute of a mask: the one for tiered layers, and the one for everything else
# Model types whose attention modules call torch's SDPA themselves instead of a registered attention function.
CALL_SDPA = {"falcon"}
# Arguments that reach an attention function and do not change what it computes.
HARMLESS = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "num_items_in_batch", "is_causal", "dropout", "logits_to_keep", "sliding_window", "cache",
    "past_key_values", "return_shared_kv_states",
}  # fmt: skip
CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # newest first
SCORES_AT_ONCE = 1 << 24  # elements of the score matrix of one chunk of queries


class Attending(Protocol):
    """A cache layer that computes attention over what it holds."""

    @property
    def kv_sharers(self) -> int:
        """Layers of the model that attend to this layer's tokens after its own attention has."""

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None = None,
        position_ids: Tensor | None = None,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of the queries [B, Hq, Q, D] of the last update, which brought key and value: [B, Q, Hq, D]."""


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
    layer = getattr(key, HANDLE)
    return layer.attention(nn.Module(), query, key, value, attn_mask, scaling, dropout=dropout_p).transpose(1, 2)


def fade_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # before scaling, as in transformers' SDPA: kvpress passes it by place
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention over a tiered layer, or as before when the call brings none (another cache, or no cache).

    Arguments are those of :func:`dense_attention`, under transformers' names: ``s_aux`` are the learned sinks [Hq].

    Returns:
        output [B, Q, Hq, D], and the weights if the model's own attention gives them.

    Raises:
        FadeError: an argument that the tiered cache does not understand (a position bias), or a tiered cache under a
            name that the model's ``forward`` does not know.
    """
    layer = kwargs.pop(HANDLE, None) or getattr(key, HANDLE, None)
    ours, theirs = getattr(attention_mask, MASKS, (attention_mask, attention_mask))
    scaled = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer is not None:
        _refuse_unknown(module, kwargs)
        more = dict(softcap=softcap, position_ids=kwargs.get("position_ids"), dropout=dropout, sinks=s_aux)
        return layer.attention(module, query, key, value, ours, scaled, **more), None
    _refuse_misnamed(module, kwargs)
    own = _own_attention(module)
    if own is not None:
        optional = {"softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: each for name, each in optional.items() if each is not None}
        return own(module, query, key, value, theirs, dropout=dropout, scaling=scaling, **kwargs)
    return dense_attention(module, query, key, value, theirs, scaled, softcap, dropout, s_aux, **kwargs), None


def _refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name, given in kwargs.items():
        if given is not None and name not in HARMLESS:
            raise FadeError(
                f"attention argument {name!r} of {type(module).__name__} is not supported by the tiered cache; "
                "use transformers' own cache and attention for this model"
            )


def _refuse_misnamed(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse a tiered cache that ``forward`` took for any keyword argument, and did not use."""
    for name in CACHE_NAMES:
        layers = getattr(kwargs.get(name), "layers", ())
        index = getattr(module, "layer_idx", None)
        if index is not None and index < len(layers) and hasattr(layers[index], "attend"):
            others = " or ".join(repr(other) for other in CACHE_NAMES[:2] if other != name)
            raise FadeError(f"this model's forward does not know the argument {name!r}; give the cache as {others}")


def _own_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The attention function that a module had before caches came; None: SDPA."""
    name = getattr(implementation_of(getattr(module, "config", None)), "before", None)
    if name == "eager":
        return getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    return None if name in (None, "sdpa", NAME) else ALL_ATTENTION_FUNCTIONS.get(name)


def is_autocast(device: str) -> bool:
    """Whether autocast is on for a type of device, which may know of none."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def as_attended(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call with tensors in the dtype in which SDPA reads them under autocast, and without autocast in what is called.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     as_attended(torch.add, torch.zeros(1), torch.zeros(1).bfloat16()).dtype
        torch.bfloat16
    """
    device = next(each.device.type for each in args if isinstance(each, Tensor))
    dtype = torch.get_autocast_dtype(device)
    cast = [each.to(dtype) if isinstance(each, Tensor) and each.dtype != torch.bool else each for each in args]
    with torch.autocast(device, enabled=False):  # scores, statistics and scales have dtypes of their own
        return call(*cast, **kwargs)


def dense_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Full keys and values: transformers' own SDPA, which knows neither softcap nor sinks, or the same with them.

    Args:
        module: the attention module. query: [B, Hq, Q, D]. key, value: [B, H, S, D].
        mask: [B or 1, 1 or Hq, Q, S], bool (True = visible) or additive; None: causal, or one query that sees all.
        scaling: factor on the scores. softcap: scores are bent into (-softcap, softcap). dropout: of probabilities.
        sinks: [Hq] learned sinks, or None.

    Returns:
        [B, Q, Hq, D].
    """
    if softcap is None:
        options = dict(dropout=dropout, scaling=scaling, **kwargs)

        def sdpa(*tokens: Tensor | None) -> Tensor:
            return sdpa_attention_forward(module, *tokens, **options)[0]

        tokens = query, key, value, mask
        return sdpa(*tokens) if sinks is None else learned_sinks.attend(sdpa, *tokens, scaling, sinks)
    steps, slots = query.shape[2], key.shape[2]
    if mask is None and steps > 1:  # aligned with the first key, as SDPA does
        mask = torch.ones(1, 1, steps, slots, dtype=torch.bool, device=query.device).tril()
    chunk = max(1, SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * slots))
    parts = []
    for at in range(0, steps, chunk):
        visible = None if mask is None else mask[:, :, at : at + chunk]
        shares = _softcapped(query[:, :, at : at + chunk], key, visible, scaling, softcap, sinks)
        parts.append(F.dropout(shares, dropout) @ value[:, :, None])
    return torch.cat(parts, dim=3).flatten(1, 2).transpose(1, 2)


def _softcapped(
    query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, softcap: float, sinks: Tensor | None
) -> Tensor:
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
    by_group = None if sinks is None else sinks.float().view(heads, -1, 1)
    return learned_sinks.softmax(scores, by_group).to(query.dtype)


def fade_mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """The mask of SDPA, written out where layers share keys: transformers cuts their queries, and the mask along.

    Where the model had another attention, or another mask, it is that mask, which brings ours along: calls with other
    caches are as before, also those during which the model is switched.
    """
    before = getattr(implementation_of(config), "before", None)
    make = sdpa_mask if before in (None, "sdpa", NAME) else ALL_MASK_ATTENTION_FUNCTIONS.get(before)
    theirs = None if make is None else make(*args, config=config, **kwargs)
    shares = getattr(config, "num_kv_shared_layers", None)
    if make is sdpa_mask and not shares:
        return theirs
    ours = sdpa_mask(*args, config=config, **{**kwargs, **({"allow_is_causal_skip": False} if shares else {})})
    mask = ours if theirs is None else theirs
    if mask is not None:
        setattr(mask, MASKS, (ours, theirs))
    return mask


def register() -> None:
    """Make "fade" a name that models know: for caches with tiers, and for what transformers' SDPA cannot compute."""
    AttentionInterface.register(NAME, fade_attention)
    AttentionMaskInterface.register(NAME, fade_mask)


def hand_over(layer: Attending, key: Tensor, call: dict[str, Any] | None) -> Tensor:
    """Let the attention function of this call find ``layer``; returns the key [B, H, Q, D] for ``update`` to return.

    Layers that share the tokens have calls of their own, and only the key in common.
    """
    if call is not None and not layer.kv_sharers:
        call[HANDLE] = layer
        return key
    handed = key.as_subclass(HandedKey)
    setattr(handed, HANDLE, layer)
    return handed


def is_attached(config: Any) -> bool:
    """Whether the model's attention goes over the tiers now."""
    return implementation_of(config) == implementation(config)


def implementation_of(config: Any) -> str | None:
    """The attention implementation that a config names."""
    if torch.compiler.is_compiling():
        return config._attn_implementation
    try:  # asked in each layer of each step: past the attribute map, whose lookups take 12 us
        return object.__getattribute__(config, "_attn_implementation_internal")
    except AttributeError:
        return getattr(config, "_attn_implementation", None)


def implementation(config: Any) -> str:
    """The attention that a model must have for tiered layers to be asked."""
    return "sdpa" if object.__getattribute__(config, "model_type") in CALL_SDPA else NAME


def text_config(model: Any) -> Any:
    """The config of the language model proper."""
    return model.config.get_text_config(decoder=True)


def window_of(layer: Any) -> int | None:
    """Tokens that a query of a stock layer attends to, itself included; None: it is no sliding-window layer."""
    return layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None


def kv_sharers(config: Any) -> list[int]:
    """How many later layers attend to each layer's keys and values instead of their own (Gemma 3n, Gemma 4).

    Example:
        >>> from types import SimpleNamespace
        >>> kinds = ["sliding_attention", "full_attention"] * 3
        >>> kv_sharers(SimpleNamespace(num_hidden_layers=6, num_kv_shared_layers=3, layer_types=kinds))
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
    return {cache_name(language_model(model)) or "past_key_values": cache}


def cache_name(model: Any) -> str | None:
    """What this model's ``forward`` calls its cache; None: it takes none."""
    known = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return next((name for name in CACHE_NAMES if name in known), None)


def language_model(given: Any) -> Any:
    """The model of transformers that a module is or wraps (adapters, data parallelism, `torch.compile`).

    Raises:
        FadeError: there is none in it, or more than one.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> tiny = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16,
        ...                    vocab_size=8)
        >>> model = LlamaForCausalLM(tiny)
        >>> language_model(nn.DataParallel(model)) is model
        True
    """
    if isinstance(given, PreTrainedModel):
        return given
    level = [given] if isinstance(given, nn.Module) else []
    while level:
        found = {id(module): module for module in level if isinstance(module, PreTrainedModel)}
        if len(found) > 1:
            names = sorted(type(module).__name__ for module in found.values())
            raise FadeError(f"{type(given).__name__} holds several models, {', '.join(names)}; give one of them")
        if found:
            return next(iter(found.values()))
        level = [child for module in level for child in module.children()]
    raise FadeError(
        f"{type(given).__name__} neither is a model of transformers nor wraps one; give what from_pretrained returned"
    )
