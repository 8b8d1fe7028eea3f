"""Tier occupancy and needle maps: the numbers under the pictures, and that something is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fade_runtime import FadeConfig
from fade_runtime.cache.telemetry import ListExporter
from pipelines.evaluation.measure import compare
from pipelines.evaluation.runs import Method
from pipelines.plots import needle_map, occupancy
from pipelines.plots.needle_map import found_at
from pipelines.plots.occupancy import occupancy_rows
from pipelines.reporting.rows import FULL

CONTEXT, STEPS, HEADS = 150, 25, 2
METHODS = {
    "safe": FadeConfig.safe(recent_window=16, reassign_every=8),
    "tiered": FadeConfig(int4_budget=20, low_budget=30, recent_window=16, reassign_every=8),
}


def drawn(path: Path) -> bool:
    pixels = np.asarray(Image.open(path).convert("L"))
    return min(pixels.shape) > 150 and pixels.std() > 5


def test_occupancy_is_what_the_cache_holds(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    tokens = torch.randint(256, (1, CONTEXT + STEPS), generator=torch.Generator().manual_seed(0))
    telemetry: dict[str, ListExporter] = {}
    methods = [Method(FULL, None), *(Method(name, config) for name, config in METHODS.items())]
    full, *measured = compare(tiny_model(), methods, tokens, STEPS, timed=False, telemetry=telemetry)
    assert set(telemetry) == set(METHODS)
    token = full.full_bytes // (CONTEXT + STEPS)
    every = []
    for one in measured:
        rows = occupancy_rows(one.name, telemetry[one.name].events, HEADS, token, STEPS)
        assert [row["step"] for row in rows] == [0, 8, 16, 24, 25]
        for row in rows:
            assert sum(row["tokens"].values()) == pytest.approx(CONTEXT + row["step"])
            assert row["tokens"]["FULL"] == (4 + 16 if row["step"] < STEPS else 21)
        assert rows[-1]["bytes"] == pytest.approx(one.resident_bytes, rel=0.05)
        every += rows
    (last,) = [row for row in every if row["method"] == "tiered" and row["step"] == 24]
    assert (last["tokens"]["HIGH"], last["tokens"]["LOW"]) == (20, 30)
    occupancy.draw(tmp_path / "it.png", every, "a title")
    assert drawn(tmp_path / "it.png")


def test_no_events_no_rows() -> None:
    assert occupancy_rows("exact", [], HEADS, 8, STEPS) == []


def test_needles_are_sorted_into_bands(tmp_path: Path) -> None:
    rows = [
        {"task": "needle", "method": method, "depth": depth, "length": length, "score": float(depth > 0.3)}
        for method in ("full", "ours")
        for depth in (0.0, 0.19, 0.5, 1.0)
        for length in (512, 1024)
    ]
    found = found_at(rows)
    assert found["needle", "full"] == {
        (band, length): scores for length in (512, 1024) for band, scores in ((0, [0.0, 0.0]), (2, [1.0]), (4, [1.0]))
    }
    assert needle_map.draw(tmp_path / "it.png", rows)
    assert drawn(tmp_path / "it.png")


def test_tasks_without_depth_have_no_map(tmp_path: Path) -> None:
    row = {"task": "copy", "method": "full", "depth": None, "length": 512, "score": 1.0}
    assert not needle_map.draw(tmp_path / "it.png", [row])
    assert not (tmp_path / "it.png").exists()
