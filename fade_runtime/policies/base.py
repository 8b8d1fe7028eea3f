"""Policies: attention statistics -> importance scores.

A policy keeps one number per token and kv head, its attention statistic. The prompt gives it a first value; each decode
step decays it and adds the attention that the token received; from time to time it is turned into a score. Adding a
policy takes a class here (or in a file of its own) and one line in :data:`fade_runtime.policies.registry.POLICIES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from predictor import rope, scores
from predictor.bundle import Predictor
from predictor.features import attention_rows, h2o_mass

WINDOW = 64  # prompt queries that start the moving average


@dataclass(frozen=True)
class Prompt:
    """One sequence in one layer at the end of its prefill, padding cut off.

    Attributes:
        query: [Hq, S, D] rotated. key, value: [H, S, D]. scaling: factor on the scores.
        table: gives the rotary table of slots 0 .. n - 1, or None without rotation.
        layer: index in the model. sinks: [Hq] learned sinks, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    table: Callable[[int], rope.Table | None]
    layer: int
    sinks: Tensor | None = None


class Forecast(NamedTuple):
    """What a policy knows at the end of a prompt.

    Attributes:
        stats: [H, S] float32 first attention statistics, or None.
        importance: [H, S] float32 by which tokens of all kv heads and layers can be compared; None: by the statistics.
    """

    stats: Tensor | None
    importance: Tensor | None = None


class ProfiledTokens(NamedTuple):
    """Body tokens of a layer, and what the profile of each kv head was at the end of its prompt.

    Attributes:
        rows: [T] row (batch x kv head) of each token. classes: [T] int8 classes of :mod:`fade_runtime.policies.text`.
        age: [T] tokens of the row that came later. profiles: [R] int8. lengths: [R] tokens of each row's text.
    """

    rows: Tensor
    classes: Tensor
    age: Tensor
    profiles: Tensor
    lengths: Tensor


class Policy:
    """The newest tokens are kept; no statistics. Also the base of the others.

    Attributes:
        name: in ``FadeConfig(eviction_policy=...)``.
        decay: of the attention statistics, per decode step; None: the policy keeps none.
        gain: factor on the attention that a step adds.
        whole_prompt: the first statistics are `h2o_mass`, the attention of all queries of the prompt.
        reads_text: the policy is told the class of each token, and profiles kv heads (:meth:`profile`).
        compares: :meth:`forecast` gives an importance by which tokens of different kv heads can be compared.
        profile_is_floor: what a profile asks for is the least that a head keeps, not the most.
        predictor: what the policy has learned, or None.
    """

    name = "position"
    decay: float | None = None
    gain: float = 1.0
    whole_prompt = False
    reads_text = False
    compares = False
    profile_is_floor = False
    predictor: Predictor | None = None

    def __deepcopy__(self, memo: object) -> Policy:
        """A policy knows nothing of any text: copies of a cache share it."""
        return self

    def start(self, prompt: Prompt) -> Tensor | None:
        """Attention statistics [H, S] float32 after the prompt, or None."""
        return None

    def forecast(self, prompt: Prompt) -> Forecast:
        """First statistics, and what makes tokens of different heads comparable if the policy :attr:`compares`."""
        return Forecast(self.start(prompt))

    def weights(self, steps: int, device: torch.device) -> Tensor | None:
        """Weight [steps] float32 of each new query's attention in the statistics, the newest last."""
        return None if self.decay is None else _weights(steps, self.decay, self.gain, device)

    def check(self, layers: Sequence[int], kv_heads: int) -> None:
        """Refuse a model that it cannot serve.

        Args:
            layers: indices of those whose tokens can be evicted. kv_heads: of each of them.

        Raises:
            FadeError: what it has learned is for other layers, or other heads.
        """

    def head_shares(self, layer: int, share: float) -> tuple[float, ...] | None:
        """Share of the context that each kv head of a layer keeps when the mean is ``share``; None: all the same."""
        return None

    def score(self, attention_stats: Tensor, slots: Tensor, seen: int | Tensor, prompt: int | Tensor) -> Tensor:
        """Importance of tokens, higher = keep.

        It must be linear in ``attention_stats``, token by token: a factor that depends on slots and lengths alone,
        times the statistic. The cache relies on that where it turns attention or another model's scores into
        statistics, by dividing by the score of a statistic of one.

        Args:
            attention_stats: [T] float32 statistics of tokens of one or many rows.
            slots: [T] int64 their places in their rows.
            seen: tokens of the row so far, a number or [T]. prompt: tokens of its first prompt, a number or [T].

        Returns:
            [T] float32.
        """
        return scores.position(slots)

    def profile(self, attention_stats: Tensor, classes: Tensor) -> Tensor | None:
        """What each kv head is to keep of a text, found at the end of its prompt; None: there are no profiles.

        Args:
            attention_stats: [H, S] float32 of the prompt's tokens. classes: [S] int8.

        Returns:
            [H] int8, for :meth:`narrow` to read.
        """
        return None

    def narrow(self, scores: Tensor, tokens: ProfiledTokens) -> tuple[Tensor, Tensor | None]:
        """Scores [T] as the profiles of kv heads want them, and how many tokens each row asks for, [R] or None."""
        return scores, None


class H2O(Policy):
    """Attention received since the token was seen, per query that could see it."""

    name = "h2o"
    decay = 1.0
    whole_prompt = True

    def start(self, prompt: Prompt) -> Tensor:
        """Mass [H, S] over all queries of the prompt."""
        return h2o_mass(prompt.query, prompt.key, prompt.scaling, sinks=prompt.sinks)

    def score(self, attention_stats: Tensor, slots: Tensor, seen: int | Tensor, prompt: int | Tensor) -> Tensor:
        """Mass divided by the number of queries that could see the token: [T]."""
        return scores.h2o(attention_stats, seen - slots)


class Ema(Policy):
    """Moving average of attention; starts from the last queries of the prompt, then follows decoding."""

    name = "ema"

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.gain = 1 - decay

    def start(self, prompt: Prompt) -> Tensor:
        """Average [H, S] over the last :data:`WINDOW` queries of the prompt."""
        last = prompt.query[:, -WINDOW:]
        first = prompt.key.shape[1] - last.shape[1]
        rows = attention_rows(last, prompt.key, prompt.scaling, first, prompt.sinks)
        assert self.decay is not None
        return scores.ema(rows, self.decay)

    def score(self, attention_stats: Tensor, slots: Tensor, seen: int | Tensor, prompt: int | Tensor) -> Tensor:
        """The average [T]; for tokens younger than the prompt corrected for starting at zero.

        Source: Kingma and Ba 2015, Adam (arXiv 1412.6980), section 3.
        """
        assert self.decay is not None
        started = 1 - self.decay ** (seen - slots).clamp(min=1).float()
        return attention_stats / torch.where(slots < prompt, 1.0, started)


class Adaptive(Ema):
    """The moving average again; the cache fills its tiers by shares of it (``tau``), not by counts."""

    name = "adaptive"


@functools.lru_cache(maxsize=8)
def _weights(steps: int, decay: float, gain: float, device: torch.device) -> Tensor:
    """Shared by all layers and steps, so nobody writes to it, and it must outlive inference mode."""
    with torch.inference_mode(False):
        age = torch.arange(steps - 1, -1, -1, device=device, dtype=torch.float32)
        return gain * decay**age
