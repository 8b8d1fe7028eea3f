"""A report as one HTML file that opens without network: style and pictures are in it."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable
from pathlib import Path

from predictor.errors import FadeError

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
h1, h2 { line-height: 1.25; margin-top: 2em }
h1 { margin-top: 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; margin: 1em 0 }
th, td { padding: .25em .7em; border-bottom: 1px solid #d8dee4; text-align: left; white-space: nowrap }
th { background: #f6f8fa; position: sticky; top: 0 }
tr:hover td { background: #f6f8fa }
img { max-width: 100%; height: auto }
code { background: #f6f8fa; padding: .1em .3em; border-radius: 4px; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0d1117 }
  th, tr:hover td, code { background: #161b22 }
  th, td { border-color: #30363d }
  img { background: #fff; border-radius: 4px }
}
"""


def renderer() -> Callable[[str], str]:
    """The function that turns Markdown with tables into HTML; what looks like HTML in it stays text.

    Raises:
        FadeError: markdown-it-py is not installed.
    """
    try:
        from markdown_it import MarkdownIt  # the extra demo
    except ImportError as error:
        raise FadeError("HTML reports need markdown-it-py; pip install 'fade-predictor[demo]'") from error
    return MarkdownIt("commonmark", {"html": False}).enable("table").render


def page(markdown: str, folder: Path) -> str:
    r"""A report in Markdown as one HTML page.

    Args:
        markdown: opens with its title. folder: where the pictures that it names lie.

    Example:
        >>> made = page("# Caches\n\n| a | b |\n| - | -: |\n| <x> | 1 |", Path())
        >>> "<title>Caches</title>" in made, "<td>&lt;x&gt;</td>" in made
        (True, True)
    """
    body = renderer()(markdown)
    body = re.sub(r'(<img src=")([^":]+)(")', lambda found: found[1] + _inlined(folder / found[2]) + found[3], body)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    title = html.escape(markdown.splitlines()[0].lstrip("# "))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def write_report(folder: Path, markdown: str, name: str = "report") -> None:
    """Write a report in Markdown, and as one HTML page.

    Args:
        folder: to write to; the pictures that the report names lie there. markdown: opens with its title.
        name: of both files, less their endings.
    """
    (folder / f"{name}.md").write_text(markdown, encoding="utf-8")
    (folder / f"{name}.html").write_text(page(markdown, folder), encoding="utf-8")


def _inlined(picture: Path) -> str:
    """A PNG as the address of itself."""
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
