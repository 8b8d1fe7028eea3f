"""Plans: a partition, budgets kept, the best tokens kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fade_runtime.tiers import Tier, TierPlan, plan_tiers, rank_in_row
from predictor.errors import FadeError


@given(st.data())
def test_plan_keeps_the_best_of_each_row(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    few_levels = st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows))  # many ties
    scores = torch.tensor(data.draw(few_levels), dtype=torch.float32)
    budgets = torch.tensor([data.draw(st.integers(0, 14)) for _ in lengths])
    plan = plan_tiers(scores, rows, budgets)
    plan.check(budgets)
    start = 0
    for length, budget in zip(lengths, budgets.tolist()):
        mine = list(range(start, start + length))
        best = sorted(mine, key=lambda t: (scores[t].item(), t), reverse=True)[:budget]
        assert [t for t in mine if plan.kept()[t]] == sorted(best)
        start += length


def test_no_budget_keeps_everything_without_scores() -> None:
    plan = plan_tiers(None, torch.tensor([0, 0, 1]), None)
    assert plan.kept().all()


def test_over_budget_without_scores_is_refused() -> None:
    with pytest.raises(FadeError, match="no policy scored them"):
        plan_tiers(None, torch.tensor([0, 0]), torch.tensor([1]))


def test_check_names_the_row_that_is_over_budget() -> None:
    plan = TierPlan(torch.tensor([Tier.INT4, Tier.INT4], dtype=torch.int8), torch.tensor([1, 1]))
    with pytest.raises(FadeError, match="row 1 keeps 2 tokens, over its budget of 1"):
        plan.check(torch.tensor([5, 1]))
    with pytest.raises(FadeError, match="exactly one"):
        TierPlan(torch.tensor([Tier.FP16], dtype=torch.int8), torch.tensor([0])).check(None)


def test_rank_of_nothing_is_nothing() -> None:
    assert rank_in_row(torch.zeros(0, dtype=torch.long)).shape == (0,)
