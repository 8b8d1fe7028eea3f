"""`python -m pipelines.evaluate_tasks`, from tasks to report, on a tiny model."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines import evaluate_tasks
from pipelines.evaluation.methods import available_methods
from pipelines.evaluation.runs import Method
from tests.pipelines.peers import Plain

Run = Callable[..., tuple[int, str, str]]
NAMES = ["full", "safe", "h2o", "mine"]


@pytest.fixture
def run(tiny_model_dir: Path, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: Any) -> tuple[int, str, str]:
        files = json.dumps({"needle": str(prose), "copy": str(prose)})
        base = ("--model", tiny_model_dir, "--n", 2, "--length", 900, "--files", files, "--data", tmp_path)
        status = evaluate_tasks.main([str(arg) for arg in (*base, "--out", tmp_path / "out", *args)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return {kind: [row for row in rows if row["kind"] == kind] for kind in ("run", "answer", "task", "all tasks")}


def table_lines(report: str) -> list[str]:
    """Rows of Markdown tables, without the rules under their heads."""
    return [line for line in report.splitlines() if line.startswith("|") and "---" not in line]


def check_page(path: Path, cells: int) -> None:
    """It parses, has every cell of the report's tables, its pictures within, and asks the network for nothing."""

    class Page(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.cells, self.pictures = 0, []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "iframe")
            self.cells += tag in ("td", "th")
            self.pictures += [dict(attrs)["src"]] if tag == "img" else []
            if tag not in ("img", "meta", "br"):
                self.open.append(tag)

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.handle_starttag(tag, attrs)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    page = Page()
    page.feed(path.read_text())
    assert page.open == []
    assert page.cells == cells
    for picture in page.pictures:
        kind, _, content = picture.partition(",")
        assert kind == "data:image/png;base64"
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))).convert("L"))
        assert min(pixels.shape) > 100
        assert pixels.std() > 5
    assert page.pictures


def test_from_tasks_to_report(run: Run, tmp_path: Path) -> None:
    status, out, err = run(
        *("--tasks", "[lines, needle, copy]", "--methods", "[safe, h2o, mine]", "--budget", 0.1),
        *("--configs", "{mine: {preset: aggressive, recent_window: 100}}", "--lengths", "{lines: 500}"),
    )
    assert status == 0, err
    rows = read(tmp_path / "out")
    assert len(rows["answer"]) == 3 * 2 * len(NAMES)
    assert [(row["task"], row["method"]) for row in rows["task"]] == [
        (task, name) for task in ("lines", "needle", "copy") for name in NAMES
    ]
    for row in rows["task"]:
        mine = [one for one in rows["answer"] if (one["task"], one["method"]) == (row["task"], row["method"])]
        full = [one for one in rows["answer"] if (one["task"], one["method"]) == (row["task"], "full")]
        assert row["n"] == len(mine) == 2
        for key in ("score", "kl", "top1", "same"):
            assert row[key] == pytest.approx(np.mean([one[key] for one in mine]))
        assert row["full_score"] == pytest.approx(np.mean([one["score"] for one in full]))
        assert row["lost"] == pytest.approx(row["full_score"] - row["score"])
        assert row["interval"][0] <= row["score"] <= row["interval"][1]
        assert row["compression"] == pytest.approx(
            sum(one["full_bytes"] for one in mine) / sum(one["resident_bytes"] for one in mine)
        )
        assert 0.8 * (500 if row["task"] == "lines" else 900) < row["tokens"] <= 900
    by = {row["method"]: row for row in rows["all tasks"]}
    assert by["full"]["kl"] == 0
    assert by["full"]["same"] == by["full"]["compression"] == 1
    assert 0 < by["safe"]["kl"] < by["h2o"]["kl"]
    assert by["h2o"]["kl"] == pytest.approx(np.mean([row["kl"] for row in rows["task"] if row["method"] == "h2o"]))

    report = (tmp_path / "out" / "report.md").read_text()
    assert out.split("\n\nReport")[0].strip() in report
    assert "- mine: `{" in report
    assert "![" in report
    check_page(tmp_path / "out" / "report.html", cells=sum(line.count("|") - 1 for line in table_lines(report)))
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    for row in rows["task"]:
        if row["method"] != "full":
            (cells,) = [cells for cells in shown if cells[:2] == [row["task"], row["method"]]]
            assert cells[5] == f"{row['kl']:.4f}"
            assert cells[-1] == f"{row['compression']:.2f}x"


def test_what_cannot_be_run_is_named_and_the_rest_is_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gsm8k-test.jsonl").write_text('{"question": "1?", "answer": "#### 1"}\nnonsense\n')
    status, _, err = run(
        *(
            "--tasks",
            "[altqa, gsm8k, lines, key-value]",
            "--methods",
            "[safe, gone]",
            "--lengths",
            "{key-value: 5000}",
        ),
        *("--configs", "{gone: {peer: quanto, nbits: 4}}"),
    )
    assert status == 2
    named = [line for line in err.splitlines() if line.startswith("skipped: ")]
    for words in (
        "config 'gone': optimum.quanto cannot be imported",
        "altqa_4k.jsonl is not there",
        "gsm8k-test.jsonl line 2 is not JSON",
        "task key-value: ",
    ):
        assert any(words in line for line in named), words
    rows = read(tmp_path / "out")
    assert {row["task"] for row in rows["answer"]} == {"lines"}
    assert [f"skipped: {line}" for line in rows["run"][0]["skipped"]] == named
    assert named[0].removeprefix("skipped: ") in (tmp_path / "out" / "report.md").read_text()


def test_a_peer_that_fails_leaves_its_task_and_no_other(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Short(Plain):
        def read(self, model: Any, tokens: Any, cache: Any) -> Any:
            assert tokens.shape[1] < 700, "too long"
            return super().read(model, tokens, cache)

    monkeypatch.setattr(
        evaluate_tasks, "available_methods", lambda *args: [*available_methods(*args), Method("short", Short())]
    )
    status, out, err = run("--tasks", "[lines, key-value]", "--methods", "[safe]", "--lengths", "{lines: 500}")
    assert status == 2
    assert "skipped: short on task key-value: transformers failed on" in err
    rows = read(tmp_path / "out")
    assert {(row["task"], row["method"]) for row in rows["answer"]} == {
        ("lines", "full"), ("lines", "safe"), ("lines", "short"), ("key-value", "full"), ("key-value", "safe"),
    }  # fmt: skip
    assert rows["run"][0]["failed"] == [["key-value", "short"]]
    (line,) = [line for line in out.splitlines() if line.startswith("| key-value | short ")]
    assert {cell.strip() for cell in line.split("|")[3:-1]} == {"failed", "-"}
    assert line in (tmp_path / "out" / "report.md").read_text()


def test_bad_input_is_one_line_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    for args, words in [
        (("--tasks", "[riddles]"), "task 'riddles' is not known; choose from wikitext"),
        (("--tasks", "[]"), "tasks is empty"),
        (("--lengths", "{riddles: 900}"), "lengths: 'riddles' is not known"),
        (("--lengths", "{lines: 9}"), "length 9 of lines"),
        (("--files", "{riddles: x}"), "files: 'riddles' is not known"),
        (("--n", 0), "n 0"),
        (("--length", 50), "length 50"),
        (("--compress", "all"), "compress 'all' is not one of prompt, context"),
        (("--methods", "[fastest]"), "method 'fastest' is not known"),
        (("--methods", "[mine]", "--configs", "{mine: {preset: best}}"), "preset 'best' is not one of safe"),
        (("--methods", "[mine]", "--configs", "{mine: {peer: gguf}}"), "peer 'gguf' is not known"),
        (("--tasks", "[altqa]"), "nothing could be asked"),
    ]:
        status, _, err = run(*args)
        assert status == 2
        assert words in err.splitlines()[-1]
        assert "Traceback" not in err
        assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    status, _, err = run("--tasks", "[lines]", "--n", 1)
    assert status == 2
    assert "holds other files" in err
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_wanted_answers_count_as_tokens_that_the_model_reads(run: Run, prose: Path) -> None:
    """A task that generates nothing has its text read by every cache all the same."""
    given = ("--tasks", '["books"]', "--methods", '["safe"]', "--files", json.dumps({"books": str(prose)}), "--n", 1)
    status, _, err = run(*given, "--length", 4033)
    assert status == 2
    assert "task books: 4097 tokens, and the model reads 4096; lower its length" in err
    assert run(*given, "--length", 4032)[0] == 0
