"""The memory benchmark: what a peak is, how rows are made, and a whole run of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import bench
from pipelines.benchmarks import ledger
from pipelines.benchmarks import memory as bench_memory
from pipelines.benchmarks.memory import CLEAR, MIB, OneRun, _in_process, _rows, status_bytes
from predictor.errors import FadeError

pytestmark = pytest.mark.skipif(not CLEAR.exists(), reason="needs Linux")


def one_run(model: Path, method: str, context: int, new_tokens: int) -> OneRun:
    return OneRun(method, context, new_tokens, str(model), None, 0.25, "float32", 1)


def test_a_peak_is_what_was_there_and_is_forgotten_when_cleared() -> None:
    CLEAR.write_text("5")
    before = status_bytes("VmRSS")
    big = torch.ones(100 * MIB // 4)
    held = status_bytes("VmRSS")
    del big
    assert 95 * MIB < held - before < 110 * MIB
    assert status_bytes("VmHWM") >= held - MIB
    CLEAR.write_text("5")
    assert status_bytes("VmHWM") < before + 20 * MIB


@pytest.mark.slow
def test_one_cache_is_measured_from_the_model_at_rest(tiny_model_dir: Path) -> None:
    runs = {name: _in_process(one_run(tiny_model_dir, name, 3000, 3)) for name in ("stock", "h2o")}
    assert runs["stock"]["first"] == runs["h2o"]["first"]
    for run in runs.values():
        assert run["added"] == run["peak"] - run["resting"] >= 0  # what loading freed may have been enough
        assert run["resting"] > 100 * MIB  # torch is loaded


def test_rows_are_medians_beside_stocks() -> None:
    run = [dict(peak=400, added=100, resting=300, first=7), dict(peak=350, added=40, resting=310, first=7)]
    other = [dict(peak=404, added=104, resting=300, first=7), dict(peak=360, added=48, resting=312, first=7)]
    stock, safe = _rows(64, ["stock", "safe"], [run, other])
    assert (stock["peak"], stock["added"], stock["peak_of_stock"]) == (402, 102, 1)
    assert (safe["peak"], safe["added"]) == (355, 44)
    assert safe["added_of_stock"] == pytest.approx(44 / 102)
    with pytest.raises(FadeError, match="safe begins with token 8, stock with 7"):
        _rows(64, ["stock", "safe"], [[run[0], {**run[1], "first": 8}]])


def test_a_stock_that_added_nothing_is_no_yardstick(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """A small prompt fits into what loading freed."""
    added = {"stock": 0, "safe": 40, "h2o": 0}
    monkeypatch.setattr(
        bench_memory, "_in_process", lambda run: {"resting": 300, "peak": 300 + added[run.method],
                                                  "added": added[run.method], "first": 1}
    )  # fmt: skip
    path, out = tmp_path / "ledger.csv", tmp_path / "rows.jsonl"
    assert bench.main(["memory", "--model", "some/where", "--ledger", str(path), "--out", str(out)]) == 0
    assert [json.loads(line)["added_of_stock"] for line in out.read_text().splitlines()] == [None] * 3
    rows = {(row["bench"], row["method"]): row["ratio"] for row in ledger.read_rows(path)}
    assert (rows["memory added", "safe"], rows["memory peak", "safe"]) == ("", "1.13333")
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["-"] * 3


def test_a_peak_is_no_lower_than_what_rests(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps the mark from counters that lag behind those of what is resident."""
    seen = {"VmRSS": 500 * MIB, "VmHWM": 499 * MIB}
    monkeypatch.setattr(bench_memory, "status_bytes", seen.__getitem__)
    run = bench_memory.measure_one(one_run(tiny_model_dir, "stock", 8, 1))
    assert (run["peak"], run["added"]) == (500 * MIB, 0)


def test_bad_options_are_named(tmp_path: Path, capsys: Any) -> None:
    for words, said in [
        (["--new_tokens", "0"], "new_tokens 0 is too small"),
        (["--contexts", "[]"], "contexts 0 is too small"),
        (["--flavour", "mild"], "option 'flavour' is not known"),
    ]:
        assert bench.main(["memory", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_each_cache_runs_in_a_process_of_its_own(tiny_model_dir: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--model", tiny_model_dir, "--contexts", "[300]", "--new_tokens", 3, "--out", out]
    assert bench.main(["memory", *map(str, arguments)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["method"] for row in rows] == ["stock", "safe", "h2o"]
    told = capsys.readouterr().out
    for row in rows:
        assert 100 * MIB < row["resting"] <= row["peak"]
        assert f"{row['peak_of_stock']:.3f}x" in told
    assert bench.main(["memory", "--model", str(tmp_path / "none")]) == 2
    assert "stock at 2048 tokens: model " in capsys.readouterr().err
