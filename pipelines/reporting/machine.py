"""What numbers were measured with: processor, threads, versions, commit."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """What the numbers were measured with: processor, threads, versions."""
    packages = ("fade-predictor", "torch", "transformers", "lightning", "numpy")
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def processor() -> str:
    """The name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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
