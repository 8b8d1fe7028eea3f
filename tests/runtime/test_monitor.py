"""The monitor's numbers against scipy and loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr
from torch import Tensor

from fade_runtime.guard.probe import FLOOR, eviction_kl, measure


def distributions(rows: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, generator=generator, dtype=torch.float64).mul(2).softmax(-1)


def expected_kl(attention: Tensor, gone: Tensor, scores: Tensor | None, floor: float, block: int) -> float:
    """One row: write the forecast down token by token, pool kept and evicted tokens of each block, ask scipy."""
    length = len(attention)
    out = [s for s in range(length) if gone[s]]
    total = 1.0 if scores is None else float(scores.sum())
    share = {s: 0.0 if scores is None else float(scores[s]) / total for s in out}
    share = {s: (1 - floor) * each + floor / len(out) for s, each in share.items()}
    kept = {s: float(attention[s]) for s in range(length) if not gone[s]}
    left = 1 - sum(share.values())
    forecast = {**share, **{s: left * each / sum(kept.values()) for s, each in kept.items()}}
    cells: dict[tuple[int, bool], list[float]] = {}
    for s in range(length):
        cell = cells.setdefault((s // block, bool(gone[s])), [0.0, 0.0])
        cell[0] += float(attention[s])
        cell[1] += forecast[s]
    return float(sum(rel_entr(p, q) for p, q in cells.values()))


@pytest.mark.parametrize("scored", [True, False], ids=["scores", "none"])
@pytest.mark.parametrize("floor", [0.1, FLOOR])
@pytest.mark.parametrize(("length", "block"), [(2, 16), (16, 16), (63, 16), (111, 7)])
def test_divergence_against_a_loop_and_scipy(length: int, block: int, floor: float, scored: bool) -> None:
    attention, scores = distributions(3, length, 0), distributions(3, length, 1) * 3
    gone = torch.rand(3, length, generator=torch.Generator().manual_seed(2)) < 0.4
    gone[:, -1] = False
    got = eviction_kl(attention, gone, scores if scored else None, floor, block)
    for row in range(3):
        expected = expected_kl(attention[row], gone[row], scores[row] if scored else None, floor, block)
        assert float(got[row]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(length=st.integers(1, 90), seed=st.integers(0, 99), share=st.floats(0, 1))
def test_divergence_is_never_negative_and_zero_where_nothing_is_gone(length: int, seed: int, share: float) -> None:
    attention, scores = distributions(3, length, seed), distributions(3, length, seed + 1)
    gone = torch.rand(3, length, generator=torch.Generator().manual_seed(seed)) < share
    gone[:, -1] = False  # the newest token is always kept
    for expected in (scores, None):
        coarse, fine = (eviction_kl(attention, gone, expected, block=block) for block in (16, 4))
        assert bool((0 <= coarse).all())
        assert bool((coarse <= fine + 1e-5).all())  # finer blocks show more
    assert not bool(eviction_kl(attention, gone & False, scores).any())


@given(length=st.integers(2, 90), seed=st.integers(0, 99), share=st.floats(0.01, 1))
def test_a_learned_sink_is_as_a_token_that_is_always_kept(length: int, seed: int, share: float) -> None:
    attention, scores = distributions(3, length, seed) * share, distributions(3, length, seed + 1)
    gone = torch.rand(3, length, generator=torch.Generator().manual_seed(seed)) < 0.4
    gone[:, -1] = False
    sink = attention.new_full((3, 1), 1 - share)
    with_token = [torch.cat(pair, dim=1) for pair in ((attention, sink), (gone, sink > 2), (scores * share, sink))]
    torch.testing.assert_close(eviction_kl(attention, gone, scores * 7), eviction_kl(*with_token), atol=1e-9, rtol=1e-6)
    beside, token = measure(attention, gone, scores, heads=3), measure(*with_token, heads=3)
    torch.testing.assert_close(beside.recovery, token.recovery, atol=1e-9, rtol=1e-6)


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
