"""What the user may choose."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fade_runtime.policy import POLICIES
from predictor.errors import FadeError

if TYPE_CHECKING:
    from predictor.bundle import Predictor

@dataclass(frozen=True)
class FadeConfig:
    """How a tiered cache spends its memory.

    Attributes:
        n_sink: first tokens of a sequence that stay in full precision (attention sinks).
        recent_window: newest tokens that stay in full precision.
        int4_budget: body tokens kept per kv head, in 4 bits: a whole number, a share of the context (a float in
            (0, 1]), or None for all of them. What exceeds the budget is evicted.
        eviction_policy: "position", "h2o", "ema" or "learned": whose score decides what is evicted.
        predictor: for "learned": `models:/NAME@alias`, `models:/NAME/3`, a bundle directory, a hub id, or a
            loaded predictor.
        head_budgets: for "learned": give each kv head the budget that the predictor learned for it (their mean is
            ``int4_budget``); with False, or a predictor without budgets, all heads get the same.
        reassign_every: tokens that gather beyond the window before they move into the body, while decoding.
        ema_decay: decay per step of the "ema" policy's moving average.
        strict: refuse a predictor that was trained for another model; with False, warn.

    Raises:
        FadeError: an option out of its range, or options that contradict each other.

    Example:
        >>> FadeConfig(int4_budget=0.25, eviction_policy="ema").budget(seen=1000)
        250
        >>> FadeConfig(eviction_policy="best")
        Traceback (most recent call last):
            ...
        predictor.errors.FadeError: eviction_policy 'best' is not one of position, h2o, ema, learned
    """

    n_sink: int = 4
    recent_window: int = 64
    int4_budget: int | float | None = None
    eviction_policy: str = "h2o"
    predictor: str | Path | Predictor | None = None
    head_budgets: bool = True
    reassign_every: int = 64
    ema_decay: float = 0.95
    strict: bool = True

    def __post_init__(self) -> None:
        """Check every option by itself, then together."""
        for name, least in (("n_sink", 0), ("recent_window", 1), ("reassign_every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise FadeError(f"{name} {value!r} is not a whole number of at least {least}")
        if not 0 < self.ema_decay < 1:
            raise FadeError(f"ema_decay {self.ema_decay!r} is not between 0 and 1")
        if self.eviction_policy not in POLICIES:
            raise FadeError(f"eviction_policy {self.eviction_policy!r} is not one of {', '.join(POLICIES)}")
        _check_budget(self.int4_budget)
        if self.eviction_policy == "learned" and self.predictor is None:
            raise FadeError(
                "eviction_policy 'learned' needs a predictor; give predictor='models:/NAME@champion' or a path"
            )
        if self.eviction_policy != "learned" and self.predictor is not None:
            raise FadeError(
                f"predictor is given but eviction_policy is {self.eviction_policy!r}; set eviction_policy='learned'"
            )

    @property
    def evicts(self) -> bool:
        """Whether anything is ever dropped."""
        return self.int4_budget is not None

    def budget(self, seen: int) -> int | None:
        """Body tokens that a kv head may keep after ``seen`` tokens, or None for all."""
        if isinstance(self.int4_budget, float):
            return int(self.int4_budget * seen)
        return self.int4_budget

    def with_options(self, **options: Any) -> FadeConfig:
        """Return a copy with some options changed; an unknown name is refused."""
        known = {field.name for field in fields(self)}
        if unknown := sorted(set(options) - known):
            raise FadeError(f"unknown option {', '.join(unknown)}; FadeConfig has {', '.join(sorted(known))}")
        return replace(self, **options)

    @classmethod
    def safe(cls, **options: Any) -> FadeConfig:
        """Everything kept, the body in 4 bits: about 3.3 times smaller at 2,048 tokens."""
        return cls(int4_budget=None).with_options(**options)

    @classmethod
    def balanced(cls, predictor: str | Path | Predictor | None = None, **options: Any) -> FadeConfig:
        """Half of the context kept in the body, by the predictor if one is given, else by h2o."""
        return cls._evicting(0.5, predictor, options)

    @classmethod
    def aggressive(cls, predictor: str | Path | Predictor | None = None, **options: Any) -> FadeConfig:
        """A fifth of the context kept in the body, by the predictor if one is given, else by h2o."""
        return cls._evicting(0.2, predictor, options)

    @classmethod
    def _evicting(cls, budget: float, predictor: Any, options: dict[str, Any]) -> FadeConfig:
        policy = "h2o" if predictor is None else "learned"
        return cls(int4_budget=budget, eviction_policy=policy, predictor=predictor).with_options(**options)


def _check_budget(budget: Any) -> None:
    if budget is None:
        return
    whole = isinstance(budget, int) and not isinstance(budget, bool)
    if (whole and budget >= 0) or (isinstance(budget, float) and 0 < budget <= 1):
        return
    raise FadeError(
        f"int4_budget {budget!r} is neither a whole number of tokens (at least 0), nor a share of the context "
        "(a float in (0, 1]), nor None"
    )
