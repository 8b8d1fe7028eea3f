"""Draw the picture of the README, for light and for dark pages: `python tools/draw_picture.py`.

KL against compression at equal true bytes, from the committed rows of docs/results/proof.jsonl. Written as text, so
that it is small and the same everywhere.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS, PICTURES = ROOT / "docs" / "results" / "proof.jsonl", ROOT / "docs" / "pictures"
SIZES = ("3.2x", "6x", "10x")
# Label -> methods of one line, smallest compression first; the lines of kvpress share a label.
OURS = {"fade-predictor": [f"ours {size}" for size in SIZES]}
ORACLE = {"knows the future": [f"oracle + heads {size}" for size in SIZES]}
PRESSES = ("snapkv", "expected attention", "tova", "streaming llm", "keydiff", "knorm")
THEIRS = {
    **{press: [f"{press} {size}" for size in SIZES] for press in PRESSES},
    "quanto": ["quanto 4 bits", "quanto 2 bits"],
    "hqq": ["hqq 4 bits", "hqq 2 bits", "hqq 1 bit"],
}
COLOURS = {  # text, grid, others, ours, presses, oracle
    "kl.svg": ("#1f2328", "#d8dce2", "#57606a", "#0550ae", "#bc4c00", "#8b949e"),
    "kl-dark.svg": ("#e6edf3", "#3d444d", "#9198a1", "#58a6ff", "#f0883e", "#7d8590"),
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 340, 62, 150, 34, 46
LOW, HIGH, FIRST, LAST = 1e-3, 20.0, 3.0, 10.6


def x_of(compression: float) -> float:
    """Pixel of a compression."""
    return LEFT + (WIDTH - LEFT - RIGHT) * (compression - FIRST) / (LAST - FIRST)


def y_of(kl: float) -> float:
    """Pixel of a KL."""
    return TOP + (HEIGHT - TOP - BOTTOM) * math.log(HIGH / kl) / math.log(HIGH / LOW)


def picture(rows: dict[str, tuple[float, float]], name: str) -> str:
    """SVG of all lines.

    Args:
        rows: method -> compression and KL. name: of the file, for its colours.
    """
    text, grid, others, ours, presses, oracle = COLOURS[name]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" '
        f'fill="{text}">',
        f'<text x="{LEFT}" y="18">KL to the full cache, nats per token (30 texts, 2,048 tokens)</text>',
    ]
    for kl in (0.001, 0.01, 0.1, 1, 10):
        y = y_of(kl)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{grid}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{kl:g}</text>')
    for compression in (4, 6, 8, 10):
        out.append(
            f'<text x="{x_of(compression):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{compression}x</text>'
        )
    out.append(
        f'<text x="{LEFT}" y="{HEIGHT - 8}">compression: bytes of the full cache / true bytes of the cache</text>'
    )

    def line(methods: list[str], colour: str, width: float, more: str = "") -> tuple[float, float]:
        points = [(x_of(rows[method][0]), y_of(rows[method][1])) for method in methods]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{more}/>')
        out.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{width + 1.5}" fill="{colour}"/>' for x, y in points)
        return points[-1]

    ends = {label: line(methods, presses if label in PRESSES else others, 1.5) for label, methods in THEIRS.items()}
    ends |= {label: line(methods, oracle, 1.5, ' stroke-dasharray="5 4"') for label, methods in ORACLE.items()}
    ends |= {label: line(methods, ours, 3) for label, methods in OURS.items()}
    labels = {
        "hqq": ("hqq", others, 0),
        "quanto": ("quanto", others, -10),
        "expected attention": ("six presses of kvpress", presses, 0),
        "fade-predictor": ("fade-predictor", ours, 2),
        "knows the future": ("knows the future", oracle, 8),
    }
    for label, (shown, colour, down) in labels.items():
        (x, y), bold = ends[label], ' font-weight="600"' if label in OURS else ""
        out.append(f'<text x="{x + 10:.1f}" y="{y + 4 + down:.1f}" fill="{colour}"{bold}>{shown}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def measured() -> dict[str, tuple[float, float]]:
    """Compression and KL of each method of the committed run."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    return {row["method"]: (row["compression"], row["kl"]) for row in rows if row.get("kind") == "method"}


def main() -> None:
    """Write both pictures."""
    for name in COLOURS:
        (PICTURES / name).write_text(picture(measured(), name), encoding="utf-8")


if __name__ == "__main__":
    main()
