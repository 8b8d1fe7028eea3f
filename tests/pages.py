"""The pages of the documentation as tests read them: code blocks, commands, links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"`((?:python -m pipelines\.\w+|lightning|make)\s[^`]+)`")  # with an argument


def named(path: Path) -> str:
    """Path of a page in the repository, as a test's id."""
    return str(path.relative_to(ROOT))


def blocks(language: str, text: str) -> list[str]:
    """Fenced blocks of a language."""
    return [block for found, block in FENCE.findall(text) if found == language]


def runs(text: str) -> list[tuple[str, str | None]]:
    """Python blocks, each with what it is said to print: the text block that follows at once, or None."""
    found = list(FENCE.finditer(text))
    said: list[tuple[str, str | None]] = []
    for at, block in enumerate(found):
        if block[1] != "python":
            continue
        after = found[at + 1] if at + 1 < len(found) else None
        follows = after is not None and after[1] == "text" and not text[block.end() : after.start()].strip()
        said.append((block[2], after[2] if after is not None and follows else None))
    return said


def commands(text: str) -> list[str]:
    """Commands of shell blocks, and inline code that starts like a command of ours, each on one line."""
    lines = [line for block in blocks("sh", text) for line in re.sub(r"\\?\n +", " ", block).splitlines()]
    lines += [" ".join(code.split()) for code in OURS.findall(FENCE.sub("", text))]
    lines = [re.split(r"\s{2,}#", line)[0].strip() for line in lines]
    return [line for line in lines if line and "NAME" not in line.split("--")[0]]
