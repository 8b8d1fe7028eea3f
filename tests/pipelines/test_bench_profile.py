"""The benchmark of FastGen's profile on a tiny model: its parts are within its whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines import bench
from pipelines.benchmarks.profile import STAGES


def test_profile_times_the_parts_of_one_run(tiny_model_dir: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "rows.jsonl"
    asked = ["--model", tiny_model_dir, "--context", 200, "--steps", 150, "--out", out]
    assert bench.main(["profile", *map(str, asked)]) == 0
    row = json.loads(out.read_text())
    parts = [row[f"{stage}_ms"] for stage in STAGES]
    assert min(parts) > 0
    assert row["profiling_share"] == pytest.approx(sum(parts) / 1e3 / row["seconds"])
    assert row["profiling_share"] < 1
    assert sum(row["policies"].values()) == 4
    assert f"{row['profiling_share']:.3%}" in capsys.readouterr().out


def test_sizes_that_cannot_work_are_refused(tiny_model_dir: Path, capsys: Any) -> None:
    assert bench.main(["profile", "--model", str(tiny_model_dir), "--steps", "0"]) == 2
    assert "steps 0 is too small" in capsys.readouterr().err
