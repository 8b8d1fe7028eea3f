"""Networks over attention history: streaming equals recomputing, timelines equal windows, and they learn."""

from __future__ import annotations

import pytest
import torch

from predictor import scores
from predictor.errors import FadeError
from predictor.scorenet import MOST_PARAMETERS, check_size
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
        torch.testing.assert_close(
            EmaBank(base=base)(history).exp(), scores.ema(history, base), rtol=1e-4, atol=0
        )
    with pytest.raises(FadeError, match=r"0\.33"):
        EmaBank(base=0.33)


def test_published_network_has_no_residual():
    """All weights zero: the same forecast for every block, whatever the history."""
    net = PublishedCNN()
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    assert net(torch.rand(2, 64, 6)).std() < 1e-5


def test_sizes_are_as_stated():
    """A bank of about seven thousand weights; nothing above a million is taken."""
    sizes = {
        type(net): sum(p.numel() for p in net.parameters()) for net in (EmaBank(), PublishedCNN(), BlockCNN())
    }
    assert 5_000 < sizes[EmaBank] < 8_000
    assert sizes[PublishedCNN] == (9 + 1) * 16 + (9 * 16 + 1) * 32 + 32 + 1
    check_size(EmaBank())
    with pytest.raises(FadeError, match=r"EmaBank has 1,\d{3},\d{3} parameters.*1,000,000"):
        check_size(EmaBank(hidden=600))
    assert MOST_PARAMETERS == 1_000_000


@pytest.mark.parametrize("net", [BlockCNN(), EmaBank(), PublishedCNN()], ids=lambda net: net.kind)
def test_log_share_is_a_distribution_that_the_temperature_flattens(net):
    net, history = randomised(net), torch.rand(2, 64, 6) / 6
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    sharp = net.log_share(history, mask)
    net.temperature.fill_(5.0)
    flat = net.log_share(history, mask)
    for share in (sharp, flat):
        torch.testing.assert_close(share.exp().sum(-1), torch.ones(2))
        assert share[1, 4:].exp().sum() == 0
    assert flat[0].max() < sharp[0].max()


def test_weights_from_before_calibration_load_and_keep_the_start():
    stored = {name: tensor for name, tensor in BlockCNN().state_dict().items() if name != "temperature"}
    net = BlockCNN()
    net.load_state_dict(stored)
    assert net.temperature == pytest.approx(1.1)


def test_decays_of_the_bank_are_those_of_the_baselines():
    assert tuple(EmaBank().config()["decays"]) == DECAYS
