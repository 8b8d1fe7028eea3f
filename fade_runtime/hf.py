"""Everything that touches the API of transformers (5.17 to the newest).

The attention function and the mask function are registered under the name "fade". A tiered layer is handed to
the attention function with the call it belongs to, so caches, models and threads cannot mix: through the ``kwargs``
dict that ``update`` receives (5.24 and newer), and as an attribute of the returned key before that.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from predictor.errors import FadeError
from predictor.provenance import head_dim

NAME = "fade"
HANDLE = "fade_layer"
# Arguments that reach an attention function and do not change what it computes.
HARMLESS = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
    "num_items_in_batch", "is_causal", "dropout", "logits_to_keep", "sliding_window", "cache", "past_key_values",
    "return_shared_kv_states",
}  # fmt: skip


class Attending(Protocol):
    """A cache layer that computes attention over what it holds."""

    def attend(self, module: torch.nn.Module, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attention of the queries [B, Hq, Q, D] that came with the last update: [B, Q, Hq, D]."""


def fade_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a tiered layer, or plain SDPA when the call brings none (another cache, or no cache).

    Returns:
        output [B, Q, Hq, D] and no weights, as transformers expects.
    """
    layer = kwargs.pop(HANDLE, None) or getattr(key, HANDLE, None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    for name, given in kwargs.items():
        if given is not None and name not in HARMLESS:
            raise FadeError(
                f"attention argument {name!r} of {type(module).__name__} is not supported by the tiered cache; "
                "use transformers' own cache for this model"
            )
    return layer.attend(module, query, attention_mask, scaling), None


def dense_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Transformers' own SDPA over full keys and values: [B, Q, Hq, D]."""
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)[0]


def hand_over(layer: Attending, key: Tensor, call: dict[str, Any] | None) -> Tensor:
    """Let the attention function of this very call find ``layer``; returns the key to give back from ``update``."""
    if call is not None:
        call[HANDLE] = layer
        return key
    key = key.view_as(key)
    setattr(key, HANDLE, layer)
    return key


def is_attached(config: Any) -> bool:
    """Whether the model runs the "fade" attention now."""
    return config._attn_implementation == NAME


def attach(model: Any) -> None:
    """Switch a model to the "fade" attention; anything but a tiered cache still runs plain SDPA there.

    Raises:
        FadeError: an architecture whose cache cannot be tiered (MLA, no attention layer, no attention interface).
    """
    config = text_config(model)
    if getattr(config, "kv_lora_rank", None):
        raise FadeError(
            f"{config.model_type} uses multi-head latent attention (kv_lora_rank), whose cache is already compressed; "
            "use its own cache"
        )
    if not any(map(can_tier, stock_layers(config))):
        raise FadeError(f"{config.model_type} has no full-attention layer; there is nothing to compress")
    AttentionInterface.register(NAME, fade_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if not is_attached(config):
        model.set_attn_implementation(NAME)
    if not is_attached(config):
        raise FadeError(f"{type(model).__name__} does not take custom attention functions; it cannot use this cache")


def text_config(model: Any) -> Any:
    """The config of the language model proper."""
    return model.config.get_text_config(decoder=True)


def stock_layers(config: Any) -> list[Any]:
    """The layers of transformers' own cache for a model, in order."""
    return list(DynamicCache(config=config).layers)


def can_tier(layer: Any) -> bool:
    """Whether a stock layer is plain full attention; sliding windows, convolutions and states are left as they are."""
    return type(layer) is DynamicLayer


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
