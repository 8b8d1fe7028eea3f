"""Policies: attention statistics -> importance scores.

A policy keeps one number per token and kv head, its *state*. The prompt gives it a first value; each decode step
decays it and adds the attention that the token received; from time to time it is turned into a score. Adding a policy
takes a class here (or in a file of its own) and one line in :data:`POLICIES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from predictor import rope, scores
from predictor.features import attention_rows, h2o_mass, prefill_features

if TYPE_CHECKING:
    from predictor.bundle import Predictor

WINDOW = 64  # prompt queries that start the moving average


@dataclass(frozen=True)
class Prompt:
    """One sequence in one layer at the end of its prefill, padding cut off.

    Attributes:
        query: [Hq, S, D] rotated. key, value: [H, S, D]. scaling: factor on the scores.
        table: gives the rotary table of slots 0 .. n - 1, or None without rotation.
        layer: index in the model.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    table: Callable[[int], rope.Table | None]
    layer: int


class Policy:
    """The newest tokens are kept; no statistics. Also the base of the others."""

    name = "position"
    decay: float | None = None  # of the state, per step; None: no statistics
    gain: float = 1.0
    whole_prompt = False  # the first state is `h2o_mass`: the attention of all queries of the prompt
    reads_text = False  # needs the class of each token (:mod:`fade_runtime.policies.text`)
    raises = False  # what a text's profile asks for is the least that a head keeps, not the most
    predictor: Predictor | None = None

    def __deepcopy__(self, memo: object) -> Policy:
        """A policy knows nothing of any text: copies of a cache share it."""
        return self

    def start(self, prompt: Prompt) -> Tensor | None:
        """State [H, S] float32 after the prompt, or None."""
        return None

    def weights(self, steps: int, device: torch.device) -> Tensor | None:
        """Weight [steps] of each new query's attention in the state, the newest last."""
        return None if self.decay is None else _weights(steps, self.decay, self.gain, device)

    def check(self, layers: int, kv_heads: int) -> None:
        """Refuse a model that it cannot serve.

        Args:
            layers: up to the last one that is tiered. kv_heads: of each of them.

        Raises:
            FadeError: what it has learned is for fewer layers, or other heads.
        """

    def head_shares(self, layer: int, share: float) -> tuple[float, ...] | None:
        """Share of the context that each kv head of a layer keeps when the mean is ``share``; None: all the same."""
        return None

    def score(self, state: Tensor, slots: Tensor, seen: int | Tensor, prompt: int | Tensor) -> Tensor:
        """Importance of tokens, higher = keep; linear in ``state`` at given slots.

        Args:
            state: [T] float32 statistics of tokens of one or many rows. slots: [T] their places in their rows.
            seen: tokens of the row so far. prompt: tokens of its first prompt. Numbers, or [T] where rows differ.
        """
        return scores.position(slots)


class H2O(Policy):
    """Attention received since the token was seen, per query that could see it."""

    name = "h2o"
    decay = 1.0
    whole_prompt = True

    def start(self, prompt: Prompt) -> Tensor:
        """Mass over all queries of the prompt."""
        return h2o_mass(prompt.query, prompt.key, prompt.scaling)

    def score(self, state: Tensor, slots: Tensor, seen: int | Tensor, prompt: int | Tensor) -> Tensor:
        """Mass divided by the number of queries that could see the token."""
        return scores.h2o(state, seen - slots)


class Ema(Policy):
    """Moving average of attention; starts from the last queries of the prompt, then follows decoding."""

    name = "ema"

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.gain = 1 - decay

    def start(self, prompt: Prompt) -> Tensor:
        """Average over the last :data:`WINDOW` queries of the prompt."""
        last = prompt.query[:, -WINDOW:]
        rows = attention_rows(last, prompt.key, prompt.scaling, first=prompt.key.shape[1] - last.shape[1])
        assert self.decay is not None
        return scores.ema(rows, self.decay)

    def score(self, state: Tensor, slots: Tensor, seen: int | Tensor, prompt: int | Tensor) -> Tensor:
        """The average; for tokens younger than the prompt corrected for starting at zero.

        Source: Kingma and Ba 2015, Adam (arXiv 1412.6980), section 3.
        """
        assert self.decay is not None
        started = 1 - self.decay ** (seen - slots).clamp(min=1).float()
        return state / torch.where(slots < prompt, 1.0, started)


class Adaptive(Ema):
    """The moving average again; the cache fills its tiers by shares of it (``tau``), not by counts."""

    name = "adaptive"


class Learned(Ema):
    """A predictor's forecast of attention over the coming steps, which decoding then corrects."""

    name = "learned"
    predictor: Predictor

    def __init__(self, predictor: Predictor, head_budgets: bool = True) -> None:
        super().__init__(decay=1 - 1 / predictor.spec.horizon)
        self.predictor = predictor
        self.budgets = predictor.budgets if head_budgets else None

    def check(self, layers: int, kv_heads: int) -> None:
        """Refuse learned budgets that some layer or head lacks."""
        if self.budgets is not None:
            what = f"predictor {self.predictor.name}"
            self.budgets.refuse_other_heads(what, kv_heads, least=layers, most=None)

    def head_shares(self, layer: int, share: float) -> tuple[float, ...] | None:
        """From the bundle's table of losses, if it has one."""
        return None if self.budgets is None else self.budgets.allocate(round(min(share, 1.0), 3))[layer]

    @torch.no_grad()
    def start(self, prompt: Prompt) -> Tensor:
        """The forecast as a share of attention, the unit of what decoding adds."""
        spec = self.predictor.spec
        table = prompt.table(prompt.key.shape[1] + spec.horizon)
        given = prompt.query, prompt.key, prompt.value
        seen = prefill_features(*given, scaling=prompt.scaling, table=table, spec=spec, layer=prompt.layer)
        return self.predictor.forecast(seen)


@functools.lru_cache(maxsize=8)
def _weights(steps: int, decay: float, gain: float, device: torch.device) -> Tensor:
    """Shared by all layers and steps, so nobody writes to it, and it must outlive inference mode."""
    with torch.inference_mode(False):
        age = torch.arange(steps - 1, -1, -1, device=device, dtype=torch.float32)
        return gain * decay**age


def _learned(options: PolicyOptions) -> Policy:
    from predictor.registry import load_predictor

    assert options.predictor is not None
    return Learned(load_predictor(options.predictor), options.head_budgets)


def _fastgen(options: PolicyOptions) -> Policy:
    from fade_runtime.policies.fastgen import fastgen

    return fastgen(options)


class PolicyOptions(Protocol):
    """What a policy may ask of the configuration."""

    @property
    def ema_decay(self) -> float:
        """Decay per step of a moving average."""

    @property
    def head_budgets(self) -> bool:
        """Whether to use the predictor's budget for each kv head."""

    @property
    def predictor(self) -> str | Path | Predictor | None:
        """A predictor or its reference."""


POLICIES: dict[str, Callable[[PolicyOptions], Policy]] = {
    "position": lambda options: Policy(),
    "h2o": lambda options: H2O(),
    "ema": lambda options: Ema(options.ema_decay),
    "adaptive": lambda options: Adaptive(options.ema_decay),
    "learned": _learned,
    "fastgen": _fastgen,
}
