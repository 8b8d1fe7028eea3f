"""The caches that evaluations compare, by name: policies, presets, configurations, other projects' caches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from predictor.errors import FadeError

if TYPE_CHECKING:
    from pipelines.evaluation.measure import Method
    from pipelines.evaluation.peers import PeerError
    from predictor.bundle import Predictor

T = TypeVar("T")
POLICIES = ("position", "h2o", "ema", "adaptive")
METHODS = ("full", "safe", *POLICIES, "learned", "fastgen")
PRESETS = ("safe", "balanced", "aggressive")


class Skipped:
    """What could not be run: said on the error stream when it happens, and kept for the report.

    Attributes:
        lines: what was said. failed: first cells of the rows that began and failed, which the tables show as that.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed: list[Sequence[str]] = []

    def add(self, line: str, *failed: str) -> None:
        """Say it and keep it; with the first cells of a row that failed."""
        self.lines.append(line)
        self.failed += [failed] if failed else []
        print(f"\nskipped: {line}", file=sys.stderr)

    @property
    def status(self) -> int:
        """Exit status of a command that wrote the rest."""
        return 2 if self.lines else 0


def check_methods(
    methods: Sequence[str],
    configs: Mapping[str, Mapping[str, Any]],
    predictors: Mapping[str, str],
    budget: float,
) -> None:
    """Refuse methods that cannot work, before anything is loaded.

    Raises:
        FadeError: names the option.
    """
    if unknown := [name for name in methods if name not in (*METHODS, *configs)]:
        raise FadeError(f"method {unknown[0]!r} is not known; choose from {', '.join((*METHODS, *configs))}")
    for kind, names in (("predictor", set(predictors)), ("config", set(configs))):
        if clash := sorted(names & {*METHODS, *(configs if kind == "predictor" else ())}):
            raise FadeError(f"{kind} name {clash[0]!r} is a method's; give it another name")
    if unused := [name for name in configs if name not in methods]:
        raise FadeError(f"config {unused[0]!r} is not in methods; add it there, or leave it out")
    if "learned" in methods and not predictors:
        raise FadeError("method 'learned' needs predictors; name one, or leave 'learned' out of methods")
    if not 0 < budget <= 1:
        raise FadeError(f"budget {budget} is not a share of the context; use a float in (0, 1]")


def possible(
    methods: Sequence[str],
    configs: Mapping[str, Mapping[str, Any]],
    predictors: Mapping[str, Predictor],
    budget: float,
    skipped: Skipped,
) -> list[Method]:
    """The methods of :func:`make_methods`, less those whose package is missing, which are skipped.

    Raises:
        FadeError: options of a config that are refused; it names them.
    """
    from pipelines.evaluation.peers import MissingPeer

    made = make_methods([], configs, predictors, budget)
    for name in dict.fromkeys(methods):
        try:
            made += make_methods([name], configs, predictors, budget)[1:]
        except MissingPeer as error:
            skipped.add(str(error))
    return made


def with_those_able(
    able: list[Method], run: Callable[[list[Method]], T], failed: Callable[[Method, PeerError], None]
) -> T:
    """Run methods; leave out of ``able`` each of another project that fails, say so, and run the others again."""
    from pipelines.evaluation.peers import PeerError

    while True:
        try:
            return run(able)
        except PeerError as error:
            one = next(method for method in able if method.config is error.peer)
            able.remove(one)
            failed(one, error)


def make_methods(
    methods: Sequence[str],
    configs: Mapping[str, Mapping[str, Any]],
    predictors: Mapping[str, Predictor],
    budget: float,
) -> list[Method]:
    """The full cache first, whether asked for or not, then one entry for each method and predictor.

    Raises:
        FadeError: options of a config that FadeConfig refuses; it names them.
    """
    from fade_runtime import FadeConfig
    from pipelines.evaluation.measure import FULL, Method

    made = [Method(FULL, None)]
    for name in dict.fromkeys(methods):
        if name in configs:
            made.append(Method(name, _config(name, configs[name], predictors)))
        elif name == "safe":
            made.append(Method(name, FadeConfig.safe()))
        elif name in (*POLICIES, "fastgen"):
            made.append(Method(name, FadeConfig(int4_budget=budget, eviction_policy=name)))
        elif name == "learned":
            made += [
                Method(label, FadeConfig(int4_budget=budget, eviction_policy="learned", predictor=predictor))
                for label, predictor in predictors.items()
            ]
    return made


def _config(name: str, options: Mapping[str, Any], predictors: Mapping[str, Predictor]) -> Any:
    from fade_runtime import FadeConfig
    from pipelines.evaluation.oracle import Oracle
    from pipelines.evaluation.peers import make_peer

    given = dict(options)
    if given.get("predictor") in predictors:
        given["predictor"] = predictors[given["predictor"]]
    preset = given.pop("preset", "safe")
    try:
        if "peer" in given:
            return make_peer(given.pop("peer"), given)
        if preset not in PRESETS:
            raise FadeError(f"preset {preset!r} is not one of {', '.join(PRESETS)}")
        knows = given.pop("oracle", False)
        made = getattr(FadeConfig, preset)(**given)
        return Oracle(made) if knows else made
    except FadeError as error:
        raise type(error)(f"config {name!r}: {error}") from error
