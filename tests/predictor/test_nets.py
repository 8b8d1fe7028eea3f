"""Networks: untrained they are the closed forms, padding and batching change nothing, config rebuilds them."""

from __future__ import annotations

import pytest
import torch

from predictor import scores
from predictor.errors import FadeError
from predictor.features import FEATURES, FeatureSpec, PrefillFeatures
from predictor.heuristics import HEURISTICS
from predictor.nets import NETS, BlockCNN, TokenMLP, build_net
from predictor.scorenet import token_scores

MADE = {"layers": 2, "kv_heads": 2, "dim": 16}  # the language model behind make_batch


def randomised(net, seed=0):
    """The same network with no zero layer left, as after training."""
    torch.manual_seed(seed)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return net


def features(batch, row, length, blocks):
    return PrefillFeatures(
        batch["tokens"][row : row + 1, :length],
        batch["history_mean"][row : row + 1, :, :blocks],
        batch["history_max"][row : row + 1, :, :blocks],
    )


@pytest.mark.parametrize("length", [96, 111, 163])
def test_untrained_mlp_is_the_closed_form_exactly(make_batch, length):
    batch = make_batch([length])
    expected = batch["tokens"][..., FEATURES.index("log_ema")] + batch["tokens"][..., FEATURES.index("log_ea")]
    net = TokenMLP()
    assert torch.equal(token_scores(net, batch), expected)
    net.calibrate(batch)  # scaling of the inputs must not move it either
    assert torch.equal(token_scores(net, batch), expected)


def test_a_network_that_knows_heads_begins_as_the_closed_form_and_then_treats_each_head_as_its_own(make_batch):
    batch = make_batch([96, 111])
    closed = token_scores(TokenMLP(), batch)
    net = TokenMLP(hidden=7, depth=1, layers=3, kv_heads=2, embedding=5)
    assert torch.equal(token_scores(net, batch), closed)
    again = build_net("mlp", randomised(net).config())
    again.load_state_dict(net.state_dict())
    scored = token_scores(net, batch)
    assert torch.equal(token_scores(again, batch), scored)
    moved = {**batch, "head": 1 - batch["head"]}
    assert not torch.allclose(token_scores(net, moved), scored)
    last = torch.tensor([[2, 1]])
    base = net(batch["tokens"][:1, :96], heads=last)
    net.gain.data[2, 1, 0] += 1
    torch.testing.assert_close(net(batch["tokens"][:1, :96], heads=last), base + batch["tokens"][:1, :96, 0])
    with pytest.raises(FadeError, match="for 3 layers of 2 kv heads, and meets 4 and 2"):
        net(batch["tokens"][:1], heads=torch.tensor([[3, 1]]))
    with pytest.raises(FadeError, match="set layers and kv_heads to those of the model"):
        net(batch["tokens"][:1])
    assert "layers" not in TokenMLP().config()


@pytest.mark.parametrize("length", [96, 111, 163])
def test_untrained_cnn_is_the_moving_average(make_batch, length):
    batch = make_batch([length])
    net = BlockCNN(window=8)
    net.calibrate(batch)
    torch.testing.assert_close(token_scores(net, batch), HEURISTICS["ema"](batch), atol=1e-4, rtol=1e-4)


def test_cnn_token_scores_add_up_to_the_block_forecast(make_batch, spec):
    batch = make_batch([111])
    net = randomised(BlockCNN(window=8))
    inside = features(batch, 0, 111, 7)
    sizes = batch["block_size"][0]
    forecast = net(inside.history_mean * sizes).exp()[0]
    tokens = net.log_importance(inside).exp()[0]
    sums = torch.stack([part.sum() for part in tokens.split(spec.block)])
    torch.testing.assert_close(sums, forecast, rtol=1e-4, atol=0)


def test_cnn_sees_history_the_average_does_not():
    """Two histories with one moving average: a trained network may tell them apart, the average cannot."""
    rising, falling = torch.full((1, 8, 5), 0.1), torch.full((1, 8, 5), 0.1)
    weights = scores.ema_weights(8, 0.95)
    rising[0, -1, 2] += 0.05 / weights[-1]
    falling[0, 0, 2] += 0.05 / weights[0]
    torch.testing.assert_close(scores.ema(rising), scores.ema(falling))
    net = randomised(BlockCNN(window=8))
    assert (net(rising) - net(falling)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", sorted(NETS))
def test_padding_never_changes_a_score(make_batch, kind):
    options = {"hidden": MADE, "cnn": {"window": 8}, "cnn_published": {"window": 8}}
    net = randomised(NETS[kind](**options.get(kind, {})))
    alone, mixed = (make_batch(lengths, hidden=net.reads_hidden) for lengths in ([111], [111, 163]))
    ours, theirs = token_scores(net, alone), token_scores(net, mixed)
    torch.testing.assert_close(theirs[:2, :111], ours, atol=1e-5, rtol=1e-5)
    assert theirs[:2, 111:].abs().max() == 0


def test_cnn_forward_on_padded_rows_equals_forward_alone(make_batch):
    net = randomised(BlockCNN(window=8))
    batch = make_batch([111, 163])
    mass = batch["history_mean"] * batch["block_size"][:, None]
    padded = net(mass, batch["block_mask"])
    torch.testing.assert_close(padded[:2, :7], net(mass[:2, :, :7]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", sorted(NETS))
def test_config_rebuilds_the_network(make_batch, kind):
    options = {
        "mlp": {"hidden": 12, "depth": 1},
        "hidden": {**MADE, "probes": 3, "hidden": 12, "depth": 1},
        "cnn": {"window": 8, "channels": (3, 5)},
        "cnn_published": {"window": 8, "channels": (3, 5)},
        "ema_bank": {"decays": (0.0, 0.9), "base": 0.9, "hidden": 7, "layers": 1, "kv_heads": 2},
    }
    net = randomised(NETS[kind](**options[kind]))
    again = build_net(kind, net.config())
    again.load_state_dict(net.state_dict())
    batch = make_batch([111], hidden=net.reads_hidden)
    assert torch.equal(token_scores(again, batch), token_scores(net, batch))


def test_scores_that_are_not_numbers_are_refused(make_batch):
    net = TokenMLP()
    net.head.bias.data.fill_(float("nan"))
    with pytest.raises(FadeError, match="not numbers"):
        token_scores(net, make_batch([111]))


def test_unknown_kind_and_argument_are_named():
    with pytest.raises(FadeError, match="'gnn'.*cnn, cnn_published, ema_bank, hidden, mlp"):
        build_net("gnn", {})
    with pytest.raises(FadeError, match="width"):
        build_net("mlp", {"width": 3})


def test_spec_that_differs_is_named():
    BlockCNN().check_spec(FeatureSpec())
    TokenMLP().check_spec(FeatureSpec(window=32))
    with pytest.raises(FadeError, match="window=64.*window=32"):
        BlockCNN().check_spec(FeatureSpec(window=32))
