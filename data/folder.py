"""A folder of files, on disk or anywhere that fsspec reaches; files in it are whole or not there."""

from __future__ import annotations

import fnmatch
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from predictor.errors import FadeError
from predictor.files import write_aside


class Folder:
    """A flat folder of files.

    Args:
        place: a path, or a URL such as ``s3://bucket/traces``; its protocol needs the fsspec plugin of its own.

    Raises:
        FadeError: a protocol that fsspec does not know, or whose plugin is not installed.

    Example:
        >>> folder = Folder("memory://traces")
        >>> with folder.write("note.txt") as path:
        ...     _ = path.write_text("whole")
        >>> with folder.fetch("note.txt") as path:
        ...     path.read_text(), folder.names("*.txt")
        ('whole', ['note.txt'])
    """

    def __init__(self, place: str | Path):
        self.place = str(place)
        self._files: Any = None
        if self.place.startswith("file://"):
            self._root = self.place.removeprefix("file://")
        elif "://" in self.place:
            try:
                self._files, self._root = fsspec.core.url_to_fs(self.place)
            except (ValueError, ImportError) as error:
                raise FadeError(f"folder {place} cannot be opened: {error}; install its fsspec plugin") from error
        else:
            self._root = self.place

    @classmethod
    def of(cls, place: Folder | str | Path) -> Folder:
        """The folder itself, or the one at a path or URL."""
        return place if isinstance(place, Folder) else cls(place)

    def __str__(self) -> str:
        """The path or URL."""
        return self.place

    def names(self, pattern: str = "*") -> list[str]:
        """Names of the files that match a pattern, sorted; none when there is no folder."""
        if self._files is None:
            return sorted(file.name for file in Path(self._root).glob(pattern) if file.is_file())
        try:
            self._files.invalidate_cache()
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(fnmatch.filter((path.rstrip("/").rpartition("/")[2] for path in found), pattern))

    @contextmanager
    def fetch(self, name: str) -> Iterator[Path]:
        """Yield a path to read a file at: its own, or that of a copy that lasts as long as the block.

        A missing file yields a path where nothing is.
        """
        if self._files is None:
            yield Path(self._root) / name
            return
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / name
            if self._files.exists(f"{self._root}/{name}"):
                self._files.get_file(f"{self._root}/{name}", str(copy))
            yield copy

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        if self._files is None:
            (Path(self._root) / name).unlink(missing_ok=True)
        elif self._files.exists(f"{self._root}/{name}"):
            self._files.rm_file(f"{self._root}/{name}")

    @contextmanager
    def write(self, name: str) -> Iterator[Path]:
        """Yield a path to write a file at; it is moved into place when the block ends well.

        What goes elsewhere is uploaded beside its place first: what is there stays until all of the new file is.
        """
        if self._files is None:
            with write_aside(Path(self._root) / name) as aside:
                yield aside
            return
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / name
            yield copy
            self._files.makedirs(self._root, exist_ok=True)
            beside = f"{self._root}/.{name}.{uuid.uuid4().hex[:8]}"
            try:
                self._files.put_file(str(copy), beside)
                self._files.mv(beside, f"{self._root}/{name}")
            except BaseException:
                if self._files.exists(beside):
                    self._files.rm_file(beside)
                raise
