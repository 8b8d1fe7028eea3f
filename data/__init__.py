"""Text to traces to batches: what a predictor is trained on.

May import predictor, transformers, lightning, pyarrow, fsspec, and datasets inside the function that streams one.
Never enters it: the cache of the runtime, a network, a command.

Example:
    >>> from data import load_documents
    >>> len(load_documents(["builtin:topics"], train=1, validation=1, length=1000))
    2
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "CollectSettings": "plan",
    "Document": "text",
    "Text": "corpus",
    "TraceDataModule": "datamodule",
    "TraceDataset": "dataset",
    "Traces": "trace",
    "load_documents": "text",
    "load_lm": "lm",
    "load_tokenizer": "lm",
    "record_forward": "record",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use: text needs no torch, a model no pyarrow."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
