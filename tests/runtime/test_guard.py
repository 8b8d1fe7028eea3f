"""The guard fires when the forecast fails, restores what was evicted, and changes nothing while all is well."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import (
    FadeConfig,
    TieredCache,
    attach_telemetry,
    create_tiered_cache,
)
from fade_runtime.guard.guard import CALM_PROBES, Watch
from fade_runtime.guard.probe import Probe
from fade_runtime.layer.movement import move
from fade_runtime.layer.positions import Positions, dense
from fade_runtime.layer.store import BodyTokens, TokenStore
from fade_runtime.storage.spill import Spill
from fade_runtime.storage.tiers import Tier
from fade_runtime.transformers_api import forward_kwargs
from predictor.twin import dense_twin
from tests.runtime.caches import create_quietly, forward_quietly, random_ids
from tests.runtime.guarded import CALMED, TIGHT, WATCHED, evicted

# -- restoring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(low_budget=30),
        dict(positions="streaming"),
        dict(eviction_policy="position"),
        dict(eviction_policy="ema"),
    ],
    ids=str,
)
def test_after_restoring_logits_are_those_of_a_cache_with_all_tokens(
    model: Any, where: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The oracle is transformers' own attention over everything that the cache reads back."""
    twin = dense_twin(model)
    spill = dict(spill="disk", spill_dir=tmp_path) if where == "disk" else {}
    cache = create_quietly(model, FadeConfig(**{**CALMED, **options, **spill}))
    ids = random_ids(2, 221)
    forward_quietly(model, ids[:, :180], cache)
    for at in range(180, 220):
        forward_quietly(model, ids[:, at : at + 1], cache)
    before = evicted(cache)
    everything = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.tiered):
        everything.update(*layer.materialise(), index)
    restored = sum(layer.tokens.restore() for layer in cache.tiered)
    assert restored == before > 0
    assert evicted(cache) == cache.guard.report()["spilled"]["tokens"] == 0
    for index, layer in enumerate(cache.tiered):
        for ours, theirs in zip(layer.materialise(), (everything.layers[index].keys, everything.layers[index].values)):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    ours = forward_quietly(model, ids[:, 220:221], cache)
    theirs = twin(ids[:, 220:221], past_key_values=everything, position_ids=torch.full((2, 1), 220)).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("low", [0, 12])
def test_restored_equals_a_cache_that_never_evicted(low: int) -> None:
    """The same tokens, plans and pages; in one store what is evicted comes back at once, in the other at the end."""
    config = FadeConfig(**{**TIGHT, "low_budget": low})
    generator = torch.Generator().manual_seed(0)
    shape = 2, 3, 0, 16
    stores = [
        TokenStore(config, torch.zeros(shape), torch.zeros(shape), keeps_stats=True, spill=Spill("host"))
        for _ in range(2)
    ]

    def plan(tokens: BodyTokens) -> Tensor:
        """Demotes by a lottery, and evicts each token at an age of its own."""
        lot = torch.sin(tokens.rows * 7.3 + tokens.slots * 12.9898) * 43758.5453 % 1
        tier = torch.where((lot < 0.4) & (low > 0), Tier.LOW, Tier.HIGH)
        old = seen - tokens.slots > 20 + 300 * (lot * 7 % 1)
        return torch.where(old, Tier.EVICTED, torch.maximum(tier, tokens.tiers))

    seen = 0
    for steps in (100, 16, 16, 40, 1, 63, 200):
        key, value = torch.randn(2, 2, 3, steps, 16, generator=generator)
        for store in stores:
            store.append(key, value)
            store.set_sequences(store.sequences.extended(steps))
        seen += steps
        for store in stores:
            move(store, torch.tensor([True, True]), plan)
        stores[0].restore()
    assert stores[1].evicted > 300
    stores[1].restore()
    assert stores[0].evicted == stores[1].evicted == 0
    plain = [dense(store, Positions(None, 0, streaming=False, plain=False)) for store in stores]
    for ours, theirs in zip(*plain):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_guard_that_does_not_fire_changes_nothing(model: Any) -> None:
    ids = random_ids(1, 300)
    caches = [create_quietly(model, FadeConfig(**options)) for options in (TIGHT, CALMED, dict(CALMED, guard="warn"))]
    for at in [slice(0, 200), *(slice(i, i + 1) for i in range(200, 240)), slice(240, 260), slice(260, 261)]:
        plain, *guarded = (forward_quietly(model, ids[:, at], cache) for cache in caches)
        assert all(torch.equal(plain, each) for each in guarded)
    assert caches[1].guard.probes > 0
    assert caches[1].guard.report()["state"] == "compressed"


# -- firing ----------------------------------------------------------------------------------------------------------


def test_a_failed_forecast_is_caught_before_anything_is_evicted(model: Any) -> None:
    """Peaked random attention does not look at the newest tokens alone, as "position" has it."""
    cache = create_quietly(model, FadeConfig(**{**WATCHED, "eviction_policy": "position"}))
    full = create_quietly(model, FadeConfig(**{**TIGHT, "int4_budget": None}))
    ids = random_ids(1, 320)
    for at in [slice(0, 300), *(slice(i, i + 1) for i in range(300, 320))]:
        ours, theirs = (forward_quietly(model, ids[:, at], each) for each in (cache, full))
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)
    report = cache.monitor.report()
    assert (report["state"], report["raised"], evicted(cache)) == ("full", report["heads"], 0)
    assert report["rollbacks"] > 0


def test_it_says_so_once_and_only_warns_if_told(model: Any) -> None:
    cache = create_tiered_cache(model, FadeConfig(**{**WATCHED, "eviction_policy": "position", "guard": "warn"}))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(random_ids(1, 300), **forward_kwargs(cache, model))
    (one,) = [str(each.message) for each in told if issubclass(each.category, RuntimeWarning)]
    assert one.startswith("after 300 tokens layer 0 looks at evicted tokens more than was forecast (KL ")
    assert cache.monitor.report()["state"] == "compressed"
    assert evicted(cache) > 0


@pytest.mark.parametrize("where", ["host", "disk", "none"])
def test_a_forecast_that_fails_while_decoding_is_taken_back(model: Any, where: str, tmp_path: Path) -> None:
    """Nothing is wrong at the end of the prompt; then the forecast is turned round, as if the topic had changed."""
    spill = dict(spill=where, **({"spill_dir": tmp_path} if where == "disk" else {}))
    cache = create_quietly(model, FadeConfig(**{**WATCHED, "kl_alarm": 100.0, "kl_target": 0.05, **spill}))
    ids = random_ids(1, 400)
    forward_quietly(model, ids[:, :300], cache)
    gone = evicted(cache)
    assert gone > 0
    options = cache.config.with_options(kl_alarm=0.1)
    cache.guard.config = options
    steps = 2 * max(options.monitor_every, options.reassign_every if where == "none" else 0)
    for at in range(300, 300 + steps + 1):
        forward_quietly(model, ids[:, at : at + 1], cache)
    report = cache.monitor.report()
    assert report["state"] in ("raised", "full")
    if where == "none":
        assert evicted(cache) >= gone  # it can only stop
        assert report["restored"] == 0
    else:
        assert report["restored"] > 0
        assert evicted(cache) < gone


def test_a_later_call_of_many_tokens_brings_back_what_was_spilled(model: Any) -> None:
    """Its plan is reviewed and its alarm restores, in the same call, after the plan was carried out."""
    cache = create_quietly(model, FadeConfig(**{**WATCHED, "kl_alarm": 100.0}))
    ids = random_ids(1, 400)
    forward_quietly(model, ids[:, :300], cache)
    spilled = cache.monitor.report()["spilled"]["tokens"]
    cache.guard.config = cache.config.with_options(kl_alarm=0.1)
    forward_quietly(model, ids[:, 300:360], cache)
    forward_quietly(model, ids[:, 360:361], cache)
    report = cache.monitor.report()
    assert report["state"] == "full"
    assert report["restored"] >= spilled > 0
    assert evicted(cache) == report["spilled"]["tokens"] == 0


def test_without_a_spill_store_rollback_says_what_it_cannot(model: Any) -> None:
    with pytest.warns(RuntimeWarning, match="cannot bring evicted tokens back, it can only stop evicting; give spill="):
        create_tiered_cache(model, FadeConfig(**{**WATCHED, "spill": "none"}))


def probe(*kl: float) -> Probe:
    return Probe(torch.tensor(kl), torch.ones(len(kl)), torch.ones(len(kl)))


def watches(model: Any, **options: Any) -> tuple[TieredCache, list[Watch]]:
    cache = create_quietly(model, FadeConfig(**{**CALMED, "kl_target": 0.05, "kl_alarm": 0.1, **options}))
    cache.guard.config = cache.guard.config.with_options(kl_alarm=100.0)  # the prompt's own looks do not count
    forward_quietly(model, random_ids(1, 200), cache)
    cache.guard.config = cache.guard.config.with_options(kl_alarm=0.1)
    for watch in cache.guard.watches:
        watch.kl = [0.0] * 4
    return cache, cache.guard.watches


def test_levels_rise_from_head_to_layer_to_cache_and_fall_again(tiny_model: Any) -> None:
    model = tiny_model("llama", num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=3, head_dim=8)
    cache, (first, second, third) = watches(model)
    layers = cache.tiered
    spilled = [len(layer.tokens.spilled) for layer in layers]
    with pytest.warns(RuntimeWarning, match="evicted tokens come back"):
        assert first.follow(layers[0], probe(0, 0.3, 0, 0), 1)[1] == "raise"
    assert first.raised == [False, True, False, False]
    assert 0 < len(layers[0].tokens.spilled) < spilled[0]
    assert cache.monitor.report()["state"] == "raised"
    first.follow(layers[0], probe(0, 0, 0.3, 0), 1)  # half of the layer's heads: the layer
    assert first.raised == [True] * 4
    assert len(layers[0].tokens.spilled) == 0
    assert second.behind  # a third of all heads: everything, as soon as each layer is called
    assert third.behind
    forward_quietly(model, random_ids(1, 1, 1), cache)
    assert cache.monitor.report()["state"] == "full"
    assert evicted(cache) == 0
    for _ in range(CALM_PROBES + 1):
        for watch, layer in zip(cache.guard.watches, layers):
            watch.kl = [0.0] * 4
            watch.follow(layer, probe(0, 0, 0, 0), 1)
    assert cache.monitor.report()["state"] == "compressed"
    ids = random_ids(1, 40, 2)
    cache.guard.config = cache.guard.config.with_options(kl_alarm=100.0)
    for at in range(40):
        forward_quietly(model, ids[:, at : at + 1], cache)
    assert evicted(cache) > 0  # back to the budget


def test_a_memory_target_is_compressed_less_after_a_rollback(model: Any) -> None:
    cache, (watch, _) = watches(model, memory=20_000, int4_budget=None, monitor_every=8)
    before = cache.memory.compression
    assert before > 4.0
    with pytest.warns(RuntimeWarning, match="looks at evicted tokens more than was forecast"):
        watch.follow(cache.tiered[0], probe(1.0, 0), 1)
    first = cache.memory.most
    assert 4.0 <= first < before
    watch.follow(cache.tiered[0], probe(0, 1.0), 1)  # in the same steps: once is enough
    assert cache.memory.most == first
    for each, layer in zip(cache.guard.watches, cache.tiered):
        each.behind = False
        for _ in range(CALM_PROBES + 1):
            each.kl = [0.0] * 2
            each.follow(layer, probe(0, 0), 1)
    assert cache.memory.most == 16.0


def test_one_bad_step_is_not_enough_two_are(model: Any) -> None:
    cache, (watch, _) = watches(model)
    watch.kl = [0.0, 0.0]
    watch.follow(cache.tiered[0], probe(0.15, 0), 1)
    assert not any(watch.raised)
    with pytest.warns(RuntimeWarning, match="looks at evicted tokens more than was forecast"):
        watch.follow(cache.tiered[0], probe(0.15, 0), 1)
    assert watch.raised[0]


def test_layers_are_looked_at_in_turn(tiny_model: Any) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    cache = create_quietly(model, FadeConfig(**CALMED))
    events = attach_telemetry(cache, exporter := Recorder()).exporter
    forward_quietly(model, random_ids(1, 200), cache)
    exporter.events.clear()
    ids = random_ids(1, 16, 1)
    for at in range(16):
        forward_quietly(model, ids[:, at : at + 1], cache)
    looks = [(event.seen, event.layer) for event in events.events if hasattr(event, "recovery")]
    assert sorted(layer for _, layer in looks) == [0, 0, 1, 1, 2, 2, 3, 3]  # each once in monitor_every steps
    assert len({seen for seen, _ in looks}) == 8  # one layer at a time


class Recorder:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def export(self, event: Any) -> None:
        self.events.append(event)
