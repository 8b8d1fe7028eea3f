"""Replacing a file or directory: the old one or the new one is there, whatever happens at whatever moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from predictor import files
from predictor.files import recover, sha256_file, write_aside

KILLED = """
import os, signal, sys
from pathlib import Path
from predictor import files

path, swaps, step, late = Path(sys.argv[1]), sys.argv[2] == "swaps", int(sys.argv[3]), sys.argv[4] == "after"
calls = 0

def counted(real):
    def call(*given, **options):
        global calls
        calls += 1
        mine = calls
        if mine == step and not late:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*given, **options)
        if mine == step and late:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer
    return call

if not swaps:
    files._exchange = lambda one, two: False
files._exchange = counted(files._exchange)
files.os.replace = counted(files.os.replace)
files.shutil.rmtree = counted(files.shutil.rmtree)
with files.write_aside(path) as aside:
    aside.mkdir()
    (aside / "one").write_text("new")
    (aside / "two").write_text("new")
print(calls)
"""


def write(path: Path, text: str) -> None:
    with write_aside(path) as aside:
        aside.mkdir()
        (aside / "one").write_text(text)
        (aside / "two").write_text(text)


def held(path: Path) -> set[str]:
    return {(path / name).read_text() for name in ("one", "two")}


def replace_in_a_child(path: Path, swaps: str, step: int, moment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLED, str(path), swaps, str(step), moment]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    target = tmp_path / "whole.txt"
    target.write_text("old")

    def interrupted() -> None:
        with write_aside(target) as aside:
            aside.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == ["whole.txt"]
    assert target.read_text() == "old"
    write(tmp_path / "dir", "1")
    write(tmp_path / "dir", "2")  # a directory replaces a directory
    assert held(tmp_path / "dir") == {"2"}
    write(target, "3")  # and a file
    assert held(target) == {"3"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dir", "whole.txt"]


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    assert sha256_file(tmp_path / "old") == "cba06b5736faf67e54b07b561eae94395e774c517a7d910a54369e1263ccfbd4"


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_two_directories_are_exchanged_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "dir", "old")
    monkeypatch.setattr(files.os, "replace", lambda *_: pytest.fail("two renames where one exchange would do"))
    write(tmp_path / "dir", "new")
    assert held(tmp_path / "dir") == {"new"}


@pytest.mark.parametrize("swaps", ["swaps", "renames"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path: Path, swaps: str, moment: str) -> None:
    """Each step of the replacement in turn: killed before it, or right after it."""
    step, finished, seen = 0, False, set()
    while not finished:
        step += 1
        path = tmp_path / str(step) / "session"
        write(path, "old")
        done = replace_in_a_child(path, swaps, step, moment)
        finished = done.returncode == 0
        assert finished or done.returncode == -signal.SIGKILL, done.stderr
        recover(path)
        seen |= held(path)
        assert held(path) in ({"old"}, {"new"})
        assert os.listdir(path.parent) == ["session"]  # nothing of the killed one is left
        write(path, "again")
        assert held(path) == {"again"}
    assert step == {"swaps": 3, "renames": 5}[swaps]  # one more than there are steps
    assert seen == ({"new"} if (swaps, moment) == ("swaps", "after") else {"old", "new"})


def test_the_next_write_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    write(tmp_path / "session", "old")
    replace_in_a_child(tmp_path / "session", "renames", 3, "before")
    assert os.listdir(tmp_path) != ["session"]  # the old one was moved away
    write(tmp_path / "session", "new")
    assert os.listdir(tmp_path) == ["session"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("at", [1, 2])
def test_an_error_between_the_renames_brings_the_old_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int
) -> None:
    path, real, calls = tmp_path / "session", os.replace, []
    write(path, "old")
    monkeypatch.setattr(files, "_exchange", lambda *_: False)

    def replace(one: Path, two: Path) -> None:
        calls.append(one)
        if len(calls) == at:
            raise error
        real(one, two)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(type(error)):
        write(path, "new")
    assert held(path) == {"old"}
    assert os.listdir(tmp_path) == ["session"]


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    with write_aside(tmp_path / "dir") as outer:
        outer.mkdir()
        (outer / "one").write_text("outer")
        write(tmp_path / "dir", "inner")
        recover(tmp_path / "dir")
        assert outer.is_dir()
        (outer / "two").write_text("outer")
    assert held(tmp_path / "dir") == {"outer"}
    assert os.listdir(tmp_path) == ["dir"]


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    """Names like those of scratch directories, with other content; and scratch of another name."""
    mine = tmp_path / ".dir.archives.aside"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "replaced").write_text("kept")
    (tmp_path / ".dir.abcdefgh.aside").symlink_to(elsewhere)
    other = tmp_path / ".dir.x.abcdefgh.aside"
    other.mkdir()
    (other / "replaced").write_text("of dir.x")
    recover(tmp_path / "dir")
    assert not (tmp_path / "dir").exists()
    write(tmp_path / "dir", "new")
    assert (mine / "thesis.txt").exists()
    assert (elsewhere / "replaced").read_text() == "kept"
    assert (other / "replaced").exists()
    recover(tmp_path / "dir.x")
    assert (tmp_path / "dir.x").read_text() == "of dir.x"
