"""Memory as the target: how much of the context may be kept so that the cache fits so many bytes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from predictor.errors import FadeError

LEAST, MOST = 4.0, 16.0  # compression
STEPS = tuple(LEAST * 2 ** (step / 4) for step in range(9))  # 4, 4.8, 5.7, 6.7, 8 ... 16
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
OVERHEAD = 16  # bytes of a body token beside its codes, until it is measured: slot, statistic, scales
MEMINFO = Path("/proc/meminfo")


def compression_for(full: float, target: float, limit: float = MOST) -> float:
    """The least of :data:`STEPS` that lets a cache fit the target.

    Args:
        full: bytes of an uncompressed cache. target: bytes that there are for it.
        limit: the most that is allowed, whether it fits or not.

    Example:
        >>> [compression_for(full, target=100) for full in (50, 400, 700, 9999)], compression_for(9999, 100, limit=6.0)
        ([4.0, 4.0, 8.0, 16.0], 6.0)
    """
    return min(next((step for step in STEPS if full / step <= target), MOST), limit)


def budget_share(full: float, fixed: float, body: float, target: float, limit: float = MOST) -> float:
    """Share of the context that the body may keep.

    Args:
        full: bytes of an uncompressed cache of the tokens that will have come before the next reassignment.
        fixed: bytes that are held whatever is kept: sinks, window, tokens that wait, predictor.
        body: bytes that all of the context would take in the body, from what a body token is seen to take.
        target: bytes for everything. limit: the most compression that is allowed.

    Returns:
        In [0, 1].

    Example:
        >>> [round(budget_share(full, fixed=10, body=full / 3, target=100), 3) for full in (300, 600, 1600)]
        [0.65, 0.396, 0.169]
    """
    room = full / compression_for(full, target, limit)
    return min(max((room - fixed) / max(body, 1.0), 0.0), 1.0)


def target_bytes(memory: int | float | str, device: torch.device) -> int:
    """Bytes that the option ``memory`` asks for: a number, a text such as "512MiB", or a share of what is free now.

    Raises:
        FadeError: a share on a device whose free memory cannot be asked for.

    Example:
        >>> target_bytes("1.5KiB", torch.device("cpu")), target_bytes(2000, torch.device("cpu"))
        (1536, 2000)
    """
    if isinstance(memory, float):
        return int(memory * free_bytes(device))
    if isinstance(memory, int):
        return memory
    number, unit = parsed(memory)
    return int(number * UNITS[unit])


def parsed(memory: str) -> tuple[float, str]:
    """Number and unit of a text such as "512MiB".

    Raises:
        FadeError: no such text.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG]i?B)?\s*", memory)
    if match is None or match[1].count(".") > 1 or not float(match[1]) > 0:
        raise FadeError(f"memory {memory!r} is no size; write it as '512MiB' or '2GB'")
    return float(match[1]), match[2] or ""


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on a device.

    Raises:
        FadeError: a device that cannot be asked.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and MEMINFO.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text())
        if found:
            return int(found[1]) * 2**10
    raise FadeError(f"free memory of {device} cannot be asked for here; give memory as bytes, such as '512MiB'")


@dataclass
class MemoryController:
    """Turns a target into each reassignment's budget, from the bytes that the layers' body tokens take.

    Attributes:
        target: bytes for the whole cache. layers: how many are compressed.
        extra: bytes beside the layers' own (predictor, codebook, classes of tokens).
        waiting: tokens that may wait in full precision (window, sinks, and until the next reassignment).
        most: bound on the compression, which a guard may lower (:meth:`limit`).
        compression: that the last budget was made for.
    """

    target: int
    layers: int
    extra: int
    waiting: int
    every: int
    most: float = MOST
    compression: float = LEAST
    held: dict[int, tuple[int, int]] = field(default_factory=dict)  # layer -> its body's tokens and bytes
    planned: tuple[Any, float] | None = None  # for which tokens, and the share: the same for all layers of a call
    warned: bool = False

    def limit(self, compression: float | None) -> None:
        """Bound the compression from now on, at the price of the target; None: no bound but :data:`MOST`.

        Raises:
            FadeError: less than 1.
        """
        if compression is not None and not compression >= 1:
            raise FadeError(f"compression {compression!r} is less than 1, which no cache has; give 1 for a full one")
        self.most = MOST if compression is None else min(float(compression), MOST)

    def share(self, lengths: Tensor, heads: int, dims: int, itemsize: int, codes: float) -> float:
        """Share of the context that each row's body may keep now.

        Args:
            lengths: [B] tokens of each sequence. heads: kv heads. dims: of a key and a value together.
            itemsize: bytes of a number in full precision. codes: bytes of a body token's codes.
        """
        asked = (tuple(lengths.tolist()), self.most)
        if self.planned is None or self.planned[0] != asked:
            self.planned = asked, self._share(asked[0], heads * self.layers, dims * itemsize, codes)
        return self.planned[1]

    def _share(self, lengths: Sequence[int], rows: int, width: int, codes: float) -> float:
        tokens, size = (sum(column) for column in zip((0, 0), *self.held.values()))
        each = size / tokens if tokens else codes + OVERHEAD
        full = rows * width * sum(length + self.every for length in lengths)
        fixed = rows * width * self.waiting * len(lengths) + self.extra
        self.compression = compression_for(full, self.target, self.most)
        if full / self.compression > self.target and not self.warned:
            self.warned = True
            warnings.warn(
                f"{sum(lengths):,} tokens take {full / self.compression / 2**20:.1f} MiB at {self.compression:g}x, the "
                f"most that is allowed, and memory is {self.target / 2**20:.1f} MiB; the cache grows beyond that",
                RuntimeWarning,
                stacklevel=2,
            )
        return budget_share(full, fixed, rows * each * sum(lengths), self.target, self.most)

    def note(self, layer: int, tokens: int, size: int) -> None:
        """Take in what a layer's body holds after a reassignment: tokens and bytes."""
        self.held[layer] = tokens, size
