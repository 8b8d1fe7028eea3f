"""`python -m pipelines.bench compare A B`: what two commits measured, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks.ledger import COLUMNS, read_rows
from pipelines.benchmarks.timing import ratio
from predictor.errors import FadeError

SAME = tuple(COLUMNS[COLUMNS.index("bench") : COLUMNS.index("p20")])  # what makes two rows the same measurement
SIZES = ("layers", "dim", "group", "batch", "length")
MACHINE = ("device", "threads")


def compare(before: str, after: str, ledger: str = "docs/results/ledger.csv") -> None:
    """Print the rows of a ledger that two commits both have: their medians, and how they changed.

    A change of the median may be the machine's mood; a change of the ratio to the baseline, which ran in the same run,
    is the code's. Both are after divided by before: less is better. Of several runs the last counts; only rows of the
    same device, threads, model and sizes are compared.

    Args:
        before: commit, or the first characters of it; with a + for files that had changed since.
        after: the other commit.
        ledger: CSV file that benchmarks were told to add to (`--ledger`).
    """
    rows = read_rows(Path(ledger))
    found = changes(of_commit(rows, before), of_commit(rows, after))
    if not found:
        raise FadeError(f"{before} and {after} have no measurement in common in {ledger}; run the same ones at both")
    print(f"{'bench':<10} {'sizes':<28} {'method':<16} {'before':>10} {'after':>10} {'change':>8} {'of baseline':>12}")
    for row in found:
        change, of_baseline = ("-" if row[name] is None else f"{row[name]:.3f}x" for name in ("change", "ratio_change"))
        print(
            f"{row['bench']:<10} {row['sizes']:<28} {row['method']:<16} {row['before']:>10.4g} {row['after']:>10.4g} "
            f"{change:>8} {of_baseline:>12}"
        )


def of_commit(rows: Sequence[Mapping[str, str]], commit: str) -> list[Mapping[str, str]]:
    """The rows of one commit.

    Raises:
        FadeError: none has it, or several begin like that.
    """
    known = list(dict.fromkeys(row["commit"] for row in rows if row["commit"]))
    meant = [one for one in known if one == commit] or [one for one in known if one.startswith(commit)]
    if len(meant) != 1:
        which = f"may be {' or '.join(meant)}" if meant else f"is not one of {', '.join(known) or 'none'}"
        raise FadeError(f"commit {commit!r} {which}")
    return [row for row in rows if row["commit"] == meant[0]]


def changes(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """One row for each measurement that both have, in the order of ``after``; no change from nothing.

    Example:
        >>> row = dict.fromkeys(COLUMNS, "") | {"method": "safe", "length": "2048", "p50": "40", "ratio": "0.8"}
        >>> change, = changes([row], [row | {"p50": "60", "ratio": "0.6"}])
        >>> change["change"], round(change["ratio_change"], 2), change["sizes"]
        (1.5, 0.75, 'length 2048')
    """
    earlier, later = ({tuple(row[name] for name in (*MACHINE, *SAME)): row for row in each} for each in (before, after))
    found = []
    for key, row in later.items():
        if (old := earlier.get(key)) is None:
            continue
        rated = bool(row["ratio"] and old["ratio"]) and row["method"] != row["baseline"]
        sizes = [f"{name} {row[name]}" for name in SIZES if row[name]]
        found.append(
            {
                "bench": row["bench"],
                "sizes": ", ".join(sizes),
                "method": row["method"],
                "before": float(old["p50"]),
                "after": float(row["p50"]),
                "change": ratio(float(row["p50"]), float(old["p50"])),
                "ratio_change": ratio(float(row["ratio"]), float(old["ratio"])) if rated else None,
            }
        )
    return found
