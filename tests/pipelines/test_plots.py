"""Pictures: labels never collide, and forecasts are what they are said to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.trace import Traces
from pipelines.plots import quality as plots
from pipelines.plots.heatmap import EVERY, head_map
from predictor.bundle import load_bundle
from predictor.errors import FadeError
from predictor.scores import CONTINUES


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12), st.floats(0.1, 50))
def test_spread_keeps_the_gap_and_the_order_and_moves_least(values: list[float], gap: float) -> None:
    moved = plots.spread(values, gap)
    order = np.argsort(values, kind="stable")
    assert (np.diff(moved[order]) >= gap - 1e-6).all()
    assert moved.mean() == pytest.approx(np.mean(values), abs=1e-6)
    if len(values) == 1 or np.diff(np.array(values)[order]).min() >= gap:
        np.testing.assert_allclose(moved, values)


def test_labels_of_equal_points_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"kl": 0.02, "kl_worst": 0.05, "resident_bytes": 3 * 2**20, "full_bytes": 24 * 2**20}
    rows = [{"method": name, **row} for name in ("full", "h2o", "ema", "learned mlp", "learned cnn", "position")]
    boxes: list[Any] = []
    plt = plots.pyplot()
    monkeypatch.setattr(plt, "close", lambda figure: boxes.extend(_label_boxes(figure)))
    plots.quality_against_bytes(tmp_path / "plot.png", rows, "title")
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def _label_boxes(figure: Any) -> list[Any]:
    from matplotlib.text import Annotation, Text

    labels = [child for child in figure.axes[0].get_children() if isinstance(child, Annotation)]
    return [Text.get_window_extent(label) for label in labels]  # the words, without the line to the point


def test_forecasts_of_untrained_networks_are_known(tiny_traces: Path, bundles: dict[str, Path]) -> None:
    """Untrained, the CNN is the moving average, and the MLP ranks by EMA times Expected Attention."""
    traces = Traces(tiny_traces)
    predictors = {kind: load_bundle(path) for kind, path in bundles.items()}
    drawn = head_map(traces, predictors, layer=1, head=0)
    row = next(row for row in traces.read(traces.shards("validation")[0]) if (row["layer"], row["head"]) == (1, 0))
    slots, block, steps = row["length"], traces.spec.block, row["steps"]
    sizes = np.array([min(block, slots - start) for start in range(0, slots, block)])
    rows = np.concatenate(
        [row["history_mean"] * sizes, row["future_mean"][:, : len(sizes)].astype(np.float32) * sizes]
    ).astype(np.float32)
    window = traces.spec.window
    for start in range(0, steps, EVERY):
        past = rows[start : start + window]
        ema = (0.95 ** np.arange(window - 1, -1, -1)[:, None] * past).sum(0)
        np.testing.assert_allclose(drawn.forecast[start], ema / ema.sum(), rtol=2e-3)
    future = rows[window:]
    np.testing.assert_allclose(drawn.recorded, future / future.sum(1, keepdims=True), rtol=1e-5)
    tokens = np.asarray(row["tokens"], dtype=np.float32)
    closed = np.empty(slots, dtype=np.float32)  # the order of the closed form, the magnitudes of the average
    closed[(tokens[:, 0] + tokens[:, 1]).argsort(kind="stable")] = np.sort(np.exp(tokens[:, 0]))
    closed = np.maximum(closed, CONTINUES * np.exp(tokens[:, -1]))  # but no less than reading on gives
    blocks = [closed[start : start + block].sum() for start in range(0, slots, block)]
    np.testing.assert_allclose(drawn.once["mlp"], blocks, rtol=1e-4)
    assert drawn.by == f"cnn, every {EVERY} steps"


def test_a_head_that_is_not_there_is_named(tiny_traces: Path) -> None:
    with pytest.raises(FadeError, match="layers 0 to 1 and kv heads 0 to 1"):
        head_map(Traces(tiny_traces), {}, layer=0, head=2)
