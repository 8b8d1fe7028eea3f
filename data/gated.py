"""A frozen language model whose following tokens attend to a prompt through gates, with a gradient for these.

The prompt is read once, without gradient, into transformers' own cache; the features that a predictor sees come out of
the same pass. Then the following tokens are read as often as one likes: with the logarithms of gates added to the
scores of their attention to the prompt, or without. Only this second pass, over few tokens, is differentiated. Layers
that evict nothing (sliding windows, states) run as ever.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

from data.record import recorded_attention, refuse_unseen
from predictor import learned_sinks, rope
from predictor.cache_layers import kv_heads, learnable_layers
from predictor.errors import FadeError
from predictor.features import FeatureSpec, Hidden, PrefillFeatures, prefill_features
from predictor.provenance import model_provenance
from predictor.twin import dense_twin

NAME = "fade_gated"


@dataclass
class ReadPrompt:
    """A prompt that a model has read.

    Attributes:
        features: of the S tokens in all evictable layers, R = L x H rows in order. length: S.
        shape: L and H. cache: keys and values of all layers, not to be changed.
    """

    features: PrefillFeatures
    length: int
    shape: tuple[int, int]
    cache: Any


class GatedModel:
    """Runs a frozen language model over prompts, and over what follows through gates.

    Args:
        model: a causal language model of transformers, on any device; a twin on its weights is run.
        spec: of the features.

    Attributes:
        layers: indices of the evictable layers, L of them. kv_heads: H of each.

    Raises:
        FadeError: no evictable layer.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=3)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
        >>> gated = GatedModel(model, FeatureSpec(window=8))
        >>> prompt = gated.read(torch.arange(20) % 9)
        >>> gates = torch.zeros(3, 2, 20, requires_grad=True)  # of 3 layers and 2 kv heads: all open
        >>> full, same = (gated.logits(prompt, torch.arange(4), each) for each in (None, gates))
        >>> full.shape, bool(torch.allclose(full, same, atol=1e-5)), same.requires_grad
        (torch.Size([4, 9]), True, True)
    """

    def __init__(self, model: Any, spec: FeatureSpec) -> None:
        self.spec = spec
        config = model.config.get_text_config(decoder=True)
        self.layers = learnable_layers(config)
        self.kv_heads = kv_heads(config, self.layers[0])
        self._twin = dense_twin(model).requires_grad_(False)
        self._twin.set_attn_implementation(NAME)
        self._rotary = rope.find_rotary(self._twin)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._twin.device

    def provenance(self, tokenizer: Any) -> dict[str, Any]:
        """What a bundle is held to: the model, its weights and its tokenizer."""
        return model_provenance(self._twin, tokenizer)

    def to(self, device: torch.device) -> GatedModel:
        """Move the model; a model that other code holds moves along, its weights being the same."""
        self._twin.to(device)
        return self

    @torch.no_grad()
    def read(self, tokens: Tensor) -> ReadPrompt:
        """Read a prompt.

        Args:
            tokens: [S] ids, more than the window of the features.

        Raises:
            FadeError: too short a prompt, or an attention that features cannot describe.
        """
        length = len(tokens)
        if length <= self.spec.window:
            raise FadeError(f"a prompt of {length} tokens is no longer than window {self.spec.window}; use longer ones")
        recorder = _Recorder(self, torch.arange(length + self.spec.horizon, device=tokens.device))
        cache = DynamicCache(config=self._twin.config)
        self._twin.base_model(input_ids=tokens[None], past_key_values=cache, use_cache=True, fade_recorder=recorder)
        refuse_unseen(self.layers, recorder.features, self._twin.config.model_type)
        found = [recorder.features[layer] for layer in self.layers]
        return ReadPrompt(_joined(found), length, (len(found), len(found[0].tokens)), cache)

    def logits(self, prompt: ReadPrompt, following: Tensor, gates: Tensor | None = None) -> Tensor:
        """Read on after a prompt.

        Args:
            prompt: that was read. following: [T] ids of the tokens after it.
            gates: [L, H, S] logarithms of gates, -inf for a token that is gone; None: all are open.

        Returns:
            [T, V] logits.
        """
        by_layer = None if gates is None else dict(zip(self.layers, gates))
        cache = _forked(prompt.cache)
        return self._twin(input_ids=following[None], past_key_values=cache, use_cache=True, fade_gates=by_layer).logits[
            0
        ]


class _Recorder:
    """Takes the features of each evictable layer while a prompt is read."""

    def __init__(self, model: GatedModel, slots: Tensor) -> None:
        self.layers, self.features = model.layers, dict[int, PrefillFeatures]()
        self._model, self._slots = model, slots

    def observe(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor | None = None
    ) -> None:
        """Query [Hq, S, D], key and value [H, S, D] of one layer."""
        rotary = self._model._rotary
        table = None if rotary is None else rotary.table(self._slots, layer)
        self.features[layer] = prefill_features(
            query, key, value, scaling=scaling, table=table, spec=self._model.spec, layer=layer, sinks=sinks
        )


def gated_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    fade_recorder: Any = None,
    fade_gates: dict[int, Tensor] | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as SDPA computes it, or through gates where a call brings some for this layer.

    Args:
        module: the attention layer. query: [1, Hq, Q, D]. key, value: [1, H, S, D]. attention_mask: as SDPA takes it.
        dropout, scaling, kwargs: as transformers' SDPA function takes them.
        fade_recorder: gets the layer's tensors. fade_gates: layer -> [H, n] logarithms, of the n <= S first tokens.
        s_aux: [Hq] learned sinks, or None.

    Returns:
        output [1, Q, Hq, D], and None for the attention weights.
    """
    gates = None if fade_gates is None else fade_gates.get(getattr(module, "layer_idx", -1))
    if gates is None:
        more = dict(fade_recorder=fade_recorder, s_aux=s_aux, **kwargs)
        return recorded_attention(module, query, key, value, attention_mask, dropout, scaling, **more)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_through(gates, query[0], key[0], value[0], factor, s_aux).transpose(0, 1)[None], None


def attend_through(
    gates: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of the last queries, each token weighted by its gate before probabilities are made.

    Args:
        gates: [H, n] logarithms, of the first n <= S - Q tokens; the others are open.
        query: [Hq, Q, D] of the last Q of S tokens. key, value: [H, S, D]. scaling: factor on the scores.
        sinks: [Hq] learned sinks, or None.

    Returns:
        [Hq, Q, D] in the values' dtype.
    """
    heads, slots, dim = key.shape
    steps = query.shape[1]
    grouped = query.reshape(heads, -1, dim)  # [H, G x Q, D]
    scores = torch.bmm(grouped, key.transpose(1, 2)).float().mul(scaling).view(heads, -1, steps, slots)
    scores = scores + pad(gates.float(), (0, slots - gates.shape[1]))[:, None, None]
    later = torch.ones(steps, slots, dtype=torch.bool, device=key.device).triu(slots - steps + 1)
    by_group = None if sinks is None else sinks.float().view(heads, -1, 1)
    shares = learned_sinks.softmax(scores.masked_fill(later, -torch.inf), by_group)
    return torch.bmm(shares.to(value.dtype).flatten(1, 2), value).view(-1, steps, value.shape[-1])


def _joined(features: list[PrefillFeatures]) -> PrefillFeatures:
    """Rows of several layers, one after the other."""

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(each, name) for each in features])

    hidden = None
    if features[0].hidden is not None:
        parts = [each.hidden for each in features]
        names = ("key", "value", "layer", "head")
        hidden = Hidden(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
    return PrefillFeatures(rows("tokens"), rows("history_mean"), rows("history_max"), hidden, rows("heads"))


def _forked(cache: Any) -> Any:
    """A cache to go on with, while the other stays: keys and values are shared where a layer only ever appends."""
    fork = copy.copy(cache)
    fork.layers = [copy.copy(each) if isinstance(each, DynamicLayer) else copy.deepcopy(each) for each in cache.layers]
    return fork


AttentionInterface.register(NAME, gated_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
