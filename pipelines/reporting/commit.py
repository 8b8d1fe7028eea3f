"""The commit that numbers were measured at."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path


@functools.cache
def this_commit() -> str:
    """The commit of this code: git is asked once, by a benchmark before it runs, for files may change meanwhile."""
    return commit()


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit that a folder is at, with a + if files of it have changed since; empty where there is no git."""
    try:
        head, changed = (
            subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout
            for words in (("rev-parse", "--short=10", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.strip() + ("+" if changed.strip() else "")
