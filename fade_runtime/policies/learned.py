"""The learned policy: a predictor's forecast of attention, which decoding corrects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fade_runtime.policies.base import Ema, Prompt
from predictor.bundle import Predictor
from predictor.features import prefill_features


class Learned(Ema):
    """A predictor's forecast of attention over the coming steps, which decoding then corrects."""

    name = "learned"
    predictor: Predictor

    def __init__(self, predictor: Predictor, head_budgets: bool = True) -> None:
        super().__init__(decay=1 - 1 / predictor.spec.horizon)
        self.predictor = predictor
        self.budgets = predictor.budgets if head_budgets else None

    def check(self, layers: Sequence[int], kv_heads: int) -> None:
        """Refuse learned budgets of other layers or heads."""
        if self.budgets is not None:
            self.budgets.refuse_other_heads(f"predictor {self.predictor.name}", layers, kv_heads)

    def head_shares(self, layer: int, share: float) -> tuple[float, ...] | None:
        """From the bundle's table of losses, if it has one."""
        return None if self.budgets is None else self.budgets.allocate(round(min(share, 1.0), 3))[layer]

    @torch.no_grad()
    def start(self, prompt: Prompt) -> Tensor:
        """The forecast [H, S] as a share of attention, the unit of what decoding adds."""
        spec = self.predictor.spec
        table = prompt.table(prompt.key.shape[1] + spec.horizon)
        features = prefill_features(
            prompt.query,
            prompt.key,
            prompt.value,
            scaling=prompt.scaling,
            table=table,
            spec=spec,
            layer=prompt.layer,
            sinks=prompt.sinks,
        )
        return self.predictor.forecast(features)
