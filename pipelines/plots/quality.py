"""The pictures of an evaluation. matplotlib comes with the `demo` extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.reporting.rows import FULL
from predictor.errors import FadeError

# Okabe and Ito's colours, told apart under every common colour blindness; markers repeat the distinction.
STYLE = [
    ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"),
    ("#56B4E9", "P"), ("#000000", "X"), ("#8C6D31", "*"),
]  # fmt: skip
SMALLEST = 1e-5  # KL below this is drawn here


def pyplot() -> Any:
    """matplotlib.pyplot with this project's style.

    Raises:
        FadeError: matplotlib is not installed.
    """
    try:
        import matplotlib  # the extra demo
    except ImportError as error:
        raise FadeError("plots need matplotlib; pip install 'fade-predictor[demo]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # after the backend is chosen

    plt.rcParams.update(
        {
            "font.size": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e4e4e4",
            "axes.axisbelow": True,
            "figure.constrained_layout.use": True,
            "savefig.dpi": 110,
        }
    )
    return plt


def quality_against_bytes(path: Path, methods: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw each method's KL against its resident bytes; a line goes up to its worst text.

    Args:
        path: PNG to write.
        methods: rows with method, kl, kl_worst, resident_bytes, full_bytes; the full cache is drawn as a line.
        title: above the plot.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.8))
    full = next(row["full_bytes"] for row in methods) / 2**20
    others = [row for row in methods if row["method"] != FULL]
    for row, (colour, marker) in zip(others, STYLE * len(others)):
        size, kl, worst = (
            row["resident_bytes"] / 2**20,
            *(max(row[key], SMALLEST) for key in ("kl", "kl_worst")),
        )
        axes.plot([size, size], [kl, worst], color=colour, linewidth=1, alpha=0.5)
        axes.plot(size, kl, marker, color=colour, markersize=9, markeredgecolor="white", markeredgewidth=0.7)
    axes.axvline(full, color="#555555", linestyle="--", linewidth=1)
    axes.text(full, 0.97, "full cache ", transform=axes.get_xaxis_transform(), ha="right", va="top", color="#555555")
    axes.set_yscale("log")
    axes.set_xlim(0, full * 1.03)
    low, high = min(max(row["kl"], SMALLEST) for row in others), max(row["kl_worst"] for row in others)
    axes.set_ylim(low / 2, max(high, low) * 2)
    axes.set_xlabel("resident cache, MiB (16-bit model)")
    axes.set_ylabel("KL to the full cache, nats per token")
    axes.set_title(title, fontsize=11, loc="left")
    places = [(row["resident_bytes"] / 2**20, max(row["kl"], SMALLEST)) for row in others]
    label_points(figure, axes, places, [row["method"] for row in others], [colour for colour, _ in STYLE])
    save(figure, path)
    plt.close(figure)


def losses_by_task(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a table of tasks and caches, coloured by KL, each with KL and compression written in it.

    Args:
        path: PNG to write.
        rows: of tasks, with task, method, kl, compression; those of the full cache are left out.
    """
    from matplotlib.colors import LogNorm  # the extra demo

    plt = pyplot()
    found = {(row["task"], row["method"]): row for row in rows if row["method"] != FULL}
    tasks, methods = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    values = np.full((len(tasks), len(methods)), np.nan)
    for (task, method), row in found.items():
        values[tasks.index(task), methods.index(method)] = max(row["kl"], SMALLEST)
    figure, axes = plt.subplots(figsize=(2.2 + 1.25 * len(methods), 1.2 + 0.42 * len(tasks)))
    norm = LogNorm(1e-4, 3, clip=True)
    image = axes.imshow(values, norm=norm, cmap="cividis_r", aspect="auto")
    axes.set_xticks(range(len(methods)), methods, rotation=20, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(tasks)), tasks)
    axes.grid(False)
    for (task, method), row in found.items():
        place = methods.index(method), tasks.index(task)
        dark = norm(max(row["kl"], SMALLEST)) > 0.5
        text = f"{row['kl']:.3f}\n{row['compression']:.1f}x"
        axes.text(*place, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    figure.colorbar(image, ax=axes, label="KL to the full cache, nats")
    save(figure, path)
    plt.close(figure)


def save(figure: Any, path: Path) -> None:
    """Write a figure as a PNG of 256 colours, a third of the size."""
    from PIL import Image  # comes with matplotlib

    figure.savefig(path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)  # thin lines keep their colours
    small.save(path, optimize=True)


def label_points(
    figure: Any, axes: Any, places: Sequence[tuple[float, float]], texts: Sequence[str], colours: Any
) -> None:
    """Write a label to the right of each point, apart from each other, with a thin line where it had to move."""
    figure.canvas.draw()
    scale = figure.dpi / 72  # pixels in a point
    pixels = axes.transData.transform(places)
    heights = spread(pixels[:, 1], gap=15 * scale)
    for (x, y), (_, pixel), height, text, colour in zip(places, pixels, heights, texts, colours * len(texts)):
        moved = (height - pixel) / scale
        axes.annotate(
            text,
            (x, y),
            xytext=(22, moved),
            textcoords="offset points",
            va="center",
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4},
        )


def spread(values: Any, gap: float) -> np.ndarray:
    """Move values apart until neighbours are ``gap`` apart, keeping their order and the centre of each cluster.

    Example:
        >>> spread([10.0, 0.0, 11.0], gap=5).tolist()
        [8.0, 0.0, 13.0]
    """
    values = np.asarray(values, float)
    order = np.argsort(values, kind="stable")
    clusters: list[list[float]] = []  # values of each cluster; its places are evenly spaced around their mean
    for value in values[order]:
        clusters.append([value])
        while len(clusters) > 1:
            below, above = clusters[-2], clusters[-1]
            top = np.mean(below) + gap * (len(below) - 1) / 2
            if np.mean(above) - gap * (len(above) - 1) / 2 - top >= gap:
                break
            clusters[-2:] = [below + above]
    places = [np.mean(c) + gap * (i - (len(c) - 1) / 2) for c in clusters for i in range(len(c))]
    out = np.empty_like(values)
    out[order] = places
    return out


def attention_and_forecasts(
    path: Path,
    recorded: np.ndarray,
    forecast: np.ndarray,
    once: Mapping[str, np.ndarray],
    block: int,
    names: tuple[str, str],
) -> None:
    """Draw recorded attention beside its forecast, and below them the mean over time with all forecasts.

    Args:
        path: PNG to write.
        recorded: [T, N] fraction of the prompt's attention on each block, at each step.
        forecast: [T, N] forecast of it.
        once: name -> [N] forecasts of the mean over time, made before the first step.
        block: tokens in a block.
        names: title of the plot, and name of the forecast.
    """
    from matplotlib.colors import LogNorm  # the extra demo

    plt = pyplot()
    figure = plt.figure(figsize=(10, 7))
    grid = figure.add_gridspec(2, 2, height_ratios=(1.3, 1))
    norm = LogNorm(1e-4, max(float(recorded.max()), 1e-3), clip=True)
    left = figure.add_subplot(grid[0, 0])
    right = figure.add_subplot(grid[0, 1], sharex=left, sharey=left)
    extent = (0, recorded.shape[1] * block, recorded.shape[0], 0)
    for axes, image, name in (
        (left, recorded, "recorded"),
        (right, forecast, names[1]),
    ):
        shown = axes.imshow(image, norm=norm, cmap="cividis", aspect="auto", extent=extent, interpolation="nearest")
        axes.grid(False)
        axes.set_title(name, fontsize=11, loc="left")
        axes.set_xlabel("position in the prompt, tokens")
    left.set_ylabel("step after the prompt")
    right.tick_params(labelleft=False)
    figure.colorbar(shown, ax=[left, right], label=f"attention on a block of {block} tokens", pad=0.01)
    below = figure.add_subplot(grid[1, :])
    middle = (np.arange(recorded.shape[1]) + 0.5) * block
    below.plot(middle, recorded.mean(0), color="#000000", linewidth=2.2, label="recorded, mean over the steps")
    for (name, values), (colour, marker) in zip(once.items(), STYLE):
        below.plot(middle, values, color=colour, marker=marker, markersize=3.5, linewidth=1.1, label=name)
    below.set_yscale("log")
    below.set_ylim(recorded.mean(0).clip(1e-6).min() / 5, 1)  # a forecast far below what happens is cut off
    below.set_xlim(0, recorded.shape[1] * block)
    below.set_xlabel("position in the prompt, tokens")
    below.set_ylabel("share of the attention")
    below.legend(frameon=False, ncols=1 + len(once), loc="lower left", bbox_to_anchor=(0, 1.0))
    figure.suptitle(names[0], fontsize=12, x=0.01, ha="left")
    save(figure, path)
    plt.close(figure)
