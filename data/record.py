"""Recording attention inside a language model's forward pass.

:func:`record_forward` runs a model once over one document under an attention function of our own, which computes
the output exactly as transformers' SDPA function does and hands queries, keys and values to an
:class:`AttentionRecorder`. The model itself is left alone: a twin on its weights is run, and the recorder travels with
the call, as a keyword, so whatever else runs at the same time, on this model or another, never mixes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from data.trace import Row
from predictor import learned_sinks, rope
from predictor.cache_layers import learnable_layers
from predictor.errors import FadeError
from predictor.features import FeatureSpec, attention_rows, floored_log, h2o_mass, pool_blocks, prefill_features
from predictor.twin import dense_twin

NAME = "fade_record"
_CHANGES_SCORES = ("softcap", "position_bias")  # arguments that would make the recorded rows wrong


class AttentionRecorder:
    """Turns each layer's queries, keys and values into trace rows, one layer at a time.

    Args:
        prompt: number of prompt tokens S; the rest of the document is the continuation.
        spec: features, window and block.
        layers: indices of those that are recorded; the model runs the others as ever.
        table: gives a layer's rotary table of slots 0 .. S + horizon - 1, or None without rotation.
        h2o: also sum the attention that each prompt token received from the whole prompt.

    Attributes:
        rows: trace rows without ``doc``, ``split`` and ``source``.
    """

    def __init__(
        self,
        prompt: int,
        spec: FeatureSpec,
        layers: Collection[int],
        table: Callable[[int], rope.Table | None],
        h2o: bool = True,
    ):
        self.prompt, self.spec, self.layers, self.table, self.h2o = prompt, spec, layers, table, h2o
        self.rows: list[Row] = []

    def observe(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor | None = None
    ) -> None:
        """Record one layer.

        Args:
            layer: its index in the model.
            query: [Hq, S + T, D] rotated. key, value: [H, S + T, D]. scaling: factor on the scores.
            sinks: [Hq] learned sinks, or None.
        """
        slots, steps = self.prompt, query.shape[1] - self.prompt
        # the prompt's features are computed from the prompt alone: nothing after it can leak in
        past = query[:, :slots], key[:, :slots], value[:, :slots]
        table = self.table(layer)
        seen = prefill_features(*past, scaling=scaling, table=table, spec=self.spec, layer=layer, sinks=sinks)
        future = attention_rows(query[:, slots:], key, scaling, slots, sinks)  # [H, T, S + T]
        mean, peak = pool_blocks(future, self.spec.block)
        columns = {
            "tokens": seen.tokens,
            "history_mean": seen.history_mean,
            "history_max": seen.history_max,
            "future_mean": mean,
            "future_max": peak,
            "target_sum": floored_log(future[..., :slots].mean(1)),
            "target_max": floored_log(future[..., :slots].amax(1)),
        }
        if seen.hidden is not None:
            columns |= {"key": seen.hidden.key, "value": seen.hidden.value}
        if self.h2o:
            visible = torch.arange(slots, 0, -1, device=key.device)
            columns["h2o"] = floored_log(h2o_mass(past[0], past[1], scaling, sinks=sinks) / visible)
        arrays: dict[str, np.ndarray] = {name: x.half().cpu().numpy() for name, x in columns.items()}
        for head in range(key.shape[0]):
            row: Row = {"layer": layer, "head": head, "length": slots, "steps": steps}
            self.rows.append(row | {name: array[head] for name, array in arrays.items()})


def recording_twin(model: Any) -> Any:
    """A twin of a model that :func:`record_forward` takes as it is; make it once for many documents.

    It is on the weights that the model has now: make another after moving or changing the model.

    Args:
        model: a causal language model of transformers, on any device. It is not changed.
    """
    twin = dense_twin(model)
    twin.set_attn_implementation(NAME)
    return twin


def record_forward(model: Any, tokens: Tensor, prompt: int, spec: FeatureSpec, h2o: bool = True) -> list[Row]:
    """Run the model once over one document and return the trace rows of its evictable layers.

    Args:
        model: a causal language model of transformers, on any device, or its :func:`recording_twin`. It is not changed,
            and other threads may run it or record it at the same time.
        tokens: [S + T] token ids.
        prompt: S. The remaining T tokens are the continuation, which the model reads and does not write.
        spec: features, window and block.
        h2o: whether rows carry the ``h2o`` column.

    Returns:
        Evictable layers (:mod:`predictor.cache_layers`) x kv heads rows without ``doc``, ``split`` and ``source``.

    Raises:
        FadeError: prompt too short, no continuation, no evictable layer, or an attention that a trace cannot describe.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=3)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
        >>> rows = record_forward(model, torch.arange(25) % 9, prompt=20, spec=FeatureSpec(window=8))
        >>> len(rows), rows[0]["tokens"].shape, rows[0]["future_mean"].shape  # 3 layers of 2 kv heads
        (6, (20, 10), (5, 2))
    """
    total = tokens.shape[0]
    if prompt <= spec.window:
        raise FadeError(f"document of {prompt} prompt tokens is no longer than window {spec.window}; use longer ones")
    if total <= prompt:
        raise FadeError(f"document of {total} tokens leaves nothing after a prompt of {prompt}; use longer ones")
    if model.config._attn_implementation != NAME:
        model = recording_twin(model)
    slots = torch.arange(max(total, prompt + spec.horizon), device=tokens.device)
    rotary = rope.find_rotary(model)

    def table(layer: int) -> rope.Table | None:
        full = rotary.table(slots, layer) if rotary is not None else None
        return full[: prompt + spec.horizon] if full is not None else None

    layers = learnable_layers(model.config.get_text_config(decoder=True))
    recorder = AttentionRecorder(prompt, spec, layers, table, h2o)
    with torch.inference_mode():
        model.base_model(input_ids=tokens[None], use_cache=False, fade_recorder=recorder)
    refuse_unseen(layers, {row["layer"] for row in recorder.rows}, model.config.model_type)
    return recorder.rows


def refuse_unseen(layers: Collection[int], seen: Collection[int], model_type: str) -> None:
    """Refuse a model some of whose layers were not seen while it ran.

    Raises:
        FadeError: names the first of them.
    """
    if missing := set(layers) - set(seen):
        raise FadeError(
            f"layer {min(missing)} of model type {model_type} does not call attention through "
            "transformers' AttentionInterface; use a model that does"
        )


def recorded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    fade_recorder: AttentionRecorder | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as SDPA does and show it to the recorder.

    Args:
        module: the attention layer.
        query: [1, Hq, L, D] rotated. key, value: [1, H, L, D]. attention_mask: [1, 1, L, L], or None for causal.
        dropout, scaling, kwargs: as transformers' SDPA function takes them.
        fade_recorder: gets the layer's tensors. s_aux: [Hq] learned sinks, or None.

    Returns:
        output [1, L, Hq, D], and None for the attention weights.

    Raises:
        FadeError: attention that a trace cannot describe.
    """
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = getattr(module, "layer_idx", None)
    if fade_recorder is not None and layer in fade_recorder.layers:
        _refuse_unknown(layer, query, value, attention_mask, kwargs)
        fade_recorder.observe(layer, query[0], key[0], value[0], factor, s_aux)

    def sdpa(*tokens: Tensor | None) -> Tensor:
        return sdpa_attention_forward(module, *tokens, dropout, factor, **kwargs)[0]

    tokens = query, key, value, attention_mask
    return sdpa(*tokens) if s_aux is None else learned_sinks.attend(sdpa, *tokens, factor, s_aux), None


def _refuse_unknown(layer: int, query: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    length = query.shape[2]
    if mask is not None:
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        visible = mask if mask.dtype == torch.bool else mask == 0
        if not torch.equal(visible.expand(1, 1, length, length)[0, 0], causal):
            raise FadeError(
                f"the mask of layer {layer} is not the plain causal one that a cache's layer of full attention has; "
                "use another model"
            )
    for name in _CHANGES_SCORES:
        if kwargs.get(name) is not None:
            raise FadeError(
                f"layer {layer} passes {name} to attention, which traces cannot describe; use another model"
            )
    if value.shape[-1] != query.shape[-1]:
        raise FadeError(
            f"layer {layer} has keys of {query.shape[-1]} and values of {value.shape[-1]} channels (latent attention), "
            "which traces cannot describe; use another model"
        )


AttentionInterface.register(NAME, recorded_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
