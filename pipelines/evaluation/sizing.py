"""Caches of equal size: one option of each is set so that its cache takes a target of bytes.

The option's value in a configuration is the word "fit". Bytes are those that are measured on a text, not those that an
option promises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pipelines.evaluation.measure import compare
from pipelines.evaluation.methods import Skipped, available_methods, make_methods, run_without_failing
from predictor.bundle import Predictor
from predictor.errors import FadeError

FIT = "fit"
DIRECT = "target_compression"  # an option that is a size itself: its value is the ratio
ENDS = (0.01, 0.99)  # of the options that are fitted: fractions of the context
ROUNDS = 8  # after the ends, at most
CLOSE = 0.004  # of the target's bytes; a token of ten times smaller caches of 2,000 tokens is .5 %
NEAR = 1.05  # a cache that is this much smaller than the target still counts as of that size


@dataclass(frozen=True)
class Sized:
    """A configuration at a size.

    Attributes:
        method: its name in tables. config: the name of the configuration that it is made of. ratio: times smaller than
            the full cache. option: that is fitted. value: of the option. compression: measured on the fitted text.
    """

    method: str
    config: str
    ratio: float
    option: str
    value: float = 0.0
    compression: float = 0.0


def to_fit(configs: Mapping[str, Mapping[str, Any]], ratios: Sequence[float]) -> list[Sized]:
    """What must be fitted: each configuration with the word "fit", at each ratio.

    Raises:
        FadeError: two options to fit in one configuration, or ratios that are not above 1, or ratios without such
            a configuration.

    Example:
        >>> for each in to_fit({"ours": {"int4_budget": "fit"}, "k4v2": {"int4_budget": 0}}, [3.2, 6.0]):
        ...     each.method, each.option, each.ratio
        ('ours 3.2x', 'int4_budget', 3.2)
        ('ours 6x', 'int4_budget', 6.0)
    """
    if wrong := [ratio for ratio in ratios if not ratio > 1]:
        raise FadeError(f"ratios has {wrong[0]}; use numbers above 1, as many times smaller than the full cache")
    targets: list[Sized] = []
    for name, options in configs.items():
        fitted = [option for option, value in options.items() if value == FIT]
        if len(fitted) > 1:
            raise FadeError(f"config {name!r} fits {' and '.join(fitted)}; only one option can be {FIT!r}")
        if fitted and not ratios:
            raise FadeError(f"config {name!r} fits {fitted[0]}; say to which sizes with ratios, such as [3.2, 6]")
        targets += [Sized(f"{name} {ratio:g}x", name, ratio, fitted[0]) for ratio in ratios if fitted]
    if ratios and not targets:
        raise FadeError(f"ratios are given, but no config has an option {FIT!r}")
    return targets


def with_fitted(
    names: Sequence[str], configs: Mapping[str, Mapping[str, Any]], sized: Sequence[Sized]
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Names and configurations with each fitted one in place of its pattern.

    Example:
        >>> sized = [Sized("ours 6x", "ours", 6.0, "int4_budget", 0.4)]
        >>> with_fitted(["safe", "ours"], {"ours": {"int4_budget": "fit"}}, sized)
        (['safe', 'ours 6x'], {'ours 6x': {'int4_budget': 0.4}})
    """
    fitted: dict[str, list[str]] = {}
    for one in sized:
        fitted.setdefault(one.config, []).append(one.method)
    methods = [each for name in names for each in fitted.get(name, [name])]
    others = {name: dict(options) for name, options in configs.items() if name not in fitted}
    return methods, others | {one.method: {**configs[one.config], one.option: one.value} for one in sized}


Measure = Callable[[Sequence[Sized]], Sequence[float]]


def fit(targets: Sequence[Sized], measure: Measure, smaller: Callable[[Sized], bool]) -> list[Sized]:
    """Find the option of each, by false position; most are near linear in bytes.

    Args:
        targets: of :func:`to_fit`. measure: gives the compressions of settings, all of which it may measure at once.
        smaller: whether a cache must be at least as small as its target; the others must be no smaller.

    Returns:
        Each with the value that comes nearest on its side, or with the end of the range that does.

    Source: Dowell and Jarratt 1971, "A modified regula falsi method for computing the root of an equation", BIT 11
        (the Illinois method).

    Example:
        >>> targets = [Sized("theirs 6x", "theirs", 6.0, "kept")]
        >>> fitted, = fit(targets, lambda settings: [1 / one.value for one in settings], smaller=lambda one: False)
        >>> round(fitted.value, 3), round(fitted.compression, 2)
        (0.167, 5.99)
    """
    tried: dict[str, list[Sized]] = {one.method: [] for one in targets}
    ends = [replace(one, value=end) for one in _first_of_each(targets) for end in ENDS]
    for end in _measured(ends, measure):
        for one in targets:
            if one.config == end.config:
                tried[one.method].append(replace(one, value=end.value, compression=end.compression))
    searches = {one.method: _Search(one.ratio, smaller(one), *tried[one.method]) for one in targets}
    for _ in range(ROUNDS):
        unfinished = [one for one in targets if not searches[one.method].done]
        if not unfinished:
            break
        for one in _measured([replace(one, value=searches[one.method].next) for one in unfinished], measure):
            searches[one.method].take(one)
    return [searches[one.method].best for one in targets]


def _first_of_each(targets: Sequence[Sized]) -> list[Sized]:
    return list({one.config: one for one in reversed(targets)}.values())


def _measured(settings: Sequence[Sized], measure: Measure) -> list[Sized]:
    compressions = measure([replace(one, method=f"{one.method} at {one.value:.6f}") for one in settings])
    return [replace(one, compression=each) for one, each in zip(settings, compressions)]


class _Search:
    """False position for one setting, in bytes: 1 / compression."""

    def __init__(self, ratio: float, smaller: bool, *ends: Sized) -> None:
        self.ratio, self.smaller, self.tried = ratio, smaller, list(ends)
        self._aim = (1 - CLOSE / 2 if smaller else 1 + CLOSE / 2) / ratio
        self._range = sorted(ends, key=lambda each: 1 / each.compression)
        self._off = [1 / each.compression - self._aim for each in self._range]
        self._reachable = self._off[0] < 0 < self._off[1]
        self._last: int | None = None

    @property
    def best(self) -> Sized:
        """The nearest on the right side; where nothing was, the nearest of all."""
        right = [one for one in self.tried if (one.compression >= self.ratio) == self.smaller]
        return min(right or self.tried, key=lambda one: abs(1 / one.compression - 1 / self.ratio))

    @property
    def done(self) -> bool:
        """Out of reach, or near enough on the right side."""
        off = self.ratio / self.best.compression - 1
        return not self._reachable or (abs(off) <= CLOSE and (off <= 0) == self.smaller)

    @property
    def next(self) -> float:
        """Where a straight line between both sides would have the target's bytes."""
        fraction = self._off[0] / (self._off[0] - self._off[1])
        return self._range[0].value + (self._range[1].value - self._range[0].value) * fraction

    def take(self, one: Sized) -> None:
        """Narrow the range; the side that stays twice counts half, so that both come nearer."""
        self.tried.append(one)
        off = 1 / one.compression - self._aim
        side = int(off > 0)
        if side == self._last:
            self._off[1 - side] /= 2
        self._last, self._range[side], self._off[side] = side, one, off


def equally_sized(
    lm: Any,
    methods: Sequence[str],
    configs: Mapping[str, Mapping[str, Any]],
    predictors: Mapping[str, Predictor],
    targets: Sequence[Sized],
    tokens: Tensor,
    steps: int,
    skipped: Skipped,
) -> tuple[list[str], list[Sized]]:
    """Set what is to be fitted, on a text [1, context + steps].

    Returns:
        Names of methods less those whose package is missing or fails here, or that cannot be of any size asked for;
        what was fitted. What cannot be of a size is named and skipped.
    """

    def measure(settings: Sequence[Sized]) -> list[float]:
        named = {one.method: {**configs[one.config], one.option: one.value} for one in settings}
        made = make_methods(list(named), named, predictors, 1.0)
        return [one.compression for one in compare(lm, made, tokens, steps, timed=False)[1:]]

    middle = {one.config: {**configs[one.config], one.option: _middle(one)} for one in targets}
    configured = [name for name in methods if name in configs]
    measured = run_without_failing(
        available_methods(configured, {**configs, **middle}, predictors, 1.0, skipped),
        lambda methods: compare(lm, methods, tokens, steps, timed=False),
        lambda method, error: skipped.add(f"{method.name}: {error}", method.name),
    )
    sizes = {one.name: one.compression for one in measured}
    names = [name for name in methods if name not in configs or name in sizes]
    is_ours = lambda one: "peer" not in configs[one.config]
    fixed_peers = [name for name in names if name in configs and "peer" in configs[name] and name not in middle]
    peer_sizes = [sizes[name] for name in fixed_peers]
    runnable = [one for one in targets if one.config in names]
    raised = [replace(one, ratio=no_larger(one.ratio, peer_sizes)) if is_ours(one) else one for one in runnable]
    fitted: list[Sized] = []
    direct = [replace(one, value=one.ratio) for one in raised if one.option == DIRECT]
    searched = fit([one for one in raised if one.option != DIRECT], measure, smaller=is_ours)
    found = {one.method: one for one in [*searched, *(_measured(direct, measure) if direct else [])]}
    for asked in runnable:
        one = found[asked.method]
        if reaches(one, is_ours(one)):
            fitted.append(replace(one, ratio=asked.ratio))
        else:
            nearest = f"the nearest is {one.compression:.2f}x, with {one.option} {one.value:.3g}"
            skipped.add(f"{one.method}: cannot be {asked.ratio:g} times smaller, {nearest}", one.method)
    left = {one.config for one in fitted}
    return [name for name in names if name not in middle or name in left], fitted


def _middle(one: Sized) -> float:
    """A value that any cache can be made with."""
    return one.ratio if one.option == DIRECT else 0.5


def reaches(one: Sized, smaller: bool) -> bool:
    """Whether what was found is of the size that was asked for: on its side of it, and not far beyond.

    A cache that has a size as its target is that size when tokens move; since then some may wait in full precision.

    Example:
        >>> found = Sized("ours 6x", "ours", 6.0, "int4_budget", 0.4, compression=6.01)
        >>> reaches(found, smaller=True), reaches(replace(found, compression=5.2), smaller=True)
        (True, False)
    """
    times = one.compression / one.ratio if smaller else one.ratio / one.compression
    return (1 / NEAR if one.option == DIRECT else 1 - CLOSE) <= times <= NEAR


def no_larger(ratio: float, others: Sequence[float]) -> float:
    """The ratio, or the compression of the smallest other cache that counts as of that size.

    Example:
        >>> no_larger(3.2, [3.3, 6.0]), no_larger(10.0, [6.0])
        (3.3, 10.0)
    """
    return max([ratio, *(other for other in others if ratio <= other <= NEAR * ratio)])
