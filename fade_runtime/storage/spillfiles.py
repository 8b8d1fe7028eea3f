"""Files of one process in a directory that others may share: for it alone, checked on each read, gone when it ends."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
import weakref
import zlib
from pathlib import Path

from predictor.errors import FadeError

PREFIX, LOCK, SUFFIX = "fade-spill-", "lock", ".safetensors"
FOLDER, FILE = re.compile(PREFIX + "[0-9a-f]{32}"), re.compile("[0-9]+" + re.escape(SUFFIX))
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # no link is followed, and no pipe waited for


class SpillError(FadeError):
    """Evicted tokens could not be stored, or are not there any more."""


class SpillFolder:
    """A new folder in a directory; it goes with this object, or at the next start after its process has died.

    The folder is its owner's alone and has a random name, and once it is open it is reached by its descriptor, never
    by a path again. Its lock file holds the folder's own name and stays locked while the process lives. What is
    removed at a start is what is surely abandoned: a folder (no link) of this user, closed to others, named so, whose
    lock holds that name and is free; and of it only files that are named as ours. A child that was forked owns
    nothing: it removes nothing, and is refused what it asks for.

    Args:
        directory: where the folder is made; it is made too if it is not there.

    Attributes:
        path: of the folder, for messages.

    Raises:
        FadeError: the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"{PREFIX}{secrets.token_hex(16)}"
        self._owner, self._numbers = os.getpid(), itertools.count(1)
        self._opened: list[int] = []  # the folder and its lock
        end = weakref.finalize(self, _end, self._owner, self._opened, self.path)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(directory)
            self.path.mkdir(mode=0o700)
            self._opened.append(_private_folder(self.path))
            self._opened.append(_new_lock(self._opened[0], self.path.name))
        except OSError as error:
            end()
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise FadeError(
                f"spill_dir {directory} cannot be written ({error.strerror}); name another folder"
            ) from error

    def check_process(self) -> None:
        """Refuse a process that was forked from the owner: files of its parent may go at any time.

        Raises:
            FadeError: this is another process.
        """
        if os.getpid() != self._owner:
            raise FadeError(
                f"the evicted tokens of this cache are in files of process {self._owner}, from which this one was "
                "forked; save a session before the fork and load it here, or use spill='host'"
            )

    def write(self, data: bytes) -> SpillFile:
        """Store bytes, all or nothing.

        Raises:
            OSError: no room for them. FadeError: this is a forked process.
        """
        self.check_process()
        name = f"{next(self._numbers)}{SUFFIX}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(name, flags, 0o600, dir_fd=self._opened[0]), "wb") as file:
                file.write(data)
            return SpillFile(self, name, data)
        except BaseException:  # an interrupt too
            self.remove(name)
            raise

    def read(self, name: str, most: int) -> bytes:
        """At most so many bytes of a file."""
        self.check_process()
        with open(os.open(name, READ, dir_fd=self._opened[0]), "rb") as file:
            return file.read(most)

    def remove(self, name: str) -> None:
        """Remove a file, if this process owns it."""
        if os.getpid() == self._owner:
            _unlink(self._opened[0], name)


class SpillFile:
    """Bytes in a file that never changes and goes with this object.

    Their checksum stays in memory. CRC-32 finds every change of up to 32 neighbouring bits, and all others but one in
    2^32: what disks do. It is no proof against forgery, but whoever may write the file may read this process's memory
    too. On one core it took 4.3 ms for 16 MiB, where reading took 3.0 ms from the page cache and 13 ms from a disk
    (BLAKE2b 24 ms, SHA-256 13 ms).
    """

    def __init__(self, folder: SpillFolder, name: str, data: bytes) -> None:
        self._folder, self._name, self._size, self._crc = folder, name, len(data), zlib.crc32(data)
        weakref.finalize(self, folder.remove, name)  # holds the folder until the file is gone

    def read(self) -> bytes:
        """The bytes, as they were written.

        Raises:
            SpillError: the file is gone, was cut, or holds anything else.
            FadeError: this is a forked process.
        """
        path = self._folder.path / self._name
        try:
            data = self._folder.read(self._name, self._size + 1)
        except OSError as error:
            raise SpillError(f"spill file {path} cannot be read ({error.strerror})") from error
        if len(data) != self._size:
            more = "more than " if len(data) > self._size else f"{len(data):,} bytes of "
            raise SpillError(f"spill file {path} has {more}{self._size:,}")
        if zlib.crc32(data) != self._crc:
            raise SpillError(f"spill file {path} does not match its checksum")
        return data


def _private_folder(path: Path) -> int:
    """Open a folder of this user that is closed to others.

    Raises:
        OSError: it is a link, or something else.
    """
    folder = os.open(path, READ | os.O_DIRECTORY)
    facts = os.fstat(folder)
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        os.close(folder)
        raise PermissionError(errno.EPERM, "a folder there is not closed to other users")
    return folder


def _new_lock(folder: int, name: str) -> int:
    """Make the lock file of a folder; it says what it is only once it is locked."""
    return _locked(os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder), name, new=True)


def _free_lock(folder: int, name: str) -> int:
    """Lock the lock file of a folder that was abandoned.

    Raises:
        OSError: there is none, it is not that of this folder, or a process has it.
    """
    return _locked(os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), name, new=False)


def _locked(lock: int, name: str, new: bool) -> int:
    import fcntl

    marker = f"{name}: evicted tokens of fade_runtime\n".encode()
    try:
        facts = os.fstat(lock)
        ours = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
        if not ours or os.read(lock, len(marker) + 1) != (b"" if new else marker):
            raise PermissionError(errno.EPERM, "a lock there is not ours")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if new:
            os.write(lock, marker)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove_abandoned(directory: Path) -> None:
    """Remove what processes that have died left in a directory; what is in doubt stays."""
    with contextlib.suppress(OSError):
        for name in filter(FOLDER.fullmatch, os.listdir(directory)):
            opened: list[int] = []
            with contextlib.suppress(OSError):
                opened.append(_private_folder(directory / name))
                opened.append(_free_lock(opened[0], name))
                _remove(opened[0], directory / name)
            for each in opened:
                os.close(each)


def _end(owner: int, opened: list[int], path: Path) -> None:
    """Close a folder; remove it, if this process owns it."""
    if opened and os.getpid() == owner:
        _remove(opened[0], path)
    for each in opened:
        os.close(each)


def _remove(folder: int, path: Path) -> None:
    """Remove our files of an open folder, its lock last, then the folder, unless something else is in it."""
    with contextlib.suppress(OSError):
        for name in filter(FILE.fullmatch, os.listdir(folder)):
            _unlink(folder, name)
    _unlink(folder, LOCK)
    with contextlib.suppress(OSError):
        path.rmdir()


def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
