"""The C kernel's library: what is loaded is what was built, and what goes wrong is said once."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import pwd
import shutil
import stat
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fade_runtime.kernels import reference
from fade_runtime.kernels.cpu import attention as cpu
from fade_runtime.kernels.cpu import library
from fade_runtime.kernels.dispatch import forget, pick_kernel

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="builds libraries of its own with gcc"),
]
ROOT = os.geteuid() == 0
OTHER = 54321  # a user that is not this one


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real library of the kernel."""
    path = tmp_path_factory.mktemp("built") / "attend.so"
    subprocess.run(["gcc", "-O0", *library.FLAGS[1:], str(library.SOURCE), "-o", str(path), "-lm"], check=True)
    return path


@pytest.fixture
def compiler(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a compiler of a few lines of shell, in which $out is the file that is asked for; by default a quick one."""

    def make(body: str = f'cp {built} "$out"', version: str = "echo quick 1.0", name: str = "quickcc") -> Path:
        path = tmp_path / name
        words = 'while [ $# -gt 1 ]; do if [ "$1" = -o ]; then out="$2"; fi; shift; done'
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {version}; exit; fi\n{words}\n{body}\n')
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return path

    make()
    return make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are kept; not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fade-predictor"


@pytest.fixture(autouse=True)
def _undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    monkeypatch.setattr(cpu, "_library", cpu._library.__wrapped__)
    yield
    forget()


def _kept(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _compile(code: str, to: Path) -> Path:
    """A library of a few lines of C."""
    source = to.with_suffix(".c")
    source.write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(to)], check=True)
    return to


def _slow(match: str) -> str:
    """What the one warning says when plain torch is picked."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        picked = [pick_kernel(torch.device("cpu")) for _ in range(3)]
    assert picked == [reference.attend] * 3
    (warning,) = said
    text = str(warning.message)
    assert text.startswith("slow attention over packed tokens: ")
    assert match in text
    return text


@pytest.mark.usefixtures("compiler")
def test_a_library_is_kept_in_a_private_folder_under_its_own_hash(folder: Path, built: Path) -> None:
    assert library.load().attend
    (kept,) = _kept(folder)
    assert library.build() == kept
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not kept.stat().st_mode & 0o077
    assert kept.stem.split("-")[-1] == hashlib.sha256(built.read_bytes()).hexdigest()
    assert pick_kernel(torch.device("cpu")) is cpu.attend


def test_a_kept_library_is_not_built_again(folder: Path, compiler: Callable[..., Path]) -> None:
    library.load()
    before = [(each, each.stat().st_ino) for each in _kept(folder)]
    path = compiler()
    path.write_text(path.read_text().replace("cp ", "exit 1; cp "))
    library.load()
    assert [(each, each.stat().st_ino) for each in _kept(folder)] == before


def _instead(make: Callable[[Path, bytes], Any]) -> Callable[[Path], None]:
    """Put another file in a library's place; the one that this process has loaded stays as it is."""

    def replace(path: Path) -> None:
        content = path.read_bytes()
        path.rename(path.with_name("loaded"))
        make(path, content)
        path.chmod(0o700)

    return replace


def _flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


SPOILED = {
    "cut": _instead(lambda path, content: path.write_bytes(content[:9000])),
    "flipped": _instead(lambda path, content: path.write_bytes(_flipped(content))),
    "empty": _instead(lambda path, _: path.write_bytes(b"")),
    "another library": _instead(lambda path, _: _compile("int attend(void *c) { return 0; }", path)),
    "a link": _instead(lambda path, _: path.symlink_to(path.with_name("loaded"))),
    "a pipe": _instead(lambda path, _: os.mkfifo(path)),
    "writable by all": lambda path: path.chmod(0o777),
    "writable by a group": lambda path: path.chmod(0o720),
    "of another user": lambda path: os.chown(path, OTHER, OTHER),
}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("how", SPOILED)
def test_what_is_not_as_built_is_built_anew_and_never_loaded(how: str, folder: Path, built: Path) -> None:
    if how == "of another user" and not ROOT:
        pytest.skip("only root may give files away")
    library.load()
    (kept,) = _kept(folder)
    SPOILED[how](kept)
    assert library.load().attend
    assert kept.read_bytes() == built.read_bytes()
    found = kept.lstat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode), stat.S_ISREG(found.st_mode)) == (os.geteuid(), 0o700, True)


@pytest.mark.usefixtures("compiler")
def test_a_planted_library_does_not_run(folder: Path, tmp_path: Path) -> None:
    """One that says so when it is loaded, under a name that was seen before, in a folder that all may write to."""
    library.load()
    (kept,) = _kept(folder)
    told = tmp_path / "told"
    code = f'#include <fcntl.h>\n__attribute__((constructor)) void f(void) {{ creat("{told}", 0600); }}\n'
    planted = _compile(code + "int attend(void *c) { return 0; }", tmp_path / "planted.so")
    ctypes.CDLL(str(planted))
    assert told.exists()  # the trap works
    told.unlink()
    shutil.copy(planted, tmp_path / "copy.so")
    os.replace(tmp_path / "copy.so", kept)
    kept.chmod(0o777)
    folder.chmod(0o777)
    library.load()
    assert not told.exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="loads by descriptor where there is /proc")
def test_what_is_loaded_is_what_was_checked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file that takes the name after the check is not what is loaded."""
    library.load()
    (kept,) = _kept(folder)
    other = _compile("int attend(void *c) { return 0; } int other;", tmp_path / "other.so")
    digest = library._digest

    def swap(opened: int) -> str:
        found = digest(opened)
        os.replace(other, kept)
        return found

    monkeypatch.setattr(library, "_digest", swap)
    assert not hasattr(library.load(), "other")
    assert hasattr(ctypes.CDLL(str(kept)), "other")


@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(not ROOT, reason="only root may give folders away")
def test_a_folder_of_another_user_is_not_used(folder: Path) -> None:
    library.load()
    os.chown(folder, OTHER, OTHER)
    assert "set XDG_CACHE_HOME to a folder of your own" in _slow(f"{folder} belongs to user {OTHER}")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_folder_is_not_used(kind: str, folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir()
    folder.symlink_to(tmp_path) if kind == "link" else folder.write_text("")
    assert "set XDG_CACHE_HOME to a folder of your own" in _slow(f"no folder {folder} for the compiled kernel")


def _load_in_child(_: int) -> bool:
    return bool(library.load().attend)


def test_processes_that_begin_together_all_get_a_whole_library(
    folder: Path, built: Path, compiler: Callable[..., Path]
) -> None:
    compiler(f'head -c 9000 {built} > "$out"; sleep 0.3; cp {built} "$out"')
    with multiprocessing.get_context("fork").Pool(6) as pool:
        assert pool.map(_load_in_child, range(6), chunksize=1) == [True] * 6
    (kept,) = _kept(folder)  # and nothing half-written beside it
    assert kept.read_bytes() == built.read_bytes()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiler")
def test_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)

    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert "set XDG_CACHE_HOME to a folder of your own" in _slow("no home folder to keep the compiled kernel in")


@pytest.mark.usefixtures("compiler")
def test_a_cache_folder_that_moves_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert "make it absolute" in _slow("XDG_CACHE_HOME is 'cache'")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("named", ["/nonexistent", "nonexistent -m64", "'"])
def test_a_compiler_that_is_not_there(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", named)
    assert "unset it, or name one that is there" in _slow("no C compiler: CC is ")


BAD = {
    "fails": ("echo wrong >&2; exit 1", "could not compile attend.c: wrong; set CC to a C compiler"),
    "fails in another alphabet": ("printf '\\377\\376' >&2; exit 1", "could not compile attend.c: ��; set CC"),
    "writes nothing": ("exit 0", "could not compile attend.c: status 0, and no library; set CC"),
    "writes an empty file": (': > "$out"', "what the C compiler built cannot be loaded"),
    "writes what is no library": ('echo hello > "$out"', "what the C compiler built cannot be loaded"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_compiler_that(how: str, folder: Path, compiler: Callable[..., Path]) -> None:
    body, said = BAD[how]
    compiler(body)
    _slow(said)
    assert _kept(folder) == []


def test_a_library_without_the_kernel(folder: Path, tmp_path: Path, compiler: Callable[..., Path]) -> None:
    compiler(f'cp {_compile("int other;", tmp_path / "other.so")} "$out"')
    _slow("undefined symbol: attend")
    assert _kept(folder) == []


CHANGED = {
    "the most tokens of a page": "#define PAGE 64 ->#define PAGE 32 ",
    "the fields of packed tokens": "FIELD(const uint8_t *, key_codes)->FIELD(const uint8_t *, codes_of_keys)",
    "the fields of a call": "FIELD(int64_t, threads)->FIELD(float, threads)",
    "the bytes of a call": "{PAGE, sizeof(packed), sizeof(call)}->{PAGE, sizeof(packed), sizeof(call) + 8}",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGED)
def test_a_library_of_other_structures_is_refused(
    what: str, folder: Path, tmp_path: Path, compiler: Callable[..., Path]
) -> None:
    """C that was changed and still compiles: its names are those of Python no more."""
    sources = tmp_path / "sources"
    shutil.copytree(library.SOURCE.parent, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    old, new = CHANGED[what].split("->")
    declared = (sources / "abi.h").read_text()
    assert old in declared
    (sources / "abi.h").write_text(declared.replace(old, new))
    named = "-Dkey_codes=codes_of_keys" if "codes_of_keys" in new else "-DNO"
    words = [
        "gcc",
        "-O0",
        *library.FLAGS[1:],
        named,
        str(sources / "attend.c"),
        "-o",
        str(tmp_path / "other.so"),
        "-lm",
    ]
    subprocess.run(words, check=True)
    compiler(f'cp {tmp_path / "other.so"} "$out"')
    _slow(f"C and Python differ in {what}: ")
    assert _kept(folder) == []


def _ended(process: int) -> bool:
    """Whether a process that was killed ends, which may take the kernel a moment."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{process}/stat").read_text().split()[2] in "XZ":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("when", ["asked for its version", "compiling"])
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_a_compiler_that_hangs_ends_with_its_children(
    when: str, folder: Path, tmp_path: Path, compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "child"

    class Patient(subprocess.Popen):  # type: ignore[type-arg]
        def communicate(self, *given: Any, **options: Any) -> Any:
            while self.poll() is None and not (told.exists() and told.read_text()):
                time.sleep(0.01)  # the limit begins when the child has
            return super().communicate(*given, **options)

    monkeypatch.setattr(subprocess, "Popen", Patient)
    monkeypatch.setattr(library, "SECONDS", 0.1)
    hangs = f"sleep 300 & echo $! > {told}; wait"
    compiler(hangs) if when == "compiling" else compiler(version=hangs)
    assert "set CC to a C compiler that does" in _slow("did not end within 0.1 s")
    assert _ended(int(told.read_text()))
    assert not folder.exists() or _kept(folder) == []


def test_a_version_in_another_alphabet(folder: Path, compiler: Callable[..., Path]) -> None:
    compiler(version="printf '\\377\\376 1.0'")
    assert library.load().attend


def test_a_compiler_with_options_and_no_place_for_temporary_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "gcc -pipe")
    monkeypatch.setattr(library, "FLAGS", library.FLAGS[1:])
    for name in ("TMPDIR", "TMP", "TEMP"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    assert library.load("x86-64" if os.uname().machine == "x86_64" else None).attend
    assert len(_kept(folder)) == 1


@pytest.mark.usefixtures("folder")
def test_a_compiler_in_a_folder_with_a_space(tmp_path: Path, compiler: Callable[..., Path]) -> None:
    compiler(name="quick cc")
    assert library.load().attend
