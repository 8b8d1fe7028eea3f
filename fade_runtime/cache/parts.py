"""What a tiered cache consists of, for whatever reads or replaces it: accounting, sessions, telemetry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fade_runtime import transformers_api as hf
from fade_runtime.cache.shadow import Shadow
from fade_runtime.config import FadeConfig, MemoryController
from fade_runtime.guard import Guard
from fade_runtime.layer import TieredLayer
from fade_runtime.layer.allocation import GlobalAllocation
from fade_runtime.layer.sequences import Shared
from fade_runtime.policies import Policy
from fade_runtime.policies.text import SeenText
from fade_runtime.storage.codebook import CodebookSet
from predictor.errors import FadeError


class CacheParts:
    """The parts of a :class:`fade_runtime.TieredCache`.

    Attributes:
        layers: of the model's cache: tiered ones, and transformers' own.
        config: its options. policy: whose scores decide.
        codebook: for product quantisation, or None.
        text: what it knows of the words, or None. memory: gives the budget of a target in bytes, or None.
        allocation: shares one budget out over the layers, or None.
        guard: watches the layers, or None. shadow: compares with full precision now and then, or None.
        shared: what its layers compute once together.
    """

    layers: list[Any]
    config: FadeConfig
    policy: Policy
    codebook: CodebookSet | None
    text: SeenText | None
    memory: MemoryController | None
    allocation: GlobalAllocation | None
    guard: Guard | None
    shadow: Shadow | None
    shared: Shared
    _model: Callable[[], nn.Module | None]

    @property
    def model(self) -> nn.Module:
        """The model that this cache was made for.

        Raises:
            FadeError: it is gone; a cache does not keep it alive.
        """
        model = self._model()
        if model is None:
            raise FadeError("this cache's model is gone; keep it while you use the cache")
        return model

    @property
    def kwargs(self) -> dict[str, CacheParts]:
        """This cache under the name by which its model takes one: ``model.generate(**inputs, **cache.kwargs)``.

        That is ``cache`` on transformers since 5.24, ``past_key_values`` before.
        """
        return hf.forward_kwargs(self, self.model)

    @property
    def own(self) -> list[TieredLayer]:
        """The layers that are this cache's own: tiered ones, and sliding windows in 4 bits."""
        return [layer for layer in self.layers if isinstance(layer, TieredLayer)]

    @property
    def tiered(self) -> list[TieredLayer]:
        """The layers whose tokens are chosen: those of full attention."""
        return [layer for layer in self.own if layer.setup.window is None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen."""
        raise NotImplementedError

    def settle(self) -> None:
        """Take back what a call of the model left behind that did not end."""
        raise NotImplementedError
