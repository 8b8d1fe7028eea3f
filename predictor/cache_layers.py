"""Which layers of a language model tokens can be evicted from: full attention that keeps keys of its own.

Transformers' own cache says what each layer keeps: all keys and values, a window of them (Gemma, Mistral, gpt-oss), a
recurrent state (Qwen3-Next, LFM2), or nothing, where another layer's keys are read (Gemma 3n, Gemma 4). The runtime
evicts in the first kind only, so traces, head budgets and certificates are about these layers, under the numbers that
they have in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predictor.errors import FadeError


def stock_layers(config: Any) -> list[Any]:
    """The layers of transformers' own cache for the config of a language model, in order."""
    from transformers import DynamicCache  # heavy: only where there is a model

    return list(DynamicCache(config=config).layers)


def can_tier(layer: Any) -> bool:
    """Whether a stock layer is plain full attention; sliding windows, convolutions and states are left as they are."""
    from transformers.cache_utils import DynamicLayer

    return type(layer) is DynamicLayer


def evictable_layers(config: Any) -> list[int]:
    """Indices of the layers that tokens can be evicted from.

    Args:
        config: of the language model proper (``model.config.get_text_config(decoder=True)``).

    Example:
        >>> from transformers import Gemma3TextConfig
        >>> kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        >>> evictable_layers(Gemma3TextConfig(num_hidden_layers=6, layer_types=kinds, sliding_window=8))
        [2, 5]
    """
    return [index for index, layer in enumerate(stock_layers(config)) if can_tier(layer)]


def learnable_layers(config: Any) -> list[int]:
    """The evictable layers of a model, of which there is one at least, and which have the same number of kv heads.

    Raises:
        FadeError: no such layer, or other kv heads in some than in others.

    Example:
        >>> from transformers import MistralConfig
        >>> try: learnable_layers(MistralConfig(num_hidden_layers=2, sliding_window=24))
        ... except FadeError as error: print(error)  # doctest: +ELLIPSIS
        no layer of mistral keeps all its tokens, so there is nothing to learn; ... FadeConfig(sliding="packed")
    """
    layers = evictable_layers(config)
    if not layers:
        raise FadeError(
            f"no layer of {config.model_type} keeps all its tokens, so there is nothing to learn; its windows can only "
            'be stored in 4 bits: FadeConfig(sliding="packed")'
        )
    heads = {layer: kv_heads(config, layer) for layer in layers}
    first = layers[0]
    if other := next((layer for layer in layers if heads[layer] != heads[first]), None):
        raise FadeError(
            f"layer {first} of {config.model_type} has {heads[first]} kv heads and layer {other} has {heads[other]}; "
            "head budgets need one number: use another model, or a policy that learns nothing (h2o)"
        )
    return layers


def kv_heads(config: Any, layer: int | None = None) -> int:
    """Kv heads of a layer; None: of :func:`typical_layer`.

    Example:
        >>> from transformers import LlamaConfig
        >>> kv_heads(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
        2
    """
    own = config.per_layer_config[typical_layer(config) if layer is None else layer]
    return getattr(own, "num_key_value_heads", None) or own.num_attention_heads


def typical_layer(config: Any) -> int:
    """The layer whose heads stand for a model's: the first evictable one, or the first of all where there is none.

    In Gemma 4 full attention has other kv heads, and another head dim, than sliding windows.
    """
    return next(iter(evictable_layers(config)), 0)


def in_words(layers: Sequence[int], noun: str = "layer") -> str:
    """Layers as a message names them: one after the other, or from the first to the last where none is left out.

    Example:
        >>> in_words([5, 11, 17]), in_words(range(30)), in_words([2])
        ('layers 5, 11, 17', 'layers 0 to 29', 'layer 2')
    """
    if len(layers) < 2:
        return f"{noun} {layers[0]}" if layers else f"no {noun}"
    consecutive = list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{noun}s " + (f"{layers[0]} to {layers[-1]}" if consecutive else ", ".join(map(str, layers)))
