"""What the user may choose: one flat constructor over four groups of options."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fade_runtime.config.budget_options import BudgetOptions
from fade_runtime.config.guard_options import GuardOptions
from fade_runtime.config.score_options import ScoreOptions
from fade_runtime.config.storage_options import StorageOptions
from predictor.bundle import Predictor
from predictor.certificate import QUANTILE, choose_rung
from predictor.errors import FadeError
from predictor.registry import load_predictor

PRESETS = ("safe", "balanced", "aggressive")
SIZES = ("int4_budget", "target_compression", "memory")  # options of which one says how much is kept


@dataclass(frozen=True)
class FadeConfig(GuardOptions, ScoreOptions, BudgetOptions, StorageOptions):
    """How a tiered cache spends its memory.

    Body tokens, those between the sinks and the recent window, go to the high tier while its budget lasts, then to
    the low tier, then out. All options are given by name, each is described by its group:
    :class:`~fade_runtime.config.storage_options.StorageOptions` (form),
    :class:`~fade_runtime.config.budget_options.BudgetOptions` (how many),
    :class:`~fade_runtime.config.score_options.ScoreOptions` (which),
    :class:`~fade_runtime.config.guard_options.GuardOptions` (what if that fails).

    Raises:
        FadeError: an option out of its range, or options that contradict each other.

    Example:
        >>> FadeConfig(int4_budget=0.25, low_budget=100, eviction_policy="ema").budgets(seen=1000)
        (250, 100)
        >>> FadeConfig(eviction_policy="best")
        Traceback (most recent call last):
            ...
        predictor.errors.FadeError: eviction_policy 'best' is not one of position, h2o, ema, adaptive, learned, fastgen
    """

    def __post_init__(self) -> None:
        """Check each group by itself, then all together; numbers of numpy become Python's."""
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), np.generic):
                object.__setattr__(self, field.name, value.item())
        self.check_storage()
        self.check_budgets()
        self.check_scores()
        self.check_guard()
        self._check_together()

    def _check_together(self) -> None:
        """Refuse options of different groups that contradict each other."""
        self._check_tiers()
        if isinstance(self.int4_budget, int) and isinstance(self.low_budget, int):
            total = self.int4_budget + self.low_budget
            if 0 < total < self.n_sink:
                raise FadeError(
                    f"a budget of {total} tokens is smaller than n_sink {self.n_sink}; raise it, or lower n_sink"
                )
        if self.phase in ("1a", "1b") and self.ranks:
            raise FadeError(
                f"phase {self.phase!r} evicts nothing; leave int4_budget, target_compression and memory at None, and "
                "fastgen out, or set phase='2'"
            )
        for name in ("tau", "low_tau"):
            if getattr(self, name) not in (None, 1) and self.eviction_policy == "position":
                raise FadeError(
                    f"{name} {getattr(self, name)!r} needs scores that are shares; eviction_policy 'position' has none"
                )
        if self.eviction_policy == "fastgen":
            if self.predictor is not None and not (self.int4_budget or self.has_target):
                raise FadeError(
                    "fastgen with a predictor raises learned budgets; set int4_budget, their mean, or a target"
                )
            if min(self.shares) < 1:
                raise FadeError("tau and low_tau share out scores by head, as fastgen does itself; leave them at None")
        self._check_allocation()
        if self.assistant is not None and (self.eviction_policy == "position" or not self.ranks):
            raise FadeError(
                "assistant has a part in scores, and none decides here; set int4_budget, and not policy 'position'"
            )
        if self.on_rollback == "redecode" and self.recent_window < 2 * self.monitor_every:
            raise FadeError(
                f"on_rollback 'redecode' drops up to 2 x monitor_every {self.monitor_every} tokens, which must be in "
                f"the recent_window {self.recent_window}; lower monitor_every to {self.recent_window // 2} or less"
            )

    def _check_allocation(self) -> None:
        """Whether scores of different heads can compete."""
        if self.allocation == "heads":
            return
        if self.eviction_policy in ("position", "fastgen"):
            raise FadeError(
                f"allocation {self.allocation!r} compares scores of all heads, and eviction_policy "
                f"{self.eviction_policy!r} decides in each by itself; use 'learned', 'h2o' or 'ema', or "
                "allocation='heads'"
            )
        if min(self.shares) < 1:
            raise FadeError(
                f"allocation {self.allocation!r} shares one budget out, and tau and low_tau (eviction_policy "
                "'adaptive' sets them) bound each head by itself; leave them out, or use allocation='heads'"
            )

    def _check_tiers(self) -> None:
        """Whether what the low tier is fits there being one."""
        bits, low = self.bits, self.low_tier if self.has_low_tier else None
        for fewer, middle, name in ((bits.low_key, bits.key, "k"), (bits.low_value, bits.value, "v")):
            if low is not None and fewer > middle:
                raise FadeError(
                    f"low_{name}_bits {fewer} is more than middle_{name}_bits {middle}; demotion only takes bits away"
                )
        if bits.key == 2 or (low == "int2" and bits.low_key == 2):
            warnings.warn(
                "2-bit keys cost much quality: K2V2 measured KL .02 to .22 on SmolLM2-135M where K4V2 has .009; "
                "use 4-bit keys (the default)",
                stacklevel=5,
            )
        if low == "pq" and self.codebook is None:
            raise FadeError("low_tier 'pq' needs a codebook; train one with `python -m pipelines.train_codebook`")
        if low != "pq" and self.codebook is not None:
            raise FadeError("codebook is given but no low tier uses it; set low_tier='pq' and low_budget")

    @property
    def ranks(self) -> bool:
        """Whether scores decide anything: not when all tokens go to one tier."""
        if self.int4_budget is None:
            return self.eviction_policy == "fastgen" or self.has_target
        return not (self.int4_budget == 0 and self.low_budget is None)

    @property
    def shares(self) -> tuple[float, float]:
        """``tau`` and ``low_tau`` with their defaults."""
        tau, low_tau = (0.9, 0.99) if self.eviction_policy == "adaptive" else (1.0, 1.0)
        return tau if self.tau is None else self.tau, low_tau if self.low_tau is None else self.low_tau

    def with_options(self, **options: Any) -> FadeConfig:
        """Return a copy with some options changed; an unknown name is refused."""
        known = {field.name for field in fields(self)}
        if unknown := sorted(set(options) - known):
            raise FadeError(f"unknown option {', '.join(unknown)}; FadeConfig has {', '.join(sorted(known))}")
        return replace(self, **options)

    @classmethod
    def of(cls, given: FadeConfig | Mapping[str, Any] | str | None) -> FadeConfig:
        """The config that is meant by one, by its options, by a preset's name, or by None ("safe").

        Raises:
            FadeError: no such preset or option.

        Example:
            >>> FadeConfig.of("safe") == FadeConfig.of({}) == FadeConfig()
            True
        """
        if isinstance(given, FadeConfig):
            return given
        if given is None or isinstance(given, Mapping):
            return cls().with_options(**(given or {}))
        if given not in PRESETS:
            raise FadeError(f"config {given!r} is not a FadeConfig, a dict of its options, or {', '.join(PRESETS)}")
        made: FadeConfig = getattr(cls, given)()
        return made

    @classmethod
    def safe(cls, **options: Any) -> FadeConfig:
        """Everything kept, the body in 4 bits: about 3.2 times smaller at 2,048 tokens."""
        return cls().with_options(**options)

    @classmethod
    def balanced(cls, predictor: str | Path | Predictor | None = None, **options: Any) -> FadeConfig:
        """The whole cache 6 times smaller, but a quarter of the context kept; by the predictor, or else by h2o."""
        return cls._evicting(predictor, {"target_compression": 6.0, "min_budget": 0.25}, options)

    @classmethod
    def aggressive(cls, predictor: str | Path | Predictor | None = None, **options: Any) -> FadeConfig:
        """The whole cache 10 times smaller, but a tenth of the context kept; by the predictor, or else by h2o."""
        return cls._evicting(predictor, {"target_compression": 10.0, "min_budget": 0.1}, options)

    @classmethod
    def risk(
        cls,
        kl: float = 0.01,
        confidence: float = 0.95,
        predictor: str | Path | Predictor | None = None,
        share: float = QUANTILE,
        **options: Any,
    ) -> FadeConfig:
        """The strongest compression that the predictor's certificate answers for.

        With the given confidence, at least a share of texts like those it was certified on loses no more than ``kl``
        per token; the certificate says on which texts, of which length. Nothing is assumed of how losses are spread.

        Args:
            kl: target, KL(full || compressed) per token in nats.
            confidence: of the promise. share: of texts that it is made for.
            predictor: reference or loaded predictor, certified by `python -m pipelines.certify`.
            options: other options; they are not certified.

        Raises:
            FadeError: no predictor, no certificate, too few texts, or a target that no compression meets.

        Example:
            >>> FadeConfig.risk(kl=0.01, predictor="smollm2-135m-instruct").eviction_policy
            'learned'
        """
        if not kl > 0 or not 0 < confidence < 1 or not 0 < share < 1:
            raise FadeError(
                f"kl {kl!r}, confidence {confidence!r}, share {share!r}: use more than 0, and shares between 0 and 1"
            )
        if predictor is None:
            raise FadeError("risk reads a predictor's certificate; give predictor='models:/NAME@champion' or a path")
        loaded = load_predictor(predictor)
        rung = choose_rung(loaded.certificate, kl, confidence, share, loaded.name)
        if rung.int4_budget is None:
            return cls.safe(**options)
        return cls._evicting(loaded, {"int4_budget": rung.int4_budget}, options)

    @classmethod
    def _evicting(cls, predictor: Any, size: dict[str, Any], options: dict[str, Any]) -> FadeConfig:
        """A preset of a size; other sizes among the options take its place."""
        policy = "h2o" if predictor is None else "learned"
        if any(options.get(name) is not None for name in SIZES):
            size = {}
        return cls().with_options(**{"eviction_policy": policy, "predictor": predictor, **size, **options})
