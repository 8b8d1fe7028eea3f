"""The ladder of a certificate: bounds against scipy and simulation, which rung is chosen, what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from predictor.certificate import Rung, choose_rung, confidence_below, ladder, upper_bound
from predictor.errors import FadeError

TEXTS = 24


def _certificate(*rungs: tuple[float | None, float, list[float]]) -> dict[str, Any]:
    return {"ladder": {"rungs": [Rung(budget, times, tuple(kl)).to_dict() for budget, times, kl in rungs]}}


def _spread(low: float, texts: int = TEXTS) -> list[float]:
    """KLs of which the second largest is ``2 * low`` and the largest far above."""
    return [*np.linspace(low, 2 * low, texts - 1).tolist(), 50 * low]


@given(st.integers(1, 60), st.data(), st.floats(0.05, 0.95))
def test_confidence_is_scipys(texts: int, data: Any, quantile: float) -> None:
    rank = data.draw(st.integers(1, texts))
    got = confidence_below(texts, rank, quantile)
    assert got == pytest.approx(binom.cdf(rank - 1, texts, quantile), abs=1e-9)
    assert got == pytest.approx(beta.sf(quantile, rank, texts - rank + 1), abs=1e-9)  # of the uniform order statistic


@pytest.mark.parametrize("draw", ["lognormal", "gamma", "two values"])
def test_bound_holds_as_often_as_it_says(draw: str) -> None:
    """Whatever the distribution, in at least 95 of 100 repetitions .8 of the population is not above the bound."""
    random = np.random.default_rng(0)
    samples = {
        "lognormal": lambda n: random.lognormal(0, 1.3, n),
        "gamma": lambda n: random.gamma(0.5, 1, n),
        "two values": lambda n: np.where(random.random(n) < 0.79, 0.01, 5.0),
    }[draw]
    quantile = np.quantile(samples(2_000_000), 0.8, method="inverted_cdf")
    held = [upper_bound(samples(TEXTS).tolist(), 0.8, 0.95) >= quantile for _ in range(2000)]
    assert np.mean(held) > 0.95 - 3 * math.sqrt(0.05 * 0.95 / 2000)


@given(st.integers(14, 40), st.integers(0, 9999))
def test_bound_is_an_observed_value_that_grows_with_what_is_asked(texts: int, seed: int) -> None:
    kl = np.random.default_rng(seed).lognormal(size=texts).tolist()
    bounds = [upper_bound(kl, quantile, 0.95) for quantile in (0.3, 0.5, 0.7, 0.8)]
    assert set(bounds) <= set(kl)
    assert bounds == sorted(bounds)
    assert upper_bound(kl, 0.5, 0.8) <= upper_bound(kl, 0.5, 0.99)
    assert upper_bound(kl[::-1], 0.8, 0.95) == bounds[-1]


def test_the_strongest_rung_below_the_target_is_chosen() -> None:
    certificate = _certificate((0.2, 9.0, _spread(0.006)), (None, 3.3, _spread(0.001)), (0.4, 6.0, _spread(0.002)))
    assert [rung.int4_budget for rung in ladder(certificate)] == [None, 0.4, 0.2]
    for target, budget in ((0.0021, None), (0.004, 0.4), (0.0119, 0.4), (0.0121, 0.2), (9.0, 0.2)):
        assert choose_rung(certificate, target, 0.95, 0.8).int4_budget == budget


def test_climbing_stops_at_the_first_rung_that_fails() -> None:
    certificate = _certificate((None, 3.3, _spread(0.001)), (0.4, 6.0, _spread(0.02)), (0.2, 9.0, _spread(0.001)))
    assert choose_rung(certificate, 0.01, 0.95, 0.8).int4_budget is None


@pytest.mark.parametrize(
    ("certificate", "asked", "words"),
    [
        (None, (0.01, 0.95, 0.8), "no certificate of KL at several budgets"),
        ({"figures": {}}, (0.01, 0.95, 0.8), "no certificate of KL at several budgets"),
        ({"ladder": {"rungs": [{"int4_budget": 0.2}]}}, (0.01, 0.95, 0.8), "is damaged"),
        ({"ladder": {"rungs": []}}, (0.01, 0.95, 0.8), "is damaged"),
        (_certificate((None, 3.0, [0.1] * 4), (0.2, 9.0, [0.1] * 5)), (1.0, 0.5, 0.5), "is damaged"),
        (_certificate((None, 3.0, [math.nan] * 20)), (1.0, 0.95, 0.8), "is damaged"),
        (_certificate((None, 3.0, [0.1] * 13)), (1.0, 0.95, 0.8), "has 13 texts, too few .* which takes 14"),
        (_certificate((None, 3.0, [0.1] * 20)), (0.05, 0.95, 0.8), "no compression of x is certified for KL 0.05"),
    ],
)
def test_what_promises_nothing_is_refused(certificate: Any, asked: tuple[float, float, float], words: str) -> None:
    with pytest.raises(FadeError, match=words):
        choose_rung(certificate, *asked, name="x")
