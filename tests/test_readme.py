"""The README is short and true: its commands come first, its code runs, its table and picture were measured."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from pipelines.evaluation.report import table
from tests.pages import DOCS, ROOT, blocks, commands

README = (ROOT / "README.md").read_text()
RESULTS = DOCS / "results"


def test_it_is_short() -> None:
    assert len(README[: README.index("```")].split()) < 150
    assert README.count("\n") < 120


def test_the_two_commands_come_first() -> None:
    assert [line.split()[:2] for line in commands(README)[:2]] == [["make", "demo"], ["make", "test"]]
    assert README.index("```sh") < README.index("```python")


@pytest.mark.slow
@pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")
def test_the_python_block_runs(
    real_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("python", README)
    assert len(block.strip().splitlines()) <= 10
    assert str(real_model_dir.relative_to(ROOT)) in block
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert float(capsys.readouterr().out.split()[-1]) > 6
    assert names["cache"].get_seq_length() > 2000  # type: ignore[attr-defined]


def test_the_table_is_of_the_committed_run() -> None:
    rows = [json.loads(line) for line in (RESULTS / "results.jsonl").read_text().splitlines()]
    run, methods = rows[0], [row for row in rows if row["kind"] == "method"]
    measured = table(methods)
    shown = [line for line in README.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(shown) == 1 + 6
    for line in shown:
        assert line in measured.splitlines(), line
    assert f"{run['settings']['context']:,}" in re.sub(r"\s", " ", README)
    for page in (RESULTS / "report.md", DOCS / "choosing.md"):
        assert measured in page.read_text()


def test_the_picture_is_of_the_committed_run() -> None:
    spec = importlib.util.spec_from_file_location("draw_picture", ROOT / "tools" / "draw_picture.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    for name in draw.COLOURS:
        assert f"docs/pictures/{name}" in README
        assert draw.picture(draw.measured(), name) == (draw.PICTURES / name).read_text()


def test_the_tables_of_tasks_are_of_the_committed_rows() -> None:
    from pipelines.evaluation.task_report import tables

    rows = [json.loads(line) for line in (RESULTS / "tasks.jsonl").read_text().splitlines()]
    text = (RESULTS / "tasks.md").read_text()
    names = [row["name"] for row in rows if row["kind"] == "run"]
    assert len(names) > 1
    for name in names:
        assert tables([row for row in rows if row["kind"] == "task" and row["run"] == name]) in text
    assert (RESULTS / "tasks.png").stat().st_size < 150_000
