"""Soft gates: the threshold that keeps the budget and its gradient, against numeric differences and brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predictor.distil import divergence, kept, kept_by_head, level_offsets, log_gates, relative, threshold
from predictor.errors import FadeError

SCORES = st.lists(st.floats(-30, 30, allow_nan=False, width=32), min_size=2, max_size=23)
BUDGET, TEMPERATURE = st.floats(0.02, 0.95), st.floats(0.05, 2.0)


@given(SCORES, BUDGET, TEMPERATURE)
def test_the_mean_gate_is_the_budget(scores, budget, temperature):
    gates = log_gates(torch.tensor(scores), budget, temperature).exp()
    assert gates.mean().item() == pytest.approx(budget, abs=2e-4)


@given(SCORES, BUDGET, st.floats(0.3, 2.0), st.integers(0, 10**6))
def test_the_gradient_is_that_of_numeric_differences(scores, budget, temperature, seed):
    """Of a random sum of gates, through the threshold too: all scores move it."""
    drawn = torch.Generator().manual_seed(seed)
    weights = torch.randn(len(scores), generator=drawn, dtype=torch.float64)

    def value(each):
        return (weights * log_gates(each, budget, temperature)).sum()

    inputs = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    value(inputs).backward()
    step = 1e-4
    for place in range(len(scores)):
        moved = torch.zeros(len(scores), dtype=torch.float64)
        moved[place] = step
        numeric = (value(inputs.detach() + moved) - value(inputs.detach() - moved)) / (2 * step)
        assert inputs.grad[place].item() == pytest.approx(numeric.item(), rel=2e-3, abs=2e-3)


def test_the_gradient_is_that_of_a_step_of_newton_at_the_solution():
    """Autograd through one step of Newton's method from the solved threshold: its derivative is the implicit one."""
    scores = torch.randn(3, 2, 71, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(threshold(scores, 0.23, 0.4), scores)
    tau = threshold(scores.detach(), 0.23, 0.4).requires_grad_(True)
    excess = torch.sigmoid((scores - tau) / 0.4).mean() - 0.23
    (slope,) = torch.autograd.grad(excess, tau, retain_graph=True)
    (theirs,) = torch.autograd.grad(tau.detach() - excess / slope, scores)
    torch.testing.assert_close(ours, theirs)


def test_moving_all_scores_moves_the_threshold_and_no_gate():
    scores = torch.randn(2, 3, 40)
    torch.testing.assert_close(log_gates(scores + 5, 0.2, 0.3), log_gates(scores, 0.2, 0.3), rtol=1e-4, atol=1e-4)


def test_cold_gates_are_the_tokens_that_are_kept():
    scores = torch.randn(4, 3, 57)
    cold = log_gates(scores, 0.25, 1e-3).exp() > 0.5
    assert torch.equal(cold, kept(scores, round(0.25 * scores.numel())))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(0, 200), st.integers(0, 10**6))
def test_kept_tokens_are_the_best_of_all_heads_or_of_each(layers, heads, tokens, count, seed):
    drawn = torch.Generator().manual_seed(seed)
    scores = torch.randn(layers, heads, tokens, generator=drawn)
    best = sorted(scores.flatten().tolist(), reverse=True)[:count]
    assert sorted(scores[kept(scores, count)].tolist(), reverse=True) == best
    counts = torch.randint(tokens + 2, (layers, heads), generator=drawn)
    keep = kept_by_head(scores, counts)
    for layer in range(layers):
        for head in range(heads):
            one, limit = scores[layer, head], int(counts[layer, head])
            assert sorted(one[keep[layer, head]].tolist(), reverse=True) == sorted(one.tolist(), reverse=True)[:limit]


def test_level_offsets_give_each_head_its_share_under_one_threshold():
    scores, shares = torch.randn(3, 2, 101) * 3, torch.rand(3, 2) * 0.6 + 0.05
    level = scores + level_offsets(scores, shares, length=150)[..., None]
    assert torch.equal((level >= 0).sum(-1), (shares * 150).long().clamp(1, 101))


def test_divergence_is_the_sum_over_the_vocabulary():
    full, gated = torch.randn(5, 11), torch.randn(5, 11)
    for step in range(5):
        p, q = full[step].double().softmax(-1).tolist(), gated[step].double().softmax(-1).tolist()
        expected = sum(a * torch.tensor(a / b).log().item() for a, b in zip(p, q))
        assert divergence(full, gated)[step].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("size", [0.05, 0.5, 5.0])
def test_losses_of_all_sizes_pull_alike(size):
    loss = torch.tensor(size, requires_grad=True)
    relative(loss).backward()
    assert loss.grad.item() * size == pytest.approx(1, abs=0.2)


def test_what_cannot_be_is_refused():
    for budget in (0.0, 1.0, 1.2):
        with pytest.raises(FadeError, match="leaves nothing to choose"):
            threshold(torch.randn(5), budget, 1.0)
    with pytest.raises(FadeError, match="not a finite number"):
        threshold(torch.tensor([0.0, float("nan")]), 0.5, 1.0)
