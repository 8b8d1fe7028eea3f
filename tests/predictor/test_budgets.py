"""Head budgets against brute force."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predictor.budgets import FRACTIONS, HeadBudgets, learn_budgets, lost_attention
from predictor.errors import FadeError


@given(st.integers(1, 40), st.integers(0, 3))
def test_lost_attention_is_the_sum_of_what_was_dropped(length: int, padding: int) -> None:
    torch.manual_seed(length)
    scores, target = torch.randn(2, length + padding), torch.rand(2, length + padding)
    eligible = (torch.rand(2, length + padding) < 0.7) & (torch.arange(length + padding) < length)
    lost = lost_attention(scores, target, eligible, torch.tensor([length, length]))
    for row in range(2):
        mine = sorted(eligible[row].nonzero().flatten().tolist(), key=lambda t: -scores[row, t])
        for fraction, value in zip(FRACTIONS, lost[row]):
            dropped = mine[int(length * fraction) :]
            assert float(value) == pytest.approx(float(target[row, dropped].sum()), abs=1e-4)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]))
def test_allocation_spends_the_budget_and_nothing_more(seed: int, fraction: float) -> None:
    lost = torch.rand(3, 2, len(FRACTIONS), generator=torch.Generator().manual_seed(seed)).sort(descending=True).values
    kept = torch.tensor(list(HeadBudgets(lost).allocate(fraction).values()))
    assert kept.shape == (3, 2)
    assert float(kept.mean()) == pytest.approx(fraction, abs=1e-5)
    assert bool(((kept >= 0) & (kept <= 1 + 1e-6)).all())


@pytest.mark.parametrize("seed", range(8))
def test_allocation_is_the_best_one_for_convex_losses(seed: int) -> None:
    """All allocations on a grid of quarters, tried out."""
    fractions = (0.0, 0.25, 0.5, 0.75, 1.0)
    generator = torch.Generator().manual_seed(seed)
    steps = torch.rand(4, 4, generator=generator).sort(descending=True).values  # savings get smaller: convex
    lost = torch.cat((steps.flip(-1).cumsum(-1).flip(-1), torch.zeros(4, 1)), -1)
    kept = HeadBudgets(lost.view(2, 2, 5), fractions).allocate(0.5)
    ours = sum(float(lost[i, fractions.index(s)]) for i, s in enumerate(s for heads in kept.values() for s in heads))
    best = min(
        sum(float(lost[i, k]) for i, k in enumerate(choice))
        for choice in itertools.product(range(5), repeat=4)
        if sum(fractions[k] for k in choice) <= 2.0
    )
    assert ours == pytest.approx(best, abs=1e-5)


def test_layers_that_no_row_is_of_get_no_budget() -> None:
    """Of a model whose layers 0, 2 and 3 hold a window: the mean over what is left is what was asked for."""
    target = torch.rand(4, 40, generator=torch.Generator().manual_seed(0))
    place = {"layer": torch.tensor([4, 1, 4, 1]), "head": torch.tensor([0, 0, 1, 1])}
    batch = place | {"length": torch.full((4,), 40), "eligible": torch.ones(4, 40, dtype=torch.bool)}
    budgets = learn_budgets(lambda given: given["target_max"], [batch | {"target_max": target}])
    kept = budgets.allocate(0.3)
    assert budgets.layers == tuple(kept) == (1, 4)
    assert sum(sum(heads) for heads in kept.values()) == pytest.approx(0.3 * 4)
    dense = learn_budgets(
        lambda given: given["target_max"], [batch | {"target_max": target, "layer": place["layer"] // 3}]
    )
    assert torch.equal(budgets.lost, dense.lost)
    assert list(dense.allocate(0.3).values()) == list(kept.values())


def test_learned_table_is_the_mean_over_documents() -> None:
    rows = {
        "length": torch.tensor([4, 4, 4]),
        "layer": torch.tensor([0, 0, 0]),
        "head": torch.tensor([0, 1, 0]),
    }
    target = torch.tensor([[0.4, 0.3, 0.2, 0.1], [1.0, 0.0, 0.0, 0.0], [0.0, 0.1, 0.2, 0.3]])
    batch = {**rows, "target_max": target, "eligible": torch.ones(3, 4, dtype=torch.bool)}
    budgets = learn_budgets(lambda given: given["target_max"], [batch])
    assert budgets.lost.shape == (1, 2, len(FRACTIONS))
    assert float(budgets.lost[0, 0, 0]) == pytest.approx((1.0 + 0.6) / 2)
    assert float(budgets.lost[0, 1, FRACTIONS.index(0.33)]) == 0.0  # one token holds all
    with pytest.raises(FadeError, match="no row of layer 0, kv head 0"):
        learn_budgets(lambda given: given["target_max"], [{k: v[1:2] for k, v in batch.items()}])


def test_table_round_trips_and_a_damaged_one_is_refused() -> None:
    budgets = HeadBudgets(torch.rand(2, 3, len(FRACTIONS)))
    again = HeadBudgets.from_dict(budgets.to_dict())
    torch.testing.assert_close(again.lost, budgets.lost, rtol=1e-3, atol=1e-4)
    assert again.layers == (0, 1)
    assert "layers" not in budgets.to_dict()  # as in bundles of earlier releases
    some = HeadBudgets(torch.rand(2, 3, len(FRACTIONS)), layers=(5, 17))
    assert HeadBudgets.from_dict(some.to_dict()).layers == (5, 17)
    for damage in ({"lost": [[1.0]]}, {"shares": [1.0, 0.0]}, {"lost": None}):
        with pytest.raises(FadeError, match="table of head budgets is damaged"):
            HeadBudgets.from_dict({**budgets.to_dict(), **damage})
