"""Pairwise comparisons: ours against each other cache at equal bytes, by kind of text and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.evaluation.intervals import paired_ratio
from pipelines.evaluation.sizing import NEAR
from pipelines.reporting.rows import compression, mean
from pipelines.reporting.tables import markdown_table

COLUMNS = ("size", "text", "against", "texts", "KL, ours", "KL, theirs", "of ours", "95 %", "result")
Row = Mapping[str, Any]


def sizes(run: Row) -> list[float]:
    """The ratios that caches were set to."""
    return sorted({one["ratio"] for one in run["sized"]})


def contestants(run: Row, methods: Sequence[Row], ratio: float, ours: str) -> dict[str, str]:
    """Which methods are compared at a size, where ours has at most the bytes of each other one.

    A cache that was set to the size is compared there. One with nothing to set is compared at the first size that it
    is not much smaller than. Oracles are not compared.

    Args:
        run: first line of an evaluation's results. methods: its rows by method. ratio: the size. ours: a configuration.

    Returns:
        name in tables -> method; ours first.

    Example:
        >>> run = {"sized": [{"config": "ours", "ratio": ratio, "method": f"ours {ratio}x"} for ratio in (3, 6)],
        ...        "settings": {"configs": {"ours 3x": {}, "ours 6x": {}, "q4": {"peer": "q"}, "q2": {"peer": "q"}}}}
        >>> methods = [{"method": "q4", "compression": 3.1}, {"method": "q2", "compression": 5.6}]
        >>> contestants(run, methods, 3, "ours"), contestants(run, methods, 6, "ours")
        ({'ours': 'ours 3x', 'q4': 'q4'}, {'ours': 'ours 6x', 'q2': 'q2'})
    """
    configs, fitted = run["settings"]["configs"], {one["method"] for one in run["sized"]}
    at_size = [one for one in run["sized"] if one["ratio"] == ratio and not configs[one["method"]].get("oracle")]
    found = {one["config"]: one["method"] for one in sorted(at_size, key=lambda one: one["config"] != ours)}
    for row in methods:
        if "peer" in configs.get(row["method"], {}) and row["method"] not in fitted:
            reached = [size for size in sizes(run) if row["compression"] <= NEAR * size]
            if reached and reached[0] == ratio:
                found[row["method"]] = row["method"]
    return found


def unreached(run: Row, methods: Sequence[Row]) -> list[str]:
    """What to say of other projects' caches that have no setting as small as a size.

    Example:
        >>> run = {"sized": [{"config": "ours", "ratio": 6.0, "method": "ours 6x"}],
        ...        "settings": {"configs": {"ours 6x": {}, "q4": {"peer": "quanto"}}}}
        >>> unreached(run, [{"method": "q4", "compression": 3.3}])
        ['quanto gets no smaller than 3.30x (q4)']
    """
    smallest: dict[str, Row] = {}
    for row in methods:
        peer = run["settings"]["configs"].get(row["method"], {}).get("peer")
        if peer and (peer not in smallest or row["compression"] > smallest[peer]["compression"]):
            smallest[peer] = row
    return [
        f"{peer} gets no smaller than {_times(row['compression'])} ({row['method']})"
        for peer, row in smallest.items()
        if row["compression"] < max(sizes(run)) / NEAR
    ]


def pairwise_rows(run: Row, documents: Sequence[Row], methods: Sequence[Row], ours: str) -> list[dict[str, Any]]:
    """One row for each size, kind of text and other cache.

    Args:
        run, documents, methods: lines of an evaluation's results. ours: name of our configuration.
    """
    rows = []
    kinds = list(dict.fromkeys(row["source"] for row in documents))
    at = {(row["method"], row["document"]): row for row in documents}
    for ratio in sizes(run):
        methods_of = contestants(run, methods, ratio, ours)
        for kind in kinds:
            texts = list(dict.fromkeys(row["document"] for row in documents if row["source"] == kind))
            for other in (name for name in methods_of if name != ours):
                pair = ([at[methods_of[name], text] for text in texts] for name in (ours, other))
                rows.append({"kind": "cell", "ratio": ratio, "source": kind, "against": other, **_compared(*pair)})
    return rows


def _compared(ours: Sequence[Row], theirs: Sequence[Row]) -> dict[str, Any]:
    """Both caches on the same texts, and whether their losses differ; nothing is won with more bytes."""
    kl = [[row["kl"] for row in rows] for rows in (ours, theirs)]
    times, (low, high) = paired_ratio(*kl)
    larger = compression(ours) < 0.99 * compression(theirs)
    return {
        "texts": [row["document"] for row in ours],
        "ours_kl": kl[0],
        "theirs_kl": kl[1],
        "ours_compression": compression(ours),
        "theirs_compression": compression(theirs),
        "times": times,
        "interval": [low, high],
        "result": "larger" if larger else "win" if low > 1 else "lose" if high < 1 else "tie",
    }


def size_table(comparisons: Sequence[Row], ratio: float) -> str:
    """Caches of one size: true compression, and mean KL on each kind of text with the result, in Markdown."""
    here = [row for row in comparisons if row["ratio"] == ratio]
    kinds, others = (list(dict.fromkeys(row[key] for row in here)) for key in ("source", "against"))
    at = {(row["source"], row["against"]): row for row in here}
    first = [at[kind, others[0]] for kind in kinds]
    lines = [("ours", _times(_mean_of(first, "ours_compression")), *(_kl(row["ours_kl"]) for row in first))]
    for other in others:
        rows = [at[kind, other] for kind in kinds]
        shown = (f"{_kl(row['theirs_kl'])}, {_short(row['times'])} {row['result']}" for row in rows)
        lines.append((other, _times(_mean_of(rows, "theirs_compression")), *shown))
    return markdown_table(("cache", "compression", *kinds), lines, words=1)


def pairwise_table(comparisons: Sequence[Row]) -> str:
    """Every comparison with its interval, in Markdown."""
    lines = [
        (
            f"{row['ratio']:g}x",
            row["source"],
            row["against"],
            str(len(row["texts"])),
            _kl(row["ours_kl"]),
            _kl(row["theirs_kl"]),
            _short(row["times"]),
            f"{_short(row['interval'][0])} - {_short(row['interval'][1])}",
            row["result"],
        )
        for row in comparisons
    ]
    return markdown_table(COLUMNS, lines, words=3)


def summary(comparisons: Sequence[Row]) -> str:
    """How many comparisons were won, and by name those that were not."""
    words = {"win": "won", "tie": "tied", "lose": "lost", "larger": "not equal (ours takes more bytes)"}
    count = {result: sum(row["result"] == result for row in comparisons) for result in words}
    lines = [f"Of {len(comparisons)} cells: {', '.join(f'{n} {words[result]}' for result, n in count.items() if n)}."]
    for result in ("lose", "tie", "larger"):
        named = [
            f"{row['against']} at {row['ratio']:g}x on {row['source']}"
            for row in comparisons
            if row["result"] == result
        ]
        lines += [f"{words[result].capitalize()}: {'; '.join(named)}."] if named else []
    return "\n\n".join(lines)


def _mean_of(rows: Sequence[Row], key: str) -> float:
    return mean([row[key] for row in rows])


def _kl(values: Sequence[float]) -> str:
    return f"{mean(values):.4f}"


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _short(value: float) -> str:
    """A factor in two or three digits.

    Example:
        >>> _short(0.954), _short(12.34), _short(345.6)
        ('.95x', '12x', '346x')
    """
    return (f"{value:.2f}" if value < 3 else f"{value:.1f}" if value < 10 else f"{value:.0f}").lstrip("0") + "x"
