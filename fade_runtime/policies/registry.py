"""Every policy by the name that ``FadeConfig(eviction_policy=...)`` has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fade_runtime.policies.base import H2O, Adaptive, Ema, Policy
from fade_runtime.policies.fastgen import FastGen, Shares
from fade_runtime.policies.learned import Learned
from predictor.registry import load_predictor

Options = Any  # a FadeConfig, which stands above this package


def _learned(options: Options) -> Learned:
    assert options.predictor is not None
    return Learned(load_predictor(options.predictor), options.head_budgets, options.allocation == "global")


def _fastgen(options: Options) -> FastGen:
    learned = None if options.predictor is None else _learned(options)
    shares = Shares(options.recover, options.frequent_share, options.local_share)
    return FastGen(shares, options.n_sink, options.recent_window, learned)


POLICIES: dict[str, Callable[[Options], Policy]] = {
    "position": lambda options: Policy(),
    "h2o": lambda options: H2O(),
    "ema": lambda options: Ema(options.ema_decay),
    "adaptive": lambda options: Adaptive(options.ema_decay),
    "learned": _learned,
    "fastgen": _fastgen,
}
