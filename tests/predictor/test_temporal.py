"""Networks over attention history: streaming equals recomputing, timelines equal windows, and they learn."""

from __future__ import annotations

import pytest
import torch

from predictor import scores
from predictor.errors import FadeError
from predictor.nets import build_net
from predictor.scorenet import MAX_PARAMETERS, check_size
from predictor.temporal import DECAYS, BlockCNN, EmaBank, PublishedCNN, advance, average_weights


def randomised(net, seed=0):
    torch.manual_seed(seed)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return net


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 0.99])
def test_an_average_is_the_one_the_heuristics_use(decay):
    rows = torch.rand(2, 9, 5)
    weights = average_weights(torch.tensor([9]), 9, [decay])[0, 0]
    expected = scores.ema(rows, decay) if decay else rows[:, -1]
    torch.testing.assert_close(torch.einsum("l,rln->rn", weights, rows), expected)


def test_a_bank_kept_up_to_date_is_the_bank_made_anew():
    """Row by row, with a block that appears on the way."""
    net, rows = EmaBank(), torch.rand(3, 30, 7)
    rows[:, :20, 6] = 0
    bank = net.bank(rows[:, :12, :6])
    for seen in range(12, 30):
        row = rows[:, seen, : 6 if seen < 20 else 7]
        bank = advance(bank, row, seen, net.decays)
    torch.testing.assert_close(bank, net.bank(rows), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("net", [BlockCNN(window=8), PublishedCNN(window=8)], ids=lambda net: net.kind)
def test_forecasts_of_a_timeline_see_the_window_before_each_step(net):
    net, line = randomised(net), torch.rand(2, 20, 5) / 5
    at, mask = torch.tensor([8, 13, 20]), torch.ones(2, 3, 5, dtype=torch.bool)
    mask[:, 0, 4] = False
    got = net.forecasts(line, at, mask)
    torch.testing.assert_close(got[:, 2], net(line[:, 12:20]))
    torch.testing.assert_close(got[:, 0, :4], net(line[:, :8, :4]), atol=1e-5, rtol=1e-5)


def test_forecasts_of_a_bank_see_every_row_before_each_step_and_none_after():
    net, line = randomised(EmaBank()), torch.rand(2, 20, 5) / 5
    at, mask = torch.tensor([8, 20]), torch.ones(2, 2, 5, dtype=torch.bool)
    got = net.forecasts(line, at, mask)
    torch.testing.assert_close(got[:, 0], net(line[:, :8]), atol=1e-5, rtol=1e-4)
    later = line.clone()
    later[:, 8:] = 9
    assert torch.equal(net.forecasts(later, at, mask)[:, 0], got[:, 0])


def test_untrained_bank_is_its_base_average():
    history = torch.rand(2, 16, 9)
    for base in (0.7, 0.95):
        torch.testing.assert_close(EmaBank(base=base)(history).exp(), scores.ema(history, base), rtol=1e-4, atol=0)
    with pytest.raises(FadeError, match=r"0\.33"):
        EmaBank(base=0.33)


def test_a_head_without_numbers_of_its_own_yet_is_as_the_shared_network():
    """Same weights, zeros for each head: the same forecast to the last bit, and untrained the base average."""
    heads, history = torch.tensor([[0, 1], [2, 0], [2, 1]]), torch.rand(3, 16, 9) / 9
    shared, apart = randomised(EmaBank()), EmaBank(layers=3, kv_heads=2)
    torch.testing.assert_close(apart(history, heads=heads).exp(), scores.ema(history, 0.7), rtol=1e-4, atol=0)
    apart.load_state_dict({**apart.state_dict(), **shared.state_dict()})
    assert torch.equal(apart(history, heads=heads), shared(history))


def test_each_row_is_forecast_by_the_numbers_of_its_own_head():
    """Three heads in any order, some steps at once: each row as that head alone, and no other head's gradient."""
    net, line = randomised(EmaBank(layers=3, kv_heads=2)), torch.rand(3, 20, 5) / 5
    heads, at = torch.tensor([[2, 1], [0, 0], [1, 1]]), torch.tensor([8, 13, 20])
    mask = torch.ones(3, 3, 5, dtype=torch.bool)
    together = net.forecasts(line, at, mask, heads)
    for row, step in ((0, 0), (1, 1), (2, 2)):
        alone = net(line[row : row + 1, : at[step]], heads=heads[row : row + 1])
        torch.testing.assert_close(together[row, step], alone[0], atol=1e-5, rtol=1e-4)
        other = net(line[row : row + 1, : at[step]], heads=heads[row - 1][None])
        assert (alone - other).abs().max() > 1e-3
    together[0].sum().backward()
    moved = net.own.grad.abs().sum((2, 3, 4)).nonzero()
    assert moved.tolist() == [[2, 1]]


def test_a_bank_that_knows_the_heads_is_told_them():
    net, history = EmaBank(layers=3, kv_heads=2), torch.rand(1, 16, 9)
    with pytest.raises(FadeError, match="3 layers of 2 kv heads and is not told"):
        net(history)
    with pytest.raises(FadeError, match="3 layers of 2 kv heads, and meets 4 and 1"):
        net(history, heads=torch.tensor([[3, 0]]))
    with pytest.raises(FadeError, match="layers 3, kv_heads 0"):
        EmaBank(layers=3)


def test_a_bank_from_before_it_knew_the_heads_loads():
    old = randomised(EmaBank(hidden=7))
    config = {name: old.config()[name] for name in ("decays", "base", "hidden", "block")}
    net, history = build_net("ema_bank", config), torch.rand(2, 16, 9)
    net.load_state_dict(old.state_dict())
    assert torch.equal(net(history), old(history))


def test_published_network_has_no_residual():
    """All weights zero: the same forecast for every block, whatever the history."""
    net = PublishedCNN()
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    assert net(torch.rand(2, 64, 6)).std() < 1e-5


def test_sizes_are_as_stated():
    """A bank of about seven thousand weights, below 100,000 with the 90 heads of SmolLM2; none above a million."""
    sizes = {type(net): sum(p.numel() for p in net.parameters()) for net in (EmaBank(), PublishedCNN(), BlockCNN())}
    assert 5_000 < sizes[EmaBank] < 8_000
    assert sizes[PublishedCNN] == (9 + 1) * 16 + (9 * 16 + 1) * 32 + 32 + 1
    apart = sum(p.numel() for p in EmaBank(layers=30, kv_heads=3).parameters())
    assert apart == sizes[EmaBank] + 90 * 4 * 40 < 100_000
    check_size(EmaBank())
    with pytest.raises(FadeError, match=r"EmaBank has 1,\d{3},\d{3} parameters.*1,000,000"):
        check_size(EmaBank(hidden=600))
    assert MAX_PARAMETERS == 1_000_000


@pytest.mark.parametrize("net", [BlockCNN(), EmaBank(), PublishedCNN()], ids=lambda net: net.kind)
def test_log_probability_is_a_distribution_that_the_temperature_flattens(net):
    net, history = randomised(net), torch.rand(2, 64, 6) / 6
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    sharp = net.log_probability(history, mask)
    net.temperature.fill_(5.0)
    flat = net.log_probability(history, mask)
    for log in (sharp, flat):
        torch.testing.assert_close(log.exp().sum(-1), torch.ones(2))
        assert log[1, 4:].exp().sum() == 0
    assert flat[0].max() < sharp[0].max()


def test_weights_from_before_calibration_load_and_keep_the_start():
    stored = {name: tensor for name, tensor in BlockCNN().state_dict().items() if name != "temperature"}
    net = BlockCNN()
    net.load_state_dict(stored)
    assert net.temperature == pytest.approx(1.1)


def test_decays_of_the_bank_are_those_of_the_baselines():
    assert tuple(EmaBank().config()["decays"]) == DECAYS
