"""What tests of collections share: their rows, a collector that is broken off, the command of given settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.collect import TraceCollector
from data.plan import CollectSettings
from data.trace import Row, Traces

Make = Callable[..., CollectSettings]


def rows_of(folder: Path) -> list[Row]:
    traces = Traces(folder)
    return [row for split in ("train", "validation") for name in traces.shards(split) for row in traces.read(name)]


def assert_same(one: Path, other: Path) -> None:
    first, second = rows_of(one), rows_of(other)
    assert len(first) == len(second) == 6 * 2 * 2
    for row, again in zip(first, second):
        assert set(row) == set(again)
        for name, value in row.items():
            np.testing.assert_array_equal(value, again[name])


def stop_after(monkeypatch: pytest.MonkeyPatch, documents: int, error: type[BaseException] = RuntimeError) -> list[str]:
    """Let the collector fail after so many documents; returns the list that it enters what it reads in."""
    read: list[str] = []
    step = TraceCollector.predict_step

    def failing(self: TraceCollector, batch: Any, batch_idx: int) -> Any:
        if len(read) == documents:
            raise error("power cut")
        read.append(batch.document.id)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(TraceCollector, "predict_step", failing)
    return read


def command(settings: CollectSettings) -> list[str]:
    values = {name: value for name, value in vars(settings).items() if name != "text"}
    return [f"--text={json.dumps(settings.text)}", *(f"--{name}={value}" for name, value in values.items())]
