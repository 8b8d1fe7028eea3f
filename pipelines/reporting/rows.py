"""Rows of results: one JSON object a line, in a folder that is written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from predictor.errors import FadeError
from predictor.files import write_aside

FULL = "full"  # the method of rows of the full cache, which all others are compared with
Row = Mapping[str, Any]


def write_jsonl(path: Path, rows: Sequence[Row]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def add_jsonl(path: Path, rows: Sequence[Row]) -> None:
    """Add one JSON object a line to what is there."""
    with open(path, "a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


@contextmanager
def results_folder(out: Path, rows: str = "results.jsonl") -> Iterator[Path]:
    """A new folder to write results to, which takes the place of ``out`` at the end.

    Args:
        out: the folder; one that is there must hold results. rows: name of the file that tells such a folder.

    Raises:
        FadeError: the folder holds other files.
    """
    if out.is_dir() and any(out.iterdir()) and not (out / rows).is_file():
        raise FadeError(f"out {out} is there and holds other files; name another folder")
    with write_aside(out) as aside:
        aside.mkdir(parents=True)
        yield aside


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean.

    Example:
        >>> mean([1, 2])
        1.5
    """
    return sum(values) / len(values)


def compression(rows: Sequence[Row]) -> float:
    """Bytes of full caches divided by what was resident, over all rows together.

    Example:
        >>> compression([{"full_bytes": 40, "resident_bytes": 10}, {"full_bytes": 40, "resident_bytes": 30}])
        2.0
    """
    return sum(row["full_bytes"] for row in rows) / sum(row["resident_bytes"] for row in rows)
