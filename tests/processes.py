"""Processes of their own that start in no time: forked from a server that has imported the libraries once.

For tests of what happens between processes, or when one is killed. What needs a fresh interpreter, such as a test of
what is imported, starts one by `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRELOADED = ["pipelines.train", "pipelines.collect_traces", "fade_runtime", "mlflow.store.tracking.sqlalchemy_store"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


def _work(words: list[str], out: str, err: str, environment: dict[str, str]) -> None:
    """In the child: `python WORDS`, where WORDS are `-m MODULE ARGUMENTS` or `-c CODE ARGUMENTS`."""
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    option, program, *arguments = words
    sys.argv = [program if option == "-m" else option, *arguments]
    if option == "-m":
        warnings.filterwarnings("ignore", ".*found in sys.modules after import")
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(textwrap.dedent(program), "<code>", "exec"), {"__name__": "__main__"})


class Process:
    """`python WORDS`, running in the project's folder; used like `subprocess.Popen`.

    The variables of its environment are those of this process now, but libraries were imported under earlier ones.
    """

    def __init__(self, *words: object) -> None:
        self._files = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115
        names = (file.name for file in self._files)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = _context.Process(target=_work, args=([str(word) for word in words], *names, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The status, or less than zero: the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Does nothing once the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote to stdout and to stderr until its end, for which this waits at most `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired("python", timeout)
        out, err = (Path(file.name).read_text() for file in self._files)
        for file in self._files:
            file.close()
        return out, err


def run_python(*words: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGUMENTS` or `python -c CODE ARGUMENTS` to its end."""
    process = Process(*words)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(list(words), process.returncode or 0, out, err)
