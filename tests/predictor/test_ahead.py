"""What reading on would give: against loops, in features of every release, and for text that repeats itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predictor import scores
from predictor.bundle import Predictor, load_bundle
from predictor.errors import FadeError
from predictor.features import FEATURES, FIRST_FEATURES, FeatureSpec, attention_rows, prefill_features
from predictor.nets import TokenMLP
from predictor.scorenet import LOG_EMA, forecast


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 50), st.integers(0, 6), st.integers(0, 99))
def test_ahead_is_the_most_that_it_or_one_shortly_before_it_got(
    steps: int, slots: int, reach: int, skip: int, seed: int
) -> None:
    rows = torch.rand(2, 3, steps, slots, generator=torch.Generator().manual_seed(seed))
    found = scores.ahead(rows, reach, skip)
    most = rows.amax(-2)
    for slot in range(slots):
        before = [most[..., at] for at in range(max(slot - reach + 1, skip), slot + 1)]
        expected = torch.stack(before).amax(0) if before else torch.zeros(2, 3)
        torch.testing.assert_close(found[..., slot], expected)


def features(names: tuple[str, ...] = FEATURES, slots: int = 50) -> Any:
    drawn = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(heads, slots, 12, generator=drawn) for heads in (6, 3, 3))
    spec = FeatureSpec(window=8, block=5, horizon=7, names=names)
    made = prefill_features(query, key, value, scaling=12**-0.5, table=None, spec=spec)
    return made, attention_rows(query[:, -4:], key, 12**-0.5, slots - 4)


def test_the_feature_is_in_units_of_attention_per_coming_step() -> None:
    made, rows = features()
    expected = scores.ahead(rows, reach=7, skip=4) / 7
    torch.testing.assert_close(made.tokens[..., -1], expected.clamp(min=1e-9).log())
    before, _ = features(FIRST_FEATURES)
    assert torch.equal(made.tokens[..., :9], before.tokens)


def test_a_forecast_gives_no_token_less_and_others_what_it_gave() -> None:
    made, rows = features()
    order = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    old = scores.match_quantiles(order, made.tokens[..., LOG_EMA].exp())
    assert torch.equal(forecast(order, made.tokens[..., :9]), old)
    new, least = forecast(order, made.tokens), scores.CONTINUES * scores.ahead(rows, 7, skip=4) / 7
    torch.testing.assert_close(new, torch.maximum(old, least))
    assert bool((new > old).any())


def test_bundles_of_earlier_releases_have_nine_features_and_go_on(tmp_path: Any) -> None:
    old = FeatureSpec(names=FIRST_FEATURES)
    made = Predictor(TokenMLP(n_features=9), old, {"layers": 2, "kv_heads": 2})
    loaded = load_bundle(made.save(tmp_path / "bundle"))
    assert loaded.spec == old
    with pytest.raises(FadeError, match="is not version 1 with"):
        FeatureSpec.from_dict({**old.to_dict(), "names": ["log_ema", "age"]})
    for width, spec in ((10, old), (9, replace(old, names=FEATURES))):
        with pytest.raises(FadeError, match=f"{width} features"):
            TokenMLP(n_features=width).check_spec(spec)
