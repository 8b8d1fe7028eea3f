"""Distributions over blocks: temperature against scipy, repair that never harms, selections against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import rel_entr, softmax

from predictor.calibration import (
    WIDEST,
    kl_divergence,
    recalibrate,
    select_threshold,
    select_topk,
    tempered_kl,
)
from predictor.metrics import Calibration

seeds = st.integers(0, 10_000)


def make_rows(seed, rows=12, places=20, sharpness=2.0):
    make = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, places, generator=make) * sharpness
    mass = (logits * torch.rand(rows, 1, generator=make) + torch.randn(rows, places, generator=make)).softmax(-1)
    mask = torch.arange(places) < torch.randint(2, places + 1, (rows, 1), generator=make)
    return logits, mass, mask


def mean_kl(temperature, logits, mass, mask):
    """The mean KL at one temperature, in double precision and without torch."""
    values = []
    for row, true, real in zip(logits.double().numpy(), mass.double().numpy(), mask.numpy()):
        p, q = true[real] / true[real].sum(), softmax(row[real] / temperature)
        values.append(rel_entr(p, q).sum())
    return np.mean(values)


@pytest.mark.parametrize("seed", range(5))
def test_temperature_is_the_one_scipy_finds(seed):
    logits, mass, mask = make_rows(seed)
    metric = Calibration()
    for part in (slice(0, 5), slice(5, 12)):
        metric.update(logits[part], mass[part], mask[part])
    temperature, kl = metric.compute().tolist()
    best = minimize_scalar(mean_kl, (1.0, 2.0), args=(logits, mass, mask), bounds=(0.2, 6), method="bounded")
    assert temperature == pytest.approx(best.x, rel=5e-3)
    assert kl == pytest.approx(best.fun, rel=1e-4)


def test_temperature_stays_in_its_range_and_starts_at_what_is_published():
    metric = Calibration()
    metric.update(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool))
    assert metric.compute()[0] == pytest.approx(1.1)
    metric.reset()
    flat = torch.full((3, 4), 0.25)
    metric.update(torch.tensor([[9.0, 0.0, 0.0, 0.0]] * 3), flat, flat > 0)
    assert metric.compute()[0] <= WIDEST + 1e-3


def test_rows_without_mass_do_not_count():
    logits, mass, mask = make_rows(0)
    alone, mixed = Calibration(), Calibration()
    alone.update(logits, mass, mask)
    mixed.update(logits, mass, mask)
    mixed.update(logits, torch.zeros_like(mass), mask)
    assert torch.equal(alone.compute(), mixed.compute())


def test_tempered_kl_agrees_with_scipy():
    logits, mass, mask = make_rows(3)
    got = tempered_kl(logits, mass, mask, torch.tensor([0.5, 1.0, 3.0])).mean(0)
    expected = [mean_kl(t, logits, mass, mask) for t in (0.5, 1.0, 3.0)]
    assert got.tolist() == pytest.approx(expected, rel=1e-4)


@given(seeds, st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_a_true_row_never_makes_the_forecast_of_it_worse(seed, weight):
    make = torch.Generator().manual_seed(seed)
    log_share = (torch.randn(3, 9, generator=make) * 5).log_softmax(-1)
    row = torch.rand(3, 9, generator=make) ** 4 * (torch.rand(3, 9, generator=make) > 0.3)
    corrected = recalibrate(log_share, row, weight)
    assert corrected.logsumexp(-1).abs().max() < 1e-5
    every = torch.ones(3, 9, dtype=torch.bool)
    for before, after, mass in zip(
        kl_divergence(log_share, row, every), kl_divergence(corrected.clamp(min=-1e4), row, every), row
    ):
        if mass.sum() > 0:
            assert after <= (1 - weight) * before + 1e-5


def test_a_row_of_zeros_changes_nothing():
    log_share = torch.randn(2, 5).log_softmax(-1)
    torch.testing.assert_close(recalibrate(log_share, torch.zeros(2, 5)), log_share)


@given(seeds, st.integers(1, 12), st.sampled_from([0.0, 0.3, 0.9, 0.999]))
def test_threshold_keeps_the_smallest_set(seed, places, tau):
    share = torch.rand(places, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    share = share / share.sum()
    kept = select_threshold(share, tau)
    assert share[kept].sum() >= tau - 1e-12
    largest = sorted(share.tolist(), reverse=True)
    fewest = next(n for n in range(places + 1) if sum(largest[:n]) >= tau - 1e-12)
    assert int(kept.sum()) == fewest


@given(seeds, st.integers(1, 60), st.integers(1, 30), st.sampled_from([0.05, 0.5, 1.0]))
def test_topk_keeps_the_best_and_at_least_so_many(seed, size, least, share):
    make = torch.Generator().manual_seed(seed)
    score, mask = torch.randn(60, generator=make), torch.arange(60) < size
    kept = select_topk(score, mask, least, share)
    count = min(max(least, math.ceil(size * share - 1e-6)), size)
    assert set(kept.nonzero().flatten().tolist()) == set(sorted(range(size), key=lambda i: -float(score[i]))[:count])


def test_topk_counts_each_row_by_its_own_length():
    mask = torch.arange(4000) < torch.tensor([100, 2000, 4000])[:, None]
    assert select_topk(torch.randn(3, 4000), mask).sum(-1).tolist() == [100, 128, 200]
