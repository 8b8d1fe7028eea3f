"""Damage, interrupts, threads, copies, forks: no evicted token goes, or comes back as another, without a word."""

from __future__ import annotations

import copy
import gc
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fade_runtime import FadeConfig, TieredCache
from fade_runtime.storage.spill import Spill, SpilledTokens
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_model
from tests.runtime.caches import create_quietly, forward_quietly, random_ids
from tests.runtime.guarded import CALMED, evicted
from tests.runtime.spilled import CPU, contents, same, spill, tokens

# -- damage ----------------------------------------------------------------------------------------------------------

IDS = random_ids(1, 251)


def spilled(model: Any, folder: Path) -> tuple[TieredCache, list[tuple[Any, Path]]]:
    """A cache after a prompt, and the layer and file of each of its chunks."""
    cache = create_quietly(model, FadeConfig(**{**CALMED, "spill": "disk", "spill_dir": folder}))
    for at in (slice(0, 200), slice(200, 250)):
        forward_quietly(model, IDS[:, at], cache)
    layers = [layer for layer in cache.tiered for _ in layer.tokens.spilled.chunks]
    named = {chunk.stored._name for layer in cache.tiered for chunk in layer.tokens.spilled.chunks}
    files = [cache.guard.spill.folder / c.stored._name for layer in cache.tiered for c in layer.tokens.spilled.chunks]
    assert {path.name for path in cache.guard.spill.folder.glob("*.safetensors")} == named
    return cache, list(zip(layers, files))


def restored(model: Any, cache: TieredCache) -> tuple[Tensor, list[str]]:
    """Logits of the next token once all that is there is back, as after a rollback; and what was said."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for layer in cache.tiered:
            layer.tokens.restore()
        logits = model(IDS[:, 250:], **forward_kwargs(cache, model)).logits
    return logits, [str(each.message) for each in told if issubclass(each.category, RuntimeWarning)]


def check_flips(model: Any, folder: Path, count: int) -> None:
    """A flipped bit costs the tokens of its chunk, by name, and nothing else: the logits are those without them."""
    drawn = random.Random(0)
    number = len(spilled(model, folder)[1])
    without: dict[int, tuple[Tensor, int]] = {}
    for at in range(number):
        cache, files = spilled(model, folder)
        (chunk,) = [c for c in files[at][0].tokens.spilled.chunks if c.stored._name == files[at][1].name]
        lost = chunk.tokens
        chunk.drop()
        without[at] = restored(model, cache)[0], lost
    for flip in range(count):
        at = flip % number
        harmed, files = spilled(model, folder)
        content = bytearray(files[at][1].read_bytes())
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        files[at][1].write_bytes(content)
        (expected, lost), (got, told) = without[at], restored(model, harmed)
        assert torch.equal(got, expected)
        report = harmed.monitor.report()["spilled"]
        assert (report["lost"], report["tokens"], evicted(harmed)) == (lost, 0, lost)
        assert report["why_lost"] == (
            f"{lost:,} evicted tokens are lost: spill file {files[at][1]} does not match its checksum"
        )
        assert told == [
            report["why_lost"] + "; tokens are kept in the cache from here on, and monitor.report() counts what is lost"
        ]


def test_a_flipped_bit_is_a_named_loss(tmp_path: Path) -> None:
    check_flips(make_tiny_model(), tmp_path, 4)


@pytest.mark.slow
def test_of_200_flipped_bits_none_is_silent(tmp_path: Path) -> None:
    check_flips(make_tiny_model(), tmp_path, 200)


def test_a_loss_is_said_on_a_full_disk_too(tmp_path: Path) -> None:
    held = SpilledTokens(Spill("disk", tmp_path), CPU)
    held.add([tokens([64])])
    with pytest.warns(RuntimeWarning, match="the disk is full"):
        held.spill.fail("the disk is full")
    next(tmp_path.glob("*/*.safetensors")).unlink()
    with pytest.warns(RuntimeWarning, match=r"64 evicted tokens are lost: spill file .* cannot be read"):
        assert held.take() == []
    assert held.spill.report()["broken"] == "the disk is full"
    assert held.spill.report()["lost"] == 64


# -- interrupts ------------------------------------------------------------------------------------------------------


@contextmanager
def interrupted(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the n-th line that runs in the spill store; gives the lines that ran."""
    count = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if "storage/spill" not in frame.f_code.co_filename or frame.f_code.co_name in (
            "remove",
            "_unlink",
            "_end",
            "_remove",
        ):
            return None  # Python swallows what is raised in a finalizer
        if event == "line":
            count[0] += 1
            if count[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


GIVEN = [tokens([9, 4], low=0.3), tokens([3, 1], 200)]
MORE = tokens([3, 4], 500)
OPERATIONS: dict[str, Callable[[SpilledTokens], object]] = {
    "add": lambda held: held.add([MORE]),
    "select rows": lambda held: held.select_rows(torch.tensor([1, 0])),
    "take some": lambda held: held.take(lambda body: body.token_row() == 0),
    "read": lambda held: held.read(),
}


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_line_leaves_all_or_what_was_asked_for(
    name: str, where: str, every: int, tmp_path: Path
) -> None:
    def filled() -> SpilledTokens:
        held = SpilledTokens(spill(where, tmp_path), CPU)
        for each in GIVEN:
            held.add([each])
        return held

    done = filled()
    with interrupted(-1) as count:
        OPERATIONS[name](done)
    before, after = contents(filled().read()), contents(done.read())
    kept = 0
    lines = range(1, count[0] + 1, every)
    for line in lines:
        held = filled()
        with interrupted(line):
            OPERATIONS[name](held)
        found = contents(held.read())
        assert same(found, before) or same(found, after), f"line {line} of {count[0]}"
        kept += same(found, before)
        if where == "disk":
            for path in held.spill.folder.glob("*.safetensors"):
                load_file(path)  # nothing half-written stays
    assert kept >= len(lines) - 5  # after the change come a return or two


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Writing fails in the middle of a file, after so many bytes."""
    before, (soft, hard) = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.take(lambda body: body.slots() % 2 == 0),
        lambda held: held.select_rows(torch.tensor([0, 1])),
        lambda held: [held.add([tokens([900], 5000)])][1:],
    ],
    ids=["take", "select rows", "add"],
)
def test_what_a_full_disk_refuses_comes_back_or_stays(
    change: Callable[[SpilledTokens], list[Any]], tmp_path: Path
) -> None:
    stored = [tokens([900, 900]), tokens([80, 80], 1000)]
    held = SpilledTokens(Spill("disk", tmp_path), CPU)
    assert all(held.add([each]) for each in stored)
    assert len(held.chunks) == 2
    with full_disk(8_000), pytest.warns(RuntimeWarning, match="takes no more tokens: .*File too large"):
        out = change(held)
    assert len(list(held.spill.folder.glob("*.safetensors"))) == len(held.chunks), "nothing half-written stays"
    assert same(contents([out, *held.read()]), contents(stored))


# -- copies and threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", "disk"])
def test_the_limit_holds_with_copies(where: str, tmp_path: Path) -> None:
    stored = tokens([64, 64])
    one = sum(t.numel() * t.element_size() for t in stored.tensors().values())
    held = SpilledTokens(spill(where, tmp_path, limit=6 * one // 5), CPU)
    held.add([stored])
    other = copy.deepcopy(held)
    with pytest.warns(RuntimeWarning, match="raise spill_limit"):
        back = held.take(lambda body: body.token_row() == 0)  # what stays is there beside the copy's whole
    assert held.spill.nbytes <= held.spill.limit
    assert same(contents([back, *held.read()]), contents([stored]))
    assert (other.read(), held.spill.dropped) == ([], 128)


def test_what_is_too_large_costs_no_others(tmp_path: Path) -> None:
    small = tokens([8])
    held = SpilledTokens(Spill("disk", tmp_path, limit=3000), CPU)
    held.add([small])
    with pytest.warns(RuntimeWarning, match="raise spill_limit"):
        held.add([tokens([640], 100)])
    assert same(contents(held.read()), contents([small]))
    assert held.spill.dropped == 640


@pytest.mark.parametrize("where", ["host", "disk"])
def test_copies_in_threads_keep_to_themselves(where: str, tmp_path: Path) -> None:
    first = SpilledTokens(spill(where, tmp_path), CPU)
    shared = tokens([30, 20])
    first.add([shared])
    copies = [copy.deepcopy(first) for _ in range(4)]
    faults: list[object] = []
    own = {at: [tokens([16, 16], 1000 * at + 100 * n) for n in range(12)] for at in range(1, 5)}

    def work(at: int, held: SpilledTokens) -> None:
        try:
            for each in own[at]:
                assert held.add([each])
            assert same(contents(held.read()), contents([shared, *own[at]]))
            back = held.take(lambda body: body.token_row() == 0)
            assert same(contents([back, *held.read()]), contents([shared, *own[at]]))
        except BaseException as error:
            faults.append((at, error))

    threads = [threading.Thread(target=work, args=each) for each in enumerate(copies, 1)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert faults == []
    assert (first.spill.lost, first.spill.broken) == (0, None)
    assert first.spill.report()["tokens"] == len(first) + sum(map(len, copies))


def test_a_copy_goes_on_when_the_other_is_gone(tmp_path: Path) -> None:
    model = make_tiny_model()
    cache, _ = spilled(model, tmp_path)
    expected, _ = restored(model, spilled(model, tmp_path)[0])
    other = copy.deepcopy(cache)
    del cache
    gc.collect()
    got, told = restored(model, other)
    assert torch.equal(got, expected)
    assert told == []
    del other
    gc.collect()
    assert os.listdir(tmp_path) == []
