"""Run the project's commands inside the test process, where libraries are imported once."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_command(words: list[str]) -> tuple[int, str, str]:
    """Run `python -m pipelines.NAME ...` or `lightning ...` in this process; status, stdout, stderr."""
    if words[:2] == ["python", "-m"]:
        module, args = words[2], words[3:]
    else:
        assert words[0] == "lightning"
        module, args = "pipelines.train", words[1:]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", [module, *args])
        patch.chdir(ROOT)
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return status, out.getvalue(), err.getvalue()
