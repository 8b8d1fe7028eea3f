"""Files that never look whole when they are not."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_aside(path: str | Path) -> Iterator[Path]:
    """Yield a fresh path beside ``path``; move it into place when the block ends well, remove it when it fails.

    The yielded path does not exist yet: create a file or a directory there. An existing ``path`` is replaced
    only at the very end.

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
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    aside = scratch / path.name
    try:
        yield aside
        if aside.is_dir() and path.exists():
            os.replace(path, scratch / "replaced")  # a directory cannot be replaced in one step
        os.replace(aside, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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
