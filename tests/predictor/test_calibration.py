"""Distributions over blocks: temperature and KL against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import rel_entr, softmax

from predictor.calibration import MAX_TEMPERATURE, tempered_kl
from predictor.metrics import Calibration


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
    assert metric.compute()[0] <= MAX_TEMPERATURE + 1e-3


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
