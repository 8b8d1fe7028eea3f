"""Configs of small guarded caches, and what such a cache has evicted."""

from __future__ import annotations

from typing import Any

from fade_runtime import TieredCache

TIGHT: dict[str, Any] = dict(n_sink=2, recent_window=16, int4_budget=20, reassign_every=16)
WATCHED: dict[str, Any] = dict(TIGHT, guard="rollback", spill="host", monitor_every=8)
CALMED: dict[str, Any] = dict(WATCHED, kl_target=100.0, kl_alarm=100.0)  # never fires


def evicted(cache: TieredCache) -> int:
    return cache.memory_report()["tokens"]["EVICTED"]
