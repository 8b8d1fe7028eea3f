"""The prefill benchmark on a tiny model: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import bench
from pipelines.benchmarks import prefill as bench_prefill


def test_prefill_prints_ratios_and_adds_rows(
    tiny_model_dir: Path, bundles: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--model", tiny_model_dir, "--contexts", "[150,300]", "--repeats", 2, "--out", out]
    arguments += ["--predictor", bundles["mlp"], "--assistant", 1]
    assert bench.main(["prefill", *map(str, arguments)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = ["stock", "safe", "position", "ema", "h2o", "fastgen", "learned", "assisted"]
    assert [(row["context"], row["method"]) for row in rows] == [(n, name) for n in (150, 300) for name in names]
    told = capsys.readouterr().out
    for row in rows:
        stock = next(each for each in rows if each["context"] == row["context"])
        assert row["ratio"] == pytest.approx(row["p50"] / stock["p50"])
        assert f"{row['ratio']:.3f}x" in told
        assert (row["packing_ms"] > 0) == (row["method"] != "stock")
        assert row["packing_ms"] < row["p50"]


def test_times_of_caches_that_disagree_are_not_shown(
    tiny_model_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = bench_prefill._read

    def spoiled(model: Any, config: Any, tokens: torch.Tensor) -> Any:
        logits, *rest = read(model, config, tokens)
        return (logits + 1 if config is not None and config.eviction_policy == "ema" else logits, *rest)

    monkeypatch.setattr(bench_prefill, "_read", spoiled)
    arguments = ["--model", str(tiny_model_dir), "--contexts", "[100]", "--repeats", "1"]
    assert bench.main(["prefill", *arguments]) == 2
    told = capsys.readouterr()
    assert "logits of ema are" in told.err
    assert "of stock" not in told.out


def test_bad_options_are_named(tiny_model_dir: Path, capsys: Any) -> None:
    for words, said in [
        (["--repeats", "0"], "repeats 0 is too small"),
        (["--contexts", "[]"], "contexts 0 is too small"),
        (["--budget", "1.5"], "int4_budget 1.5"),
        (["--predictor", "nowhere/at/all"], "nowhere/at/all"),
    ]:
        assert bench.main(["prefill", "--model", str(tiny_model_dir), *words]) == 2
        assert said in capsys.readouterr().err
