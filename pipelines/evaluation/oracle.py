"""A cache that knows the future: the tokens that what follows the prompt will look at most are those that it keeps.

No cache can be made of it. It says how much better a predictor could still become, bytes and storage being the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.record import record_forward
from fade_runtime import FadeConfig
from fade_runtime.policies.base import Policy, Prompt
from predictor.features import FeatureSpec


@dataclass(frozen=True)
class Oracle:
    """A tiered cache whose scores are the attention that each token of the prompt is going to receive.

    Attributes:
        config: of the cache; of its policy only the budgets of heads are left.
    """

    config: FadeConfig


class Foresight(Policy):
    """Attention that is going to be received, known beforehand.

    Args:
        future: [H, S] attention that each token of the prompt is going to receive. policy: gives budgets of heads.
    """

    name = "oracle"
    decay = 1.0

    def __init__(self, future: Tensor, policy: Policy) -> None:
        self.future, self.policy = future, policy

    def start(self, prompt: Prompt) -> Tensor:
        """All that there is to know, [H, S]."""
        return self.future

    def weights(self, steps: int, device: torch.device) -> None:
        """Nothing is learned on the way."""

    def head_shares(self, layer: int, share: float) -> tuple[float, ...] | None:
        """Those of the cache's own policy."""
        return self.policy.head_shares(layer, share)

    def score(self, attention_stats: Tensor, slots: Tensor, seen: int | Tensor, prompt: int | Tensor) -> Tensor:
        """The future itself [T]."""
        return attention_stats


def future_attention(model: Any, tokens: Tensor, prompt: int) -> dict[int, Tensor]:
    """Attention that each token of a prompt receives from what follows it, layer by layer.

    Args:
        model: a causal language model. tokens: [S + T] token ids. prompt: S.

    Returns:
        layer -> [H, S] mean over the T steps and over the query heads of a kv head.
    """
    rows = record_forward(model, tokens, prompt, FeatureSpec(window=min(FeatureSpec.window, prompt - 1)), h2o=False)
    heads: dict[int, list[Tensor]] = {}
    for row in rows:
        heads.setdefault(row["layer"], []).append(torch.from_numpy(row["target_sum"]).float().exp())
    return {layer: torch.stack(each) for layer, each in heads.items()}


def foresee(cache: Any, future: dict[int, Tensor]) -> None:
    """Give each tiered layer of an empty cache its part of the future: layer -> [H, S]."""
    for layer in cache.tiered:
        layer.setup = replace(layer.setup, policy=Foresight(future[layer.index], layer.policy))
