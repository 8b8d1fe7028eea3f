"""A CSV file that measurements of many runs and machines are added to, never changed in."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from predictor.errors import FadeError


def add_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a CSV file; make it with a header if it is not there.

    Args:
        path: of the file. columns: of the header. rows: what is absent is left empty; floats are rounded to six digits.

    Raises:
        FadeError: the file has another header.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "ledger.csv"
        >>> add_rows(path, ["bench", "ms"], [{"bench": "gpu", "ms": 1 / 3}])
        >>> add_rows(path, ["bench", "ms"], [{"bench": "cpu"}])
        >>> path.read_text().splitlines()
        ['bench,ms', 'gpu,0.333333', 'cpu,']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="", encoding="utf-8") as file:
            found = next(csv.reader(file))
        if found != list(columns):
            raise FadeError(f"{path} has other columns ({', '.join(found)}); name another file with --out")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
