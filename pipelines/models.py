"""Which language model a command runs: the one that is named, or else the one that its input was made with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from data.gguf import is_gguf
from data.lm import DEMO_MODEL, is_hub_id
from data.trace import Traces
from predictor.bundle import Predictor
from predictor.errors import FadeError


def model_of(named: str | None, predictors: Iterable[Predictor] = (), traces: Traces | None = None) -> str:
    """Choose the language model that a command runs.

    Args:
        named: what the command was told. predictors, traces: its input; each may say what it was made with.

    Returns:
        A directory, GGUF file or hub id: what is named, else the model of the first predictor that says, else that of
        the traces, else the demo's.

    Raises:
        FadeError: nothing is named, and what the input was made with is not there any more.

    Example:
        >>> model_of("org/name"), model_of(None)
        ('org/name', 'artefacts/models/smollm2-135m-instruct')
    """
    if named is not None:
        return named
    recorded = [(f"predictor {each.name}", each.manifest.get("model")) for each in predictors]
    if traces is not None:
        recorded.append((f"traces {traces.folder}", traces.manifest["settings"].get("model")))
    for what, model in recorded:
        if model is not None:
            if not Path(model).exists() and not is_hub_id(model):
                raise FadeError(f"{what} was made with model {model}, which is not there; name where it is (model)")
            return str(model)
    return DEMO_MODEL


def name_of(model: str) -> str:
    """A name for what is made for a model.

    Example:
        >>> name_of("org/Some-Model 1.5B"), name_of("models/gemma-3-270m-q4_k_m.gguf")
        ('some-model-1.5b', 'gemma-3-270m-q4_k_m')
    """
    path = Path(model)
    return re.sub(r"[^\w.-]+", "-", path.stem if is_gguf(path) else path.resolve().name).lower()
