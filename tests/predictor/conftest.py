"""Small padded batches of random but lawful trace rows: what the data module yields, without a language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from predictor import registry
from predictor.bundle import Predictor
from predictor.features import (
    FeatureSpec,
)
from predictor.nets import TokenMLP
from tests.predictor.fitting import write_traces
from tests.predictor.rows import collate, sequence


@pytest.fixture
def spec() -> FeatureSpec:
    """A short window, everything else as released."""
    return FeatureSpec(window=8)


@pytest.fixture
def make_batch(spec: FeatureSpec) -> Callable[..., dict[str, Tensor]]:
    """``make_batch([111, 163], seed=1)``: two rows (kv heads) for each length."""

    def make(lengths: list[int], seed: int = 0, steps: int = 12, hidden: bool = False) -> dict[str, Tensor]:
        asked = replace(spec, hidden=hidden)
        rows = [row for i, n in enumerate(lengths) for row in sequence(n, steps, asked, seed * 1000 + i)]
        return collate(rows, spec)

    return make


@pytest.fixture(scope="session")
def traces(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces whose rows keep what the value norm tells; tests that change them copy them first."""
    return write_traces(tmp_path_factory.mktemp("traces"), tiny_model_dir)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for the module: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A small bundle with random weights."""
    net = TokenMLP(hidden=4, depth=1)
    torch.nn.init.normal_(net.head.weight)
    return Predictor(
        net,
        spec=FeatureSpec(),
        provenance={"model_type": "llama"},
        metrics={"recovery_at_0.25": 0.9},
        manifest={},
    ).save(tmp_path / "bundle")


@pytest.fixture
def client(store: str) -> Any:
    """A client of that store."""
    return registry._client(store)
