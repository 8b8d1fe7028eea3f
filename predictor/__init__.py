"""What a predictor is: features, scores, networks, head budgets, bundles, and what holds them to one language model.

May import torch and safetensors; lightning only in ``module``, torchmetrics only in ``metrics`` and what builds on it,
mlflow and huggingface_hub only inside functions of ``registry``, transformers only inside those of ``cache_layers``.
Never enters it: text, traces on disk, the tiered cache, a command. Whatever training and serving must agree on has its
one definition here.

Example:
    >>> from predictor import FeatureSpec
    >>> FeatureSpec().window
    64
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from predictor.errors import FadeError

_HOMES = {
    "BlockNet": "scorenet",
    "FeatureSpec": "features",
    "HeadBudgets": "budgets",
    "PrefillFeatures": "features",
    "Predictor": "bundle",
    "ScoreNet": "scorenet",
    "load_bundle": "bundle",
    "load_predictor": "registry",
    "prefill_features": "features",
}
__all__ = ["FadeError", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use: a command that only prints its help needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
