"""Whose scores decide which tokens are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fade_runtime.config.validation import check_choice, check_fraction, check_whole
from fade_runtime.policies.registry import POLICIES
from predictor.bundle import Predictor
from predictor.errors import FadeError

OF_A_PREDICTOR = ("learned", "fastgen")  # policies that may have one


@dataclass(frozen=True)
class ScoreOptions:
    """Whose scores decide which tokens are kept.

    Attributes:
        eviction_policy: "position", "h2o", "ema", "adaptive", "learned", "fastgen": whose score decides. "adaptive" is
            "ema" that lets the scores fill the tiers: tau .9 and low_tau .99 unless given. "fastgen" finds for each kv
            head, at the end of the prompt, how little of its attention must be kept; int4_budget then is the most that
            a head may keep. With a predictor learned budgets are the least, and the profile may raise them.
        predictor: for "learned", possible for "fastgen": `models:/NAME@alias`, `models:/NAME/3`, a bundle directory, a
            hub id, or a loaded predictor.
        head_budgets: with a predictor: give each kv head the budget that the predictor learned for it (their mean is
            the budget given); with False, or a predictor without budgets, all heads get the same.
        recover: for "fastgen": share of a kv head's attention that its policy must recover, in (0, 1]. The policies:
            special tokens; and punctuation; and frequent tokens; and local ones; everything.
        frequent_share, local_share: for "fastgen": shares of the context that count as frequent and as local.
        tokenizer: for "fastgen", which must know special tokens and punctuation, and to compare an assistant's: a
            tokenizer, its directory, or None for the one that lies where the model was loaded from. Nothing is
            downloaded.
        assistant: a smaller model that reads the end of each prompt too, and has a part in the scores: a model of the
            same tokenizer, its directory, or a number: so many first layers of the model itself.
        assist_weight: the main model's part in the scores, from .6 to .8.
        assist_tail: tokens at the end of a prompt that the assistant reads.
        ema_decay: decay per step of the "ema" policy's moving average.
        strict: refuse a predictor or codebook that was trained for another model; with False, warn.
    """

    eviction_policy: str = "h2o"
    predictor: str | Path | Predictor | None = None
    head_budgets: bool = True
    recover: float = 0.95
    frequent_share: float = 0.3
    local_share: float = 0.3
    tokenizer: Any = None
    assistant: Any = None
    assist_weight: float = 0.7
    assist_tail: int = 1024
    ema_decay: float = 0.95
    strict: bool = True

    def check_scores(self) -> None:
        """Refuse a value out of its range, and a policy without what it needs.

        Raises:
            FadeError: names the option, its value and the remedy.
        """
        policy = self.eviction_policy
        check_choice("eviction_policy", policy, tuple(POLICIES))
        check_whole("assist_tail", self.assist_tail, 1)
        if not 0 < self.ema_decay < 1:
            raise FadeError(f"ema_decay {self.ema_decay!r} is not between 0 and 1")
        for name in ("recover", "frequent_share", "local_share"):
            check_fraction(name, getattr(self, name))
        if policy == "learned" and self.predictor is None:
            raise FadeError(
                "eviction_policy 'learned' needs a predictor; give predictor='models:/NAME@champion' or a path"
            )
        if policy not in OF_A_PREDICTOR and self.predictor is not None:
            raise FadeError(f"predictor is given but eviction_policy is {policy!r}; set eviction_policy='learned'")
        if isinstance(self.assistant, bool):
            raise FadeError(f"assistant {self.assistant!r} is neither a model nor a number of layers")
        if not 0.6 <= self.assist_weight <= 0.8:
            raise FadeError(f"assist_weight {self.assist_weight!r} is not from 0.6 to 0.8")
        if policy != "fastgen" and self.assistant is None and self.tokenizer is not None:
            raise FadeError(f"tokenizer is given but eviction_policy is {policy!r}, which reads no text; leave it out")
