"""Where a cache's tokens are while it decodes: tokens in each tier and bytes, from its telemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fade_runtime.events import Event, Reassignment
from pipelines.plots.quality import STYLE, pyplot, save

TIERS = {"FULL": "#08306b", "HIGH": "#2171b5", "LOW": "#6baed6", "PQ": "#9ecae1", "EVICTED": "#eeeeee"}
NAMES = {"FULL": "full precision", "HIGH": "high tier", "LOW": "low tier", "PQ": "low tier (PQ)", "EVICTED": "evicted"}
COLUMNS = 4
Row = Mapping[str, Any]


def occupancy_rows(method: str, events: Sequence[Event], heads: int, full: int, steps: int) -> list[dict[str, Any]]:
    """One JSON-able row for each time at which a cache reassigned its tokens, and one for the last step.

    Args:
        method: whose. events: of its telemetry; those of reassignments count. heads: kv heads of a layer.
        full: bytes of one token in a full cache of two-byte floats, all layers. steps: tokens after the prompt.

    Returns:
        step, mean tokens of a kv head in each tier, bytes, and those of a token in a full cache.
    """
    found: dict[int, list[Reassignment]] = {}
    for event in events:
        if isinstance(event, Reassignment):
            found.setdefault(event.seen, []).append(event)
    if not found:
        return []
    first = min(found)
    rows: list[dict[str, Any]] = []
    for seen, each in sorted(found.items()):
        tokens = {tier: sum(event.tokens.get(tier, 0) for event in each) / (len(each) * heads) for tier in TIERS}
        wider = sum(event.full_bytes for event in each) / seen - full  # of a token, where the model's floats are wider
        resident = sum(event.resident_bytes for event in each) - tokens["FULL"] * wider
        size = {"tokens": tokens, "bytes": resident, "token_bytes": full}
        rows.append({"kind": "occupancy", "method": method, "step": seen - first, **size})
    return [*rows, grown(rows[-1], steps)] if rows[-1]["step"] < steps else rows


def grown(row: Row, step: int) -> dict[str, Any]:
    """A row some steps later, nothing reassigned: what came since is in full precision.

    Example:
        >>> grown({"step": 0, "tokens": {"FULL": 10.0}, "bytes": 100, "token_bytes": 5}, step=4)
        {'step': 4, 'tokens': {'FULL': 14.0}, 'bytes': 120, 'token_bytes': 5}
    """
    more = step - row["step"]
    tokens = {**row["tokens"], "FULL": row["tokens"]["FULL"] + more}
    return {**row, "step": step, "tokens": tokens, "bytes": row["bytes"] + more * row["token_bytes"]}


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw tokens per tier over the steps, method by method, and the bytes of all.

    Args:
        path: PNG to write. rows: of :func:`occupancy_rows`. title: above the plot.
    """
    plt = pyplot()
    methods = list(dict.fromkeys(row["method"] for row in rows))
    panels = len(methods) + 2  # bytes, and their legend
    columns = panels if panels <= COLUMNS + 1 else COLUMNS
    lines = -(-panels // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(3.1 * columns, 2.7 * lines + 0.5), squeeze=False)
    every = list(grid.flat)
    paths = {name: _path([row for row in rows if row["method"] == name]) for name in methods}
    there = [tier for tier in TIERS if any(row["tokens"][tier] for row in rows)]
    for axes, (name, points) in zip(every, paths.items()):
        steps = [row["step"] for row in points]
        heights = [[row["tokens"][tier] for row in points] for tier in there]
        axes.stackplot(steps, heights, colors=[TIERS[tier] for tier in there], linewidth=0)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlim(steps[0], steps[-1])
        axes.set_ylim(0, max(map(sum, zip(*heights))))
        axes.grid(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("tokens of a kv head", fontsize=9)
    last, aside = every[len(methods)], every[len(methods) + 1]
    for (name, points), (colour, _) in zip(paths.items(), STYLE * len(paths)):
        last.plot([row["step"] for row in points], [row["bytes"] / 2**20 for row in points], color=colour, label=name)
    last.set_title("bytes, MiB", fontsize=10, loc="left")
    last.set_ylim(0)
    last.margins(x=0)
    aside.axis("off")
    aside.legend(*last.get_legend_handles_labels(), frameon=False, fontsize=9, loc="upper left", title="bytes of")
    for axes in every:
        axes.tick_params(labelsize=8)
    for axes in every[panels:]:
        axes.remove()
    for axes in every[: len(methods) + 1]:
        axes.set_xlabel("decode steps", fontsize=9)
    patches = [plt.Rectangle((0, 0), 1, 1, color=TIERS[tier]) for tier in there]
    figure.legend(
        patches, [NAMES[tier] for tier in there], loc="outside upper right", ncols=len(there), frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    save(figure, path)
    plt.close(figure)


def _path(rows: Sequence[Row]) -> list[Row]:
    """Rows with those just before each reassignment, between which everything grows evenly."""
    points: list[Row] = []
    for row in rows:
        points += [grown(points[-1], row["step"])] if points else []
        points.append(row)
    return points
