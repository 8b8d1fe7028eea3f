"""The options that all benchmarks of a model have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data.lm import DEMO_MODEL, load_lm
from pipelines.benchmarks.ledger import keep
from pipelines.cli import at_least_one


@dataclass(frozen=True)
class BenchSettings:
    """Options of every benchmark of a model.

    Args:
        model: directory or hub id of a causal language model, loaded in float32.
        threads: of torch.
        out: JSON lines file to add the rows to.
        ledger: CSV file to add the rows to, for `pipelines.bench compare`.
    """

    model: str = DEMO_MODEL
    threads: int = 1
    out: str | None = None
    ledger: str | None = None

    def load(self) -> tuple[Any, Any]:
        """Set the threads of torch and load the model; returns it and its tokenizer."""
        torch.set_num_threads(self.threads)
        return load_lm(self.model, "float32")

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows to the files that are named."""
        keep(rows, self.model, self.out, self.ledger)


@dataclass(frozen=True)
class ContextSettings(BenchSettings):
    """Options of a benchmark that goes through several contexts.

    Args:
        contexts: tokens in the cache before the first step.
    """

    contexts: list[int] = field(default_factory=lambda: [2048])

    def at_least_one(self, **options: int) -> None:
        """Refuse numbers below 1: these options, threads, and the contexts, of which there must be one.

        Raises:
            FadeError: names the option.
        """
        at_least_one(*options.items(), ("threads", self.threads), ("contexts", min(self.contexts, default=0)))
