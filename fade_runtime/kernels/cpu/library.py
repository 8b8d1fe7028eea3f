"""The C kernel's library: built once by the machine's own compiler, kept in a private folder, checked before each load.

A library's name holds a hash of what it was built from (source, flags, compiler, processor) and the SHA-256 of its own
bytes. Nothing is loaded but a file of this user (or of root) that nobody else may write and whose bytes have the hash
in its name; any other is built anew. Owner, mode and hash are read from one open file, and that file is what is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fade_runtime.kernels.cpu import layout
from predictor.errors import FadeError

SOURCE = Path(__file__).with_name("attend.c")
INCLUDED = ("abi.h", "vectors.inc.h", "codes.inc.h", "vnni.inc.h", "splits.inc.h")
FLAGS = ("-O3", "-fPIC", "-shared", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-pthread")
SECONDS = 120.0  # that a compiler may take
OWN_FOLDER = "set XDG_CACHE_HOME to a folder of your own"


def load(march: str | None = None) -> ctypes.CDLL:
    """The kernel's library, built if it is not there; arguments and errors of :func:`build`."""
    return _found(march)[1]


def build(march: str | None = None) -> Path:
    """Build the kernel unless it is there already; return where its library is kept.

    Args:
        march: instruction set, as GCC's ``-march`` names it; None: that of the environment's ``FADE_MARCH``, else
            this processor's.

    Raises:
        FadeError: there is no compiler, or it fails, hangs or builds something else; no folder to keep a library in.
        OSError: the system refuses to read, write or load.
    """
    return _found(march)[0]


def _found(march: str | None) -> tuple[Path, ctypes.CDLL]:
    if os.name != "posix":
        raise FadeError(f"the C kernel is not built on {platform.system()}; it needs a POSIX system")
    compiler, march = _compiler(), march or os.environ.get("FADE_MARCH") or "native"
    stem = f"attend-{_facts(compiler, march)}-"
    with _folder() as (path, folder):
        for name in sorted(os.listdir(folder)):
            if name.startswith(stem):
                library = _open(name, folder)
                if library is not None and name == f"{stem}{_digest(library)}.so":
                    return path / name, _load(path / name, library)
                with contextlib.suppress(FileNotFoundError):  # another process was quicker
                    os.unlink(name, dir_fd=folder)
        return _build([*compiler, f"-march={march}"], path, stem)


def _build(compiler: Sequence[str], path: Path, stem: str) -> tuple[Path, ctypes.CDLL]:
    """Compile, load, and keep what could be loaded; each process by itself, of several the last one's is kept."""
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".build-", dir=path, ignore_cleanup_errors=True)
    except OSError as problem:
        raise FadeError(f"no room in {path} for the compiled kernel ({problem.strerror}); {OWN_FOLDER}") from None
    with scratch as folder:
        aside = Path(folder) / "attend.so"
        words = [*compiler, *FLAGS, str(SOURCE), "-o", str(aside), "-lm"]
        status, _, said = _run(words, TMPDIR=folder)
        if status or not aside.is_file():
            first = said.decode(errors="replace").strip().splitlines()[:1] or [f"status {status}, and no library"]
            raise FadeError(f"{compiler[0]} could not compile {SOURCE.name}: {first[0]}; set CC to a C compiler")
        aside.chmod(0o700)
        library = _open(aside)
        if library is None:
            raise FadeError(f"{aside} is not what {compiler[0]} was to write; {OWN_FOLDER}")
        loaded = _load(aside, library)
        kept = path / f"{stem}{_digest(library)}.so"
        os.replace(aside, kept)
        return kept, loaded


def _compiler() -> list[str]:
    """The words that call the C compiler."""
    named = os.environ.get("CC", "").strip()
    if named:
        try:
            words = [named] if shutil.which(named) else shlex.split(named)
        except ValueError:
            words = []
        if not words or shutil.which(words[0]) is None:
            raise FadeError(f"no C compiler: CC is {named!r}, which is no program; unset it, or name one that is there")
        return words
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        raise FadeError("no C compiler found; install gcc for the fast CPU kernel")
    return [found]


def _facts(compiler: Sequence[str], march: str) -> str:
    """A hash of all that makes one library another than the next."""
    digest = hashlib.sha256(_run([*compiler, "--version"])[1])
    for text in (*compiler, march, *FLAGS, platform.machine(), _processor()):
        digest.update(text.encode(errors="surrogateescape") + b"\n")
    for source in (SOURCE, *map(SOURCE.with_name, INCLUDED)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor()
    return next((line for line in info.splitlines() if line.startswith(("flags", "Features"))), "")


def _run(words: Sequence[str], **environment: str) -> tuple[int, bytes, bytes]:
    """Status, output and errors of a program; what it started ends with it when it takes too long."""
    try:
        started = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C", **environment},
        )
    except OSError as problem:
        raise FadeError(f"no C compiler: {words[0]} cannot be run ({problem.strerror}); set CC to one") from None
    with started as process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
            return process.returncode, output, errors
        except BaseException as problem:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(problem, subprocess.TimeoutExpired):
                raise
            raise FadeError(f"{words[0]} did not end within {SECONDS:g} s; set CC to a C compiler that does") from None


@contextlib.contextmanager
def _folder() -> Iterator[tuple[Path, int]]:
    """The folder that libraries are kept in, and a descriptor of it: this user's own, closed to others."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise FadeError(f"no home folder to keep the compiled kernel in; {OWN_FOLDER}") from None
    if not root.is_absolute():
        raise FadeError(f"XDG_CACHE_HOME is {str(root)!r}, which depends on where a program runs; make it absolute")
    path = root / "fade-predictor"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as problem:
        raise FadeError(f"no folder {path} for the compiled kernel ({problem.strerror}); {OWN_FOLDER}") from None
    try:
        found = os.fstat(folder)
        if not _trusted(found):
            raise FadeError(f"{path} belongs to user {found.st_uid}, who could replace what is run; {OWN_FOLDER}")
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != 0o700:
            os.fchmod(folder, 0o700)
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise FadeError(f"others may write in {path}; {OWN_FOLDER}")
        yield path, folder
    finally:
        os.close(folder)


def _trusted(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid())


def _open(path: str | Path, folder: int | None = None) -> int | None:
    """A descriptor of a regular file of this user or of root that nobody else may write; None: it is none."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    found = os.fstat(opened)
    if stat.S_ISREG(found.st_mode) and _trusted(found) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return opened
    os.close(opened)
    return None


def _digest(opened: int) -> str:
    """SHA-256 of an open file, in hexadecimal."""
    digest = hashlib.sha256()
    os.lseek(opened, 0, os.SEEK_SET)
    while chunk := os.read(opened, 1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _load(path: Path, opened: int) -> ctypes.CDLL:
    """Load an open file. It stays open: the loader knows libraries by name, and this one's is the descriptor's.

    Raises:
        FadeError: it is no library, lacks the kernel, or was built of other structures.
    """
    same = Path(f"/proc/self/fd/{opened}")
    try:
        library = ctypes.CDLL(str(same if same.exists() else path))
        library.attend  # noqa: B018  looked up now
        layout.check(library)
    except (OSError, AttributeError, ValueError) as problem:  # the last: a symbol that is not there
        remedy = "set CC to another compiler, or XDG_CACHE_HOME to a folder that programs may run from"
        raise FadeError(f"what the C compiler built cannot be loaded ({problem}); {remedy}") from None
    return library
