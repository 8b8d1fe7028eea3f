"""Metrics against brute force, scipy and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax
from scipy.stats import spearmanr

from predictor.calibration import masked_kl
from predictor.metrics import (
    Recovery,
    RowMean,
    RowQuantile,
    gap_closed,
    kept_counts,
    middle_recovery,
    recovery,
    spearman,
    topk_recall,
)

lengths = st.integers(6, 40)
seeds = st.integers(0, 10_000)
budgets = st.sampled_from([0.05, 0.125, 0.25, 0.3, 0.5, 0.9, 1.0])


def make_rows(seed, sizes, sinks=2, recent=3):
    make = torch.Generator().manual_seed(seed)
    slots = max(sizes)
    place, size = torch.arange(slots), torch.tensor(sizes)[:, None]
    mask = place < size
    eligible = (place >= sinks) & (place < size - recent)
    scores = torch.randn(len(sizes), slots, generator=make)
    target = torch.rand(len(sizes), slots, generator=make) ** 3 * mask
    return scores, target, mask, eligible


def kept_by_hand(scores, mask, eligible, budget):
    """The set a policy keeps, one row, in plain Python."""
    slots = [j for j in range(len(mask)) if mask[j]]
    protected = {j for j in slots if not eligible[j]}
    free = sorted((j for j in slots if eligible[j]), key=lambda j: -float(scores[j]))
    room = max(math.floor(budget * len(slots) + 1e-9) - len(protected), 0)
    return protected | set(free[:room])


@given(seeds, st.lists(lengths, min_size=1, max_size=4), budgets)
def test_recovery_is_what_a_policy_would_keep(seed, sizes, budget):
    scores, target, mask, eligible = make_rows(seed, sizes)
    got = recovery(scores, target, mask, eligible, [budget])[:, 0]
    for i in range(len(sizes)):
        kept = kept_by_hand(scores[i], mask[i], eligible[i], budget)
        assert kept_counts(mask, eligible, budget)[i] == len(kept)
        assert got[i] == pytest.approx(sum(float(target[i, j]) for j in kept) / float(target[i].sum()), abs=1e-5)


@given(seeds, st.lists(lengths, min_size=1, max_size=4))
def test_oracle_is_never_beaten_and_more_budget_never_hurts(seed, sizes):
    scores, target, mask, eligible = make_rows(seed, sizes)
    shares = [0.125, 0.25, 0.5, 1.0]
    ours = recovery(scores, target, mask, eligible, shares)
    best = recovery(target, target, mask, eligible, shares)
    assert (ours <= best + 1e-6).all()
    assert (ours.diff(dim=-1) >= -1e-6).all()
    assert torch.allclose(ours[:, -1], torch.ones(len(sizes)))


@given(seeds, st.lists(lengths, min_size=1, max_size=4), budgets)
def test_topk_recall_counts_the_common_set(seed, sizes, budget):
    scores, target, mask, eligible = make_rows(seed, sizes)
    got = topk_recall(scores, target, mask, eligible, budget)
    for i in range(len(sizes)):
        free = {j for j in range(len(mask[i])) if eligible[i, j]}
        ours = kept_by_hand(scores[i], mask[i], eligible[i], budget) & free
        best = kept_by_hand(target[i], mask[i], eligible[i], budget) & free
        if best:
            assert got[i] == pytest.approx(len(ours & best) / len(best))
        else:
            assert got[i].isnan()


def test_scores_of_protected_and_padded_slots_do_not_matter():
    scores, target, mask, eligible = make_rows(0, [20, 31])
    before = recovery(scores, target, mask, eligible, [0.5])
    scores[~eligible] = float("inf")
    scores[~mask] = float("nan")
    assert torch.equal(recovery(scores, target, mask, eligible, [0.5]), before)


@given(seeds, st.integers(2, 30))
def test_kl_agrees_with_scipy(seed, size):
    make = torch.Generator().manual_seed(seed)
    logits, mass = torch.randn(1, size + 3, generator=make), torch.rand(1, size + 3, generator=make)
    mass[0, 0] = 0.0
    mask = torch.arange(size + 3)[None] < size
    p = mass[0, :size].double() / mass[0, :size].double().sum()
    expected = rel_entr(p.numpy(), softmax(logits[0, :size].double().numpy())).sum()
    assert masked_kl(logits, mass, mask).item() == pytest.approx(expected, abs=1e-5)


def test_gap_closed():
    assert gap_closed(0.9, 0.9, 1.0) == 0
    assert gap_closed(1.0, 0.9, 1.0) == 1
    assert gap_closed(0.8, 0.9, 1.0) == pytest.approx(-1)
    assert math.isnan(gap_closed(0.9, 0.9, 0.9))


def test_metric_in_parts_equals_function_on_the_whole():
    rows = make_rows(3, [20, 31, 40, 9])
    layer = torch.tensor([0, 0, 2, 1])
    metric = Recovery([0.5, 0.25])
    for part in (slice(0, 3), slice(3, 4)):
        metric.update(*(tensor[part] for tensor in rows), layer[part])
    whole = recovery(*rows, [0.5, 0.25])
    torch.testing.assert_close(metric.compute(), whole.mean(0))
    by_layer = metric.by_layer()
    assert sorted(by_layer) == [0, 1, 2]
    torch.testing.assert_close(by_layer[0], whole[:2].mean(0))
    metric.reset()
    assert not metric.by_layer()


def test_row_mean_leaves_nan_out():
    metric = RowMean(lambda values: values)
    metric.update(torch.tensor([1.0, float("nan")]))
    metric.update(torch.tensor([2.0]))
    assert metric.compute() == 1.5


@given(seeds, st.lists(lengths, min_size=1, max_size=4), budgets)
def test_middle_recovery_counts_what_could_be_dropped(seed, sizes, budget):
    scores, target, mask, eligible = make_rows(seed, sizes)
    got = middle_recovery(scores, target, mask, eligible, budget)
    for i in range(len(sizes)):
        free = {j for j in range(len(mask[i])) if eligible[i, j]}
        total = sum(float(target[i, j]) for j in free)
        if not total:
            assert got[i].isnan()
            continue
        kept = kept_by_hand(scores[i], mask[i], eligible[i], budget) & free
        assert got[i] == pytest.approx(sum(float(target[i, j]) for j in kept) / total, abs=1e-5)


@given(seeds, st.lists(lengths, min_size=1, max_size=4))
def test_spearman_agrees_with_scipy_ties_included(seed, sizes):
    scores, target, _, eligible = make_rows(seed, sizes)
    scores, target = (scores * 2).round(), (target * 5).round()
    got = spearman(scores, target, eligible)
    for i in range(len(sizes)):
        x, y = (values[i][eligible[i]].numpy() for values in (scores, target))
        if len({*x.tolist()}) > 1 and len({*y.tolist()}) > 1:
            assert got[i] == pytest.approx(spearmanr(x, y).statistic, abs=1e-5)
        else:
            assert not got[i].isfinite()


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30), st.sampled_from([0.0, 0.01, 0.3, 1.0]))
def test_row_quantile_in_parts_is_the_quantile_of_the_whole(values, q):
    metric = RowQuantile(lambda rows: rows, q)
    for part in torch.tensor(values).split(7):
        metric.update(part)
    assert metric.compute().item() == pytest.approx(np.quantile(values, q), abs=1e-6)


def test_by_head_and_by_layer_are_means_of_the_same_rows():
    rows = make_rows(3, [20, 31, 40, 9])
    metric = Recovery([0.5])
    metric.update(*rows, torch.tensor([0, 0, 0, 2]), torch.tensor([1, 1, 0, 1]))
    each = recovery(*rows, [0.5])
    heads = metric.by_head()
    assert sorted(heads) == [(0, 0), (0, 1), (2, 1)]
    torch.testing.assert_close(heads[0, 1], each[:2].mean(0))
    torch.testing.assert_close(metric.by_layer()[0], each[:3].mean(0))
