"""The benchmark of the guard on a tiny model: its probes are within the steps, and see what is spilled."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines import bench


@pytest.mark.parametrize("spill", ["host", "disk"])
def test_probes_are_timed_within_the_steps(spill: str, tiny_model_dir: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "rows.jsonl"
    asked = ["--model", tiny_model_dir, "--contexts", "[300]", "--steps", 16, "--monitor_every", 8, "--out", out]
    folder = ["--spill_dir", tmp_path / "spill"] if spill == "disk" else []
    began = time.perf_counter()
    assert bench.main(["guard", *map(str, [*asked, "--spill", spill, *folder])]) == 0
    row = json.loads(out.read_text())
    assert row["probes"] == 4  # two layers, each twice
    assert row["spilled"] == 4 * (300 - 68 - 60)  # four kv heads, a fifth of the context kept
    assert 0 < 16 * row["guard_ms"] < 1000 * (time.perf_counter() - began)  # not p50: others may run beside a probe
    assert row["share"] == pytest.approx(row["guard_ms"] / row["p50"])
    assert f"{row['share']:.2%}" in capsys.readouterr().out
