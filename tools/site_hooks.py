"""What `make docs` adds to mkdocs: drawn diagrams, and pages whose source lies outside `docs/`.

mkdocs loads this file by its path (`hooks:` in mkdocs.yml). Nothing is fetched: a mermaid block becomes the SVG that
`tools/draw_diagrams.py` drew of it, and a block that was changed since then is an error.
"""

from __future__ import annotations

import hashlib
import html
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
DIAGRAMS = ROOT / "docs" / "diagrams"
# Page of the site -> file of the repository, and how links in it change.
ELSEWHERE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "results/bundle.md": "predictor/bundles/smollm2-135m-instruct/README.md",
}


def on_config(config: Any) -> Any:
    """Draw mermaid blocks."""
    fence = {"name": "mermaid", "class": "mermaid", "format": diagram}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are kept elsewhere in the repository."""
    for page, source in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to files outside `docs/` lead to their page."""
    for page, source in ELSEWHERE.items():
        markdown = re.sub(rf"\]\((?:\.\./)+{re.escape(source)}\)", f"]({Path(page).name})", markdown)
    return markdown


def diagram(source: str, *_: Any, **__: Any) -> str:
    """The SVG of a mermaid block, whose first line is a comment with its name.

    Raises:
        PluginError: it has not been drawn, or was changed since.
    """
    name, path = name_of(source), DIAGRAMS / f"{name_of(source)}.svg"
    if not path.is_file() or digest(source) not in (drawn := path.read_text(encoding="utf-8")):
        raise PluginError(f"diagram {name} is not drawn as it is written; run tools/draw_diagrams.py")
    return f'<figure class="diagram" role="img" aria-label="{html.escape(name)}">{drawn}</figure>'


def name_of(source: str) -> str:
    """Name of a mermaid block: its first line without ``%%``."""
    return source.strip().splitlines()[0].removeprefix("%%").strip()


def digest(source: str) -> str:
    """What a drawing says of its source."""
    return hashlib.sha256(source.strip().encode()).hexdigest()
