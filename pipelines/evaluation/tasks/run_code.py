"""Run a program that a model wrote: in a process and a folder of its own, with little time and memory.

This is no sandbox. It keeps accidents small; it does not stop a program that means harm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

SECONDS, MEMORY = 10, 1 << 30


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Whether a Python program ends by itself, without an error, in time.

    Args:
        program: its source. seconds: after which it is killed, with all that it started.

    Example:
        >>> passes("assert 1 + 1 == 2"), passes("assert False"), passes("while True: pass", seconds=0.2)
        (True, False, False)
    """
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
            preexec_fn=_limits(),
        )
        try:
            process.communicate(program.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
    return process.returncode == 0


def _limits() -> Callable[[], None] | None:
    """What the new process does to itself before it runs; nothing where the system has no such limits."""
    try:
        import resource
    except ImportError:  # Windows
        return None

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    return limit


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and what it started."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()
