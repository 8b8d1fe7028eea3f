"""Which model a trace set or a bundle was made for."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from predictor.cache_layers import kv_heads, typical_layer
from predictor.errors import FadeError

ALL_VALUES = "all:"  # begins a fingerprint of all values; without it, it is one of the first values of each parameter
FIRST_VALUES = 256  # how many those are
SAMPLE_SIZE = 64  # values of each tensor that are looked at to see whether a known model has changed
CHUNK = 1 << 24  # values converted at a time

_known: WeakKeyDictionary[nn.Module, tuple[Any, str]] = WeakKeyDictionary()  # model -> what it was, its fingerprint


def weights_fingerprint(model: nn.Module) -> str:
    """Hash names, shapes and all values of every parameter and stored buffer, floats rounded to bfloat16.

    The same for a float32 and a bfloat16 load of one checkpoint, on any device. The first call reads every value (.3
    seconds for 135 million); later ones look whether the tensors are the same and were not written to, by PyTorch's
    own count of writes and by a sample of the values, which also sees most writes around that count (``.data``).

    Returns:
        :data:`ALL_VALUES` and a SHA-256 in hexadecimal.

    Raises:
        FadeError: a tensor without values, on the meta device.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> weights_fingerprint(layer) == weights_fingerprint(layer.to(torch.bfloat16))
        True
    """
    now = _watch(model)
    before, fingerprint = _known.get(model, (None, ""))
    if now is None or now != before:
        digest = hashlib.sha256()
        for name, tensor in _tensors(model):
            kind = "" if tensor.is_floating_point() else f"{tensor.dtype}"
            digest.update(f"{name}{tuple(tensor.shape)}{kind}".encode())
            flat = tensor.detach().reshape(-1)
            for start in range(0, flat.numel(), CHUNK):
                digest.update(_bytes(flat[start : start + CHUNK]))
        fingerprint = ALL_VALUES + digest.hexdigest()
        _known[model] = now, fingerprint
    return fingerprint


def first_values_fingerprint(model: nn.Module) -> str:
    """The fingerprint of earlier releases, which saw the first values of each parameter only."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        head = parameter.detach().flatten()[:FIRST_VALUES].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(head.numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each once, and the buffers that a checkpoint holds (codes of quantised weights are buffers)."""
    buffers = [
        (f"{path}.{name}".lstrip("."), buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    for name, tensor in (*model.named_parameters(), *buffers):
        if tensor.is_meta:
            raise FadeError(f"{name} of the model is on the meta device and has no values; load its weights")
        yield name, tensor


def _bytes(values: Tensor) -> memoryview:
    """Values [T] as the fingerprint sees them."""
    rounded = values.to(torch.bfloat16) if values.is_floating_point() else values
    return rounded.contiguous().view(torch.uint8).cpu().numpy().data


def _watch(model: nn.Module) -> Any:
    """What changes when a model's values do: each tensor's place and count of writes, a sample of its values.

    None where writes are not counted, as for tensors that were made in inference mode.
    """
    places, some = [], defaultdict(list)
    for name, tensor in _tensors(model):
        if tensor.is_inference():
            return None
        places.append((name, tuple(tensor.shape), tensor.data_ptr(), tensor._version))
        flat = tensor.detach().reshape(-1)
        some[tensor.dtype, tensor.device].append(flat[:: max(flat.numel() // SAMPLE_SIZE, 1)])
    return places, {kind: _bytes(torch.cat(each)).tobytes() for kind, each in some.items()}


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash a tokenizer's vocabulary and special tokens."""
    facts = [sorted(tokenizer.get_vocab().items()), sorted(map(str, tokenizer.all_special_tokens))]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def head_dim(config: Any) -> int:
    """Head dimension of a text config, its own or derived from the hidden size.

    Where layers have their own (Gemma 4) it is the general one, which ``getattr`` refuses.
    """
    own = vars(config)["head_dim"] if "head_dim" in vars(config) else getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def model_provenance(model: Any, tokenizer: Any = None, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe a causal language model so that a predictor can be held to it.

    Args:
        model: the model. tokenizer: enters unless it is None.
        like: what it is to be compared with; one of an earlier release has a fingerprint of another kind.

    Returns:
        A JSON-able dictionary: architecture, head geometry, RoPE, weights fingerprint and, with a tokenizer, its hash.
    """
    config = model.config.get_text_config(decoder=True)
    facts: dict[str, Any] = {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "kv_heads": kv_heads(config),
        "query_heads": config.num_attention_heads,
        "head_dim": head_dim(config.per_layer_config[typical_layer(config)]),
        "vocab_size": config.vocab_size,
        "rope": json.loads(json.dumps(getattr(config, "rope_parameters", None), default=str)),
        "weights": first_values_fingerprint(model) if like and not _sees_all(like) else weights_fingerprint(model),
    }
    if tokenizer is not None:
        facts["tokenizer"] = tokenizer_hash(tokenizer)
    return facts


def check_provenance(stored: Mapping[str, Any], model: Any, what: str) -> None:
    """Refuse a ``what`` that was made for another model.

    Args:
        stored: a dictionary from :func:`model_provenance`.
        model: the model it is to be used with. what: how to name the thing in the message.

    Raises:
        FadeError: names the first field that differs and both values.
    """
    for field, here in model_provenance(model, like=stored).items():
        if field not in stored:
            raise FadeError(f"{what} does not say its model's {field}; make it again with this release")
        if stored[field] != here:
            raise FadeError(
                f"{what} was made for another model: {field} is {_short(stored[field])} there and {_short(here)} "
                "here; use the model it was made for, or make one for this model"
            )
    if not _sees_all(stored):
        warnings.warn(
            f"{what} knows its model by the first {FIRST_VALUES} values of each parameter, as earlier releases did: "
            "one that differs in others would pass for it; make it again with this release",
            stacklevel=2,
        )


def _sees_all(stored: Mapping[str, Any]) -> bool:
    return str(stored.get("weights")).startswith(ALL_VALUES)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:12] + "..."
