"""What each layer of a cache takes as its text grows, for a target over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from fade_runtime import transformers_api as hf
from fade_runtime.cache.accounting import reachable_tensors
from fade_runtime.cache.parts import CacheParts
from fade_runtime.config import LayerSize
from fade_runtime.layer import TieredLayer
from fade_runtime.storage.packed import packed_bytes


def layer_sizes(cache: CacheParts) -> list[LayerSize]:
    """What each layer takes as its text grows, read off its tensors.

    While the first prompt is read, later layers hold nothing yet: the nearest earlier layer of their kind tells, or
    else any. With a ratio as the target, numbers of the model's dtype count as 16 bits, so that a model in float32
    keeps the tokens that it keeps in bfloat16.
    """
    layers, most = cache.layers, 2 if cache.memory is not None and cache.memory.ratio is not None else 8
    shapes, states = [_shape(layer) for layer in layers], [_state(layer, most) for layer in layers]
    sizes = []
    for index, layer in enumerate(layers):
        size = LayerSize(state=_known(states, layers, index) or 0.0)
        shape = _known(shapes, layers, index) if isinstance(layer, CacheLayerMixin) else None
        if shape is not None:
            width = shape.heads * (shape.key + shape.value) * min(shape.itemsize, most)
            size = size._replace(heads=shape.heads, width=width, window=hf.window_of(layer))
        if shape is not None and isinstance(layer, TieredLayer):
            bits, page, stats = cache.config.bits, cache.config.page_tokens, layer.setup.keeps_stats
            packed = shape.heads * packed_bytes(shape.key, shape.value, bits, page, keeps_stats=stats)
            size = size._replace(packed=packed, window=layer.setup.window)
        sizes.append(size)
    return sizes


class _Shape(NamedTuple):
    """Kv heads, channels of a key and of a value, and bytes of each in full precision."""

    heads: int
    key: int
    value: int
    itemsize: int


def _shape(layer: Any) -> _Shape | None:
    """Of a layer that has seen tokens."""
    if isinstance(layer, TieredLayer):
        key, value = (None, None) if layer.store is None else (layer.store.full.key, layer.store.full.value)
    else:
        key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(key, Tensor) or not isinstance(value, Tensor) or key.dim() != 4:
        return None
    return _Shape(key.shape[1], key.shape[3], value.shape[3], key.element_size())


def _state(layer: Any, most: int) -> float | None:
    """Bytes of a recurrent state for one sequence, 0 for a layer without; None: it has not begun."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return 0.0
    states = list(reachable_tensors([layer.conv_states, layer.recurrent_states]))
    return sum(t.numel() / t.shape[0] * min(t.element_size(), most) for t in states) if states else None


def _known(found: Sequence[Any], layers: Sequence[Any], index: int) -> Any:
    """What was found for a layer, or for the nearest before it of its kind, or for any."""
    kind = lambda layer: (type(layer), layer.is_sliding if isinstance(layer, TieredLayer) else None)
    before = [each for each in range(index, -1, -1) if kind(layers[each]) == kind(layers[index])]
    return next((found[each] for each in (*before, *range(len(found))) if found[each] is not None), None)
