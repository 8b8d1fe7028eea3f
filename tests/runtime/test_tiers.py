"""Plans: a partition, budgets kept, the best tokens kept, demotion before eviction."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fade_runtime.storage.tiers import Budgets, Tier, plan_tiers, rank_in_row
from predictor.errors import FadeError


@given(st.data())
@pytest.mark.parametrize("low_tier", [Tier.LOW, Tier.PQ])
def test_plan_fills_the_tiers_of_each_row_best_first(low_tier: Tier, data: st.DataObject) -> None:
    """Against a loop over each row's tokens, best first: the high tier while it lasts, the low tier, then out."""
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    some = lambda least, most: data.draw(st.lists(st.integers(least, most), min_size=len(rows), max_size=len(rows)))
    scores = torch.tensor(some(0, 4), dtype=torch.float32)  # many ties
    slots = torch.tensor(some(0, 1000)) * 1000 + torch.arange(len(rows)).flip(0)
    now = torch.where(torch.tensor(some(0, 3)) == 0, int(low_tier), int(Tier.HIGH))
    each_row = lambda: torch.tensor([data.draw(st.integers(0, 7)) for _ in lengths])
    tau, low_tau = data.draw(st.sampled_from([(1.0, 1.0), (0.5, 0.9), (0.3, 1.0)]))
    budgets = Budgets(each_row(), each_row(), tau, low_tau)
    plan = plan_tiers(scores, rows, budgets, slots=slots, tiers=now, low_tier=low_tier)
    assert bool(((plan.tiers == Tier.HIGH) | (plan.tiers == low_tier) | (plan.tiers == Tier.EVICTED)).all())
    assert bool((plan.count(Tier.HIGH, len(budgets.high)) <= budgets.high).all())
    assert bool((plan.count(low_tier, len(budgets.low)) <= budgets.low).all())
    start = 0
    for row, length in enumerate(lengths):
        mine = range(start, start + length)
        total = sum(scores[t].item() for t in mine)
        int4 = low = before = 0
        for t in sorted(mine, key=lambda t: (scores[t].item(), slots[t].item()), reverse=True):
            share = before / total if total else 0.0
            before += scores[t].item()
            tier = plan.tiers[t].item()
            if now[t] == Tier.HIGH and int4 < budgets.high[row] and share < tau - 1e-6:
                assert tier == Tier.HIGH
                int4 += 1
            elif low < budgets.low[row] and share < low_tau - 1e-6:
                assert tier == low_tier
                low += 1
            else:
                assert tier == Tier.EVICTED or min(abs(share - tau), abs(share - low_tau)) < 1e-6
        start += length


def test_no_budget_keeps_everything_without_scores() -> None:
    plan = plan_tiers(None, torch.tensor([0, 0, 1]), None)
    assert bool((plan.tiers == Tier.HIGH).all())


def test_over_budget_without_scores_is_refused() -> None:
    with pytest.raises(FadeError, match="no policy scored them"):
        plan_tiers(None, torch.tensor([0, 0]), Budgets(torch.tensor([1]), torch.tensor([0])))


def test_scores_that_are_no_shares_cannot_be_cut_by_share() -> None:
    budgets = Budgets(torch.tensor([5]), torch.tensor([0]), tau=0.5)
    with pytest.raises(FadeError, match="tau needs a score that is a share of attention"):
        plan_tiers(torch.tensor([-1.0, 2.0]), torch.tensor([0, 0]), budgets)


def test_rank_of_nothing_is_nothing() -> None:
    assert rank_in_row(torch.zeros(0, dtype=torch.long)).shape == (0,)
