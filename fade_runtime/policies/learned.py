"""The learned policy: a predictor's forecast of attention, which decoding corrects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fade_runtime.policies.base import Ema, Forecast, Prompt
from predictor.bundle import Predictor
from predictor.cache_layers import in_words
from predictor.errors import FadeError
from predictor.features import PrefillFeatures, prefill_features
from predictor.nets import LOG_EMA
from predictor.scores import match_quantiles


class Learned(Ema):
    """A predictor's forecast of attention over the coming steps, which decoding then corrects.

    Args:
        predictor: whose forecast. head_budgets: use those that it learned. compares: use its head offsets.

    Raises:
        FadeError: it has no head offsets.
    """

    name = "learned"
    predictor: Predictor

    def __init__(self, predictor: Predictor, head_budgets: bool = True, compares: bool = False) -> None:
        super().__init__(decay=1 - 1 / predictor.spec.horizon)
        self.predictor = predictor
        self.budgets = predictor.budgets if head_budgets else None
        self.compares = compares
        if compares and predictor.offsets is None:
            raise FadeError(
                f"allocation 'global' compares tokens of all heads by head offsets, and predictor {predictor.name} has "
                "none; use one that was trained with them, or allocation='heads'"
            )

    def check(self, layers: Sequence[int], kv_heads: int) -> None:
        """Refuse learned budgets or offsets of other layers or heads."""
        predictor = self.predictor
        if self.budgets is not None:
            self.budgets.refuse_other_heads(f"predictor {predictor.name}", layers, kv_heads)
        if self.compares and predictor.offsets is not None:
            ours, theirs = (predictor.layers, predictor.offsets.shape[1]), (tuple(layers), kv_heads)
            if ours != theirs:
                raise FadeError(
                    f"predictor {predictor.name} has head offsets for {in_words(ours[0])} ({ours[1]} kv heads), and "
                    f"its model can evict tokens from {in_words(layers)} ({kv_heads}); train it again, or use "
                    "allocation='heads'"
                )

    def head_shares(self, layer: int, share: float) -> tuple[float, ...] | None:
        """From the bundle's table of losses, if it has one."""
        return None if self.budgets is None else self.budgets.allocate(round(min(share, 1.0), 3))[layer]

    @torch.no_grad()
    def start(self, prompt: Prompt) -> Tensor:
        """The forecast [H, S] as a share of attention, the unit of what decoding adds."""
        return self.predictor.forecast(self._features(prompt))

    @torch.no_grad()
    def forecast(self, prompt: Prompt) -> Forecast:
        """The same, and the predictor's importance with its head offsets."""
        if not self.compares:
            return super().forecast(prompt)
        features = self._features(prompt)
        importance = self.predictor.comparable_importance(features)
        return Forecast(match_quantiles(importance, features.tokens[..., LOG_EMA].exp()), importance)

    def _features(self, prompt: Prompt) -> PrefillFeatures:
        spec = self.predictor.spec
        table = prompt.table(prompt.key.shape[1] + spec.horizon)
        return prefill_features(
            prompt.query,
            prompt.key,
            prompt.value,
            scaling=prompt.scaling,
            table=table,
            spec=spec,
            layer=prompt.layer,
            sinks=prompt.sinks,
        )
