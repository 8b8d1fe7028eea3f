"""The report of what is claimed, from rows that were made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.stats import ttest_1samp

from pipelines import proof
from pipelines.evaluation.intervals import paired_ratio
from pipelines.evaluation.pairwise import pairwise_rows, summary

FULL_BYTES = 1200
SETTINGS = {"model": "a/tiny", "context": 100, "steps": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "ours 3x": {}, "ours 6x": {}, "press 3x": {"peer": "kvpress"}, "press 6x": {"peer": "kvpress"},
    "knows 3x": {"oracle": True}, "knows 6x": {"oracle": True}, "bits": {"peer": "quanto"},
}  # fmt: skip
SIZED = [
    {"config": name.split()[0], "method": name, "ratio": float(name.split()[1][0])} for name in CONFIGS if " " in name
]
SIZE = {
    "full": 1.0, "ours 3x": 3.0, "ours 6x": 6.0, "press 3x": 2.99, "press 6x": 5.99, "knows 3x": 3.0, "knows 6x": 6.0,
    "bits": 3.1,
}  # fmt: skip
LOSS = {
    "full": 0, "ours 3x": 1, "ours 6x": 4, "press 3x": 10, "press 6x": 4.1, "knows 3x": 0.5, "knows 6x": 1, "bits": 0.2,
}  # fmt: skip
TEXTS = [(f"{kind}/{number}", kind) for kind in ("prose", "code") for number in range(4)]


def document(method: str, number: int, text: str, kind: str) -> dict[str, Any]:
    noise = 1 + 0.1 * math.sin(7 * number + len(method))
    size = {"method": method, "full_bytes": FULL_BYTES, "resident_bytes": FULL_BYTES / SIZE[method]}
    return {"kind": "document", "document": text, "source": kind, "kl": 0.01 * LOSS[method] * noise, **size}


DOCUMENTS = [document(name, n, *text) for n, text in enumerate(TEXTS) for name in SIZE]


def rows() -> list[dict[str, Any]]:
    run = {
        "kind": "run", "command": "evaluate", "settings": {**SETTINGS, "configs": CONFIGS}, "sized": SIZED,
        "skipped": ["hqq cannot be imported"], "peers": {"quanto": "1.0"},
        "texts": [{"document": text, "source": kind} for text, kind in TEXTS],
        "machine": {"processor": "abacus", "threads": 1, "python": "3", "versions": {"torch": "2"}},
    }  # fmt: skip
    methods = [
        {"kind": "method", "method": name, "kl": 0.01 * LOSS[name], "full_bytes": FULL_BYTES,
         "resident_bytes": FULL_BYTES / size, "compression": size}
        for name, size in SIZE.items()
    ]  # fmt: skip
    return [run, *DOCUMENTS, *methods]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    task = {
        "kind": "task", "task": "needle", "n": 8, "full_score": 1.0, "score": 0.875, "lost": 0.125,
        "lost_interval": [0.0, 0.375], "kl": 0.02, "compression": 6.0,
    }  # fmt: skip
    asked = [
        {"kind": "run", "command": "evaluate_tasks", "skipped": []},
        {**task, "method": "full", "lost": 0},
        {**task, "method": "ours"},
        {"kind": "all tasks", "method": "ours", "tasks": 1, "lost": 0.125},
    ]
    step = {"context": 8192, "method": "int4", "p50": 100.0, "of_stock": 2.5, "of_static": 1.5, "bytes": 2**21}
    timed = [{**step, "processor": "abacus", "threads": 1}]
    for name, lines in (("kl/results.jsonl", rows()), ("tasks/results.jsonl", asked), ("decode.jsonl", timed)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def call(folder: Path, *args: str) -> int:
    where = {"kl": "kl", "tasks": "tasks", "decode": "decode.jsonl"}
    given = [f"--{option}={folder / name}" for option, name in where.items()]
    return proof.main([*given, "--out", str(folder / "out"), *args])


def test_intervals_are_those_of_a_paired_test_of_logarithms() -> None:
    drawn = np.random.default_rng(0)
    ours, theirs = drawn.lognormal(size=9), drawn.lognormal(0.5, size=9)
    times, (low, high) = paired_ratio(ours, theirs)
    expected = ttest_1samp(np.log(theirs / ours), 0).confidence_interval(0.95)
    assert np.log([low, high]) == pytest.approx([expected.low, expected.high])
    assert times == pytest.approx(np.exp(np.log(theirs / ours).mean()))
    assert paired_ratio([0.1], [0.2])[1] == (0.0, math.inf)


def test_a_cell_is_won_lost_or_tied_by_its_interval_and_never_with_more_bytes() -> None:
    run, *others = rows()
    methods = [row for row in others if row["kind"] == "method"]
    found = {
        (row["ratio"], row["source"], row["against"]): row for row in pairwise_rows(run, DOCUMENTS, methods, "ours")
    }
    assert set(found) == {
        (*at, kind, name) for kind in ("prose", "code") for *at, name in ((3.0, "press"), (6.0, "press"), (3.0, "bits"))
    }
    for kind in ("prose", "code"):
        assert found[3.0, kind, "press"]["result"] == "win"
        assert found[3.0, kind, "press"]["times"] == pytest.approx(10, rel=0.2)
        assert found[6.0, kind, "press"]["result"] == "tie"
        assert found[3.0, kind, "bits"]["result"] == "larger"  # ours at 3x against theirs at 3.1x
        low, high = found[6.0, kind, "press"]["interval"]
        assert low < 1 < high
    equal = [{**row, "resident_bytes": 400} if row["method"] == "bits" else row for row in DOCUMENTS]
    again = [row["result"] for row in pairwise_rows(run, equal, methods, "ours") if row["against"] == "bits"]
    assert again == ["lose", "lose"]
    said = summary(list(found.values()))
    assert "Of 6 cells: 2 won, 2 tied, 2 not equal" in said
    assert "Tied: press at 6x on prose; press at 6x on code." in said


def test_the_report_says_what_was_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(folder) == 0, capsys.readouterr().err
    text = (folder / "out" / "proof.md").read_text()
    for words in (
        "quanto gets no smaller than 3.10x (bits)",
        "hqq cannot be imported",
        "quanto 1.0",
        "ours loses 12.5 points on the mean of 1 tasks",
    ):
        assert words in text
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["needle", "ours", "8", "100.0", "87.5", "12.5", "0.0 - 37.5", "0.0200", "6.00x", "no"] in shown
    assert ["8,192", "int4", "100.0", "2.50x", "1.50x", "2.0"] in shown
    assert "data:image/png;base64," in (folder / "out" / "proof.html").read_text()
    pixels = np.asarray(Image.open(folder / "out" / "proof.png").convert("L"))
    assert min(pixels.shape) > 400
    assert pixels.std() > 5
    kinds = [json.loads(line)["kind"] for line in (folder / "out" / "proof.jsonl").read_text().splitlines()[:-1]]
    assert kinds.count("cell") == 6


def test_mistakes_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "torn.jsonl").write_text('{"kind": "run"}\n{"kind"')
    (folder / "none.jsonl").write_text("")
    for args, words in [
        (("--ours", "mine"), "no configuration 'mine' at several sizes"),
        (("--decode", f"{folder}/absent.jsonl"), "absent.jsonl is not there"),
        (("--decode", f"{folder}/torn.jsonl"), "torn.jsonl line 2 is not JSON"),
        (("--decode", f"{folder}/none.jsonl"), "none.jsonl is empty"),
    ]:
        assert call(folder, *args) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    assert not (folder / "out").exists()
