"""Loss against true bytes, with what an oracle would lose: one picture of all caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.plots.quality import SMALLEST, STYLE, label_points, pyplot, save
from pipelines.reporting.rows import FULL

GREY = "#555555"
MIB = 2**20
Row = Mapping[str, Any]


def curves(run: Row, methods: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of one configuration at several sizes together, the smallest first; any other method by itself.

    Example:
        >>> run = {"sized": [{"config": "ours", "method": "ours 3x"}, {"config": "ours", "method": "ours 6x"}]}
        >>> rows = [{"method": name, "resident_bytes": size} for name, size in (("ours 3x", 9), ("ours 6x", 5))]
        >>> {name: [row["method"] for row in each] for name, each in curves(run, rows).items()}
        {'ours': ['ours 6x', 'ours 3x']}
    """
    family = {one["method"]: one["config"] for one in run["sized"]}
    found: dict[str, list[Row]] = {}
    for row in sorted(methods, key=lambda row: row["resident_bytes"]):
        method: str = row["method"]
        if method != FULL:
            found.setdefault(family.get(method, method), []).append(row)
    return found


def draw(path: Path, run: Row, methods: Sequence[Row], title: str) -> None:
    """Draw each cache's KL against its resident bytes, both axes logarithmic; oracles are dashed and grey.

    Args:
        path: PNG to write. run: first line of an evaluation's results. methods: its rows by method.
        title: above the plot.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9.5, 6))
    configs = run["settings"]["configs"]
    found = curves(run, methods)
    oracles = [name for name, rows in found.items() if configs.get(rows[0]["method"], {}).get("oracle")]
    ours = [name for name, rows in found.items() if "peer" not in configs.get(rows[0]["method"], {})]
    order = sorted(found, key=lambda name: (name in oracles, name not in ours, -len(found[name])))
    style, dashes = iter(STYLE[:1] + STYLE[1:] * len(found)), iter(("--", ":") * len(found))
    ends, colours = [], []
    for name in order:
        colour, marker = (GREY, ".") if name in oracles else next(style)
        x = [row["resident_bytes"] / MIB for row in found[name]]
        y = [max(row["kl"], SMALLEST) for row in found[name]]
        is_ours = name in ours and name not in oracles
        axes.plot(
            x, y, marker=marker, color=colour, linestyle=next(dashes) if name in oracles else "-",
            linewidth=2.4 if is_ours else 1.1, markersize=10 if is_ours else 6.5, zorder=4 if is_ours else 3,
            markeredgecolor="white", markeredgewidth=0.6,
        )  # fmt: skip
        ends.append((x[-1], y[-1]))
        colours.append(colour)
    full = next(row["full_bytes"] for row in methods) / MIB
    axes.axvline(full, color=GREY, linestyle=":", linewidth=1)
    axes.text(full, 0.01, "full cache ", transform=axes.get_xaxis_transform(), ha="right", va="bottom", color=GREY)
    axes.set_xscale("log")
    axes.set_yscale("log")
    least = min(row["resident_bytes"] for rows in found.values() for row in rows) / MIB
    axes.set_xlim(least / 1.15, max(full, *(x for x, _ in ends)) * 2)
    ticks = [full / ratio for ratio in (16, 10, 8, 6, 4, 3, 2, 1) if full / ratio > least / 1.15]
    axes.set_xticks(ticks, [f"{tick:.1f}\n{full / tick:.0f}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("resident cache: MiB of a 16-bit model, and how many times smaller than the full cache")
    axes.set_ylabel("KL to the full cache, nats per token")
    axes.set_title(title, fontsize=11, loc="left")
    label_points(figure, axes, ends, order, colours)
    save(figure, path)
    plt.close(figure)
