"""The GPU benchmark and the tuning, carried out in Triton's interpreter on tiny layers."""

from __future__ import annotations

import pytest
import torch

from fade_runtime.kernels.triton import attention as triton
from fade_runtime.kernels.triton.launch_table import Launch
from pipelines.benchmarks import gpu as bench_gpu
from pipelines.benchmarks import tune as bench_tune
from predictor.errors import FadeError

CPU = torch.device("cpu")
CELL = dict(dim=64, group=32, batch=1, length=200)


def test_rows_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_gpu.check_cell(CPU, **CELL) == [CELL]
    rows = {row["method"]: row for row in bench_gpu.attention_rows(CPU, 1e12, 1, **CELL)}
    assert list(rows) == ["sdpa", "fused", "dequantised"]
    assert all(set(row) <= set(bench_gpu.COLUMNS) for row in rows.values())
    assert all(0 < row["p20"] <= row["p50"] <= row["p80"] for row in rows.values())
    assert rows["sdpa"]["ratio"] == 1
    assert rows["fused"]["ratio"] == rows["fused"]["p50"] / rows["sdpa"]["p50"]
    assert rows["sdpa"]["bytes"] == 2 * 200 * 64 * 2
    assert rows["fused"]["bytes"] < rows["sdpa"]["bytes"]
    assert rows["fused"]["share_of_copy"] == pytest.approx(rows["fused"]["bytes"] / (rows["fused"]["p50"] * 1e9))
    assert "x of sdpa" in bench_gpu._line(rows["fused"])
    real = triton.fused
    monkeypatch.setattr(triton, "fused", lambda *args: (real(*args)[0] * 1.05, None, []))
    with pytest.raises(FadeError, match=r"the fused kernel is 5\.0e-02 away from SDPA .* no times are shown"):
        bench_gpu.check_cell(CPU, **CELL)


def test_tuning_takes_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_tune, "ROWS", 1)
    for name, few in (("STAGES", (1,)), ("PAGES", (1, 2)), ("PROGRAMS", (1,))):
        monkeypatch.setattr(bench_tune, name, few)
    spent = {(2, 1): 3.0, (4, 1): 1.0, (4, 2): 0.5}  # by warps and pages
    asked = []

    def milliseconds(call: object, *_: object) -> tuple[float, float, float]:
        how = call.__self__.launch  # type: ignore[attr-defined]
        asked.append((how.warps, how.pages))
        call()  # type: ignore[operator]
        return 0.0, spent.get((how.warps, min(how.pages, 2)), 1.0), 0.0

    monkeypatch.setattr(bench_tune, "milliseconds", milliseconds)
    how = bench_tune.best_launch(CPU, 64, "tiered", 1, tokens=130, warps=(2, 4))
    assert (how.warps, how.pages) == (4, 2)
    assert asked == [(2, 16), (4, 16), (4, 1), (4, 2)]


def test_crossovers_are_the_fewest_queries_for_which_unpacking_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_tune, "ROWS", 1)

    def milliseconds(call: object, *_: object, graph: bool) -> tuple[float, float, float]:
        layer, name = call.__self__, call.__name__  # type: ignore[attr-defined]
        tokens = len(layer.packed)
        return 0.0, layer.query.shape[1] * tokens / 10 if name == "fused" else tokens + 1.0, 0.0

    monkeypatch.setattr(bench_tune, "milliseconds", milliseconds)
    how = Launch(2, 1, 2, 2)
    found = bench_tune.crossovers(CPU, 64, "plain", how, 1, (5, 70, 600), (1, 10, 11, 20))
    assert found == ((0, 20), (70, 11), (600, 11))
    assert bench_tune.crossovers(CPU, 64, "plain", how, 1, (70,), (1, 10)) == ()
