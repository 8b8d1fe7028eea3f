"""Holes in the heap go back to the operating system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fade_runtime.storage.heap import _malloc_trim, trim_heap

MIB = 2**20


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.skipif(not sys.platform.startswith("linux") or _malloc_trim() is None, reason="needs glibc")
def test_what_was_freed_between_what_stays_leaves_the_process() -> None:
    blocks = [torch.ones(25_000) for _ in range(800)]  # 100 kB each: from the heap, not mapped one by one
    kept = blocks[9::10]
    full = resident()
    del blocks
    trim_heap(torch.device("cpu"))
    assert full - resident() > 50 * MIB
    assert all(bool((block == 1).all()) for block in kept)


def test_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def called() -> None:
        raise AssertionError

    monkeypatch.setattr("fade_runtime.storage.heap._malloc_trim", called)
    trim_heap(torch.device("meta"))
