"""Where in a context something is still found: depth against length, cache by cache, from answers to tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.plots.quality import pyplot, save

BANDS = 5  # of depth
Row = Mapping[str, Any]


def found_at(answers: Sequence[Row], bands: int = BANDS) -> dict[tuple[str, str], dict[tuple[int, int], list[float]]]:
    """Scores by task and cache, then by band of depth and length.

    Args:
        answers: rows of answers; those without a depth, a length or a score are left out. bands: of depth, evenly wide.

    Example:
        >>> one = {"task": "needle", "method": "safe", "depth": 0.99, "length": 512, "score": 1.0}
        >>> found_at([one, {**one, "depth": 0.0}, {**one, "depth": None}])
        {('needle', 'safe'): {(4, 512): [1.0], (0, 512): [1.0]}}
    """
    found: dict[tuple[str, str], dict[tuple[int, int], list[float]]] = {}
    for row in answers:
        if row.get("depth") is None or row.get("length") is None or row["score"] is None:
            continue
        place = min(int(row["depth"] * bands), bands - 1), row["length"]
        found.setdefault((row["task"], row["method"]), {}).setdefault(place, []).append(row["score"])
    return found


def draw(path: Path, answers: Sequence[Row]) -> bool:
    """Draw a map for each task and cache; false, and nothing is written, where no answer has a depth.

    Args:
        path: PNG to write. answers: rows of answers.
    """
    found = found_at(answers)
    if not found:
        return False
    plt = pyplot()
    tasks, methods = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    lengths = sorted({place[1] for each in found.values() for place in each})
    width = 0.9 + 0.62 * len(lengths)
    figure, grid = plt.subplots(
        len(tasks), len(methods), figsize=(1.6 + width * len(methods), 1.1 + 1.75 * len(tasks)),
        squeeze=False, sharex=True, sharey=True,
    )  # fmt: skip
    for line, task in zip(grid, tasks):
        for axes, method in zip(line, methods):
            _panel(axes, found.get((task, method), {}), lengths)
        line[0].set_ylabel(f"{task}\ndepth", fontsize=9)
    for axes, method in zip(grid[0], methods):
        axes.set_title(method, fontsize=10, loc="left")
    for axes in grid[-1]:
        axes.set_xlabel("prompt, tokens", fontsize=9)
    figure.colorbar(grid[0, 0].images[0], ax=grid, label="found, %", shrink=0.8, aspect=30)
    save(figure, path)
    plt.close(figure)
    return True


def _panel(axes: Any, scores: Mapping[tuple[int, int], Sequence[float]], lengths: Sequence[int]) -> None:
    percents = np.full((BANDS, len(lengths)), np.nan)
    for (band, length), each in scores.items():
        percent = percents[band, lengths.index(length)] = 100 * np.mean(each)
        axes.text(
            lengths.index(length), band, f"{percent:.0f}", ha="center", va="center", fontsize=7.5,
            color="white" if percent > 50 else "black",
        )  # fmt: skip
    axes.imshow(percents, vmin=0, vmax=100, cmap="YlGnBu", aspect="auto", interpolation="nearest")
    axes.grid(False)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
    axes.set_yticks([-0.5, BANDS / 2 - 0.5, BANDS - 0.5], ["0", ".5", "1"], fontsize=8)
