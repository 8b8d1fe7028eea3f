"""The caches that evaluations compare, by name: policies, presets, configurations, other projects' caches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fade_runtime import FadeConfig
from fade_runtime.config import PRESETS
from fade_runtime.policies import POLICIES
from pipelines.evaluation.oracle import Oracle
from pipelines.evaluation.peer import MissingPeer, Peer, PeerError
from pipelines.evaluation.peers import make_peer
from pipelines.evaluation.runs import Method
from pipelines.reporting.rows import FULL
from predictor.bundle import Predictor
from predictor.errors import FadeError
from predictor.registry import load_predictor

T = TypeVar("T")
METHODS = (FULL, "safe", *POLICIES)


class Skipped:
    """What could not be run: named on the error stream when it happens, and kept for the report.

    Attributes:
        lines: the messages. failed: first columns of the rows that began and failed, which the tables show as that.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed: list[Sequence[str]] = []

    def add(self, line: str, *failed: str) -> None:
        """Print a message and keep it; with the first columns of a row that failed."""
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


def load_predictors(references: Mapping[str, str] | None, tracking_uri: str | None) -> dict[str, Predictor]:
    """The predictors that are named.

    Args:
        references: name in tables -> what :func:`predictor.registry.load_predictor` takes. tracking_uri: as there.
    """
    return {name: load_predictor(reference, tracking_uri) for name, reference in (references or {}).items()}


def available_methods(
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
    made = make_methods([], configs, predictors, budget)
    for name in dict.fromkeys(methods):
        try:
            made += make_methods([name], configs, predictors, budget)[1:]
        except MissingPeer as error:
            skipped.add(str(error))
    return made


def run_without_failing(
    methods: list[Method], run: Callable[[list[Method]], T], on_failure: Callable[[Method, PeerError], None]
) -> T:
    """Run methods; remove from ``methods`` each of another project that fails, name it, and run the others again."""
    while True:
        try:
            return run(methods)
        except PeerError as error:
            failing = next(method for method in methods if method.config is error.peer)
            methods.remove(failing)
            on_failure(failing, error)


def make_methods(
    methods: Sequence[str],
    configs: Mapping[str, Mapping[str, Any]],
    predictors: Mapping[str, Predictor],
    budget: float,
) -> list[Method]:
    """The full cache first, whether it is named or not, then one entry for each method and predictor.

    Raises:
        FadeError: options of a config that FadeConfig refuses; it names them.
    """
    made = [Method(FULL, None)]
    for name in dict.fromkeys(methods):
        if name in configs:
            made.append(Method(name, make_config(name, configs[name], predictors)))
        elif name == "safe":
            made.append(Method(name, FadeConfig.safe()))
        elif name == "learned":
            made += [
                Method(label, FadeConfig(int4_budget=budget, eviction_policy="learned", predictor=predictor))
                for label, predictor in predictors.items()
            ]
        elif name in POLICIES:
            made.append(Method(name, FadeConfig(int4_budget=budget, eviction_policy=name)))
    return made


def make_config(
    name: str, options: Mapping[str, Any], predictors: Mapping[str, Predictor]
) -> FadeConfig | Oracle | Peer:
    """What the options of a named configuration ask for.

    Args:
        name: of the configuration, for errors. options: of FadeConfig, or ``peer`` and its own; ``predictor`` may name
            one of ``predictors``, ``preset`` a preset to start from, ``oracle`` says that the cache knows the future.
        predictors: name -> predictor.

    Raises:
        FadeError: options that are refused; it names the configuration.
    """
    left = dict(options)
    if left.get("predictor") in predictors:
        left["predictor"] = predictors[left["predictor"]]
    preset = left.pop("preset", "safe")
    try:
        if "peer" in left:
            return make_peer(left.pop("peer"), left)
        is_oracle = left.pop("oracle", False)
        config = from_preset(preset, left)
        return Oracle(config) if is_oracle else config
    except FadeError as error:
        raise type(error)(f"config {name!r}: {error}") from error


def from_preset(preset: str, options: Mapping[str, Any]) -> FadeConfig:
    """A FadeConfig that begins with a preset.

    Raises:
        FadeError: no such preset, or options that it refuses.

    Example:
        >>> from_preset("aggressive", {"int4_budget": 0.1}).int4_budget
        0.1
    """
    check_preset(preset)
    return getattr(FadeConfig, preset)(**options)


def check_preset(preset: str) -> None:
    """Refuse a name that is no preset's.

    Raises:
        FadeError: names the presets.
    """
    if preset not in PRESETS:
        raise FadeError(f"preset {preset!r} is not one of {', '.join(PRESETS)}")
