"""Head budgets for people: what each allocation loses on held-out documents, and how much each kv head keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from pipelines.plots.quality import STYLE, pyplot, save
from predictor.budgets import ALLOCATIONS, HeadBudgets, lost_curves
from predictor.heuristics import GATE

LEAST = 1e-4  # a loss below this is drawn here


def format_lost(metrics: Mapping[str, float]) -> str:
    """Lay out lost attention by allocation, for a terminal.

    Example:
        >>> print(format_lost({"max/lost_at_0.25": 0.1, "max/lost_at_0.5": 0.0213, "uniform/lost_at_0.25": 0.5}))
        attention lost at the worst step, validation documents, by kept share
                                                       0.5    0.25
        by head, learned from the worst step        0.0213  0.1000
        all heads alike                                     0.5000
    """
    lost = lost_curves(metrics)
    budgets = sorted({budget for each in lost.values() for budget in each}, reverse=True)
    lines = ["attention lost at the worst step, validation documents, by kept share"]
    lines.append(" " * 42 + "".join(f"{budget:>8}" for budget in budgets))
    for kind in (kind for kind in ALLOCATIONS if kind in lost):
        cells = (f"{lost[kind][b]:8.4f}" if b in lost[kind] else " " * 8 for b in budgets)
        lines.append(f"{ALLOCATIONS[kind]:<42}" + "".join(cells))
    return "\n".join(lines)


def draw_head_budgets(path: Path, budgets: HeadBudgets, metrics: Mapping[str, float]) -> None:
    """Draw lost attention against the kept fraction, and the fraction of each kv head when a quarter is kept.

    Args:
        path: PNG to write. budgets: the table that is kept. metrics: of the validation, name -> value.
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1, 1.4))
    for (kind, lost), (colour, marker) in zip(sorted(lost_curves(metrics).items()), STYLE):
        fractions = sorted(lost)
        values = [max(lost[fraction], LEAST) for fraction in fractions]
        left.plot(fractions, values, color=colour, marker=marker, label=ALLOCATIONS[kind])
    left.set_xscale("log")
    left.set_xticks(fractions, map(str, fractions))
    left.minorticks_off()
    left.set_yscale("log")
    left.set_xlabel("kept share of the context, besides sinks and window")
    left.set_ylabel("attention lost at the worst step")
    left.set_title("validation documents, mean of all heads", fontsize=11, loc="left")
    left.legend(frameon=False, fontsize=9)
    kept = torch.tensor(list(budgets.allocate(GATE).values())).T.numpy()  # [H, layers]
    image = right.imshow(kept, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
    right.grid(False)
    right.set_xlabel("layer")
    if budgets.layers[-1] >= len(budgets.layers):  # some were left out: columns are not layers
        right.set_xticks(range(len(budgets.layers)), map(str, budgets.layers))
    right.set_ylabel("kv head")
    right.set_yticks(range(len(kept)))
    right.set_title(f"share that each head keeps of {GATE}", fontsize=11, loc="left")
    figure.colorbar(image, ax=right, pad=0.01)
    save(figure, path)
    plt.close(figure)
