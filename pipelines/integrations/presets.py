"""The FadeConfig that is meant by a preset's name, a file or options, for use inside other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from data.reading import read_text
from fade_runtime import FadeConfig
from fade_runtime.config import PRESETS
from pipelines.evaluation.methods import from_preset
from predictor.bundle import Predictor
from predictor.errors import FadeError
from predictor.registry import load_predictor


def read_config(
    config: str | Path | Mapping[str, Any] | FadeConfig | None = None,
    predictor: str | Path | Predictor | None = None,
    **options: Any,
) -> FadeConfig:
    """One FadeConfig, its predictor loaded, so that many caches can be made of it.

    Args:
        config: safe, balanced or aggressive; a YAML file of FadeConfig's options, where ``preset`` may name one to
            start from; such options; or a FadeConfig. None: balanced with a predictor, else safe.
        predictor: `models:/NAME@alias`, `models:/NAME/3`, a bundle directory, a hub id, or a loaded one.
        options: of FadeConfig, in place of the config's.

    Raises:
        FadeError: no such preset, file or option; options that contradict each other.

    Example:
        >>> read_config("aggressive", int4_budget=0.1).int4_budget
        0.1
        >>> read_config("brave")
        Traceback (most recent call last):
            ...
        predictor.errors.FadeError: config 'brave' is neither safe, balanced, aggressive nor a YAML file that is there
    """
    if predictor is not None:
        options["predictor"] = predictor
    if isinstance(config, FadeConfig):
        read = config.with_options(**options)
    else:
        options = {**_options(config), **options}
        read = from_preset(options.pop("preset", "balanced" if options.get("predictor") else "safe"), options)
    return read if read.predictor is None else read.with_options(predictor=load_predictor(read.predictor))


def _options(config: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if config in PRESETS:
        return {"preset": config}
    if not Path(config).is_file():
        raise FadeError(f"config {str(config)!r} is neither {', '.join(PRESETS)} nor a YAML file that is there")
    try:
        read = yaml.safe_load(read_text(config, "config"))
    except yaml.YAMLError as error:
        raise FadeError(f"config {config} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(read, dict):
        raise FadeError(f"config {config} holds no options; write lines such as 'int4_budget: 0.2'")
    return read
