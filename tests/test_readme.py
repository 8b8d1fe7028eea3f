"""The README is true: its commands exist, its code runs, its table was measured, its tree is there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pipelines.evaluation.report import table
from pipelines.evaluation.task_report import tables
from tests.commands import ROOT, run_command

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
RESULTS = ROOT / "docs" / "results"


def blocks(language: str, text: str) -> list[str]:
    """Fenced blocks of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for named, block in found if named == language]


def commands(text: str) -> list[str]:
    """Lines of shell blocks, and inline code that starts like a command of ours."""
    lines = [line for block in blocks("sh", text) for line in block.splitlines()]
    lines += re.findall(r"`((?:python -m|lightning) [^`]+ [^`]+)`", text)
    return [line.split("   #")[0].strip() for line in lines if line.strip()]


LINES = list(dict.fromkeys([*commands(README), *commands(CONTRIBUTING)]))


def test_the_two_commands_come_first() -> None:
    assert [line.split()[:2] for line in commands(README)[:2]] == [["make", "demo"], ["make", "test"]]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_make_knows_it(line: str) -> None:
    done = subprocess.run([*shlex.split(line), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for line in LINES if not line.startswith("make ")])
def test_command_takes_its_options(line: str) -> None:
    status, out, err = run_command([*shlex.split(line), "--print_config"])
    assert status == 0, err
    assert ":" in out


def test_every_command_of_the_project_has_help() -> None:
    named = {word for line in LINES for word in line.split() if word.startswith("pipelines.")}
    assert {
        "pipelines.collect_traces",
        "pipelines.register",
        "pipelines.generate",
        "pipelines.evaluate",
    } <= named
    for module in sorted(named | {"pipelines.train", "pipelines.demo_model"}):
        status, out, err = run_command(["python", "-m", module, "--help"])
        assert status == 0, err
        assert out.startswith("usage: ")


@pytest.mark.slow
def test_the_python_blocks_run(
    real_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block, guarded, elsewhere = blocks("python", README)
    assert str(real_model_dir.relative_to(ROOT)) in block
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert float(out.split()[-1]) > 3  # compression of a float32 model's cache
    assert names["cache"].get_seq_length() > 1000  # type: ignore[attr-defined]
    exec(compile(guarded, "README.md", "exec"), names)
    assert names["cache"].monitor.report()["looks"] > 0  # type: ignore[attr-defined]
    exec(compile(elsewhere, "README.md", "exec"), names)
    (answer,) = names["answer"]  # type: ignore[misc]
    assert answer["generated_text"][-1]["role"] == "assistant"
    assert answer["memory"]["full_bytes"] > 0


def test_the_table_and_the_plot_are_of_the_committed_run() -> None:
    rows = [json.loads(line) for line in (RESULTS / "results.jsonl").read_text().splitlines()]
    run, methods = rows[0], [row for row in rows if row["kind"] == "method"]
    shown = table(methods)
    assert shown in README
    assert shown in (RESULTS / "report.md").read_text()
    said = README[: README.index("## ")]
    assert f"{run['settings']['context']:,} tokens" in said
    assert run["machine"]["processor"] in said
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", said):
        assert (ROOT / picture).stat().st_size < 150_000


def test_the_tables_of_tasks_are_of_the_committed_rows() -> None:
    rows = [json.loads(line) for line in (RESULTS / "tasks.jsonl").read_text().splitlines()]
    text = (RESULTS / "tasks.md").read_text()
    runs = [row["name"] for row in rows if row["kind"] == "run"]
    assert len(runs) > 1
    for name in runs:
        assert tables([row for row in rows if row["kind"] == "task" and row["run"] == name]) in text
    assert (RESULTS / "tasks.png").stat().st_size < 150_000


def test_links_and_the_tree_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README + CONTRIBUTING):
        assert (ROOT / target).exists(), target
    (tree,) = blocks("", README)
    folders = [line.split()[0] for line in tree.splitlines()]
    assert len(folders) > 6
    for folder in folders:
        assert folder == "artefacts/" or (ROOT / folder).is_dir(), folder
