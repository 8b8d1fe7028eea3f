"""Re-selection while decoding, against a plain loop over rows, steps and blocks."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import seed_everything

from predictor.errors import FadeError
from predictor.module import PredictorModule
from predictor.nets import TokenMLP
from predictor.reselect import AVERAGES, ReselectMetrics, blocks_at, horizon_mass, timeline
from predictor.temporal import BlockCNN, EmaBank
from tests.predictor.fitting import fit

BLOCK, SINKS, RECENT = 16, 4, 64


@pytest.fixture
def batch(make_batch):
    return make_batch([163, 230], steps=40)


def by_hand(batch, every, budget, rank):
    """Mean recovery over rows and steps; ``rank(row, made)`` gives each block's score from the rows before ``made``."""
    line, window, total = timeline(batch), batch["history_mean"].shape[1], []
    for i in range(len(line)):
        length = int(batch["length"][i])
        for step in range(line.shape[1] - window):
            made, now = step // every * every, length + step + 1
            order = rank(i, made)
            blocks = range(math.ceil(now / BLOCK))
            always = [
                b
                for b in blocks
                if b * BLOCK < SINKS or (b + 1) * BLOCK > now - RECENT or b * BLOCK >= length + made + 1
            ]
            fixed = [b for b in blocks if b * BLOCK < SINKS or (b + 1) * BLOCK > now - RECENT]
            rest = sorted(
                (b for b in blocks if b not in fixed),
                key=lambda b: -math.inf if b in always else -float(order[b]),
            )
            count = max(math.floor(budget * len(blocks) + 1e-9), len(fixed))
            kept = fixed + rest[: count - len(fixed)]
            row = line[i, window + step]
            total.append(float(row[kept].sum() / row[: len(blocks)].sum()))
    return sum(total) / len(total)


@pytest.mark.parametrize(("every", "steps"), [(1, 40), (16, 40), (100, 100)])  # in 100, blocks come and grow old
def test_metrics_agree_with_a_loop(make_batch, every, steps):
    batch = make_batch([163, 230], steps=steps)
    metrics, net, budget = ReselectMetrics(every, budgets=[0.6]), EmaBank(), 0.6
    metrics.update(net, batch)
    line, window, table = timeline(batch), 8, metrics.table()
    assert table["oracle"][budget] == pytest.approx(
        by_hand(batch, every, budget, lambda i, made: line[i, window + made : window + made + every].mean(0)),
        abs=1e-4,
    )
    for decay in (0.5, 0.95):

        def rank(i, made, decay=decay):
            rows = line[i, : window + made]
            weights = decay ** torch.arange(len(rows) - 1, -1, -1.0)
            return (weights[:, None] * rows).sum(0) / weights.sum()

        assert table[f"ema{100 * decay:.0f}"][budget] == pytest.approx(by_hand(batch, every, budget, rank), abs=1e-4)
    assert table["net"][budget] == pytest.approx(table["ema70"][budget], abs=1e-4)  # untrained


def test_fixed_is_a_selection_held_for_good(batch):
    once, each = ReselectMetrics(every=40, budgets=[0.6]), ReselectMetrics(every=1, budgets=[0.6])
    for metrics in (once, each):
        metrics.update(EmaBank(), batch)
    assert once.table()["ema95"] == pytest.approx(each.table()["fixed"], abs=1e-6)


def test_choosing_more_often_helps_who_knows_the_future(batch):
    tables = {}
    for every in (1, 8, 40):
        metrics = ReselectMetrics(every, budgets=[0.6])
        metrics.update(EmaBank(), batch)
        tables[every] = metrics.table()
    oracle = [tables[every]["oracle"][0.6] for every in (1, 8, 40)]
    assert oracle == sorted(oracle, reverse=True)
    assert oracle[0] > oracle[2]
    for name in AVERAGES:
        assert tables[1][name][0.6] <= oracle[0] + 1e-6


def test_a_timeline_holds_the_mass_of_whole_rows(batch):
    """Each row of attention sums to 1 over the blocks, of the prompt and of the future alike."""
    line = timeline(batch)
    torch.testing.assert_close(line.sum(-1), torch.ones(line.shape[:2]), atol=1e-4, rtol=0)


def test_sinks_window_and_blocks_to_come_are_no_candidates(batch):
    existing, candidates = blocks_at(batch, torch.tensor([0, 39]))
    for i, length in enumerate(batch["length"].tolist()):
        for place, step in enumerate((0, 39)):
            now = length + step + 1
            for block in range(existing.shape[-1]):
                start = block * BLOCK
                assert bool(existing[i, place, block]) == (start < now)
                free = start >= SINKS and start + BLOCK <= now - RECENT
                assert bool(candidates[i, place, block]) == free


def test_horizon_is_cut_at_the_last_recorded_row(batch):
    line = timeline(batch)
    got = horizon_mass(line, 8, torch.tensor([0, 30]), 16)
    torch.testing.assert_close(got[:, 0], line[:, 8:24].mean(1), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(got[:, 1], line[:, 38:48].mean(1), atol=1e-6, rtol=1e-4)


def test_padding_never_changes_a_row(make_batch):
    net = EmaBank()
    torch.nn.init.normal_(net.head.weight)
    metrics = [ReselectMetrics(4), ReselectMetrics(4)]
    metrics[0].update(net, make_batch([163, 230], steps=20))
    for row, length in enumerate((163, 230)):
        batch = make_batch([163, 230], steps=20)
        alone = {name: tensor[2 * row : 2 * row + 2] for name, tensor in batch.items()}
        count = math.ceil(length / BLOCK)
        for name in ("history_mean", "history_max", "block_size", "block_mask"):
            alone[name] = alone[name][..., :count]
        alone["future_mean"] = alone["future_mean"][..., : math.ceil((length + 20) / BLOCK)]
        for name in ("mask", "eligible"):
            alone[name] = alone[name][:, :length]
        metrics[1].update(net, alone)
    for name, row in metrics[0].table().items():
        assert row == pytest.approx(metrics[1].table()[name], abs=1e-5), name


def test_numbers_of_one_head_move_that_head_alone(make_batch):
    net, batch = EmaBank(layers=2, kv_heads=2), make_batch([520, 540], steps=20)
    torch.nn.init.normal_(net.head.weight)
    heads = []
    for _ in range(2):
        metrics = ReselectMetrics(4, stride=2)
        metrics.update(net, batch)
        heads.append({(row["layer"], row["head"]): row["net"] for row in metrics.by_head()})
        torch.nn.init.normal_(net.own.data[1, 0])
    assert [place for place in heads[0] if heads[0][place] != heads[1][place]] == [(1, 0)]


def test_values_tables_and_reset(make_batch):
    metrics = ReselectMetrics(every=4, stride=2)
    metrics.update(EmaBank(), make_batch([520, 540], steps=20))
    values = metrics.values()
    assert {
        "recovery_at_0.25",
        "heuristic/fixed/recovery_at_0.25",
        "heuristic/ema70/recovery_at_0.25",
        "worst_percentile_recovery_at_0.25",
        "topk_recall_at_0.25",
        "block_kl",
        "block_kl_calibrated",
        "temperature",
    } <= set(values)
    assert values["block_kl_calibrated"] <= values["block_kl"] + 1e-6
    assert values["worst_percentile_recovery_at_0.25"] <= values["recovery_at_0.25"]
    heads = metrics.by_head()
    assert [(row["layer"], row["head"]) for row in heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row["layer"] for row in metrics.by_layer()] == [0, 1]
    metrics.reset()
    assert not metrics.by_head()


def test_what_cannot_re_select_is_refused_by_name(batch):
    with pytest.raises(FadeError, match="TokenMLP scores tokens"):
        PredictorModule(TokenMLP(), every=1)
    with pytest.raises(FadeError, match="every 4.*steps 2"):
        PredictorModule(EmaBank(), every=4, steps=2)
    with pytest.raises(FadeError, match="every 0"):
        ReselectMetrics(every=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "net",
    [EmaBank(hidden=8), EmaBank(hidden=8, layers=1, kv_heads=2), BlockCNN(window=8, channels=(4, 4))],
    ids=["ema_bank", "ema_bank_by_head", "cnn"],
)
def test_it_learns_a_march_that_averages_miss(make_batch, net):
    """The attention of a block at one step goes to the block after it at the next."""
    seed_everything(0, verbose=False)

    def marching(seed):
        batch = make_batch([263], seed=seed, steps=24)
        drawn = torch.Generator().manual_seed(seed)
        count, window = batch["future_mean"].shape[2], batch["history_mean"].shape[1]
        row = torch.rand(2, count, generator=drawn) ** 6 / count
        line = torch.stack([row.roll(step, dims=-1) for step in range(window + 24)], dim=1)
        batch["history_mean"] = line[:, :window, : batch["history_mean"].shape[2]]
        batch["future_mean"] = line[:, window:]
        return batch

    module = PredictorModule(net, every=1, loss="listwise", lr=0.02, budgets=(0.5,))
    fit(module, [marching(seed) for seed in range(6)], epochs=8)
    module.metrics.update(module.net, marching(99))
    table = module.metrics.table()
    best = max(table[name][0.5] for name in AVERAGES)
    assert table["net"][0.5] > best + 0.3 * (table["oracle"][0.5] - best)
    temperature = float(module.net.temperature)
    assert temperature != pytest.approx(1.1)  # calibrated on what was held out
