"""Draw the mermaid blocks of the documentation as SVG files under `docs/diagrams`, for `make docs` to put in.

`python tools/draw_diagrams.py MERMAID` after a diagram was changed. MERMAID is `dist/mermaid.min.js` of the npm package
`mermaid` 11; headless Chromium runs it. Colours become those of the page, so that one drawing serves light and dark.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import subprocess
import tempfile
from pathlib import Path

from site_hooks import DIAGRAMS, ROOT, digest, name_of

# What mermaid is told to use, and what stands in the drawing instead.
COLOURS = {
    "#010203": "var(--md-default-fg-color, currentColor)",  # text
    "#020304": "var(--md-default-fg-color--light, currentColor)",  # lines
    "#030405": "var(--md-code-bg-color, transparent)",  # boxes
    "#040506": "var(--md-default-bg-color, transparent)",  # behind the text on lines
}
TEXT, LINE, BOX, PAPER = COLOURS
SETTINGS = {
    "startOnLoad": False,
    "theme": "base",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False, "curve": "basis", "padding": 12},
    "themeVariables": {
        "fontFamily": "DejaVu Sans",  # wider than most, so that texts fit their boxes elsewhere too
        "fontSize": "14px",
        **dict.fromkeys(("primaryTextColor", "textColor", "nodeTextColor", "titleColor"), TEXT),
        **dict.fromkeys(("primaryBorderColor", "lineColor", "nodeBorder", "clusterBorder"), LINE),
        **dict.fromkeys(("primaryColor", "mainBkg"), BOX),
        **dict.fromkeys(("edgeLabelBackground", "clusterBkg", "background"), PAPER),
    },
}
PAGE = """<!doctype html><meta charset="utf-8"><body><script src="{script}"></script><script>
mermaid.initialize({settings});
mermaid.render({name}, {source}).then(drawn => {{ document.body.textContent = drawn.svg; }});
</script></body>"""


def draw(source: str, script: Path) -> str:
    """The SVG of a mermaid block."""
    page = PAGE.format(
        script=script.resolve().as_uri(), settings=json.dumps(SETTINGS), name=json.dumps(f"diagram-{name_of(source)}"),
        source=json.dumps(source),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
        done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, check=True)
    svg = html.unescape(re.search(r"<svg.*</svg>", html.unescape(done.stdout), re.DOTALL)[0])  # type: ignore[index]
    for colour, instead in COLOURS.items():
        svg = svg.replace(colour, instead)
    svg = re.sub(r"font-family:[^;}]*DejaVu[^;}]*", "font-family:inherit", svg)
    return svg.replace(">", f"><!-- source {digest(source)} -->", 1) + "\n"


def main() -> None:
    """Draw all blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mermaid", type=Path)
    script = parser.parse_args().mermaid
    DIAGRAMS.mkdir(exist_ok=True)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for source in re.findall(
            r"^```mermaid\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            (DIAGRAMS / f"{name_of(source)}.svg").write_text(draw(source, script), encoding="utf-8")
            print(f"docs/diagrams/{name_of(source)}.svg")


if __name__ == "__main__":
    main()
