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
from predictor.batches import heads_of
from predictor.errors import FadeError
from predictor.features import FEATURES, Hidden, PrefillFeatures
from predictor.scorenet import LOG_EA, LOG_EMA, MAX_PARAMETERS, MIN_SPREAD, ScoreNet, check_size
from predictor.sealed import Header
from predictor.temporal import BlockCNN, EmaBank, PublishedCNN

MAX_DEPTH = 64  # hidden layers of a perceptron


class TokenMLP(ScoreNet):
    """Multi-layer perceptron over a token's features; a residual on ``log EMA + log Expected Attention``.

    Each feature enters twice: as it is, and relative to its mean and spread over the row, which tell what kind of
    head it is.

    Args:
        n_features: F.
        hidden: width.
        depth: hidden layers.
        layers, kv_heads: of the language model, if each kv head is to have weights of its own on the closed form's
            two terms (1 when untrained); 0: it knows no heads.
        embedding: numbers of its own that each kv head adds to the inputs, if it knows them.

    Example:
        >>> net = TokenMLP()
        >>> tokens = torch.randn(2, 5, len(FEATURES))
        >>> torch.equal(net(tokens), tokens[..., 0] + tokens[..., 1])  # untrained, it is the closed form
        True
    """

    kind = "mlp"
    level = "token"

    def __init__(
        self,
        n_features: int = len(FEATURES),
        hidden: int = 64,
        depth: int = 2,
        layers: int = 0,
        kv_heads: int = 0,
        embedding: int = 8,
    ) -> None:
        super().__init__()
        self.n_features, self.hidden, self.depth = n_features, hidden, depth
        self.of_heads = (layers, kv_heads, embedding) if layers and kv_heads else None
        inputs = 2 * n_features
        if self.of_heads:
            self.gain = nn.Parameter(torch.ones(layers, kv_heads, 2))
            self.embedding = nn.Parameter(torch.randn(layers, kv_heads, embedding) * 0.1)
            inputs += embedding
        self.body, width = perceptron(inputs, hidden, depth)
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("shift", torch.zeros(n_features))
        self.register_buffer("scale", torch.ones(n_features))

    def config(self) -> dict[str, Any]:
        plain = {"n_features": self.n_features, "hidden": self.hidden, "depth": self.depth}
        return plain | dict(zip(("layers", "kv_heads", "embedding"), self.of_heads or ()))

    @torch.no_grad()
    def calibrate(self, batch: Mapping[str, Tensor]) -> None:
        """Standardise the features [R, S, F] over the real tokens."""
        self._standardise(batch["tokens"][batch["mask"]])

    def forward(self, tokens: Tensor, mask: Tensor | None = None, heads: Tensor | None = None) -> Tensor:
        """Score tokens.

        Args:
            tokens: [R, S, F] features.
            mask: [R, S], False where a row is padded; padding never changes what the real tokens get.
            heads: [R, 2] layer and kv head of each row, for a network that knows them apart.

        Returns:
            [R, S] log importance.

        Raises:
            FadeError: it knows heads, and is not told them, or those of another model.
        """
        inputs, terms = self._inputs(tokens, mask), (tokens[..., LOG_EMA], tokens[..., LOG_EA])
        if self.of_heads is None:
            return scores.ema_ea(*terms) + self.head(self.body(inputs)).squeeze(-1)
        layer, head = self._places(heads)
        own = self.embedding[layer, head][:, None].expand(*tokens.shape[:2], -1)
        ema_gain, ea_gain = self.gain[layer, head][:, None].unbind(-1)  # [R, 1]
        residual = self.head(self.body(torch.cat((inputs, own), dim=-1))).squeeze(-1)
        return scores.ema_ea(ema_gain * terms[0], ea_gain * terms[1]) + residual

    def _places(self, heads: Tensor | None) -> tuple[Tensor, ...]:
        """Layer and kv head of each row, [R] each."""
        layers, kv_heads, _ = self.of_heads or (0, 0, 0)
        found = (0, 0) if heads is None or not len(heads) else tuple((heads.amax(0) + 1).tolist())
        if heads is None or found[0] > layers or found[1] > kv_heads:
            raise FadeError(
                f"{type(self).__name__} is for {layers} layers of {kv_heads} kv heads, and meets {found[0]} and "
                f"{found[1]}; set layers and kv_heads to those of the model"
            )
        return heads.unbind(-1)

    def _inputs(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Each feature as it is, and relative to its row, [R, S, 2F]."""
        centred, spread = relative(tokens, mask)
        return torch.cat(((tokens - self.shift) / self.scale, centred / (spread + MIN_SPREAD)), dim=-1)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Score a padded batch of traces, [R, S]."""
        return self(batch["tokens"], batch["mask"], heads_of(batch) if self.of_heads else None)

    def log_importance(self, features: PrefillFeatures) -> Tensor:
        """As :meth:`ScoreNet.log_importance`, [H, S] from ``features.tokens`` [H, S, F]."""
        return self(features.tokens, heads=features.heads)


class HiddenMLP(TokenMLP):
    """The same over what the token is as well: its key before the rotation, and its value.

    Each kv head has some directions of its own (``probe``) in the space of its keys and values; what a token measures
    along them joins its features. Vectors enter relative to their row: less its mean, in units of its mean spread.

    Args:
        layers, kv_heads, dim: of the language model.
        probes: directions of each kv head.
        attention: with False it sees neither attention nor the closed form, only keys and values, as KVzap does.
        n_features, hidden, depth: as in :class:`TokenMLP`.

    Source: KVzap (arXiv 2601.07891), section 3, which reads the hidden states that keys and values are made of.

    Example:
        >>> net = HiddenMLP(layers=2, kv_heads=1, dim=8)
        >>> tokens, vector, place = torch.randn(2, 5, len(FEATURES)), torch.randn(2, 5, 8), torch.tensor([0, 1])
        >>> vectors = Hidden(vector, vector, layer=place, head=torch.zeros_like(place))
        >>> torch.equal(net(tokens, vectors), tokens[..., 0] + tokens[..., 1])  # untrained, it is the closed form
        True
    """

    kind = "hidden"
    reads_hidden = True

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        dim: int,
        probes: int = 4,
        attention: bool = True,
        n_features: int = len(FEATURES),
        hidden: int = 64,
        depth: int = 2,
    ) -> None:
        super().__init__(n_features, hidden, depth)
        self.probe = nn.Parameter(torch.randn(layers, kv_heads, 2 * dim, probes) / (2 * dim) ** 0.5)
        self.attention = attention
        self.body, _ = perceptron(2 * n_features * attention + probes, hidden, depth)

    def config(self) -> dict[str, Any]:
        layers, kv_heads, channels, probes = self.probe.shape
        own = {"layers": layers, "kv_heads": kv_heads, "dim": channels // 2, "probes": probes}
        return {**own, "attention": self.attention, **super().config()}

    def forward(self, tokens: Tensor, vectors: Hidden, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Score tokens.

        Args:
            tokens: [R, S, F] features. vectors: of the same rows.
            mask: [R, S], False where a row is padded.

        Returns:
            [R, S] log importance.

        Raises:
            FadeError: vectors of another model than the arguments say.
        """
        self._refuse_other(vectors)
        both = []
        for vector in (vectors.key, vectors.value):
            centred, spread = relative(vector, mask)
            both.append(centred / (spread.mean(-1, keepdim=True) + MIN_SPREAD))
        inputs = torch.cat(both, dim=-1) @ self.probe[vectors.layer, vectors.head]  # [R, S, probes]
        if not self.attention:
            return self.head(self.body(inputs)).squeeze(-1)
        residual = self.head(self.body(torch.cat((self._inputs(tokens, mask), inputs), dim=-1))).squeeze(-1)
        return scores.ema_ea(tokens[..., LOG_EMA], tokens[..., LOG_EA]) + residual

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Score a padded batch of traces with keys and values, [R, S]."""
        vectors = (batch[name] for name in ("key", "value", "layer", "head"))
        return self(batch["tokens"], Hidden(*vectors), batch["mask"])

    def log_importance(self, features: PrefillFeatures) -> Tensor:
        """As :meth:`ScoreNet.log_importance`, [H, S] from tokens [H, S, F], keys and values [H, S, D].

        Raises:
            FadeError: the features have no keys and values.
        """
        if features.hidden is None:
            raise FadeError("this network reads keys and values; give it a feature spec with hidden=True")
        return self(features.tokens, features.hidden)

    def _refuse_other(self, vectors: Hidden) -> None:
        found = int(vectors.layer.max()) + 1, int(vectors.head.max()) + 1, vectors.key.shape[-1]
        layers, kv_heads, channels, _ = self.probe.shape
        if found[0] > layers or found[1] > kv_heads or found[2] != channels // 2:
            raise FadeError(
                f"{type(self).__name__} is for {layers} layers of {kv_heads} kv heads of {channels // 2} channels, and "
                f"meets {found[0]}, {found[1]} and {found[2]}; set layers, kv_heads and dim to those of the model"
            )


def perceptron(inputs: int, hidden: int, depth: int) -> tuple[nn.Sequential, int]:
    """Hidden layers with their activations, and the width of what they give.

    Raises:
        FadeError: no width, or deeper than a predictor may be.
    """
    if hidden < 1 or not 0 <= depth <= MAX_DEPTH:
        raise FadeError(f"hidden {hidden}, depth {depth}: use a width of at least 1 and a depth of 0 to {MAX_DEPTH}")
    layers: list[nn.Module] = []
    for width, after in pairwise([inputs] + [hidden] * depth):
        layers += [nn.Linear(width, after), nn.SiLU()]
    return nn.Sequential(*layers), hidden if depth else inputs


def relative(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values [R, S, C] less the mean of their row's real tokens, and the spread [R, 1, C] of these."""
    real = torch.ones_like(values[..., :1]) if mask is None else mask.to(values)[..., None]
    count = real.sum(-2, keepdim=True)
    centred = values - (values * real).sum(-2, keepdim=True) / count
    return centred, ((centred * real).square().sum(-2, keepdim=True) / count).sqrt()


NETS: dict[str, type[ScoreNet]] = {net.kind: net for net in (TokenMLP, HiddenMLP, BlockCNN, PublishedCNN, EmaBank)}


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
    for name, value in config.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and not 0 <= number <= MAX_PARAMETERS:
                raise FadeError(
                    f"network kind {kind!r} does not take {name}={number}; use a number up to {MAX_PARAMETERS:,}"
                )
    try:
        return NETS[kind](**config)
    except FadeError:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise FadeError(f"network kind {kind!r} does not take {config}: {error}") from error


def tensors_of(kind: str, config: dict[str, Any]) -> Header:
    """Dtypes and shapes of the tensors that a network would have, by name; none is allocated.

    Raises:
        FadeError: as :func:`build_net`, or more parameters than a predictor may have.

    Example:
        >>> tensors_of("mlp", {"n_features": 9, "hidden": 8, "depth": 1})["head.weight"]
        ('F32', (1, 8))
    """
    with torch.device("meta"):
        net = build_net(kind, config)
    check_size(net)
    return {name: ("F32", tuple(tensor.shape)) for name, tensor in net.state_dict().items()}
