"""Spill files: nothing is read that was not written, and nothing is removed that is not ours."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fade_runtime.storage.spillfiles import LOCK, PREFIX, SpillError, SpillFile, SpillFolder
from predictor.errors import FadeError
from tests.conftest import ROOT

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
TEXT = bytes(range(256)) * 5 + b"odd"


def run(script: str, *arguments: object) -> str:
    """What a script prints that has spillfiles, and may fork."""
    opening = """
        import fcntl, gc, os, sys, types
        from pathlib import Path
        for name in ("fade_runtime", "fade_runtime.storage"):  # without all of them, torch included: seconds less
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [name.replace(".", "/")]
        from fade_runtime.storage.spillfiles import PREFIX, SpillFolder
        from predictor.errors import FadeError
        directory = Path(sys.argv[1])
        def child(work):
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                try:
                    work()
                    code = 0
                except BaseException as error:
                    print(f"{type(error).__name__}: {error}", flush=True)
                    code = 1
                os._exit(code)
            return pid
    """
    code = textwrap.dedent(opening) + textwrap.dedent(script)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def abandoned(directory: Path, text: bytes = TEXT) -> Path:
    """A folder as a killed process leaves it."""
    aside = SpillFolder(directory / "aside")
    kept = aside.write(text)
    left = shutil.copytree(aside.path, directory / aside.path.name)
    left.chmod(0o700)
    del aside, kept
    gc.collect()
    (directory / "aside").rmdir()
    return left


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[SpillFile, Path]:
    folder = SpillFolder(tmp_path_factory.mktemp("spill"))
    file = folder.write(TEXT)
    return file, folder.path / "1.safetensors"


@given(bit=st.integers(0, 8 * len(TEXT) - 1))
def test_every_flipped_bit_is_seen(bit: int, written: tuple[SpillFile, Path]) -> None:
    file, path = written
    harmed = bytearray(TEXT)
    harmed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(harmed)
    with pytest.raises(SpillError, match=r"spill file .*1.safetensors does not match its checksum"):
        file.read()
    path.write_bytes(TEXT)
    assert file.read() == TEXT


@given(cut=st.integers(0, len(TEXT) - 1), more=st.binary(min_size=1))
def test_a_file_of_another_length_is_seen(cut: int, more: bytes, written: tuple[SpillFile, Path]) -> None:
    file, path = written
    path.write_bytes(TEXT[:cut])
    with pytest.raises(SpillError, match=rf"has {cut:,} bytes of {len(TEXT):,}"):
        file.read()
    path.write_bytes(TEXT + more)
    with pytest.raises(SpillError, match=rf"has more than {len(TEXT):,}"):
        file.read()
    path.write_bytes(TEXT)


@pytest.mark.parametrize("how", ["gone", "a folder", "a link", "a pipe"])
def test_what_is_no_file_any_more_is_seen(how: str, tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path)
    file, path = folder.write(TEXT), folder.path / "1.safetensors"
    path.unlink()
    (tmp_path / "same").write_bytes(TEXT)
    {
        "gone": lambda: None,
        "a folder": path.mkdir,
        "a link": lambda: path.symlink_to(tmp_path / "same"),
        "a pipe": lambda: os.mkfifo(path),
    }[how]()
    with pytest.raises(SpillError, match=r"spill file .* (cannot be read \(.+\)|has 0 bytes of 1,283)$"):
        file.read()
    assert (tmp_path / "same").read_bytes() == TEXT


def test_files_are_for_their_owner_alone_and_go_one_by_one(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path / "new" / "one")
    one, two = folder.write(b"1"), folder.write(b"2")
    assert {path.stat().st_mode & 0o077 for path in (folder.path, *folder.path.iterdir())} == {0}
    del one
    assert [path.name for path in folder.path.glob("*.safetensors")] == ["2.safetensors"]
    path = folder.path
    del folder
    assert two.read() == b"2", "a file holds its folder"
    del two
    assert not path.exists()


def test_a_folder_that_was_exchanged_is_not_written_to(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path)
    kept = folder.write(b"1")
    folder.path.rename(tmp_path / "moved")
    folder.path.mkdir()
    other = folder.write(b"2")
    assert list(folder.path.iterdir()) == []
    assert (kept.read(), other.read()) == (b"1", b"2")


# -- what a start removes --------------------------------------------------------------------------------------------


def test_what_was_abandoned_is_removed_at_the_next_start(tmp_path: Path) -> None:
    left, alive = abandoned(tmp_path), SpillFolder(tmp_path)
    assert left.exists() is False
    again = SpillFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive.path, again.path])


def renamed(left: Path) -> Path:
    return left.rename(left.parent / f"{PREFIX}results")


def copied(left: Path) -> Path:
    return left.rename(left.parent / f"{PREFIX}{'0' * 32}")


def linked(left: Path) -> Path:
    elsewhere = left.parent / "elsewhere"
    elsewhere.mkdir()
    left.rename(elsewhere / left.name)
    left.symlink_to(elsewhere / left.name)
    return elsewhere / left.name


def without_lock(left: Path) -> Path:
    (left / LOCK).unlink()
    return left


def empty_lock(left: Path) -> Path:
    (left / LOCK).write_bytes(b"")
    return left


def linked_lock(left: Path) -> Path:
    (left / LOCK).rename(left.parent / "real")
    (left / LOCK).symlink_to(left.parent / "real")
    return left


def pipe_for_lock(left: Path) -> Path:
    (left / LOCK).unlink()
    os.mkfifo(left / LOCK)
    return left


def open_to_others(left: Path) -> Path:
    left.chmod(0o750)
    return left


def of_another_user(left: Path) -> Path:
    os.chown(left, 12345, -1)
    return left


def lock_of_another_user(left: Path) -> Path:
    os.chown(left / LOCK, 12345, -1)
    return left


def plain_file(left: Path) -> Path:
    shutil.rmtree(left)
    left.write_bytes(TEXT)
    return left


OTHERS = (renamed, copied, linked, without_lock, empty_lock, linked_lock, pipe_for_lock, open_to_others, plain_file)


@pytest.mark.parametrize(
    "changed", [*OTHERS, *(pytest.param(each, marks=ROOT_ONLY) for each in (of_another_user, lock_of_another_user))]
)
def test_what_is_not_surely_ours_is_left_as_it_is(changed: Callable[[Path], Path], tmp_path: Path) -> None:
    there = changed(abandoned(tmp_path))
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    left = [abandoned(tmp_path) for _ in range(4)]
    folder = SpillFolder(tmp_path)
    assert not any(map(Path.exists, left)), "what is in doubt does not keep the rest"
    (there if there.is_file() else there / "1.safetensors").read_bytes()
    path = folder.path
    del folder
    assert not path.exists()
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_other_files_in_an_abandoned_folder_stay(tmp_path: Path) -> None:
    left = abandoned(tmp_path)
    (left / "thesis.tex").write_text("ten years")
    (left / "7.safetensors").mkdir()
    SpillFolder(tmp_path)
    assert sorted(path.name for path in left.iterdir()) == ["7.safetensors", "thesis.tex"]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FadeError, match=r"spill_dir .*file.* cannot be written \(.+\); name another folder"):
        SpillFolder(tmp_path / "file" / "folder")


# -- several processes -----------------------------------------------------------------------------------------------


def test_a_forked_child_removes_nothing_and_is_refused(tmp_path: Path) -> None:
    script = """
        folder = SpillFolder(directory)
        file = folder.write(b"tokens")
        def drop():
            global folder, file
            del folder, file
            gc.collect()
        def leave():
            sys.exit(0)
        def grandchild():
            os.waitpid(child(drop), 0)
            drop()
        for work in (drop, grandchild, file.read, lambda: folder.write(b"more")):
            os.waitpid(child(work), 0)
        sys.stdout.flush()
        if os.fork() == 0:
            sys.exit()  # finalizers run
        os.wait()
        def own():
            mine = SpillFolder(directory)
            assert mine.write(b"mine").read() == b"mine"
            del mine
        os.waitpid(child(own), 0)
        print(file.read(), len(list(directory.glob("*/*.safetensors"))), len(list(directory.iterdir())), os.getpid())
    """
    *refused, last = run(script, tmp_path).splitlines()
    assert last.startswith("b'tokens' 1 1 ")
    pid = last.split()[-1]
    assert (
        refused
        == [
            f"FadeError: the evicted tokens of this cache are in files of process {pid}, from which this one was "
            "forked; save a session before the fork and load it here, or use spill='host'"
        ]
        * 2
    )
    assert list(tmp_path.iterdir()) == []


def test_twenty_processes_share_a_directory(tmp_path: Path) -> None:
    script = """
        def work():
            for number in range(25):
                folder = SpillFolder(directory)
                file = folder.write(b"%d %d" % (os.getpid(), number))
                assert file.read() == b"%d %d" % (os.getpid(), number)
                if number % 5:
                    del folder, file
        def die():
            folder = SpillFolder(directory)
            folder.write(b"left")
            os.kill(os.getpid(), 9)
        pids = [child(die if number % 4 == 3 else work) for number in range(20)]
        print(sorted(os.waitpid(pid, 0)[1] for pid in pids))
        left = list(directory.iterdir())
        folder = SpillFolder(directory)
        print([path.name for path in directory.iterdir()] == [folder.path.name])
    """
    assert run(script, tmp_path).splitlines() == [str([0] * 15 + [9] * 5), "True"]


@ROOT_ONLY
def test_two_users_share_a_directory() -> None:
    script = """
        directory.chmod(0o1777)
        made, asked = os.pipe(), os.pipe()
        def user(number, then):
            def work():
                os.setgroups([]), os.setgid(number), os.setuid(number)
                folder = SpillFolder(directory)
                file = folder.write(b"of %d" % number)
                then()
                assert file.read() == b"of %d" % number
                del folder, file
            return work
        def wait():
            os.write(made[1], b"!")
            os.read(asked[0], 1)
        def count():
            return len(list(directory.iterdir()))
        os.waitpid(child(user(12345, lambda: os.kill(os.getpid(), 9))), 0)
        print(os.waitpid(child(user(23456, lambda: None)), 0)[1], count(), "left by the other")
        alive = child(user(12345, wait))
        os.close(made[1])
        os.read(made[0], 1)
        print(os.waitpid(child(user(23456, lambda: None)), 0)[1], count(), "of the other")
        os.write(asked[1], b"!")
        print(os.waitpid(alive, 0)[1], count())
    """
    with tempfile.TemporaryDirectory() as directory:  # which others may enter
        assert run(script, directory).splitlines() == ["0 1 left by the other", "0 1 of the other", "0 0"]
