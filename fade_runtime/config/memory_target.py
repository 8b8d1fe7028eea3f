"""Memory as the target: how much of the context may be kept so that the cache fits so many bytes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from predictor.errors import FadeError

LEAST, MOST = 4.0, 16.0  # compression of the body: what is neither sink nor in the window
STEPS = tuple(LEAST * 2 ** (step / 4) for step in range(9))  # 4, 4.8, 5.7, 6.7, 8 ... 16
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
OVERHEAD = 16  # bytes of a body token beside its codes, until it is measured: slot, statistic, scales
MEMINFO = Path("/proc/meminfo")


def budget_share(
    held: float, tokens: int, target: float, *, width: float, fixed: float = 0.0, limit: float = MOST
) -> tuple[float, float]:
    """Share of the body that may be kept, and the compression of the body that this is.

    The least of :data:`STEPS` that lets the cache fit the target; the most that is allowed if none does.

    Args:
        held: bytes that a token of the body is seen to take.
        tokens: between sinks and window, over all rows (batch, layers and kv heads).
        target: bytes for everything.
        width: bytes of a token in full precision.
        fixed: bytes that are held whatever is kept: sinks, window, tokens that wait, predictor.
        limit: the most compression that is allowed.

    Example:
        >>> [budget_share(64, tokens, target=40_000, width=256)[1] for tokens in (100, 1000, 5000)]
        [4.0, 6.727171322029716, 16.0]
        >>> budget_share(64, 1000, target=40_000, width=256, fixed=8000, limit=8.0)
        (0.5, 8.0)
    """
    steps = [step for step in STEPS if step < limit] + [min(limit, MOST)]
    for step in steps:
        if fixed + tokens * min(width / step, held) <= target:
            break
    return min(width / (step * held), 1.0), step


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
        exact: sinks and window, in tokens. every: tokens that may wait until the next reassignment.
        most: bound on the compression of the body, which a guard may lower (:meth:`limit`).
        compression: that the last budget was made for.
    """

    target: int
    layers: int
    extra: int
    exact: int
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

    def reset(self) -> None:
        """Forget the text and the bound."""
        self.most, self.compression, self.planned, self.warned = MOST, LEAST, None, False
        self.held = {}

    def facts(self) -> dict[str, Any]:
        """What a session stores of it."""
        named = {name: getattr(self, name) for name in ("target", "most", "compression", "warned")}
        held = {str(layer): list(each) for layer, each in self.held.items()}
        planned = None if self.planned is None else [list(self.planned[0][0]), self.planned[0][1], self.planned[1]]
        return {**named, "held": held, "planned": planned}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on from :meth:`facts`."""
        for name in ("target", "most", "compression", "warned"):
            setattr(self, name, facts[name])
        self.held = {int(layer): (tokens, size) for layer, (tokens, size) in facts["held"].items()}
        lengths, most, share = facts["planned"] or ([], 0.0, 0.0)
        self.planned = ((tuple(lengths), most), share) if facts["planned"] else None

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
        kept, size = (sum(column) for column in zip((0, 0), *self.held.values()))
        held, body = size / kept if kept else codes + OVERHEAD, sum(max(n - self.exact, 0) for n in lengths)
        tokens, fixed = rows * body, rows * width * (self.exact + self.every) * len(lengths) + self.extra
        share, self.compression = budget_share(held, tokens, self.target, width=width, fixed=fixed, limit=self.most)
        needed = fixed + share * held * tokens
        if needed > self.target and not self.warned:
            self.warned = True
            warnings.warn(
                f"{sum(lengths):,} tokens take up to {needed / 2**20:.3g} MiB with the body at {self.compression:g}x, "
                f"the most that is allowed, and memory is {self.target / 2**20:.3g} MiB; the cache grows beyond that",
                RuntimeWarning,
                stacklevel=2,
            )
        return share * body / max(sum(lengths), 1)

    def note(self, layer: int, tokens: int, size: int) -> None:
        """Take in what a layer's body holds after a reassignment: tokens and bytes."""
        self.held[layer] = tokens, size
