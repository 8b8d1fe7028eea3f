"""Which model a trace set or a bundle was made for."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from predictor.errors import FadeError

SAMPLE = 256  # values of each parameter that enter the fingerprint


def weights_fingerprint(model: nn.Module) -> str:
    """Hash names, shapes and the first values of every parameter, rounded to bfloat16.

    The same for a float32 and a bfloat16 load of one checkpoint; reads a few hundred values a tensor, so it is
    quick on any model.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> weights_fingerprint(layer) == weights_fingerprint(layer.to(torch.bfloat16))
        True
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        head = parameter.detach().flatten()[:SAMPLE].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(head.numpy().tobytes())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash a tokenizer's vocabulary and special tokens."""
    facts = [sorted(tokenizer.get_vocab().items()), sorted(map(str, tokenizer.all_special_tokens))]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def head_dim(config: Any) -> int:
    """Head dimension of a text config, given or derived from the hidden size."""
    return _given(config, "head_dim") or config.hidden_size // config.num_attention_heads


def _given(config: Any, name: str) -> Any:
    """An option of a config; where layers have their own (Gemma 4) the general one, which ``getattr`` refuses."""
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def model_provenance(model: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Describe a causal language model so that a predictor can be held to it.

    Returns:
        A JSON-able dictionary: architecture, head geometry, RoPE, weights fingerprint and, when a tokenizer is
        given, its hash.
    """
    config = model.config.get_text_config(decoder=True)
    facts: dict[str, Any] = {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "kv_heads": _given(config, "num_key_value_heads") or config.num_attention_heads,
        "query_heads": config.num_attention_heads,
        "head_dim": head_dim(config),
        "vocab_size": config.vocab_size,
        "rope": json.loads(json.dumps(getattr(config, "rope_parameters", None), default=str)),
        "weights": weights_fingerprint(model),
    }
    if tokenizer is not None:
        facts["tokenizer"] = tokenizer_hash(tokenizer)
    return facts


def check_provenance(stored: dict[str, Any], model: Any, what: str) -> None:
    """Refuse a ``what`` that was made for another model.

    Args:
        stored: a dictionary from :func:`model_provenance`.
        model: the model it is to be used with. what: how to name the thing in the message.

    Raises:
        FadeError: names the first field that differs and both values.
    """
    for field, here in model_provenance(model).items():
        if field not in stored:
            raise FadeError(f"{what} does not say its model's {field}; make it again with this release")
        if stored[field] != here:
            raise FadeError(
                f"{what} was made for another model: {field} is {_short(stored[field])} there and {_short(here)} "
                "here; use the model it was made for, or make one for this model"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:12] + "..."
