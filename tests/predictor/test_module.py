"""Training: losses against formulas, and a network that learns what the heuristics cannot know."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from scipy.optimize import brentq
from scipy.special import log_softmax

from predictor.batches import block_targets, target_mass
from predictor.errors import FadeError
from predictor.features import FEATURES
from predictor.heuristics import HEURISTICS
from predictor.losses import (
    EDGE_WIDTH,
    FRACTIONS,
    LOSSES,
    bce_loss,
    kl_loss,
    listwise_loss,
    listwise_mass_loss,
    mse_loss,
    mse_probability_loss,
    recovery_loss,
)
from predictor.metrics import recovery
from predictor.module import MONITOR, PredictorModule
from predictor.nets import BlockCNN, TokenMLP
from predictor.ranking_metrics import BUDGETS, RankingMetrics
from predictor.scorenet import token_scores
from tests.predictor.fitting import fit


@pytest.fixture
def rows():
    make = torch.Generator().manual_seed(0)
    logits, mass = torch.randn(3, 12, generator=make), torch.rand(3, 12, generator=make)
    mask = torch.arange(12) < torch.tensor([12, 9, 5])[:, None]
    return logits, mass, mask


def test_listwise_and_kl_against_scipy(rows):
    logits, mass, mask = rows
    cross, entropy = [], []
    for i in range(3):
        keep = mask[i].numpy()
        p = mass[i].double().numpy()[keep]
        p /= p.sum()
        cross.append(-(p * log_softmax(logits[i].double().numpy()[keep])).sum())
        entropy.append(-(p * np.log(p)).sum())
    assert listwise_loss(*rows).item() == pytest.approx(np.mean(cross), abs=1e-5)
    assert kl_loss(*rows).item() == pytest.approx(np.mean(cross) - np.mean(entropy), abs=1e-5)
    total = (mass * mask).sum(-1).numpy()
    assert listwise_mass_loss(*rows).item() == pytest.approx(np.mean(total * cross), rel=1e-5)


def test_bce_marks_the_top_quarter(rows):
    logits, mass, mask = rows
    total, count = 0.0, 0
    for i in range(3):
        free = [j for j in range(12) if mask[i, j]]
        top = set(sorted(free, key=lambda j: -float(mass[i, j]))[: int(np.ceil(len(free) * 0.25))])
        for j in free:
            p = 1 / (1 + np.exp(-float(logits[i, j])))
            total -= np.log(p if j in top else 1 - p)
            count += 1
    assert bce_loss(logits, mass, mask).item() == pytest.approx(total / count, abs=1e-5)


def test_mse_ignores_the_scale_of_a_forecast(rows):
    logits, mass, mask = rows
    assert mse_loss(mass.log() + torch.tensor([[3.0], [-7.0], [0.0]]), mass, mask) == pytest.approx(0, abs=1e-5)
    free = [(logits - mass.log())[i][mask[i]].double().numpy() for i in range(3)]
    expected = sum(((x - x.mean()) ** 2).sum() for x in free) / sum(map(len, free))
    assert mse_loss(logits, mass, mask).item() == pytest.approx(expected, rel=1e-4)


def test_mse_share_is_the_squared_error_of_probabilities(rows):
    logits, mass, mask = rows
    each = [(float(logits[i, j].exp()) - float(mass[i, j])) ** 2 for i in range(3) for j in range(12) if mask[i, j]]
    assert mse_probability_loss(logits, mass, mask).item() == pytest.approx(np.mean(each), rel=1e-5)


def test_recovery_loss_is_the_lost_share_when_the_edge_is_sharp(rows):
    logits, mass, mask = rows
    lost = []
    for i in range(3):
        free = sorted((j for j in range(12) if mask[i, j]), key=lambda j: -float(logits[i, j]))
        for fraction in FRACTIONS:
            count = int(np.ceil(len(free) * fraction))
            kept = sum(float(mass[i, j]) for j in free[:count])
            lost.append(1 - kept / float(mass[i][mask[i]].sum()))
    assert recovery_loss(logits * 1e4, mass, mask).item() == pytest.approx(np.mean(lost), abs=1e-4)


def test_recovery_loss_ignores_a_shift_and_follows_swaps(rows):
    """The gradient sums to zero in each row, and points towards exchanging a light token for a heavy one."""
    logits, mass, mask = rows
    logits = logits.clone().requires_grad_()
    recovery_loss(logits, mass, mask).backward()
    torch.testing.assert_close(logits.grad.sum(-1), torch.zeros(3), atol=1e-7, rtol=0)
    better = logits.detach() - 0.05 * logits.grad / logits.grad.norm()
    assert recovery_loss(better, mass, mask) < recovery_loss(logits, mass, mask)


def test_recovery_loss_gradient_keeps_the_number_kept(rows):
    """Against finite differences of the loss whose edge is found anew, so that the soft number stays the same."""
    logits, mass, mask = (tensor[:1].double() if tensor.is_floating_point() else tensor[:1] for tensor in rows)
    logits = logits.requires_grad_()
    recovery_loss(logits, mass, mask).backward()
    x, p = logits.detach()[0].numpy(), (mass[0] / mass[0].sum()).numpy()

    def soft(edge, scores):
        return 1 / (1 + np.exp(-(scores - edge) / EDGE_WIDTH))

    def lost(scores):
        total = 0.0
        for fraction in FRACTIONS:
            k = int(np.ceil(12 * fraction))
            wanted = soft(np.sort(x)[::-1][k - 1 : k + 1].mean(), x).sum()
            excess = partial(lambda edge, wanted: soft(edge, scores).sum() - wanted, wanted=wanted)
            total += 1 - (p * soft(brentq(excess, -50, 50, xtol=1e-13), scores)).sum()
        return total / len(FRACTIONS)

    for j in range(12):
        step = np.zeros(12)
        step[j] = 1e-5
        slope = (lost(x + step) - lost(x - step)) / 2e-5
        assert logits.grad[0, j].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_masked_places_have_no_gradient_and_no_row_gives_nan(rows, name):
    logits, mass, mask = rows
    mask = mask.clone()
    mask[2] = False  # a row without a candidate
    logits = logits.clone().requires_grad_()
    loss = LOSSES[name](logits, mass, mask)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).any()


def test_block_targets_are_the_mean_future_mass_of_prompt_blocks(make_batch, spec):
    batch = make_batch([111, 163])
    mass, eligible = block_targets(batch, None)
    for i, length in ((0, 111), (2, 163)):
        for block in range(batch["block_size"].shape[1]):
            slots = [j for j in range(block * 16, block * 16 + 16) if j < length]
            inside = [j for j in slots if batch["eligible"][i, j]]
            assert bool(eligible[i, block]) == bool(inside)
            if inside and len(slots) == 16:
                assert mass[i, block].item() == pytest.approx(batch["target_sum"][i, slots].sum().item(), rel=1e-3)
    first, _ = block_targets(batch, 1)
    torch.testing.assert_close(first, batch["future_mean"][:, 0, : mass.shape[1]] * batch["block_size"])


def test_blend_is_half_of_each_as_shares(make_batch):
    batch = make_batch([111, 163])
    for i, eligible in enumerate(batch["eligible"]):
        sums, peaks = (batch[name][i][eligible] for name in ("target_sum", "target_max"))
        expected = (sums / sums.sum() + peaks / peaks.sum()) / 2
        torch.testing.assert_close(target_mass(batch, "blend")[i][eligible], expected)
        torch.testing.assert_close(target_mass(batch, "max")[i][eligible], peaks / peaks.sum())
    peak, mask = block_targets(batch, 5, "max")
    future = batch["future_mean"][:, :5, : peak.shape[1]] * batch["block_size"][:, None]
    highest, mean = future.amax(1) * mask, future.mean(1) * mask
    torch.testing.assert_close(peak, highest / highest.sum(-1, keepdim=True))
    blend, _ = block_targets(batch, 5, "blend")
    torch.testing.assert_close(blend, (peak + mean / mean.sum(-1, keepdim=True)) / 2)
    with pytest.raises(FadeError, match="'median'.*sum, max, blend"):
        target_mass(batch, "median")


def test_metrics_name_the_worst_the_middle_the_ranks_and_each_head(make_batch):
    """An oracle for a network: nothing is better; its opposite: nothing is worse."""

    class Oracle(TokenMLP):
        def __init__(self, sign):
            super().__init__()
            self.sign = sign

    batch, values = make_batch([400, 420]), {}
    for sign in (1, -1):
        metrics, net = RankingMetrics(), Oracle(sign)
        net.log_importance = lambda features, sign=sign: sign * features.tokens[..., 0]
        batch["target_sum"] = batch["tokens"][..., 0].exp() * batch["mask"]
        metrics.update(net, batch)
        values[sign] = metrics.values()
        assert [(row["layer"], row["head"]) for row in metrics.by_head()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    best, worst = values[1], values[-1]
    assert best["spearman"] == pytest.approx(1, abs=1e-4)
    assert worst["spearman"] == pytest.approx(-1, abs=1e-4)
    assert best["topk_recall_at_0.25"] == 1
    for name in ("middle_recovery_at_0.25", "worst_percentile_recovery_at_0.25"):
        assert best[name] > worst[name]
    assert best["worst_percentile_recovery_at_0.25"] <= best["recovery_at_0.25"]
    assert best["middle_recovery_at_0.25"] < best["recovery_at_0.25"]


def test_a_network_above_a_million_parameters_is_refused():
    with pytest.raises(FadeError, match="TokenMLP has .* parameters, a predictor at most 1,000,000"):
        PredictorModule(TokenMLP(hidden=1000))


def test_metrics_agree_with_the_functions(make_batch):
    batches = [make_batch([111, 163], seed=seed) for seed in (1, 2)]
    metrics, net = RankingMetrics(), TokenMLP()
    for batch in batches:
        metrics.update(net, batch)
    table = metrics.table()
    assert table["net"] == pytest.approx(table["ema_ea"])
    for name in HEURISTICS:
        parts = [recovery(HEURISTICS[name](b), b["target_sum"], b["mask"], b["eligible"], BUDGETS) for b in batches]
        assert list(table[name].values()) == pytest.approx(torch.cat(parts).mean(0).tolist(), abs=1e-5)
        assert all(table["oracle"][budget] >= table[name][budget] - 1e-6 for budget in BUDGETS)
    assert len(metrics.by_layer()) == 2
    metrics.reset()
    assert not metrics.by_layer()


def test_no_batch_of_a_heuristic_needs_the_h2o_column(make_batch):
    batch = make_batch([111])
    del batch["h2o"]
    metrics = RankingMetrics()
    metrics.update(TokenMLP(), batch)
    assert "h2o" not in metrics.table()
    assert "ema" in metrics.table()


def misleading(batch):
    """A task where the closed form is wrong by construction: what is kept is told by the value norm alone."""
    signal = batch["tokens"][..., FEATURES.index("value_norm")]
    batch["target_sum"] = (3 * signal).softmax(-1) * batch["mask"]
    return batch


def test_mlp_learns_what_the_closed_form_cannot_know(make_batch):
    seed_everything(0, verbose=False)
    batches = [misleading(make_batch([140, 140], seed=seed)) for seed in range(6)]
    held = misleading(make_batch([140, 140], seed=99))
    module = PredictorModule(TokenMLP(hidden=16, depth=1), lr=0.02)
    before = module.loss_of(held).item()
    trainer = fit(module, batches, epochs=15)
    assert module.loss_of(held).item() < before - 0.1
    metrics = RankingMetrics()
    metrics.update(module.net, held)
    table = metrics.table()
    assert table["net"][0.5] > table["ema_ea"][0.5] + 0.02
    assert {MONITOR, "val/heuristic/ema/recovery_at_0.125", "val/gap_closed_at_0.5"} <= set(trainer.callback_metrics)


@pytest.mark.slow
def test_cnn_learns_a_march_that_the_average_misses(make_batch):
    """Attention moves on by one block: the future of a block is the past of the block before it."""
    seed_everything(0, verbose=False)

    def marching(batch):
        past = batch["history_mean"].mean(1, keepdim=True)
        batch["future_mean"][:, :, : past.shape[2]] = past.roll(1, dims=2)
        return batch

    batches = [marching(make_batch([263, 263], seed=seed)) for seed in range(6)]
    held = marching(make_batch([263, 263], seed=99))
    module = PredictorModule(BlockCNN(window=8, channels=(8, 8)), lr=0.02, loss="kl")
    before = module.loss_of(held).item()
    fit(module, batches, epochs=20)
    assert module.loss_of(held).item() < 0.5 * before


def test_same_seed_same_weights(make_batch):
    def train(seed):
        seed_everything(seed, verbose=False)
        module = PredictorModule(TokenMLP(hidden=8), lr=0.01)
        fit(module, [make_batch([111, 140], seed=5)], epochs=2)
        return token_scores(module.net, make_batch([111]))

    first = train(1)
    assert torch.equal(train(1), first)
    assert not torch.equal(train(2), first)


def test_unknown_loss_and_budget_are_named():
    with pytest.raises(FadeError, match="'hinge'.*recovery, listwise"):
        PredictorModule(TokenMLP(), loss="hinge")
    with pytest.raises(FadeError, match="1.5"):
        PredictorModule(TokenMLP(), budgets=(1.5,))
