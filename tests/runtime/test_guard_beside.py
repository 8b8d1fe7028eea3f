"""The guard beside the cache's other parts: sessions, beams, bytes, a disk that fails, telemetry, wrong options."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from fade_runtime import (
    FadeConfig,
    FadeError,
    JsonlExporter,
    attach_telemetry,
    create_tiered_cache,
    load_session,
)
from fade_runtime.transformers_api import forward_kwargs
from predictor.twin import dense_twin
from tests.runtime.caches import create_quietly, forward_quietly, random_ids, reachable_bytes
from tests.runtime.guarded import CALMED, TIGHT, WATCHED, evicted


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_session_takes_spilled_tokens_along(model: Any, where: str, tmp_path: Path) -> None:
    spill = dict(spill="disk", spill_dir=tmp_path / "spill") if where == "disk" else {}
    config = FadeConfig(**{**CALMED, **spill})
    cache = create_quietly(model, config)
    ids = random_ids(2, 280)
    forward_quietly(model, ids[:, :200], cache)
    for at in range(200, 240):
        forward_quietly(model, ids[:, at : at + 1], cache)
    cache.save_session(tmp_path / "session")
    other = load_session(model, tmp_path / "session", **({"spill_dir": tmp_path / "other"} if spill else {}))
    assert other.monitor.report()["kl_by_layer"] == cache.monitor.report()["kl_by_layer"]
    assert other.monitor.report()["spilled"]["tokens"] == cache.monitor.report()["spilled"]["tokens"] > 0
    for each in (cache, other):
        each.tiered[0].tokens.restore()
    for at in range(240, 280):
        assert torch.equal(*(forward_quietly(model, ids[:, at : at + 1], each) for each in (cache, other)))


@pytest.mark.parametrize("where", ["host", "disk"])
def test_beams_copies_and_resets(model: Any, where: str, tmp_path: Path) -> None:
    spill = dict(spill="disk", spill_dir=tmp_path) if where == "disk" else {}
    cache = create_quietly(model, FadeConfig(**{**CALMED, **spill}))
    ids = random_ids(3, 200)
    forward_quietly(model, ids, cache)
    alone = create_quietly(model, FadeConfig(**CALMED))
    forward_quietly(model, ids[2:], alone)
    copied = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    for each in (cache, alone):
        for layer in each.tiered:
            layer.tokens.restore()
    step = random_ids(1, 1, 5)
    ours, theirs = forward_quietly(model, step.expand(3, -1), cache), forward_quietly(model, step, alone)
    torch.testing.assert_close(ours[[0, 2]], theirs.expand(2, -1, -1), atol=2e-5 * float(theirs.abs().max()), rtol=1e-4)
    assert copied.monitor.report()["spilled"]["where"] == where
    assert sum(len(layer.tokens.spilled) for layer in copied.tiered) > 0
    copied.reset()
    cache.reset()
    assert cache.monitor.report()["state"] == "compressed"
    del copied
    forward_quietly(model, ids, cache)
    assert evicted(cache) > 0


def test_bytes_are_those_that_can_be_reached(model: Any, tmp_path: Path) -> None:
    ids = random_ids(2, 260)
    sizes = {}
    for name, spill in {
        "none": dict(guard="off", spill="none"),
        "host": {},
        "disk": dict(spill="disk", spill_dir=tmp_path),
    }.items():
        cache = create_quietly(model, FadeConfig(**{**CALMED, **spill}))
        forward_quietly(model, ids[:, :200], cache)
        for at in range(200, 220):
            forward_quietly(model, ids[:, at : at + 1], cache)
        sizes[name] = cache.memory_report()["resident_bytes"]
        assert sizes[name] == reachable_bytes(cache)
    assert sizes["none"] == sizes["disk"] < sizes["host"]  # host memory is this device's memory


def test_a_disk_that_fails_in_the_middle_ends_eviction_and_nothing_else(model: Any, tmp_path: Path) -> None:
    cache = create_quietly(model, FadeConfig(**{**CALMED, "spill": "disk", "spill_dir": tmp_path}))
    ids = random_ids(1, 300)
    forward_quietly(model, ids[:, :200], cache)
    gone = evicted(cache)
    shutil.rmtree(cache.guard.spill.folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for at in range(200, 300):
            model(ids[:, at : at + 1], **forward_kwargs(cache, model))
    (one,) = [str(each.message) for each in told if issubclass(each.category, RuntimeWarning)]
    assert "evicted tokens are lost: spill file" in one
    assert evicted(cache) == gone
    assert cache.monitor.report()["spilled"]["broken"] is not None


def test_compression_off_is_the_full_cache(model: Any) -> None:
    ids = random_ids(1, 300)
    cache = create_tiered_cache(model, FadeConfig(**TIGHT, compression="off"))
    stock, twin = DynamicCache(config=model.config), dense_twin(model)
    for at in [slice(0, 200), *(slice(i, i + 1) for i in range(200, 240))]:
        ours = forward_quietly(model, ids[:, at], cache)
        torch.testing.assert_close(ours, twin(ids[:, at], past_key_values=stock).logits, atol=1e-5, rtol=1e-5)
    assert cache.memory_report()["compression"] < 1.01


def test_telemetry_tells_of_looks(model: Any, tmp_path: Path) -> None:
    cache = create_quietly(model, FadeConfig(**{**WATCHED, "eviction_policy": "position"}))
    attach_telemetry(cache, JsonlExporter(tmp_path / "events.jsonl"))
    forward_quietly(model, random_ids(1, 200), cache)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    looks = [event for event in events if event["event"] == "guard"]
    assert {event["event"] for event in events} == {"guard", "reassignment"}
    assert len(looks) == cache.guard.probes
    assert looks[0]["action"] == "raise"
    assert looks[0]["kl"] > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(guard="on"), "guard 'on' is not one of off, warn, rollback"),
        (dict(spill="tape", guard="warn"), "spill 'tape' is not one of none, host, disk"),
        (dict(spill="host"), "spill 'host' stores what a guard would restore; set guard="),
        (dict(guard="warn", spill="disk"), "spill 'disk' and spill_dir go together"),
        (dict(guard="warn", spill="host", spill_dir="x"), "spill 'disk' and spill_dir go together"),
        (dict(guard="warn", spill="host", spill_limit=0.5), "spill_limit 0.5 is not a whole number of bytes"),
        (dict(guard="warn", spill_limit=5), "spill_limit is given but nothing is spilled"),
        (dict(kl_target=0.2), r"kl_target 0.2 is not in \(0, kl_alarm 0.1\]; lower it"),
        (dict(monitor_every=0), "monitor_every 0 is not a whole number of at least 1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FadeError, match=message):
        FadeConfig(**options)


def test_a_cache_without_a_guard_says_how_to_get_one(model: Any) -> None:
    with pytest.raises(FadeError, match="this cache has no guard; create it with FadeConfig"):
        _ = create_tiered_cache(model).monitor
