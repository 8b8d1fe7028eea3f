"""The model's own continuation of a prompt, greedy or sampled, with a seed of its own."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

KINDS = ("text", "greedy", "sample")


@torch.inference_mode()
def continue_prompt(
    model: Any,
    tokens: Tensor,
    steps: int,
    *,
    sample: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int | str = 0,
) -> Tensor:
    """Let the model go on from a prompt for exactly so many tokens; ids that end a text are never chosen.

    The model's own generation settings (temperature, penalties and so on) are not used.

    Args:
        model: a causal language model of transformers.
        tokens: [S] ids of the prompt. steps: T.
        sample: draw each token; otherwise the likeliest is taken.
        temperature: divides the logits before a draw. top_p: see :func:`nucleus`.
        seed: of the draws. They are made on the CPU, so that a device changes nothing but rounding.

    Returns:
        [S + T] ids, the prompt first.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
        >>> continue_prompt(model, torch.arange(5), steps=3).shape
        torch.Size([8])
    """
    drawn = torch.Generator().manual_seed(_number(seed))
    ends = _end_ids(model)
    ids = [tokens]
    # all but the last token without the language model's head: its logits would be the largest tensor of all
    cache = model.base_model(input_ids=tokens[None, :-1], use_cache=True).past_key_values
    for _ in range(steps):
        out = model(input_ids=ids[-1][None, -1:], past_key_values=cache, use_cache=True)
        logits, cache = out.logits[0, -1].float(), out.past_key_values
        logits[ends] = -torch.inf
        if sample:
            probabilities = nucleus((logits / temperature).softmax(-1).cpu(), top_p)
            chosen = torch.multinomial(probabilities, 1, generator=drawn).to(tokens.device)
        else:
            chosen = logits.argmax(keepdim=True)
        ids.append(chosen)
    return torch.cat(ids)


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Set to zero what is not among the likeliest tokens that together reach ``top_p``; the likeliest stays.

    Args:
        probabilities: [V]. top_p: in (0, 1].

    Returns:
        [V], not normalised again.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", section 3.1 (arXiv 1904.09751).

    Example:
        >>> nucleus(torch.tensor([0.2, 0.5, 0.3]), top_p=0.6)
        tensor([0.0000, 0.5000, 0.3000])
    """
    if top_p >= 1:
        return probabilities
    order = probabilities.argsort(descending=True, stable=True)
    ranked = probabilities[order].double()
    before = ranked.cumsum(0) - ranked  # [V] reached without the token itself
    kept = torch.zeros_like(probabilities)
    kept[order] = torch.where(before < top_p, probabilities[order], 0.0)
    return kept


def _number(seed: int | str) -> int:
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:7], "big")


def _end_ids(model: Any) -> list[int]:
    """Ids that end a text, by the model's configuration and by its generation settings."""
    config, settings = model.config.get_text_config(decoder=True), getattr(model, "generation_config", None)
    found: set[int] = set()
    for held in (config.eos_token_id, getattr(settings, "eos_token_id", None)):
        found |= {held} if isinstance(held, int) else set(held or ())
    return sorted(one for one in found if one < config.vocab_size)
