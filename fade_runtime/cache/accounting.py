"""Bytes: what a cache holds now, every tensor that is reachable from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fade_runtime.cache.parts import CacheParts
from fade_runtime.layer import CompressedLayer, TieredLayer
from fade_runtime.storage.tiers import Tier
from predictor.bundle import Predictor

TIERS = tuple(tier.name for tier in Tier if tier < Tier.EVICTED)
KINDS = {
    "full.key": "FULL", "full.value": "FULL",
    "packed.key_codes": "HIGH", "packed.value_codes": "HIGH",
    "packed.low_key_codes": "LOW", "packed.low_value_codes": "LOW",
    "packed.pq_codes": "PQ", "pq.codes": "PQ",
}  # fmt: skip
EXACT, OTHER = KINDS["full.key"], "scales and slots"


def memory_report(cache: CacheParts, as_16_bit: bool = False) -> dict[str, Any]:
    """Count what the cache holds now.

    Args:
        cache: of any model.
        as_16_bit: count numbers in the model's own precision as two bytes each, as a model of two-byte floats has them.

    Returns:
        resident_bytes: every tensor that is reachable from the cache, scales, slots, statistics, the predictor's
        weights, the text's token classes and what is spilled to the memory of the same device included; full_bytes:
        the same tokens in an uncompressed cache of the model's dtype; compression: their ratio; tiers: bytes by
        tier, with "statistics", "predictor", "text", "codebook", "spilled" and "other layers" (transformers' own);
        layers: the three numbers for "compressed" layers (full attention, with all that serves them), for "others"
        (sliding windows, recurrent states) and for the "whole"; tokens: tokens kept per tier, summed over rows and
        layers; seen: logical tokens; reachable: the compression that a target_compression has come down to, or None.
    """
    tiers = dict.fromkeys((*TIERS, OTHER, "statistics", "predictor", "codebook", "spilled", "other layers"), 0)
    tokens = dict.fromkeys((*TIERS, Tier.EVICTED.name), 0)
    others, others_full, in_full = 0, 0, 0
    for layer in cache.own:
        if layer.store is None:
            continue
        stored, before = layer.resident(), sum(tiers.values())
        for kind in set(map(_kind, stored)):
            size = stored_bytes(*(tensor for name, tensor in stored.items() if _kind(name) == kind))
            tiers[kind] += _as_stored(size, layer.dtype, as_16_bit) if kind == EXACT else size
        for name, count in layer.store.counts().items():
            tokens[name] += count
        if layer.store.spilled is not None and layer.device.type == "cpu":
            tiers["spilled"] += stored_bytes(*layer.store.spilled.tensors())
        full = _as_stored(full_bytes(layer), layer.dtype, as_16_bit)
        in_full += full
        if layer.is_sliding:
            others, others_full = others + sum(tiers.values()) - before, others_full + full
    stock = stock_tensors(cache.layers)
    tiers["other layers"] = sum(_as_stored(stored_bytes(t), t.dtype, as_16_bit) for t in stock)
    stock_full = sum(_as_stored(t.nbytes, t.dtype, as_16_bit) for t in stock)  # a view of a prompt is no cache
    if cache.policy.predictor is not None:
        tiers["predictor"] = stored_bytes(*predictor_tensors(cache.policy.predictor))
    rows = {id(layer.store.sequences): layer.store.sequences for layer in cache.own if layer.store is not None}
    rows |= {id(held.sequences): held.sequences for layer in cache.own for held in layer.held.calls}
    tiers[OTHER] += stored_bytes(*(tensor for each in rows.values() for tensor in each.tensors().values()))
    tiers[OTHER] += stored_bytes(*(cache.allocation.tensors() if cache.allocation is not None else []))
    tiers["text"] = stored_bytes(*(cache.text.tensors() if cache.text is not None else []))
    tiers["codebook"] = stored_bytes(*(cache.codebook.tensors() if cache.codebook is not None else []))
    resident, in_full = sum(tiers.values()), in_full + stock_full
    others, others_full = others + tiers["other layers"], others_full + stock_full
    return {
        **_ratio(resident, in_full),
        "tiers": tiers,
        "layers": {
            "compressed": _ratio(resident - others, in_full - others_full),
            "others": _ratio(others, others_full),
            "whole": _ratio(resident, in_full),
        },
        "tokens": tokens,
        "seen": cache.get_seq_length(),
        "reachable": None if cache.memory is None else cache.memory.reachable,
    }


def stock_tensors(layers: Sequence[Any]) -> list[Tensor]:
    """Keys, values and states `[...]` of the layers that are transformers' own."""
    return [t for layer in layers if not isinstance(layer, TieredLayer) for t in reachable_tensors(vars(layer))]


def full_cache_bytes(layers: Sequence[Any]) -> int:
    """Bytes of layers of transformers' own cache, numbers of two bytes each; a view counts as what it shows."""
    return sum(_as_stored(t.nbytes, t.dtype, True) for t in stock_tensors(layers) if t.is_floating_point())


def _as_stored(size: int, dtype: torch.dtype, as_16_bit: bool) -> int:
    return size * 2 // dtype.itemsize if as_16_bit and dtype.is_floating_point else size


def _ratio(resident: int, full: int) -> dict[str, Any]:
    return {"resident_bytes": resident, "full_bytes": full, "compression": full / resident if resident else 1.0}


def predictor_tensors(predictor: Predictor) -> list[Tensor]:
    """Every tensor of a predictor, of any shape `[...]`: parameters, buffers, head budgets [L, H, n]."""
    budgets = [] if predictor.budgets is None else [predictor.budgets.lost]
    return [*predictor.parameters(), *predictor.buffers(), *budgets]


def _kind(name: str) -> str:
    """What a tensor of a layer is counted as."""
    return "statistics" if name.endswith((".attention_stats", ".queries", ".mask")) else KINDS.get(name, OTHER)


def reachable_tensors(thing: Any) -> Iterator[Tensor]:
    """Tensors `[...]` in nested dicts, lists and tuples."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for each in thing.values():
            yield from reachable_tensors(each)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from reachable_tensors(each)


def full_bytes(layer: CompressedLayer) -> int:
    """Bytes of a layer's tokens, padding included, in an uncompressed cache of the model's dtype.

    Of a sliding window those that transformers keeps between two calls.
    """
    if layer.store is None:
        return 0
    full = layer.store.full
    width = (full.key.shape[3] + full.value.shape[3]) * full.key.element_size()
    window = layer.setup.window
    columns = layer.seen if window is None else min(layer.seen, window - 1)
    return full.key.shape[0] * layer.store.heads * columns * width


def stored_bytes(*tensors: Tensor) -> int:
    """Bytes of the storages behind ``tensors``, each once, whether or not a view covers its storage."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
