"""Models with learned attention sinks (gpt-oss) over the tiered cache, against transformers' own eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, create_tiered_cache, load_session, save_session
from fade_runtime.guard.probe import true_attention
from fade_runtime.policies.base import H2O, Ema, Policy, Prompt
from fade_runtime.policies.fastgen import Accumulated
from fade_runtime.transformers_api import forward_kwargs
from predictor.features import prefill_features
from predictor.learned_sinks import with_sink_token
from tests.families import FAMILIES
from tests.runtime.caches import create_quietly, decode, forward, random_ids, save_bundle

OFF = FadeConfig(compression="off")
LOSSY = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, reassign_every=4)
LENGTH, PROMPT, GROUPS = 61, 45, 2


def gpt_oss(**options: Any) -> Any:
    return FAMILIES["gpt_oss"](**options)


def full_only() -> Any:
    return gpt_oss(num_hidden_layers=2, layer_types=["full_attention"] * 2)


def received(model: Any, ids: Tensor, before: int = 0) -> list[Tensor]:
    """Attention [B, H, S] that each token receives from the queries from ``before`` on, layer by layer, by eager."""
    with torch.no_grad():
        maps = model(ids, output_attentions=True).attentions
    return [each.unflatten(1, (-1, GROUPS)).mean(2)[:, :, before:].sum(2) for each in maps]


def close(ours: Tensor, theirs: Tensor, relative: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, atol=relative * float(theirs.abs().max()), rtol=0)


def test_sinks_matter() -> None:
    """Or what is below tests nothing."""
    model, ids = gpt_oss(), random_ids(1, LENGTH)
    for layer in received(model, ids):
        share = layer.sum(-1) / LENGTH
        assert bool((share < 0.9).any())
        assert float(share.max() - share.min()) > 0.1
    before = model(ids).logits
    for block in model.model.layers:
        block.self_attn.sinks.data.fill_(-torch.inf)
    assert float((model(ids).logits - before).norm() / before.norm()) > 0.1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("config", [OFF, FadeConfig(recent_window=500)], ids=["off", "not yet"])
def test_logits_before_anything_is_compressed_are_those_of_eager_attention(config: FadeConfig, padded: bool) -> None:
    model, ids = gpt_oss(), random_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, : 13 if padded else 0] = 0
    logits = []
    for cache in (DynamicCache(config=model.config), create_quietly(model, config)):
        calls = []
        for part in torch.arange(LENGTH).split([PROMPT, 7, *[1] * (LENGTH - PROMPT - 7)]):
            seen = mask[:, : int(part[-1]) + 1]
            calls.append(forward(model, ids[:, part], cache, attention_mask=seen))
        logits.append(torch.cat(calls, dim=1)[mask.bool()])
    close(logits[1], logits[0])


def test_calls_with_other_caches_are_as_before() -> None:
    model, ids = gpt_oss(), random_ids(1, LENGTH)
    expected = model(ids, output_attentions=True)
    with create_quietly(model, OFF):
        ours = model(ids, output_attentions=True)
    assert torch.equal(ours.logits, expected.logits)
    assert all(torch.equal(*pair) for pair in zip(ours.attentions, expected.attentions, strict=True))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("prompt", [LENGTH, PROMPT], ids=["prompt", "decode"])
def test_statistics_are_what_eager_attention_sums_to(prompt: int, padded: bool) -> None:
    """Of h2o: all queries of the text, each with the sink in its denominator."""
    model, ids = full_only(), random_ids(1, LENGTH)
    cache = create_tiered_cache(model, FadeConfig(eviction_policy="h2o", int4_budget=0.5, recent_window=500))
    if padded:  # another path than that of a prompt alone
        ids = torch.nn.functional.pad(ids, (5, 0), value=257)
    for part in ids.split([prompt + ids.shape[1] - LENGTH, *[1] * (LENGTH - prompt)], dim=1):
        seen = cache.get_seq_length() + part.shape[1]
        forward(model, part, cache, attention_mask=(ids[:, :seen] != 257).long())
    for layer, expected in zip(cache.tiered, received(model, ids[:, -LENGTH:]), strict=True):
        assert layer.store.full.attention_stats is not None
        close(layer.store.full.attention_stats[..., -LENGTH:], expected)


def test_a_probe_sees_what_eager_attention_shows() -> None:
    """Over packed and spilled tokens too, in the first layer, whose queries do not depend on what was packed."""
    model, ids = full_only(), random_ids(1, LENGTH)
    exact = LOSSY.with_options(middle_k_bits=8, middle_v_bits=8, spill="host", guard="warn", monitor_every=1)
    cache, found = create_quietly(model, exact), []
    layer = cache.tiered[0]
    begin = layer.hooks.begin
    layer.hooks.begin = lambda at, call: (found.append(true_attention(at, call, 1)[0]), begin(at, call))
    decode(model, ids, PROMPT, cache)
    assert len(found) == 1 + LENGTH - PROMPT
    with torch.no_grad():
        rows = model(ids, output_attentions=True).attentions[0][0].unflatten(0, (-1, GROUPS)).mean(1)  # [H, S, S]
    for at, (attention,) in zip(range(PROMPT, LENGTH), found[1:], strict=True):
        torch.testing.assert_close(attention, rows[:, at, : at + 1], atol=1e-2, rtol=0)
        assert bool((attention.sum(-1) < 0.97).any())


@pytest.mark.parametrize("policy", [Ema(0.95), H2O(), Accumulated()], ids=lambda policy: type(policy).__name__)
def test_first_statistics_are_those_of_a_prompt_whose_first_token_is_the_sink(policy: Policy) -> None:
    query, key, value = (torch.randn(heads, 90, 16) for heads in (6, 2, 2))
    sinks = 3 + 2 * torch.randn(6)
    ours = policy.start(Prompt(query, key, value, 0.25, lambda count: None, 0, sinks))
    *tokens, _ = with_sink_token(query, key, value, None, 0.25, sinks[:, None])
    first = torch.zeros(6, 1, tokens[0].shape[2])  # its query sees nothing else
    with_token = Prompt(torch.cat((first, tokens[0]), dim=1), *tokens[1:], 0.25, lambda count: None, 0)
    theirs = policy.start(with_token)
    assert ours is not None
    assert theirs is not None
    close(ours, theirs[:, 1:])


def test_a_predictor_sees_features_beside_the_sinks(tmp_path: Any) -> None:
    model, ids = full_only(), random_ids(1, LENGTH)
    bundle, seen = save_bundle(tmp_path, model), []
    config = FadeConfig(eviction_policy="learned", int4_budget=0.5, recent_window=500, predictor=bundle)
    cache = create_tiered_cache(model, config)
    forecast = cache.policy.forecast
    cache.policy.forecast = lambda prompt: (seen.append(prompt), forecast(prompt))[1]
    forward(model, ids, cache)
    predictor = cache.policy.predictor
    for layer, prompt in zip(cache.tiered, seen, strict=True):
        table, sinks = prompt.table(LENGTH + predictor.spec.horizon), model.model.layers[layer.index].self_attn.sinks
        facts = dict(scaling=prompt.scaling, table=table, spec=predictor.spec, layer=layer.index)
        features = prefill_features(prompt.query, prompt.key, prompt.value, **facts, sinks=sinks)
        assert torch.equal(layer.store.full.attention_stats[0], predictor.forecast(features))


@pytest.mark.parametrize("policy", ["ema", "h2o", "adaptive", "position"])
def test_generate_runs_over_windows_and_full_layers(policy: str) -> None:
    model, ids = gpt_oss(), random_ids(2, 70)
    cache = create_tiered_cache(model, LOSSY.with_options(eviction_policy=policy))
    out = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert out.shape == (2, 82)
    tokens = cache.memory_report()["tokens"]
    assert tokens["HIGH"] > 0
    assert tokens["EVICTED"] > 0


def test_a_session_keeps_calls_that_may_still_be_taken_back(tmp_path: Any) -> None:
    model, ids = full_only(), random_ids(1, LENGTH)
    cache = create_tiered_cache(model, LOSSY.with_options(eviction_policy="h2o"))
    decode(model, ids[:, :PROMPT], PROMPT, cache)
    cache.activate_past_recording()
    forward(model, ids[:, PROMPT : PROMPT + 3], cache)
    again = load_session(model, save_session(cache, tmp_path / "session"))
    for layer in again.tiered:
        held = layer.held.calls[-1].call.sinks
        assert held is not None
        assert torch.equal(held, model.model.layers[layer.index].self_attn.sinks)
    rest = [forward(model, ids[:, PROMPT + 3 :], each) for each in (cache, again)]
    assert torch.equal(*rest)


def test_under_autocast_sinks_stay_as_they_are() -> None:
    model, ids = gpt_oss(), random_ids(1, LENGTH)
    model.model.layers[0].self_attn.sinks.data.fill_(5.003)  # 5.0 in bfloat16
    cache = create_quietly(model, OFF)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        ours = forward(model, ids, cache)
        theirs = model(ids, **forward_kwargs(DynamicCache(config=model.config), model)).logits
    assert float((ours - theirs).norm() / theirs.norm()) < 0.05
