"""The guard in every family of models: it sees the failure, and what it brings back is all there was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fade_runtime import FadeConfig, TieredCache, create_tiered_cache
from tests.families import FAMILIES, TIERED
from tests.runtime.caches import forward_quietly, random_ids

WATCHED: dict[str, Any] = dict(
    n_sink=2, recent_window=8, int4_budget=6, reassign_every=8, guard="rollback", spill="host", monitor_every=4
)


def make(model: Any, **options: Any) -> TieredCache:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return create_tiered_cache(model, FadeConfig(**options))


@pytest.mark.slow
@pytest.mark.parametrize("family", TIERED)
def test_restored_logits_are_those_of_the_cache_that_never_evicted(family: str) -> None:
    """Caught at the prompt's end, nothing is evicted: the same pages as in a cache with room for all, so 1e-5."""
    model = FAMILIES[family]()
    ids = random_ids(1, 130)
    watched = make(model, **{**WATCHED, "eviction_policy": "position", "kl_target": 1e-9, "kl_alarm": 2e-9})
    roomy = make(model, **{**WATCHED, "int4_budget": None, "guard": "off", "spill": "none"})
    for at in [slice(0, 100), *(slice(i, i + 1) for i in range(100, 120)), slice(120, 130)]:
        ours, theirs = (forward_quietly(model, ids[:, at], cache) for cache in (watched, roomy))
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)
    report = watched.monitor.report()
    assert report["probes"] > 0
    assert report["state"] == "full"
    assert watched.memory_report()["tokens"]["EVICTED"] == 0


@pytest.mark.parametrize("family", TIERED)
def test_what_was_spilled_is_seen_and_comes_back(family: str) -> None:
    """Evicted first, then noticed: recovery falls below one, and after the rollback nothing is missing."""
    model = FAMILIES[family]()
    ids = random_ids(2, 140)
    cache = make(model, **{**WATCHED, "kl_target": 1e9, "kl_alarm": 1e9})
    forward_quietly(model, ids[:, :100], cache)
    for at in range(100, 112):
        forward_quietly(model, ids[:, at : at + 1], cache)
    spilled = cache.monitor.report()["spilled"]["tokens"]
    assert spilled == cache.memory_report()["tokens"]["EVICTED"] > 0
    assert cache.monitor.report()["recovery"] < 1
    cache.monitor.config = cache.config.with_options(kl_target=1e-9, kl_alarm=2e-9)
    for at in range(112, 122):
        forward_quietly(model, ids[:, at : at + 1], cache)
    report = cache.monitor.report()
    assert report["state"] == "full"
    assert report["restored"] >= spilled
    assert cache.memory_report()["tokens"]["EVICTED"] == 0
