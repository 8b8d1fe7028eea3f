"""Evicted tokens go to host memory or disk in their packed form, and come back as they were."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch

from fade_runtime.storage.spill import Spill, SpilledTokens
from fade_runtime.storage.spillfiles import PREFIX
from fade_runtime.storage.tiers import Tier
from predictor.errors import FadeError
from tests.processes import run_python
from tests.runtime.spilled import CPU, contents, same, spill, tokens

WHERE = ["host", "disk"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("lengths", [[1], [63, 64, 200], [0, 5, 0, 130]], ids=str)
def test_what_was_spilled_comes_back_bit_by_bit(where: str, lengths: list[int], tmp_path: Path) -> None:
    held = SpilledTokens(spill(where, tmp_path), CPU)
    stored = [tokens(lengths, first, low=0.3) for first in range(0, 1000, 250)]
    for each in stored:
        assert held.add([each])
    assert len(held) == 4 * sum(lengths)
    expected = contents(stored)
    assert same(contents(held.read()), expected)
    rows = torch.arange(len(lengths)) % 2 == 0
    taken = held.take(lambda tokens: rows[tokens.token_row()])
    assert same(contents(taken), {key: each for key, each in expected.items() if rows[key[0]]})
    assert same(contents(held.read()), {key: each for key, each in expected.items() if not rows[key[0]]})
    held.take()
    assert len(held) == 0
    assert held.spill.nbytes == 0


@pytest.mark.parametrize("where", WHERE)
def test_rows_are_selected_as_often_as_named(where: str, tmp_path: Path) -> None:
    held = SpilledTokens(spill(where, tmp_path), CPU)
    stored = tokens([30, 7, 90])
    held.add([stored])
    held.select_rows(torch.tensor([2, 0, 2]))
    old = contents([stored])
    found = contents(held.read())
    assert same(found, {(new, slot): old[row, slot] for new, row in enumerate([2, 0, 2]) for slot in range(200)
                        if (row, slot) in old})  # fmt: skip


def test_many_small_chunks_are_merged() -> None:
    held = SpilledTokens(Spill("host"), CPU)
    for first in range(0, 6400, 64):
        held.add([tokens([64, 64], first)])
    assert len(held.chunks) <= 8
    assert len(contents(held.read())) == 12800


@pytest.mark.parametrize("where", WHERE)
def test_bytes_are_counted_and_the_oldest_are_dropped_at_the_limit(where: str, tmp_path: Path) -> None:
    one = sum(t.numel() * t.element_size() for t in tokens([64, 64]).tensors().values())
    held = SpilledTokens(spill(where, tmp_path, limit=4 * one), CPU)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for first in range(0, 640, 64):
            held.add([tokens([64, 64], first)])
            assert held.spill.nbytes <= 4 * one
    assert [str(each.message) for each in told] == [
        f"the spill store is full ({4 * one:,} bytes): its oldest tokens are dropped and cannot be restored; "
        "raise spill_limit"
    ]
    left = {slot for _, slot in contents(held.read())}
    assert left == set(range(640 - len(left), 640))  # the newest
    assert held.spill.dropped == 1280 - 2 * len(left)
    assert held.spill.broken is None


def test_taking_some_tokens_back_under_a_limit_drops_none() -> None:
    stored = tokens([64, 64])
    size = sum(t.numel() * t.element_size() for t in stored.tensors().values())
    held, other = (SpilledTokens(spill_of_both, CPU) for spill_of_both in [Spill("host", limit=2 * size)] * 2)
    other.add([tokens([64, 64], 500)])
    held.add([stored])
    back = held.take(lambda body: body.token_row() == 0)
    assert (sum(map(len, back)), len(held), len(other), held.spill.dropped) == (64, 64, 128, 0)


def test_rows_that_cannot_be_stored_again_are_given_back(tmp_path: Path) -> None:
    held = SpilledTokens(Spill("disk", tmp_path), CPU)
    held.add([tokens([10, 20])])
    with pytest.warns(RuntimeWarning, match="the disk is full; tokens are kept in the cache"):
        held.spill.fail("the disk is full")
    left = held.select_rows(torch.tensor([1, 1]))
    assert (sum(map(len, left)), len(held)) == (40, 0)


def test_what_is_larger_than_the_limit_is_dropped_at_once() -> None:
    held = SpilledTokens(Spill("host", limit=100), CPU)
    with pytest.warns(RuntimeWarning, match="raise spill_limit"):
        assert held.add([tokens([64])])
    assert (len(held), held.spill.dropped, held.spill.nbytes) == (0, 64, 0)


def test_files_are_private_and_go_with_the_cache(tmp_path: Path) -> None:
    held = SpilledTokens(Spill("disk", tmp_path), CPU)
    held.add([tokens([64])])
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o77 == 0
    assert len(list(folder.glob("*.safetensors"))) == 1
    held.take()
    assert list(folder.glob("*.safetensors")) == []
    del held
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_two_caches_in_one_directory_do_not_mix(tmp_path: Path) -> None:
    one, two = (SpilledTokens(Spill("disk", tmp_path), CPU) for _ in range(2))
    one.add([tokens([10], 0)])
    two.add([tokens([10], 500)])
    assert len(list(tmp_path.iterdir())) == 2
    assert {slot for _, slot in contents(one.read())} == set(range(10))
    assert {slot for _, slot in contents(two.read())} == set(range(500, 510))


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from fade_runtime.storage.spill import Spill
        spill = Spill("disk", Path(sys.argv[1]))
        (spill.folder / "1.safetensors").write_bytes(b"text")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_python("-c", script, tmp_path).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    mine = Spill("disk", tmp_path)
    assert not left.exists()
    assert [path.name for path in tmp_path.glob(f"{PREFIX}*")] == [mine.folder.name]


@pytest.mark.parametrize("how", ["removed", "cut"])
def test_a_file_that_is_damaged_is_named_and_ends_eviction(how: str, tmp_path: Path) -> None:
    held = SpilledTokens(Spill("disk", tmp_path), CPU)
    held.add([tokens([64])])
    (file,) = tmp_path.glob("*/*.safetensors")
    file.unlink() if how == "removed" else os.truncate(file, 100)
    with pytest.warns(RuntimeWarning, match=rf"64 evicted tokens are lost: spill file {file}"):
        assert held.take() == []
    assert (held.spill.lost, len(held)) == (64, 0)
    assert not held.add([tokens([64])])  # from here on nothing is evicted


def test_a_directory_that_goes_away_loses_nothing(tmp_path: Path) -> None:
    held = SpilledTokens(Spill("disk", tmp_path), CPU)
    shutil.rmtree(held.spill.folder)
    with pytest.warns(RuntimeWarning, match="takes no more tokens: .*; tokens are kept in the cache from here on"):
        assert not held.add([tokens([64])])


@pytest.mark.slow
def test_a_host_without_memory_loses_nothing() -> None:
    script = """
        import resource, warnings
        import torch
        from fade_runtime.storage.spill import Spill, SpilledTokens
        from tests.runtime.spilled import contents, tokens
        warnings.simplefilter("ignore")
        held, more = SpilledTokens(Spill("host"), torch.device("cpu")), tokens([4_000_000], dim=16)
        assert held.add([tokens([64])])
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (size + 20_000_000, hard))
        assert not held.add([more])
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        assert len(contents(held.take())) == 64
        print(held.spill.broken)
    """
    run = run_python("-c", script)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("the spill store takes no more tokens: ")


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FadeError, match=r"spill_dir .*file.* cannot be written \(.*\); name another folder"):
        Spill("disk", tmp_path / "file" / "folder")


def test_tiers_are_kept(tmp_path: Path) -> None:
    held = SpilledTokens(Spill("disk", tmp_path), CPU)
    stored = tokens([200], low=0.5)
    held.add([stored])
    (back,) = held.take()
    now = torch.where(back.low(), int(Tier.LOW), int(Tier.HIGH))
    assert torch.equal(now, torch.where(stored.low(), int(Tier.LOW), int(Tier.HIGH)))
