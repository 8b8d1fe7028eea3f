"""The networks: attention and token features in, one importance score per cached token out.

All but the published one are a residual on a closed form with the last layer set to zero, so an untrained network is
that closed form, and training only has to find what the form misses. Those that forecast blocks from attention
history are in :mod:`predictor.temporal`. Shapes: R rows (one document, layer, kv head each), S tokens, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from predictor import scores
from predictor.errors import FadeError
from predictor.features import FEATURES, PrefillFeatures
from predictor.scorenet import LEAST, LOG_EA, LOG_EMA, ScoreNet
from predictor.temporal import BlockCNN, EmaBank, PublishedCNN


class TokenMLP(ScoreNet):
    """Multi-layer perceptron over a token's features; a residual on ``log EMA + log Expected Attention``.

    Each feature enters twice: as it is, and relative to its mean and spread over the row, which tell what kind of
    head it is.

    Args:
        n_features: F.
        hidden: width.
        depth: hidden layers.

    Example:
        >>> net = TokenMLP()
        >>> tokens = torch.randn(2, 5, len(FEATURES))
        >>> torch.equal(net(tokens), tokens[..., 0] + tokens[..., 1])  # untrained, it is the closed form
        True
    """

    kind = "mlp"
    level = "token"

    def __init__(self, n_features: int = len(FEATURES), hidden: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.n_features, self.hidden, self.depth = n_features, hidden, depth
        widths = [2 * n_features] + [hidden] * depth
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.SiLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("shift", torch.zeros(n_features))
        self.register_buffer("scale", torch.ones(n_features))

    def config(self) -> dict[str, Any]:
        return {"n_features": self.n_features, "hidden": self.hidden, "depth": self.depth}

    @torch.no_grad()
    def calibrate(self, batch: Mapping[str, Tensor]) -> None:
        self._standardise(batch["tokens"][batch["mask"]])

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Score tokens.

        Args:
            tokens: [R, S, F] features.
            mask: [R, S], False where a row is padded; padding never changes what the real tokens get.

        Returns:
            [R, S] log importance.
        """
        real = torch.ones_like(tokens[..., :1]) if mask is None else mask.to(tokens)[..., None]
        count = real.sum(-2, keepdim=True)
        centred = tokens - (tokens * real).sum(-2, keepdim=True) / count
        spread = ((centred * real).square().sum(-2, keepdim=True) / count).sqrt()
        inputs = torch.cat(((tokens - self.shift) / self.scale, centred / (spread + LEAST)), dim=-1)
        return scores.ema_ea(tokens[..., LOG_EMA], tokens[..., LOG_EA]) + self.head(
            self.body(inputs)
        ).squeeze(-1)

    def score(self, features: PrefillFeatures) -> Tensor:
        return self(features.tokens)


NETS: dict[str, type[ScoreNet]] = {net.kind: net for net in (TokenMLP, BlockCNN, PublishedCNN, EmaBank)}


def build_net(kind: str, config: dict[str, Any]) -> ScoreNet:
    """Rebuild a network from its kind and :meth:`ScoreNet.config`.

    Raises:
        FadeError: unknown kind, or arguments that it does not take.

    Example:
        >>> build_net("mlp", {"n_features": 9, "hidden": 8, "depth": 1}).config()["hidden"]
        8
    """
    if kind not in NETS:
        raise FadeError(f"unknown network kind {kind!r}; this release has {', '.join(sorted(NETS))}")
    try:
        return NETS[kind](**config)
    except TypeError as error:
        raise FadeError(f"network kind {kind!r} does not take {config}: {error}") from error
