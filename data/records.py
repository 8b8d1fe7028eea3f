"""Files -> texts: plain text and code, JSON lines and Parquet, of which records are fields or chats."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data.chat import Render, is_chat, role_lines
from data.reading import json_lines, proper, read_text
from predictor.errors import FadeError

RECORDS = (".jsonl", ".parquet")
CODE = (
    ".c", ".cc", ".cpp", ".cs", ".cu", ".css", ".go", ".h", ".hpp", ".hs", ".html", ".java", ".jl", ".js", ".kt",
    ".lua", ".php", ".pl", ".py", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".tex", ".ts",
)  # fmt: skip
SUFFIXES = (".txt", ".md", ".rst", *RECORDS, *CODE)  # read from folders; a file that is named may have any
DEFAULT_FIELDS = ("text", "messages")  # the first of them that a record has
_WITH_FIELDS = re.compile(r"(.+(?:\.jsonl|\.parquet)):([^/\\:]+)")


class Part(NamedTuple):
    """A text as its file gives it; ``whole`` forbids to cut it at blank lines (a chat in its template)."""

    text: str
    whole: bool = False


def split_fields(source: str) -> tuple[str, tuple[str, ...]]:
    """Take the names of fields off ``FILE.jsonl:FIELD+FIELD`` or ``FILE.parquet:COLUMN``.

    Example:
        >>> split_fields("rows.jsonl:question+answer"), split_fields("a:b.txt")
        (('rows.jsonl', ('question', 'answer')), ('a:b.txt', ()))
    """
    if found := _WITH_FIELDS.fullmatch(source):
        return found[1], tuple(found[2].split("+"))
    return source, ()


def text_files(folder: Path) -> list[Path]:
    """Files of text, code and records under a folder, sorted; nothing whose name or folder begins with a dot.

    Raises:
        FadeError: there is none.
    """
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(place, name) for name in names if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES
        ]
    if not found:
        raise FadeError(f"text source {folder} is a folder without .txt, .md, .jsonl, .parquet or code files; add some")
    return sorted(found)


def file_texts(file: Path, fields: Sequence[str] = (), render: Render = role_lines) -> Iterator[Part]:
    """Read the texts of one file: itself, or those of its records.

    Args:
        file: .jsonl, .parquet, or text of any other suffix.
        fields: of each record, joined by line ends; by default its ``text``, or its chat ``messages``.
        render: writes a chat (:func:`data.chat.chat_renderer`).

    Raises:
        FadeError: unreadable, binary or in another encoding, not JSON, or a record without the field.
    """
    if file.suffix.lower() == ".parquet":
        yield from _parquet(file, fields, render)
    elif file.suffix.lower() != ".jsonl":
        yield Part(read_text(file))
    else:
        for where, record in json_lines(file, remedy="give one object with a text field a line"):
            if part := record_text(record, fields, render, where):
                yield part


def record_text(
    record: Mapping[str, Any],
    fields: Sequence[str] = (),
    render: Render = role_lines,
    where: str = "text source record",
) -> Part | None:
    r"""Write one record as text. A field is a text, or a chat: messages with ``role`` and ``content``.

    Args:
        record: name -> value. fields: joined by line ends; by default ``text``, or else ``messages``.
        render: writes a chat. where: names the record in an error.

    Returns:
        The text; None when one of the fields is null.

    Raises:
        FadeError: no such field, something else in it, or a text with half of a surrogate pair.

    Example:
        >>> record_text({"question": "1 + 1?", "answer": "2"}, ["question", "answer"]).text
        '1 + 1?\n2'
    """
    names = fields or [name for name in DEFAULT_FIELDS if name in record][:1] or DEFAULT_FIELDS[:1]
    parts = []
    for name in names:
        value = record.get(name)
        if value is None and name in record:
            return None
        if is_chat(value):
            parts.append(Part(proper(_rendered(render, value, where), where), whole=True))
        elif isinstance(value, str):
            parts.append(Part(proper(value, where)))
        else:
            raise FadeError(
                f"{where} has no text field {name!r} but {sorted(record)}; give records with a text field "
                "or chat messages, or name fields: FILE.jsonl:FIELD+FIELD"
            )
    return Part("\n".join(part.text for part in parts), any(part.whole for part in parts))


def columns_of(fields: Sequence[str], columns: Sequence[str], where: str) -> list[str]:
    """The columns to read of a table: the named ones, or the first of the default ones that it has.

    Raises:
        FadeError: a column that the table does not have.
    """
    wanted = list(fields) or [name for name in DEFAULT_FIELDS if name in columns][:1] or list(DEFAULT_FIELDS[:1])
    for name in wanted:
        if name not in columns:
            raise FadeError(f"text source {where} has no {name} column but {list(columns)}; name one that it has")
    return wanted


def _rendered(render: Render, messages: Sequence[Mapping[str, Any]], where: str) -> str:
    try:
        return render(messages)
    except FadeError as error:
        raise FadeError(f"{where}: {error}") from error


def _parquet(file: Path, fields: Sequence[str], render: Render) -> Iterator[Part]:
    try:
        with pq.ParquetFile(file) as table:
            wanted = columns_of(fields, table.schema_arrow.names, str(file))
            number = 0
            for batch in table.iter_batches(batch_size=64, columns=wanted):
                for record in batch.to_pylist():
                    number += 1
                    if part := record_text(record, wanted, render, f"text source {file} row {number}"):
                        yield part
    except UnicodeDecodeError as error:
        raise FadeError(f"text source {file} has text that is not UTF-8; write it again as UTF-8") from error
    except (pa.ArrowException, OSError) as error:
        raise FadeError(f"text source {file} is not a whole Parquet file; check the file") from error
