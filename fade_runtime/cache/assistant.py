"""Help from a smaller model: what it attends to at the end of a prompt, fused with the scores of a policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fade_runtime import transformers_api as hf
from fade_runtime.cache.parts import CacheParts
from fade_runtime.config import FadeConfig
from fade_runtime.policies.text import find_tokenizer
from predictor.errors import FadeError
from predictor.provenance import tokenizer_hash
from predictor.twin import dense_twin

CacheFactory = Callable[[nn.Module, FadeConfig], CacheParts]


def fuse(score: Tensor, importance: Tensor, weight: float) -> Tensor:
    """Mix a score with another model's, which has the same sum over the tokens that it knows of.

    Args:
        score: [H, S] shares of attention. importance: [n], of the newest n tokens. weight: of the score, in [0, 1].

    Returns:
        [H, S]; tokens before the newest n keep their score.

    Example:
        >>> fuse(torch.tensor([[0.4, 0.4, 0.2]]), torch.tensor([1.0, 3.0]), weight=0.5)
        tensor([[0.4000, 0.2750, 0.3250]])
    """
    known = score[:, score.shape[1] - len(importance) :]
    scale = known.sum(1, keepdim=True) / importance.sum().clamp(min=torch.finfo(torch.float32).tiny)
    mixed = weight * known + (1 - weight) * scale * importance
    return torch.cat((score[:, : score.shape[1] - len(importance)], mixed), dim=1)


class Assistant:
    """A smaller model that reads the end of each prompt.

    Args:
        model: the smaller model; its attention is switched to "fade", as that of every model with a tiered cache.
        weight: of the main model's score. tail: tokens at the end of the prompt that it reads.
        make_cache: makes a tiered cache for a model.
    """

    def __init__(self, model: nn.Module, *, weight: float, tail: int, make_cache: CacheFactory) -> None:
        self.model, self.weight, self.tail, self.make_cache = model, weight, tail, make_cache

    @torch.no_grad()
    def importance(self, ids: Tensor) -> Tensor:
        """Attention that the last queries pay to each token of the tail, averaged over heads and layers.

        Args:
            ids: [S] of the prompt.

        Returns:
            [min(S, tail)] float32, of sum 1, or less with learned sinks; average and decay are those of policy "ema".
        """
        tail = ids[-self.tail :].long()[None]
        whole = FadeConfig(eviction_policy="ema", int4_budget=1.0, n_sink=0, recent_window=tail.shape[1])
        cache = self.make_cache(self.model, whole)
        base: Any = getattr(self.model, "base_model", self.model)
        base(tail, use_cache=True, **hf.forward_kwargs(cache, base))
        found = [
            layer.tokens.full.attention_stats[0].mean(0)
            for layer in cache.tiered
            if layer.tokens.full.attention_stats is not None
        ]
        return torch.stack([each.to(ids.device) for each in found]).mean(0)

    def fused(self, score: Tensor, importance: Tensor) -> Tensor:
        """:func:`fuse` of a score [H, S] and an importance [n] with this assistant's weight: [H, S]."""
        return fuse(score, importance.to(score.device), self.weight)


def find_assistant(
    model: Any, source: Any, *, weight: float, tail: int, tokenizer: Any = None, make_cache: CacheFactory
) -> Assistant:
    """The assistant that the option ``assistant`` asks for.

    Args:
        model: the main model. tokenizer: the main model's, or None for the one that lies beside it.
        source: a model, a directory or an id whose files are on this machine, or a number of the main model's layers.
        weight, tail, make_cache: see :class:`Assistant`.

    Raises:
        FadeError: it cannot be loaded, or has another tokenizer.
    """
    assistant = partial(Assistant, weight=weight, tail=tail, make_cache=make_cache)
    if isinstance(source, int):
        return assistant(first_layers(model, source))
    other = find_tokenizer(source) if isinstance(source, nn.Module) else find_tokenizer(model, source)
    if tokenizer_hash(find_tokenizer(model, tokenizer)) != tokenizer_hash(other):
        raise FadeError(
            f"assistant {_name(source)} has another tokenizer than {_name(model)}, so its tokens are others; take a "
            "smaller model of the same family"
        )
    if isinstance(source, nn.Module):
        return assistant(source)

    first = next(model.parameters())
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source, local_files_only=True, dtype=first.dtype)
    except Exception as error:  # transformers and safetensors raise many kinds
        raise FadeError(
            f"assistant {source} cannot be loaded; give a causal language model or its directory"
        ) from error
    return assistant(loaded.to(first.device).eval())


def first_layers(model: Any, count: int) -> nn.Module:
    """A model of the first layers of another one, on the same weights.

    Raises:
        FadeError: fewer than one layer, not fewer than it has, or layers that are not in one list.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> tiny = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=3, intermediate_size=16,
        ...                    vocab_size=8)
        >>> model = LlamaForCausalLM(tiny)
        >>> small = first_layers(model, 2)
        >>> len(small.model.layers), small.lm_head.weight is model.lm_head.weight
        (2, True)
    """
    layers = getattr(getattr(model, "base_model", model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise FadeError(f"{type(model).__name__} has no list of layers; give the assistant as a model")
    if not 1 <= count < len(layers):
        raise FadeError(f"assistant {count} is not a number of layers from 1 to {len(layers) - 1}")
    small = dense_twin(model)
    small.base_model.layers = small.base_model.layers[:count]
    config = hf.text_config(small)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    return small


def _name(thing: Any) -> str:
    plain = type(thing).__name__ if isinstance(thing, nn.Module) else thing
    return str(getattr(thing, "name_or_path", None) or plain)
