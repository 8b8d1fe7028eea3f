"""How the Triton kernel is started: a table in a file, by device, head dim, bits and kind of tokens."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from predictor.errors import FadeError
from predictor.files import write_aside

TABLE = Path(__file__).with_name("launches.json")
ANY = "any"
KINDS = ("plain", "tiered", "rotated", "float32")  # tokens of one tier, of both, un-rotated keys, a float32 model
KEYS = ("device", "dim", "bits", "kind")  # what a row is chosen by


@dataclass(frozen=True)
class Launch:
    """One row of the table.

    Attributes:
        pages: most pages of a split, which one program walks through.
        programs: splits that keep a multiprocessor busy: short contexts are cut finer, until there are as many.
        warps, stages: of a program.
        dense: ``[tokens, queries]``, ascending: where the rows hold as many tokens on average, from how many queries
            on a dequantised layer and SDPA are faster.

    Example:
        >>> launch = Launch(16, 4, 2, 2, ((0, 256), (4096, 64)))
        >>> launch.span(64, 132), launch.span(100_000, 132), launch.dense_from(5000), launch.dense_from(100)
        (1, 16, 64, 256)
    """

    pages: int
    programs: int
    warps: int
    stages: int
    dense: tuple[tuple[int, int], ...] = ()

    def span(self, pages: int, processors: int) -> int:
        """Pages of a split, where there are ``pages`` over all rows."""
        return max(1, min(self.pages, pages // (self.programs * processors)))

    def dense_from(self, tokens: float) -> float:
        """Queries from which a dequantised layer is faster, where rows hold ``tokens`` on average."""
        return next((queries for least, queries in reversed(self.dense) if tokens >= least), math.inf)


@functools.cache
def read_table(path: Path = TABLE) -> tuple[dict[str, Any], ...]:
    """Rows of a table.

    Raises:
        FadeError: it is not there, or is no such table.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            _launch(row)
        return tuple(rows)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise FadeError(
            f"launch table {path} cannot be read ({problem}); write one with python -m pipelines.bench tune"
        ) from problem


@functools.cache
def choose(device: str, dim: int, bits: int, kind: str, path: Path = TABLE) -> Launch:
    """The first row that fits.

    Args:
        device: its name. dim: head dim. bits: of the keys in the high tier. kind: of :data:`KINDS`. path: of the table.

    Example:
        >>> choose("a GPU that nobody has measured", 128, 4, "tiered").warps
        4
    """
    wanted = (device, dim, bits, kind)
    for row in read_table(path):
        if all(row[name] in (ANY, mine) for name, mine in zip(KEYS, wanted)):
            return _launch(row)
    raise FadeError(f"launch table {path} has no row for {wanted}; add one for any")


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def name_of(device: torch.device) -> str:
    """Name of a GPU as the table has it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def add_rows(new: list[dict[str, Any]], path: Path = TABLE) -> None:
    """Put rows on top of a table, in place of those that are chosen by the same."""
    table = json.loads((path if path.exists() else TABLE).read_text(encoding="utf-8"))
    taken = [[row[name] for name in KEYS] for row in new]
    old = [row for row in table["rows"] if [row[name] for name in KEYS] not in taken]
    lines = ",\n  ".join(json.dumps(row) for row in [*new, *old])
    text = f'{{\n "note": {json.dumps(table["note"])},\n "rows": [\n  {lines}\n ]\n}}\n'
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")
    read_table.cache_clear()
    choose.cache_clear()


def _launch(row: dict[str, Any]) -> Launch:
    dense = tuple((int(tokens), int(queries)) for tokens, queries in row["dense"])
    return Launch(int(row["pages"]), int(row["programs"]), int(row["warps"]), int(row["stages"]), dense)
