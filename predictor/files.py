"""Files and directories that never look whole when they are not, and are never lost while they are replaced."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: nothing tells a killed writer's scratch from a living one's, so none is cleared
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".aside"  # of the scratch directories
REPLACED = "replaced"  # in a scratch directory: what was moved away to make room
PATIENCE = 2.0  # seconds that a reader gives a living writer between its two renames


@contextmanager
def write_aside(path: str | Path) -> Iterator[Path]:
    """Yield a fresh path beside ``path``; move it into place when the block ends well, remove it when it fails.

    The yielded path does not exist yet: create a file or a directory there. An existing ``path`` is replaced only at
    the very end, when the new one is on the disk, in one step: a process that is killed or interrupted leaves the old
    one or the new one. Where the kernel or the file system cannot exchange two directories it takes two renames, and
    :func:`recover` takes back a first one without a second.

    Example:
        >>> import tempfile, pathlib
        >>> target = pathlib.Path(tempfile.mkdtemp()) / "note.txt"
        >>> with write_aside(target) as aside:
        ...     _ = aside.write_text("whole")
        >>> target.read_text(), len(list(target.parent.iterdir()))
        ('whole', 1)
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    scratch, lock = _scratch(path)
    try:
        yield scratch / path.name
        _flush(scratch)
        _move(scratch / path.name, path, scratch / REPLACED)
        _flush(path.parent, deep=False)
    finally:
        _settle(scratch, path)
        os.close(lock)


def recover(path: str | Path) -> None:
    """Put back what a killed :func:`write_aside` had moved away, and remove what it left beside ``path``.

    To be called before a directory is read that is not there. What a living process writes is left alone.
    """
    path = Path(path)
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}{re.escape(SUFFIX)}")
    try:
        found = [path.parent / name for name in os.listdir(path.parent) if pattern.fullmatch(name)]
    except OSError:
        return
    for scratch in found:
        if (lock := _lock_of_the_dead(scratch, path.name)) is not None:
            try:
                _settle(scratch, path)
            finally:
                os.close(lock)


@contextmanager
def locked(folder: str | Path, patience: float) -> Iterator[None]:
    """Hold the lock of a folder, which other processes that ask for it wait for; it ends with the process.

    Nothing is held where the system or the file system has no locks.

    Args:
        folder: any directory. patience: seconds to wait for another process.

    Raises:
        TimeoutError: another process held it all the time.
    """
    if fcntl is None:
        yield
        return
    lock, began = os.open(folder, os.O_RDONLY), time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - began > patience:
                    raise TimeoutError(f"another process has held {folder} for {patience:g} seconds") from None
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(lock)


def sha256_file(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal.

    Example:
        >>> import tempfile, pathlib
        >>> p = pathlib.Path(tempfile.mkdtemp()) / "empty"; _ = p.write_bytes(b"")
        >>> sha256_file(p)[:8]
        'e3b0c442'
    """
    with open(path, "rb") as handle:
        digest = hashlib.sha256()
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# -- scratch directories -----------------------------------------------------------------------------------------


def _scratch(path: Path) -> tuple[Path, int]:
    """A new directory beside ``path``, and the descriptor that keeps it locked as long as this process lives."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=SUFFIX, dir=path.parent))
        with suppress(FileNotFoundError):
            lock = os.open(scratch, os.O_RDONLY)
            if fcntl is not None:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
            if scratch.exists():
                return scratch, lock
            os.close(lock)  # another process took it for a dead one's before it was locked


def _lock_of_the_dead(scratch: Path, name: str) -> int | None:
    """Lock a scratch directory whose process is gone; None for one that is used, or is not ours."""
    if fcntl is None:
        return None
    try:
        lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    began = time.monotonic()
    while os.fstat(lock).st_uid == os.geteuid() and set(os.listdir(lock)) <= {name, REPLACED}:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if REPLACED not in os.listdir(lock) or time.monotonic() - began > PATIENCE:
                break
            time.sleep(0.01)  # its process is between two renames
        except OSError:  # a file system without locks
            break
    os.close(lock)
    return None


def _settle(scratch: Path, path: Path) -> None:
    """Remove a scratch directory; what was moved away from ``path`` and not replaced goes back first."""
    if os.path.lexists(scratch / REPLACED) and not os.path.lexists(path):
        os.replace(scratch / REPLACED, path)
    shutil.rmtree(scratch, ignore_errors=True)


# -- into place --------------------------------------------------------------------------------------------------


def _move(aside: Path, path: Path, replaced: Path) -> None:
    """Move ``aside`` to ``path``; where that takes two steps, what was there goes to ``replaced`` first."""
    if not (aside.is_dir() and os.path.lexists(path)):
        try:
            os.replace(aside, path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was quicker
                raise
    if not _exchange(aside, path):
        os.replace(path, replaced)
        os.replace(aside, path)


def _exchange(one: Path, two: Path) -> bool:
    """Swap two names in one step; False where the kernel or the file system cannot.

    Source: renameat2(2), RENAME_EXCHANGE, Linux 3.15.
    """
    call = _renameat2()
    if call is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call(here, os.fsencode(one), here, os.fsencode(two), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(two))


@cache
def _renameat2() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or an older C library
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call


def _flush(path: Path, deep: bool = True) -> None:
    """Wait until a file, or a directory and with ``deep`` all in it, is on the disk."""
    if path.is_symlink():
        return
    if deep and path.is_dir():
        for each in path.iterdir():
            _flush(each)
    with suppress(PermissionError):  # a file that its owner may not read, Windows' directories
        handle = os.open(path, os.O_RDONLY)
        try:
            with suppress(OSError if path.is_dir() else PermissionError):  # not every file system flushes directories
                os.fsync(handle)
        finally:
            os.close(handle)
