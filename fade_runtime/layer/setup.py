"""What a layer of the cache is made of, in one bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fade_runtime.config import FadeConfig, MemoryController
from fade_runtime.layer.allocation import GlobalAllocation
from fade_runtime.policies import Policy
from fade_runtime.policies.text import SeenText
from fade_runtime.storage.pq import LayerCodebook
from fade_runtime.storage.spill import Spill
from predictor import rope


@dataclass(frozen=True)
class LayerSetup:
    """What a layer of the cache is made of; the layers of one cache differ in index, codebook and kv_sharers.

    Attributes:
        config: options of the cache. policy: whose scores decide.
        model_config: gives the config of the language model, which a cache does not keep alive.
        rotary: rotates keys, or None if positions enter in another way.
        index: of the layer in the model.
        codebook: of the layer, for product quantisation.
        kv_sharers: later layers that read this layer's tokens after it, in each call (Gemma 4, Gemma 3n).
        window: tokens that a query attends to, itself included, in a sliding-window layer: what has left it goes,
            nothing is ranked; None: all.
        text: what the cache knows of the words, if its policy asks for it.
        memory: gives the budget, if the target is bytes; shared by the layers.
        allocation: shares one budget out over the layers, if it is global.
        spill: where evicted tokens go, or None.
        ranks: whether scores decide which tokens are kept.
        keeps_stats: whether each token has an attention statistic.
    """

    config: FadeConfig
    policy: Policy
    model_config: Callable[[], Any]
    rotary: rope.Rotary | None = None
    index: int = 0
    codebook: LayerCodebook | None = None
    kv_sharers: int = 0
    window: int | None = None
    text: SeenText | None = None
    memory: MemoryController | None = None
    allocation: GlobalAllocation | None = None
    spill: Spill | None = None
    ranks: bool = field(init=False)
    keeps_stats: bool = field(init=False)

    def __post_init__(self) -> None:
        """Say once what each layer asks in each step."""
        ranks = self.config.ranks and self.window is None
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "keeps_stats", ranks and self.policy.decay is not None)

    def sliding(self, window: int) -> LayerSetup:
        """The same for a layer whose queries attend to a window of so many tokens."""
        return replace(
            self, policy=Policy(), codebook=None, text=None, memory=None, allocation=None, spill=None, window=window
        )
