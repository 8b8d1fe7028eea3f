"""Head offsets in a bundle: stored, read, added to scores, refused where they do not fit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from predictor.budgets import HeadBudgets
from predictor.bundle import CARD, Predictor, load_bundle
from predictor.errors import FadeError
from predictor.features import FeatureSpec, prefill_features
from predictor.nets import TokenMLP


def test_head_offsets_come_back_to_the_last_bit_and_are_added_to_their_own_layer(tmp_path):
    generator = torch.Generator().manual_seed(3)
    offsets, net = torch.randn(2, 3, generator=generator), TokenMLP(hidden=5)
    torch.nn.init.normal_(net.head.weight)
    provenance = {"layers": 8, "kv_heads": 3}
    budgets = HeadBudgets(torch.zeros(2, 3, 2), fractions=(0.0, 1.0), layers=(2, 5))
    Predictor(net, FeatureSpec(), provenance, budgets=budgets, offsets=offsets, layers=(2, 5)).save(tmp_path / "b")
    loaded = load_bundle(tmp_path / "b")
    assert loaded.offsets is not None
    assert torch.equal(loaded.offsets, offsets)
    assert loaded.layers == (2, 5)
    card = (tmp_path / "b" / CARD).read_text()
    assert "comparable, by an offset of each head" in card
    assert "ranks tokens by how much attention" not in card
    query, key, value = (torch.randn(heads, 40, 8, generator=generator) for heads in (6, 3, 3))
    of = partial(prefill_features, query, key, value, scaling=0.3, table=None, spec=loaded.spec)
    expected = loaded.log_importance(of(layer=5)) + offsets[1][:, None]
    assert torch.equal(loaded.comparable_importance(of(layer=5)), expected)
    with pytest.raises(FadeError, match="offsets for layers 2, 5, not for layer 4"):
        loaded.comparable_importance(of(layer=4))
    with pytest.raises(FadeError, match="has no head offsets"):
        Predictor(net, FeatureSpec(), provenance).comparable_importance(of(layer=5))
    with pytest.raises(FadeError, match="layers 2, 6, and head budgets for layers 2, 5"):
        Predictor(net, FeatureSpec(), provenance, budgets=budgets, offsets=offsets, layers=(2, 6))
