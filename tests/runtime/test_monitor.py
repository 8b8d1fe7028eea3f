"""The monitor's numbers against scipy and loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr
from torch import Tensor

from fade_runtime.monitor import FLOOR, block_kl, forecast_attention, measure


def distributions(rows: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, generator=generator).mul(2).softmax(-1)


@pytest.mark.parametrize(("rows", "length", "block"), [(1, 1, 16), (3, 16, 16), (2, 63, 16), (5, 111, 7)])
def test_block_kl_is_the_relative_entropy_of_pooled_shares(rows: int, length: int, block: int) -> None:
    true, forecast = distributions(rows, length, 0), distributions(rows, length, 1)
    expected = [
        sum(
            rel_entr(p[at : at + block].sum(), q[at : at + block].sum())
            for at in range(0, length, block)
        )
        for p, q in zip(true.double().numpy(), forecast.double().numpy())
    ]
    np.testing.assert_allclose(block_kl(true, forecast, block=block), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("floor", [0.0, FLOOR])
def test_forecast_attention_against_a_loop(floor: float) -> None:
    attention, scores = distributions(4, 37, 0).double(), distributions(4, 37, 1).double() * 3
    gone = torch.rand(4, 37, generator=torch.Generator().manual_seed(2)) < 0.4
    got = forecast_attention(attention, gone, scores, floor)
    for row in range(4):
        expected = {s: float(scores[row, s] / scores[row].sum()) for s in range(37) if gone[row, s]}
        expected = {s: (1 - floor) * share + floor / len(expected) for s, share in expected.items()}
        kept = [s for s in range(37) if not gone[row, s]]
        left, all_kept = 1 - sum(expected.values()), sum(float(attention[row, s]) for s in kept)
        expected |= {s: left * float(attention[row, s]) / all_kept for s in kept}
        np.testing.assert_allclose(got[row], [expected[s] for s in range(37)], rtol=1e-9)


@given(length=st.integers(1, 90), seed=st.integers(0, 99), share=st.floats(0, 1))
def test_a_forecast_is_a_distribution_and_its_divergence_not_negative(length: int, seed: int, share: float) -> None:
    attention, scores = distributions(3, length, seed), distributions(3, length, seed + 1)
    gone = torch.rand(3, length, generator=torch.Generator().manual_seed(seed)) < share
    gone[:, -1] = False  # the newest token is always kept
    for expected in (scores, None):
        forecast = forecast_attention(attention, gone, expected)
        assert torch.allclose(forecast.sum(-1), torch.ones(3), atol=1e-5)
        assert bool((forecast >= 0).all())
        pooled, split = block_kl(attention, forecast), block_kl(attention, forecast, gone)
        assert bool((0 <= pooled).all())
        assert bool((pooled <= split + 1e-6).all())  # finer cells show more
    assert torch.equal(forecast_attention(attention, gone & False, scores), attention)


def test_a_right_forecast_has_no_divergence_and_a_wrong_one_much() -> None:
    attention = distributions(2, 64, 3)
    gone = torch.arange(64).expand(2, -1) % 3 == 0
    right = measure(attention, gone, attention, heads=2)
    wrong = measure(attention, gone, torch.where(gone, attention * 1e-3, attention), heads=2)
    assert float(right.kl.max()) < 1e-3 < 0.1 < float(wrong.kl.min())
    lost = torch.where(gone, attention, 0).sum(-1)
    assert torch.allclose(right.recovery, 1 - lost)
    assert torch.equal(right.recovery, wrong.recovery)


def test_measure_takes_the_worst_sequence_of_a_batch_for_each_head() -> None:
    attention = distributions(6, 40, 5)  # batch 3, 2 heads
    gone = torch.rand(6, 40, generator=torch.Generator().manual_seed(6)) < 0.5
    single = [measure(attention[row : row + 1], gone[row : row + 1], None, heads=1, top=8) for row in range(6)]
    together = measure(attention, gone, None, heads=2, top=8)
    for head in range(2):
        mine = single[head::2]
        assert together.kl[head] == max(each.kl for each in mine)
        assert together.recovery[head] == min(each.recovery for each in mine)
        best = [set(attention[row].topk(8).indices.tolist()) for row in range(head, 6, 2)]
        kept = [set((~gone[row]).nonzero().flatten().tolist()) for row in range(head, 6, 2)]
        assert float(together.recall[head]) == min(len(a & b) / 8 for a, b in zip(best, kept))
