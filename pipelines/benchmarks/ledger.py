"""A CSV file that measurements of many commits and machines are added to, never changed in."""

from __future__ import annotations

import csv
import importlib
import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data.reading import read_text
from pipelines.reporting.commit import this_commit
from pipelines.reporting.machine import machine, processor
from pipelines.reporting.rows import add_jsonl
from predictor.errors import FadeError

COLUMNS = (
    "date", "commit", "device", "threads", "torch", "triton", "transformers",
    "bench", "model", "layers", "dim", "group", "batch", "length", "method", "unit",
    "p20", "p50", "p80", "baseline", "ratio", "bytes", "share_of_copy", "tokens_per_second", "peak_bytes",
)  # fmt: skip
PACKAGES = ("torch", "triton", "transformers")


def record(path: str | Path | None, rows: Sequence[Mapping[str, Any]], device: str = "", **shared: Any) -> None:
    """Add a benchmark's rows to a ledger, with the commit, the machine and the versions they were measured with.

    Args:
        path: of the ledger; None: nothing is done. device: name of the GPU; by default the processor's.
        rows: what of them has a column is written; ``context`` is the length; ``ratio`` is the row's p50 divided by its
            baseline's in the same run, or the part of it that it takes: less is better. shared: of all rows.

    Raises:
        FadeError: the file has other columns.
    """
    if path is not None:
        here = {**origin(device), **shared}
        named = [{**here, **row, **({"length": row["context"]} if "context" in row else {})} for row in rows]
        add_rows(Path(path), COLUMNS, [{name: row[name] for name in COLUMNS if name in row} for row in named])


def keep(rows: Sequence[Mapping[str, Any]], model: str, out: str | None, ledger: str | None) -> None:
    """Add a benchmark's rows to the files that are named.

    Args:
        rows: to add. model: directory or hub id that they were measured with. out: file of JSON lines, which also get
            what the numbers were measured with. ledger: see :func:`record`.
    """
    name = Path(model).name
    if out is not None:
        add_jsonl(Path(out), [{**row, "model": name, **machine()} for row in rows])
    record(ledger, rows, model=name)


def origin(device: str = "") -> dict[str, Any]:
    """Where and with what measurements are made: date, commit, device, threads, versions."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.import_module(name).__version__
        except ImportError:  # triton is Linux only
            versions[name] = ""
    where = {"date": time.strftime("%Y-%m-%d"), "commit": this_commit(), "device": device or processor()}
    return {**where, "threads": torch.get_num_threads(), **versions}


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
        found = next(csv.reader(io.StringIO(read_text(path, "ledger"))))
        if found != list(columns):
            raise FadeError(f"{path} has other columns ({', '.join(found)}); name another file")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a ledger, in order.

    Raises:
        FadeError: it is not there, or no ledger.
    """
    if not path.is_file():
        raise FadeError(f"ledger {path} is not there; make one with --ledger of a benchmark")
    rows = list(csv.DictReader(io.StringIO(read_text(path, "ledger"))))
    if not rows or list(rows[0]) != list(COLUMNS):
        raise FadeError(f"{path} is no ledger of this version; name another file")
    return rows
