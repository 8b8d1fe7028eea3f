"""The networks: attention and token features in, one importance score per cached token out.

Each is a residual on a closed form with its last layer set to zero, so an untrained network is that closed
form, and training only has to find what the form misses. Shapes: R rows (one document, layer, kv head each),
S tokens, F features, W history steps, N blocks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from predictor import scores
from predictor.errors import FadeError
from predictor.features import FEATURES, FLOOR, FeatureSpec, PrefillFeatures, block_sizes

LEAST = 1e-3  # spread of a feature that counts as none
FAINT = 1e-6  # block mass below which float16 traces tell nothing apart; the image is cut there
LOG_EMA, LOG_EA = FEATURES.index("log_ema"), FEATURES.index("log_ea")


class ScoreNet(nn.Module, ABC):
    """What every network has: a kind, a level, the arguments that rebuild it, and a score per token.

    Attributes:
        kind: name in bundles and in :data:`NETS`.
        level: what ``forward`` ranks, tokens or blocks; it decides which columns of the traces it trains on.
    """

    kind: ClassVar[str]
    level: ClassVar[str]
    shift: Tensor
    scale: Tensor

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the JSON-able arguments that rebuild this network."""

    @abstractmethod
    def calibrate(self, batch: Mapping[str, Tensor]) -> None:
        """Set the input scaling from a batch of traces."""

    @abstractmethod
    def score(self, features: PrefillFeatures) -> Tensor:
        """Return log importance [H, S] of one layer's tokens, higher = keep."""

    def check_spec(self, spec: FeatureSpec) -> None:
        """Refuse a feature spec that this network was not built for.

        Raises:
            FadeError: names the setting that differs.
        """
        for name in ("window", "block", "ema_decay"):
            mine, theirs = getattr(self, name, None), getattr(spec, name)
            if mine is not None and mine != theirs:
                raise FadeError(f"{type(self).__name__} has {name}={mine}, the traces have {name}={theirs}")


def _standardise(net: ScoreNet, values: Tensor) -> None:
    """Set a network's input ``shift`` and ``scale`` from samples [M, C]."""
    net.shift.copy_(values.mean(0))
    net.scale.copy_(values.std(0).clamp(min=LEAST))


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
        _standardise(self, batch["tokens"][batch["mask"]])

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


class BlockCNN(ScoreNet):
    """Convolutions over attention history as a two-dimensional time series, one forecast per block of tokens.

    The published stack (3x3, 3x3, mean over time, 1x1), as a residual on the log of the moving average of each
    block's mass. It sees three planes: the log of the mass, the same against the moving average, and the time, which
    the mean would otherwise forget. A block's forecast is spread over its tokens by their share of the average.

    Args:
        window: history steps W.
        channels: of the two 3x3 convolutions.
        block: tokens in a block.
        ema_decay: of the moving average.

    Source: AttentionPredictor (arXiv 2502.04077), section 4.2, figure 4.

    Example:
        >>> net = BlockCNN(window=4)
        >>> history = torch.rand(3, 4, 6)
        >>> torch.allclose(net(history), scores.ema(history).log())  # untrained, it is the moving average
        True
    """

    kind = "cnn"
    level = "block"

    def __init__(
        self, window: int = 64, channels: tuple[int, int] = (16, 32), block: int = 16, ema_decay: float = 0.95
    ) -> None:
        super().__init__()
        self.window, self.channels, self.block, self.ema_decay = window, tuple(channels), block, ema_decay
        self.first = nn.Conv2d(3, channels[0], 3, padding=1)
        self.second = nn.Conv2d(channels[0], channels[1], 3, padding=1)
        self.head = nn.Conv1d(channels[1], 1, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))

    def config(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "channels": list(self.channels),
            "block": self.block,
            "ema_decay": self.ema_decay,
        }

    @torch.no_grad()
    def calibrate(self, batch: Mapping[str, Tensor]) -> None:
        log = (batch["history_mean"] * batch["block_size"][:, None]).clamp(min=FAINT).log()
        _standardise(self, log.transpose(1, 2)[batch["block_mask"]].reshape(-1, 1))

    def forward(self, history: Tensor, mask: Tensor | None = None) -> Tensor:
        """Forecast the log of each block's mass.

        Args:
            history: [R, W, N] attention mass of each block at each step (mean times tokens), newest last.
            mask: [R, N], False where a row is padded; padding never changes what the real blocks get.

        Returns:
            [R, N], unnormalised.
        """
        real = torch.ones_like(history[:, 0]) if mask is None else mask.to(history)
        real = real[:, None, None]  # [R, 1, 1, N]
        base = scores.ema(history, self.ema_decay).clamp(min=FLOOR).log()  # [R, N]
        log = history.clamp(min=FAINT).log()
        time = torch.linspace(-1, 1, history.shape[1], device=log.device)[:, None].expand_as(log)
        against = log - base.clamp(min=math.log(FAINT))[:, None]
        image = torch.stack(((log - self.shift) / self.scale, against, time), dim=1) * real  # [R, 3, W, N]
        image = torch.relu(self.first(image)) * real
        pooled = torch.relu(self.second(image)).mean(2)  # [R, C, N]
        return base + self.head(pooled).squeeze(1)

    def score(self, features: PrefillFeatures) -> Tensor:
        slots = features.tokens.shape[1]
        sizes = block_sizes(slots, self.block).to(features.history_mean)
        forecast = self(features.history_mean * sizes)  # [H, N]
        log_ema = features.tokens[..., LOG_EMA]
        inside = pad(log_ema, (0, -slots % self.block), value=-math.inf).unflatten(-1, (-1, self.block))
        spread = (inside - inside.logsumexp(-1, keepdim=True)) + forecast[..., None]
        return spread.flatten(-2)[..., :slots]


NETS: dict[str, type[ScoreNet]] = {net.kind: net for net in (TokenMLP, BlockCNN)}


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
