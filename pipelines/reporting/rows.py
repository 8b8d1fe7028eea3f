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


def by_layers(rows: Sequence[Row]) -> dict[str, float]:
    """The same for the layers that evict and for the others; empty where there are no others, or nobody counted them.

    Example:
        >>> by_layers([{"full_bytes": 40, "resident_bytes": 10, "others_full_bytes": 12, "others_bytes": 6}])
        {'compressed_layers': 7.0, 'other_layers': 2.0}
    """
    names = ("full_bytes", "resident_bytes", "others_full_bytes", "others_bytes")
    full, resident, others_full, others = (sum(row.get(name, 0) for row in rows) for name in names)
    if not others or others >= resident:
        return {}
    return {
        "compressed_layers": (full - others_full) / (resident - others),
        "other_layers": others_full / others,
    }


def layer_columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """Titles of two more columns of a table, if any of its rows has :func:`by_layers`."""
    return ("compressed layers", "other layers") if any("other_layers" in row for row in rows) else ()


def layer_cells(row: Row, columns: Sequence[str]) -> list[str]:
    """Cells of these columns.

    Example:
        >>> layer_cells({"compressed_layers": 7.0, "other_layers": 2.0}, ("compressed layers", "other layers"))
        ['7.00x', '2.00x']
    """
    found = [row.get(column.replace(" ", "_")) for column in columns]
    return ["-" if each is None else f"{each:.2f}x" for each in found]
