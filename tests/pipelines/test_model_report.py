"""One report of a model, from evaluations that ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines import evaluate, evaluate_tasks, model_report
from tests.conftest import make_tiny_tokenizer
from tests.families import FAMILIES


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    """A tiny Gemma 3: two layers that evict, two with a window."""
    for each in (FAMILIES["gemma3"](), make_tiny_tokenizer()):
        each.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_sizes_of_the_whole_cache_texts_and_tasks_in_one_report(
    windowed: Path, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"recent_window": 8, "target_compression": "fit", "min_budget": 0.01}
    configs = {"mean": {**small, "eviction_policy": "ema"}, "mass": small}
    for context in (180, 300):
        status = evaluate.main(
            [
                *("--model", str(windowed), "--traces", "null", "--methods", "[safe, mean, mass]"),
                *("--configs", json.dumps(configs), "--ratios", "[2.5, 3]", "--context", str(context), "--steps", "64"),
                *("--text", json.dumps({"prose": [str(prose)]}), "--documents", "2"),
                *("--speed", "false", "--out", str(tmp_path / str(context))),
            ]
        )
        assert status == 0, capsys.readouterr().err
    tasks = ["--model", str(windowed), "--tasks", "[copy]", "--methods", "[safe]", "--n", "1", "--length", "400"]
    assert evaluate_tasks.main([*tasks, "--out", str(tmp_path / "tasks")]) == 0
    folders = json.dumps([str(tmp_path / "180"), str(tmp_path / "300")])
    given = ["--quality", folders, "--tasks", json.dumps([str(tmp_path / "tasks")]), "--ours", "mean"]
    assert model_report.main([*given, "--out", str(tmp_path / "out")]) == 0
    said = (tmp_path / "out" / "report.md").read_text()
    for title in ("## 180 tokens of prompt, 64 decoded, 2 texts", "## 300 tokens", "## Tasks, prompts of 400 tokens"):
        assert title in said
    rows = [line.split("|") for line in said.splitlines() if line.startswith("| mean 3x") and line.count("|") == 9]
    assert len(rows) == 2
    for row in rows:
        whole, evicting, others = (float(cell.strip(" x")) for cell in row[6:9])
        assert whole == pytest.approx(3, rel=0.05)
        assert others < whole < evicting
    documents = [row for row in lines(tmp_path / "300") if row["kind"] == "document"]
    loss = {name: [row["kl"] for row in documents if row["method"] == name] for name in ("mean 3x", "mass 3x")}
    better = sum(ours < theirs for ours, theirs in zip(loss["mean 3x"], loss["mass 3x"]))
    beside = [line.split("|") for line in said.splitlines() if line.startswith("| 3x ")][-1]
    assert [cell.strip() for cell in beside[2:5]] == ["mass", "2", str(better)]
    assert (tmp_path / "out" / "quality-180.png").is_file()
    assert len(lines(tmp_path / "out", "report.jsonl")) == sum(
        len(lines(tmp_path / name)) for name in ("180", "300", "tasks")
    )


def lines(folder: Path, name: str = "results.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_what_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_report.main(["--quality", json.dumps([str(tmp_path / "none")])]) == 2
    assert "none/results.jsonl is not there" in capsys.readouterr().err
    assert model_report.main(["--quality", "[]"]) == 2
    assert "quality is empty" in capsys.readouterr().err
