"""Features against stock eager attention, brute force and Monte Carlo."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from predictor import features, rope
from predictor.errors import FadeError
from predictor.features import (
    FEATURES,
    FeatureSpec,
    attention_and_mass,
    attention_rows,
    block_sizes,
    h2o_mass,
    pool_blocks,
)

SHAPES = [(4, 2, 37), (9, 3, 130), (2, 2, 1), (8, 1, 65)]  # query heads, kv heads, tokens


def _qkv(query_heads: int, heads: int, slots: int, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(slots)
    return (
        torch.randn(query_heads, slots, dim),
        torch.randn(heads, slots, dim),
        torch.randn(heads, slots, dim),
    )


def _probabilities(query: Tensor, key: Tensor, scaling: float, sinks: Tensor | None = None) -> Tensor:
    """Brute force, one query and one head at a time: [H, S, S], averaged over the group."""
    sinks = torch.full((len(query),), -math.inf) if sinks is None else sinks
    groups = query.shape[0] // key.shape[0]
    out = torch.zeros(key.shape[0], query.shape[1], key.shape[1])
    for head in range(query.shape[0]):
        for at in range(query.shape[1]):
            scores = key[head // groups, : at + 1] @ query[head, at] * scaling
            out[head // groups, at, : at + 1] += torch.cat((scores, sinks[head, None])).softmax(0)[:-1] / groups
    return out


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_mass_equal_brute_force(shape: tuple[int, int, int], with_sinks: bool) -> None:
    query, key, value = _qkv(*shape)
    sinks = 2 * torch.randn(shape[0]) if with_sinks else None
    expected = _probabilities(query, key, 0.3, sinks)
    torch.testing.assert_close(attention_rows(query, key, 0.3, 0, sinks), expected, atol=1e-5, rtol=1e-4)
    last = min(5, shape[2])
    rows = attention_rows(query[:, -last:], key, 0.3, shape[2] - last, sinks)
    torch.testing.assert_close(rows, expected[:, -last:], atol=1e-5, rtol=1e-4)
    for chunk in (7, 64):
        mass = h2o_mass(query, key, 0.3, chunk, sinks)
        torch.testing.assert_close(mass, expected.sum(1), atol=1e-4, rtol=1e-4)
        assert torch.equal(attention_and_mass(query, key, value, 0.3, chunk, sinks)[1], mass)


def test_sinks_of_minus_infinity_are_none() -> None:
    query, key, value = _qkv(6, 2, 33)
    none, table, spec = torch.full((6,), -math.inf), None, FeatureSpec(window=8)
    seen, alike = (
        features.prefill_features(query, key, value, scaling=0.3, table=table, spec=spec, sinks=sinks)
        for sinks in (None, none)
    )
    assert torch.equal(seen.tokens, alike.tokens)
    assert torch.equal(
        attention_and_mass(query, key, value, 0.3)[0], attention_and_mass(query, key, value, 0.3, sinks=none)[0]
    )


@given(st.integers(1, 70), st.integers(1, 20))
def test_blocks_pool_their_real_tokens(slots: int, block: int) -> None:
    rows = torch.rand(2, slots)
    mean, peak = pool_blocks(rows, block)
    cut = [rows[:, i : i + block] for i in range(0, slots, block)]
    torch.testing.assert_close(mean, torch.stack([c.mean(1) for c in cut], 1))
    torch.testing.assert_close(peak, torch.stack([c.amax(1) for c in cut], 1))
    assert block_sizes(slots, block).tolist() == [c.shape[1] for c in cut]


@pytest.mark.parametrize("sink", [-math.inf, 3.0])
def test_expected_attention_equals_monte_carlo(sink: float) -> None:
    """Queries drawn from the fitted normal, unnormalised attention averaged over draws, then normalised."""
    query, key, _ = _qkv(2, 1, 300, dim=8)
    query, key = query + 0.5, key * 0.7
    sinks = torch.tensor([sink, sink + 1])
    share = features.expected_attention(query, key, 0.35, None, 4, sinks).exp()
    assert float(share.sum()) == pytest.approx(1.0) or sink > 0
    expected = torch.zeros(1, 300)
    for head in range(2):
        used = query[head, features.EA_SINKS :]
        normal = torch.distributions.MultivariateNormal(used.mean(0), torch.cov(used.T, correction=0))
        torch.manual_seed(0)
        weights = (normal.sample((200_000,)) @ key[0].T * 0.35).exp().mean(0)
        expected += weights / (weights.sum() + sinks[head].exp()) / 2
    torch.testing.assert_close(share, expected, atol=0, rtol=0.05)


@pytest.mark.parametrize("interleaved", [False, True])
def test_expected_attention_rotates_the_mean_to_the_coming_positions(interleaved: bool) -> None:
    """With one constant un-rotated query the forecast is that query, rotated to the average of the next positions."""
    dim, slots, horizon = 8, 50, 16
    angles = torch.arange(slots + horizon)[:, None] * torch.tensor([0.5, 0.1, 0.02, 0.004])
    wide = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 2)
    table = rope.Table(wide.cos(), wide.sin(), interleaved)
    plain = torch.randn(1, 1, dim)
    query = rope.rotate(plain.expand(-1, slots, -1), table[:slots])
    key = torch.randn(1, slots, dim)
    coming = range(slots, slots + horizon)
    average = torch.stack([rope.rotate(plain[0], table[[t]]) for t in coming])
    expected = (average.mean(0) @ key[0].T * 0.4).log_softmax(-1)
    ours = features.expected_attention(query, key, 0.4, table, horizon)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_expected_attention_rotates_the_covariance(interleaved: bool) -> None:
    """Against a rotation matrix: log E[exp(k R q)] of a normal q is k R mean + k R cov R' k / 2."""
    dim, slots, horizon = 6, 40, 5
    angles = torch.arange(slots + horizon)[:, None] * torch.tensor([0.5, 0.1])
    wide = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 2)
    table = rope.Table(wide.cos(), wide.sin(), interleaved)  # 4 of 6 channels
    plain, key = torch.randn(1, slots, dim), torch.randn(1, slots, dim)
    turn = torch.zeros(horizon, dim, dim)
    for step, pair in ((s, i) for s in range(horizon) for i in range(2)):
        one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 2)
        angle = angles[slots + step, pair]
        turn[step, one, one] = turn[step, two, two] = angle.cos()
        turn[step, one, two], turn[step, two, one] = -angle.sin(), angle.sin()
        turn[step, 4, 4] = turn[step, 5, 5] = 1
    mean_turn, used = turn.mean(0), plain[0, features.EA_SINKS :]
    cov = mean_turn @ torch.cov(used.T, correction=0) @ mean_turn.T
    scaled = key[0] * 0.4
    expected = (scaled @ mean_turn @ used.mean(0) + ((scaled @ cov) * scaled).sum(-1) / 2).log_softmax(-1)
    ours = features.expected_attention(rope.rotate(plain, table[:slots]), key, 0.4, table, horizon)
    torch.testing.assert_close(ours[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_features_say_what_their_names_say(shape: tuple[int, int, int]) -> None:
    query, key, value = _qkv(*shape)
    spec, slots = FeatureSpec(window=32, block=8), shape[2]
    out = features.prefill_features(query, key, value, scaling=0.3, table=None, spec=spec, layer=5)
    rows = _probabilities(query, key, 0.3)[:, -32:]
    if slots < 32:
        rows = torch.cat((rows[:, :1].expand(-1, 32 - slots, -1), rows), 1)
    column = {name: out.tokens[..., i] for i, name in enumerate(FEATURES)}
    weights = 0.95 ** torch.arange(31, -1, -1.0)
    average = (rows * (weights / weights.sum())[:, None]).sum(1)
    tiny = 1e-9
    torch.testing.assert_close(column["log_ema"], average.clamp(min=tiny).log(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(column["log_mean"], rows.mean(1).clamp(min=tiny).log(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(column["log_max"], rows.amax(1).clamp(min=tiny).log(), atol=1e-3, rtol=1e-3)
    norm = value.norm(dim=-1).log()
    torch.testing.assert_close(column["value_norm"], norm - norm.mean(-1, keepdim=True))
    age = [math.log(slots - i) - math.log(1024) for i in range(slots)]
    assert column["age"][0].tolist() == pytest.approx(age, abs=1e-5)
    assert out.history_mean.shape == out.history_max.shape == (shape[1], 32, -(-slots // 8))
    mass = (out.history_mean * block_sizes(slots, 8)).sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass))
    assert bool(out.tokens.isfinite().all())
    assert out.heads.tolist() == [[5, head] for head in range(shape[1])]


def test_spec_round_trips_and_refuses_what_it_does_not_know() -> None:
    spec = FeatureSpec(window=32)
    assert FeatureSpec.from_dict(spec.to_dict()) == spec
    with pytest.raises(FadeError, match="version 9 .* collect the traces and train again"):
        FeatureSpec.from_dict({**spec.to_dict(), "version": 9})
    with pytest.raises(FadeError, match=r"unknown fields \['colour'\]"):
        FeatureSpec.from_dict({**spec.to_dict(), "colour": 1})
