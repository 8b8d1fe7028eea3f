"""The ledger: whence its rows come, what each benchmark adds, and two commits side by side."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines import bench
from pipelines.benchmarks import collect as bench_collect
from pipelines.benchmarks import ledger
from pipelines.benchmarks import memory as bench_memory
from pipelines.benchmarks import select as bench_select
from pipelines.benchmarks.timing import quantiles
from pipelines.reporting.commit import commit
from pipelines.reporting.machine import processor
from predictor.errors import FadeError


def test_quantiles_are_measurements() -> None:
    values = np.random.default_rng(0).exponential(size=41)
    found = quantiles(values.tolist())
    expected = {f"p{q}": np.quantile(values, q / 100, method="nearest") for q in (20, 50, 80)}
    assert found == pytest.approx(expected)
    assert quantiles([7.0]) == {"p20": 7.0, "p50": 7.0, "p80": 7.0}


def test_the_commit_is_gits_and_says_when_files_have_changed(tmp_path: Path) -> None:
    assert commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("one")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert head.startswith(commit(tmp_path))
    (tmp_path / "new").write_text("not known to git")
    assert not commit(tmp_path).endswith("+")
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == head[:10] + "+"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["collect", "select", "decode", "prefill", "guard", "profile"])
def test_each_benchmark_adds_its_rows_only_when_asked(
    name: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    few = {
        "collect": ["--contexts", "[200]", "--future", "20", "--repeats", "1"],
        "select": ["--contexts", "[300]", "--steps", "128"],
        "decode": ["--contexts", "[150]", "--steps", "3"],
        "prefill": ["--contexts", "[150]", "--repeats", "2"],
        "guard": ["--contexts", "[300]", "--steps", "8", "--monitor_every", "2"],
        "profile": ["--context", "200", "--steps", "70"],
    }[name]
    path = tmp_path / "a" / "ledger.csv"
    arguments = [name, "--model", str(tiny_model_dir), *few]
    assert bench.main(arguments) == 0
    assert not list(tmp_path.iterdir())
    assert bench.main([*arguments, "--ledger", str(path), "--out", "rows.jsonl"]) == 0
    rows = ledger.read_rows(path)
    lines = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == [row["method"] for row in lines]
    for row, line in zip(rows, lines):
        assert (row["bench"], row["length"], row["unit"]) == (name, str(line["context"]), "ms")
        assert row["model"] == tiny_model_dir.name
        assert row["threads"] == "1"
        assert row["torch"] == torch.__version__
        assert row["device"] == processor()
        assert 0 < float(row["p20"]) <= float(row["p50"]) <= float(row["p80"])
        base = [each for each in lines if each["method"] == row["baseline"]]
        if base:
            assert float(row["ratio"]) == pytest.approx(line["p50"] / base[0]["p50"], rel=1e-4)
        else:  # a part of what it serves; the guard of a tiny model is longer than its steps
            assert 0 < float(row["ratio"]) < (np.inf if name == "guard" else 1)
    if (measured := rows[0]["commit"]) != "":  # without git there is none
        assert bench.main(["compare", measured, measured, "--ledger", str(path)]) == 0
        assert "1.000x" in capsys.readouterr().out


def test_peaks_of_memory_are_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"stock": 400, "safe": 300, "h2o": 350}

    def measured(run: bench_memory.OneRun) -> dict[str, Any]:
        return dict(peak=peaks[run.method], added=peaks[run.method] - 200, resting=200, first=1)

    monkeypatch.setattr(bench_memory, "_in_process", measured)
    path = tmp_path / "ledger.csv"
    assert bench.main(["memory", "--model", "some/where", "--ledger", str(path), "--threads", "3"]) == 0
    rows = {(row["bench"], row["method"]): row for row in ledger.read_rows(path)}
    assert list(rows) == [(f"memory {what}", name) for what in ("peak", "added") for name in peaks]
    row = rows["memory added", "safe"]
    assert (row["p50"], row["ratio"], row["unit"], row["model"]) == ("100", "0.5", "bytes", "where float32")
    assert row["threads"] == "3"


def test_traces_that_are_not_whole_are_not_timed(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    read = bench_collect._read

    def spoiled(*given: Any) -> Any:
        rows = read(*given)
        return rows and rows[1:]

    monkeypatch.setattr(bench_collect, "_read", spoiled)
    words = ["--model", str(tiny_model_dir), "--contexts", "[100]", "--future", "8", "--repeats", "1"]
    assert bench.main(["collect", *words]) == 2
    told = capsys.readouterr()
    assert "recorded: 3 rows of 4, finite: True; no times are shown" in told.err
    assert "of stock" not in told.out


def test_choices_are_timed_within_the_steps(tiny_model_dir: Path, tmp_path: Path, bundles: dict[str, Path]) -> None:
    out = tmp_path / "rows.jsonl"
    asked = ["--contexts", "[300]", "--steps", "192", "--predictor", str(bundles["mlp"]), "--out", str(out)]
    assert bench.main(["select", "--model", str(tiny_model_dir), *asked]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["method"] for row in rows] == ["position", "h2o", "ema", "adaptive", "learned"]
    assert {row["choices"] for row in rows} == {3}  # once each 64 tokens
    for row in rows:
        assert row["ratio"] < 3 * row["p80"] / (0.2 * 192 * row["step_ms"])


def test_a_choice_that_takes_long_shows(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from data.lm import load_lm
    from fade_runtime import FadeConfig
    from fade_runtime.layer import compressed_layer

    plan = compressed_layer.plan
    lm, _ = load_lm(tiny_model_dir)
    config = FadeConfig(int4_budget=0.5, eviction_policy="h2o")
    quick = bench_select._row(lm, "h2o", config, 300, 64)

    def slow(*given: Any) -> Any:
        torch.zeros(3_000_000).sort()
        return plan(*given)

    monkeypatch.setattr(compressed_layer, "plan", slow)
    assert bench_select._row(lm, "h2o", config, 300, 64)["ratio"] > 2 * quick["ratio"]


def entry(**given: Any) -> dict[str, Any]:
    return {"device": "cpu", "threads": 1, "bench": "decode", "length": 2048, "baseline": "stock", **given}


def test_two_commits_side_by_side(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "ledger.csv"
    rows = [
        entry(commit="aaa1", method="stock", p50=40.0, ratio=1.0),
        entry(commit="aaa1", method="safe", p50=99.0, ratio=9.0),
        entry(commit="aaa1", method="safe", p50=20.0, ratio=0.5),  # the later run
        entry(commit="aaa1", method="safe", p50=7.0, ratio=0.1, length=4096),
        entry(commit="aab2", method="stock", p50=60.0, ratio=1.0),
        entry(commit="aab2", method="safe", p50=24.0, ratio=0.4),
        entry(commit="aab2", method="h2o", p50=24.0, ratio=0.4),
        entry(commit="aab2", method="safe", p50=1.0, ratio=0.4, device="other", length=4096),
        entry(commit="aab2+", method="h2o", p50=5.0, ratio=0.1),
        entry(commit="aaa1", method="h2o", p50=0.0, ratio=0.0, length=64),  # nothing was added, say
        entry(commit="aab2", method="h2o", p50=3.0, ratio=0.1, length=64),
    ]
    ledger.add_rows(path, ledger.COLUMNS, rows)
    assert bench.main(["compare", "aaa", "aab2", "--ledger", str(path)]) == 0
    _, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["decode", "length", "2048", "stock", "40", "60", "1.500x", "-"],
        ["decode", "length", "2048", "safe", "20", "24", "1.200x", "0.800x"],
        ["decode", "length", "64", "h2o", "0", "3", "-", "-"],
    ]
    for words, said in [
        (["aa", "aab2"], "commit 'aa' may be aaa1 or aab2 or aab2+"),
        (["aaa", "c"], "commit 'c' is not one of aaa1, aab2, aab2+"),
        (["aaa1", "aab2+"], "aaa1 and aab2+ have no measurement in common"),
        (["aaa1"], "after"),
    ]:
        assert bench.main(["compare", *words, "--ledger", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_files_that_are_no_ledger_are_named(tmp_path: Path) -> None:
    with pytest.raises(FadeError, match=r"none.csv is not there; make one with --ledger"):
        ledger.read_rows(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FadeError, match="other.csv is no ledger of this version"):
        ledger.read_rows(tmp_path / "other.csv")
    with pytest.raises(FadeError, match="has other columns"):
        ledger.record(tmp_path / "other.csv", [{"bench": "decode"}])
    ledger.record(None, [{"bench": "decode"}])
    assert len(list(csv.reader((tmp_path / "other.csv").open()))) == 2
