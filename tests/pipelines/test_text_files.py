"""What commands read from text files is the same from every system's files, and refused by name if it is no text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines import proof
from pipelines.benchmarks import ledger
from pipelines.evaluation.tasks.records import records
from pipelines.generate import read_prompt
from pipelines.integrations.presets import read_config
from predictor.errors import FadeError

ROW = {"question": "caf\xe9?", "answer": "one\ntwo"}
LEDGER = ",".join(ledger.COLUMNS) + "\n" + ",".join(["caf\xe9"] * len(ledger.COLUMNS)) + "\n"
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "prompt": ("One caf\xe9.\n\nTwo.", lambda path: read_prompt(None, path)),
    "config": ("# caf\xe9\nint4_budget: 0.2\n", read_config),
    "tasks": (
        f"{json.dumps(ROW, ensure_ascii=False)}\n",
        lambda path: [record.text(name) for record in records(str(path)) for name in ROW],
    ),
    "results": (f"{json.dumps(ROW, ensure_ascii=False)}\n", proof.read),
    "ledger": (LEDGER, ledger.read_rows),
}


@pytest.mark.parametrize("end", ["\r\n", "\r"], ids=["windows", "old mac"])
@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE], ids=["8", "16le", "16be"])
@pytest.mark.parametrize("name", READERS)
def test_every_systems_files_are_read_alike(name: str, mark: bytes, end: str, tmp_path: Path) -> None:
    text, read = READERS[name]
    plain, other = tmp_path / "plain", tmp_path / "other"
    plain.write_bytes(text.encode())
    encoding = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le"}.get(mark, "utf-16-be")
    other.write_bytes(mark + text.replace("\n", end).encode(encoding))
    assert read(other) == read(plain)


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_text_is_named_by_file_and_byte(name: str, tmp_path: Path) -> None:
    text, read = READERS[name]
    path = tmp_path / "latin"
    path.write_bytes(text.encode("latin-1"))
    place = text.index("\xe9")
    with pytest.raises(FadeError, match=f"latin is not UTF-8: byte 0xe9 at {place}; save it as UTF-8"):
        read(path)
    path.write_bytes(b"a\0b")
    with pytest.raises(FadeError, match="latin is not text but binary"):
        read(path)


def test_half_of_a_surrogate_pair_is_refused_in_prompts_and_tasks(tmp_path: Path) -> None:
    with pytest.raises(FadeError, match=r"prompt has half of a surrogate pair \('\\udce9'\) at character 3"):
        read_prompt("caf\udce9", None)  # a byte of a terminal that is not UTF-8
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"one": "\ud800", "more": ["a", "\udc00"]}) + "\n")
    (record,) = records(str(path))
    for read in (lambda: record.text("one"), lambda: record.texts("more")):
        with pytest.raises(FadeError, match="line 1 has half of a surrogate pair"):
            read()
