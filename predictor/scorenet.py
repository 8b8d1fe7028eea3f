"""What every network has in common, and what those that forecast blocks from attention history have besides.

Shapes: R rows (one document, layer, kv head each), S tokens, W history steps, N blocks, P places in a timeline.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from predictor import scores
from predictor.batches import Batch, heads_of, hidden_of
from predictor.errors import FadeError
from predictor.features import FEATURES, FeatureSpec, PrefillFeatures, block_sizes

MIN_SPREAD = 1e-3  # spread of a feature that counts as none
MAX_PARAMETERS = 1_000_000  # of a predictor: scoring must stay far below the cost of a decode step
OPTIONAL_TENSORS = ("temperature",)  # tensors that the weights of older releases may lack
LOG_EMA, LOG_EA, LOG_AHEAD = (FEATURES.index(name) for name in ("log_ema", "log_ea", "log_ahead"))


class ScoreNet(nn.Module, ABC):
    """What every network has: a kind, a level, the arguments that rebuild it, and a score per token.

    Attributes:
        kind: name in bundles and in ``predictor.nets.NETS``.
        level: what ``forward`` ranks, tokens or blocks; it decides which columns of the traces it trains on.
        reads_hidden: whether it needs keys and values.
    """

    kind: ClassVar[str]
    level: ClassVar[str]
    reads_hidden: ClassVar[bool] = False
    shift: Tensor
    scale: Tensor

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the JSON-able arguments that rebuild this network."""

    @abstractmethod
    def calibrate(self, batch: Mapping[str, Tensor]) -> None:
        """Set the input scaling from R padded trace rows: ``tokens`` [R, S, F], ``history_mean`` [R, W, N]."""

    @abstractmethod
    def log_importance(self, features: PrefillFeatures) -> Tensor:
        """Forecast how much attention the tokens of one layer will get, higher = keep.

        Unlike the score of a cache policy it reads the features of a whole prompt, need not be linear in anything and
        has no unit (:func:`predictor.scores.match_quantiles` gives it one).

        Args:
            features: of one layer's S tokens, H kv heads.

        Returns:
            [H, S] log of the attention expected, up to a constant for each kv head: only the order within a head is
            relied on.
        """

    def check_spec(self, spec: FeatureSpec) -> None:
        """Refuse a feature spec that this network was not built for.

        Raises:
            FadeError: names the setting that differs.
        """
        for name in ("window", "block", "ema_decay"):
            mine, theirs = getattr(self, name, None), getattr(spec, name)
            if mine is not None and mine != theirs:
                raise FadeError(f"{type(self).__name__} has {name}={mine}, the traces have {name}={theirs}")
        mine = getattr(self, "n_features", len(spec.names))
        if mine != len(spec.names):
            raise FadeError(
                f"{type(self).__name__} has {mine} features, the traces have {len(spec.names)}; set "
                f"model.net.init_args.n_features to {len(spec.names)}, or collect them with this release"
            )
        if self.reads_hidden and not spec.hidden:
            raise FadeError(
                f"{type(self).__name__} reads keys and values, which the traces lack; collect them with "
                "record_hidden: true"
            )

    def _standardise(self, values: Tensor) -> None:
        """Set the input ``shift`` and ``scale`` from samples [M, C]."""
        self.shift.copy_(values.mean(0))
        self.scale.copy_(values.std(0).clamp(min=MIN_SPREAD))


def check_size(net: nn.Module) -> None:
    """Refuse a network that is too large to run beside a language model.

    Raises:
        FadeError: more than a million parameters.

    Example:
        >>> check_size(nn.Linear(8, 8))
    """
    count = sum(parameter.numel() for parameter in net.parameters())
    if count > MAX_PARAMETERS:
        raise FadeError(
            f"{type(net).__name__} has {count:,} parameters, a predictor at most {MAX_PARAMETERS:,}; "
            "make it narrower or shallower"
        )


class BlockNet(ScoreNet):
    """A network that forecasts how much attention each block of tokens gets next, from its past rows.

    Attributes:
        window: history steps W that it looks back.
        block: tokens in a block.
        temperature: divides the forecast before it is read as a distribution; fitted on validation documents
            (:mod:`predictor.calibration`), 1.1 until then.
    """

    level = "block"
    window: int
    block: int
    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(1.1))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in OPTIONAL_TENSORS:
            state_dict.setdefault(f"{prefix}{name}", getattr(self, name))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @abstractmethod
    def forward(self, history: Tensor, mask: Tensor | None = None, heads: Tensor | None = None) -> Tensor:
        """Forecast the log of each block's mass.

        Args:
            history: [R, W, N] attention mass of each block at each step (mean times tokens), newest last.
            mask: [R, N], False where a row is padded; padding never changes what the real blocks get.
            heads: [R, 2] layer and kv head of each row, for a network that knows them apart.

        Returns:
            [R, N], unnormalised.
        """

    def forecasts(self, timeline: Tensor, at: Tensor, mask: Tensor, heads: Tensor | None = None) -> Tensor:
        """Forecast several steps of a decode, each from the rows before it.

        Args:
            timeline: [R, L, N] attention mass of each block at each step. at: [P] steps to forecast, at least W.
            mask: [R, P, N] blocks that exist at each step. heads: [R, 2] as in :meth:`forward`.

        Returns:
            [R, P, N] log mass, unnormalised.
        """
        windows = timeline.unfold(1, self.window, 1)[:, at - self.window].transpose(-1, -2)  # [R, P, W, N]
        each = None if heads is None else heads.repeat_interleave(len(at), 0)
        out = self(windows.flatten(0, 1), mask.flatten(0, 1), each)
        return out.unflatten(0, mask.shape[:2])

    def log_probability(self, history: Tensor, mask: Tensor | None = None, heads: Tensor | None = None) -> Tensor:
        """Return the calibrated log probability that the next attention falls on each block.

        Args:
            history: [R, W, N]. mask: [R, N]. heads: [R, 2]; all as in :meth:`forward`.

        Returns:
            [R, N], normalised over the blocks; -inf on padding.
        """
        logits = self(history, mask, heads) / self.temperature
        return (logits if mask is None else logits.masked_fill(~mask, -math.inf)).log_softmax(-1)

    def log_importance(self, features: PrefillFeatures) -> Tensor:
        """Spread each block's forecast over its tokens, in proportion to their moving averages.

        Args and result as in :meth:`ScoreNet.log_importance`: [H, S] from features of [H, S, F] and [H, W, N].
        """
        slots = features.tokens.shape[1]
        sizes = block_sizes(slots, self.block).to(features.history_mean)
        forecast = self(features.history_mean * sizes, heads=features.heads)  # [H, N]
        log_ema = features.tokens[..., LOG_EMA]
        inside = pad(log_ema, (0, -slots % self.block), value=-math.inf).unflatten(-1, (-1, self.block))
        spread = (inside - inside.logsumexp(-1, keepdim=True)) + forecast[..., None]
        return spread.flatten(-2)[..., :slots]


def forecast(log_importance: Tensor, tokens: Tensor) -> Tensor:
    """Attention of each token in the coming steps, as the cache ranks it.

    Args:
        log_importance: [..., S] a network's order. tokens: [..., S, F] features.

    Returns:
        [..., S] in that order and as large as the moving average, but no less than reading on would give
        (:func:`predictor.scores.with_ahead`; not with features of earlier releases).
    """
    matched = scores.match_quantiles(log_importance, tokens[..., LOG_EMA].exp())
    if tokens.shape[-1] <= LOG_AHEAD:
        return matched
    return scores.with_ahead(matched, tokens[..., LOG_AHEAD].exp())


@torch.no_grad()
def token_scores(net: ScoreNet, batch: Batch, in_cache: bool = False) -> Tensor:
    """Score a padded batch exactly as the runtime scores a prompt: rows of one length at a time, no padding.

    Args:
        net: the network. batch: R trace rows, as :func:`data.dataset.collate` pads them to S tokens.
        in_cache: give the forecast that a cache ranks by (:func:`forecast`), in place of the network's own order.

    Returns:
        [R, S] log importance, or log of the forecast; 0 on padding.

    Raises:
        FadeError: the network gives something that is not a number.
    """
    out = torch.zeros(batch["mask"].shape, device=batch["mask"].device)
    for length in batch["length"].unique().tolist():
        rows = (batch["length"] == length).nonzero().flatten()
        blocks = int(batch["block_mask"][rows[0]].sum())
        features = PrefillFeatures(
            batch["tokens"][rows, :length],
            batch["history_mean"][rows, :, :blocks],
            batch["history_max"][rows, :, :blocks],
            hidden_of(batch, rows, length),
            heads=heads_of(batch)[rows],
        )
        scored = net.log_importance(features).float()
        out[rows, :length] = forecast(scored, features.tokens).log() if in_cache else scored
    if not out.isfinite().all():
        raise FadeError(f"{type(net).__name__} gives scores that are not numbers; train it again")
    return out
