"""Layers weighed by what the model loses when one alone forgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.plan import CollectSettings, prepare
from pipelines.evaluation import fragility
from pipelines.evaluation.fragility import FLOOR, OneLayer, layer_weights, validation_texts
from predictor.budgets import HeadBudgets
from predictor.bundle import Predictor
from predictor.errors import FadeError
from predictor.features import FeatureSpec
from predictor.nets import TokenMLP
from predictor.provenance import model_provenance
from tests.conftest import make_tiny_model, make_tiny_tokenizer

CURVE = [4.0, 1.0, 0.0]


def predictor_of(model: Any, layers: int) -> Predictor:
    table = HeadBudgets(torch.tensor([[CURVE, CURVE]] * layers), (0.0, 0.5, 1.0))
    spec = FeatureSpec(window=8, block=4, horizon=8)
    facts = model_provenance(model, make_tiny_tokenizer())
    return Predictor(TokenMLP(), spec, facts, budgets=table)


def test_a_layer_that_says_nothing_weighs_nothing_and_the_mean_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers, of which the output of the second is cut off; in groups of two caches."""
    model = make_tiny_model(num_hidden_layers=3)
    model.model.layers[1].self_attn.o_proj.weight.zero_()
    monkeypatch.setattr(fragility, "FEW", 2)
    texts = [torch.randint(1, 250, (1, 330), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    weights = layer_weights(model, predictor_of(model, 3), texts, steps=16)
    assert weights[1] == FLOOR
    assert min(weights[0], weights[2]) > 0.2
    assert sum(weights) == pytest.approx(3, abs=2 * FLOOR)


def test_one_layer_forgets_and_its_heads_share_what_it_keeps() -> None:
    table = torch.tensor([[[4.0, 0.5, 0.0], [4.0, 3.9, 0.0]], [CURVE, CURVE]])
    budgets = OneLayer(table, (0.0, 0.5, 1.0), (3, 8), layer=3)
    assert budgets.allocate(0.25) == {3: (0.5, 0.0), 8: (1.0, 1.0)}


def test_weights_move_what_layers_keep_and_are_stored() -> None:
    table = HeadBudgets(torch.tensor([[CURVE], [CURVE]]), (0.0, 0.5, 1.0), (3, 8))
    assert table.allocate(0.25) == {3: (0.5,), 8: (0.0,)}
    heavy = replace(table, weights=(0.1, 1.9))
    assert heavy.allocate(0.25) == {3: (0.0,), 8: (0.5,)}
    assert heavy.allocate(0.5) == {3: (0.5,), 8: (0.5,)} or heavy.allocate(0.5)[8] == (1.0,)
    again = HeadBudgets.from_dict(heavy.to_dict())
    assert (again.weights, again.allocate(0.6)) == (heavy.weights, heavy.allocate(0.6))
    assert "weights" not in table.to_dict()
    for wrong in ([0.1], [0.1, float("inf")], [1.0, -1.0], [0.0, 2.0]):
        with pytest.raises(FadeError, match="damaged"):
            HeadBudgets.from_dict({**heavy.to_dict(), "weights": wrong})


def test_validation_texts_are_those_of_the_collection(tiny_model_dir: Path, prose: Path) -> None:
    settings = CollectSettings(
        text=[str(prose)], train_documents=2, validation_documents=2, min_prompt=200, max_prompt=200, future=40
    )
    found = validation_texts(str(tiny_model_dir), settings.content(), documents=1, length=230)
    tasks = [task for task in prepare(settings, make_tiny_tokenizer()) if task.document.split == "validation"]
    assert [each.tolist() for each in found] == [tasks[0].tokens[None, :230].tolist()]
    assert validation_texts(str(tiny_model_dir), settings.content(), documents=1, length=500) == []
