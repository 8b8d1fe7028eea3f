"""The size of the whole cache as the target: how much of the context full-attention layers may then keep."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from predictor.errors import FadeError

LEAST, MOST = 4.0, 16.0  # compression of the body: what is neither sink nor in the window
STEPS = tuple(LEAST * 2 ** (step / 4) for step in range(9))  # 4, 4.8, 5.7, 6.7, 8 ... 16
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
AIM = 1.01  # a ratio is aimed at with so much to spare: last pages are not full, slots and rows take bytes
SLACK = 0.02  # a ratio that is reached but for so much of it counts as reached
MEMINFO = Path("/proc/meminfo")
FACTS = ("target", "ratio", "most", "compression", "reachable", "warned")  # what a session stores


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


def fitting_share(held: float, tokens: int, target: float, *, fixed: float, least: float) -> float:
    """Share of the body that may be kept so that the cache is of the target's bytes; no less than ``least``.

    Args:
        held: bytes that a token of the body is seen to take. tokens: between sinks and window.
        target: bytes for everything. fixed: bytes that are held whatever is kept.

    Example:
        >>> [fitting_share(64, 1000, target, fixed=8000, least=0.1) for target in (40_000, 10_000, 100_000)]
        [0.5, 0.1, 1.0]
    """
    return min(max((target - fixed) / (held * tokens), least), 1.0) if tokens else 1.0


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


class LayerSize(NamedTuple):
    """What the tokens of one layer take, as a function of the length of their text.

    Attributes:
        heads: kv heads. width: bytes of a token of all of them in full precision, keys and values.
        packed: bytes of it in the high tier; 0: the layer is transformers' own, which compresses nothing.
        window: tokens that a query attends to, itself included; None: all.
        state: bytes of what does not grow with the text (recurrent states).
    """

    heads: int = 0
    width: float = 0.0
    packed: float = 0.0
    window: int | None = None
    state: float = 0.0

    @property
    def evicts(self) -> bool:
        """Whether the layer's tokens are chosen: full attention, and ours."""
        return self.packed > 0 and self.window is None

    def full(self, length: int) -> float:
        """Bytes in the model's own cache.

        Example:
            >>> [LayerSize(width=512, window=100).full(length) for length in (50, 1000)]
            [25600.0, 50688.0]
        """
        return self.state + float(self.width) * (length if self.window is None else min(length, self.window - 1))

    def kept(self, length: int, exact: int, waiting: int) -> float:
        """Bytes of a layer whose tokens are not chosen: all that its queries attend to, in 4 bits but for the exact.

        Args:
            length: tokens of the text. exact: sinks and recent window. waiting: tokens that wait to be packed.

        Example:
            >>> LayerSize(width=512, packed=160, window=500).kept(1000, exact=68, waiting=64)
            136704.0
        """
        if not self.packed or self.window is None:
            return self.full(length)
        return self.width * min(length, exact + waiting) + float(self.packed) * max(min(length, self.window) - exact, 0)


@dataclass
class MemoryController:
    """Turns a target for the whole cache into each reassignment's budget, from the bytes that its layers take.

    Attributes:
        target: bytes of the whole cache, or None. ratio: times smaller than the model's own cache, or None.
        extra: bytes beside the layers' own (predictor, classes of tokens).
        exact: sinks and window, in tokens. every: tokens that may wait until the next reassignment.
        least: share of the context that is kept whatever the ratio asks.
        most: bound on the compression of the body, which a guard may lower (:meth:`limit`).
        compression: of the body, that the last budget was made for.
        reachable: how many times smaller the cache is at least, if the ratio asked for more; else None.
        sizes: gives the layers of the cache, those that evict and the others; the cache sets it.
    """

    target: int | None
    ratio: float | None
    extra: int
    exact: int
    every: int
    least: float = 0.0
    most: float = MOST
    compression: float = LEAST
    reachable: float | None = None
    held: dict[int, tuple[int, int]] = field(default_factory=dict)  # layer -> its body's tokens and bytes
    planned: tuple[Any, float] | None = None  # for which tokens, and the share: the same for all layers of a call
    warned: bool = False
    sizes: Callable[[], Sequence[LayerSize]] = tuple

    def __post_init__(self) -> None:
        """No bound yet."""
        self.most = min(self.most, MOST) if self.ratio is None else math.inf

    def limit(self, compression: float | None) -> None:
        """Bound the compression from now on, at the price of the target; None: no bound but the controller's own.

        Raises:
            FadeError: less than 1.
        """
        if compression is not None and not compression >= 1:
            raise FadeError(f"compression {compression!r} is less than 1, which no cache has; give 1 for a full one")
        self.most = self._unbounded if compression is None else min(float(compression), self._unbounded)

    @property
    def _unbounded(self) -> float:
        return MOST if self.ratio is None else math.inf

    def reset(self) -> None:
        """Forget the text and the bound."""
        self.most, self.compression, self.planned, self.warned = self._unbounded, LEAST, None, False
        self.held, self.reachable = {}, None

    def facts(self) -> dict[str, Any]:
        """What a session stores of it."""
        named = {name: getattr(self, name) for name in FACTS} | {"most": self.most if self.most < math.inf else None}
        held = {str(layer): list(each) for layer, each in self.held.items()}
        planned = None if self.planned is None else [list(self.planned[0][0]), self.planned[0][1], self.planned[1]]
        return {**named, "held": held, "planned": planned}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on from :meth:`facts`."""
        for name in FACTS:
            setattr(self, name, facts.get(name))
        self.most = self._unbounded if self.most is None else self.most
        self.held = {int(layer): (tokens, size) for layer, (tokens, size) in facts["held"].items()}
        lengths, most, share = facts["planned"] or ([], 0.0, 0.0)
        self.planned = ((tuple(lengths), most), share) if facts["planned"] else None

    def share(self, lengths: Tensor) -> float:
        """Share of the context that each row's body may keep now; ``lengths`` [B]: tokens of each sequence."""
        asked = (tuple(lengths.tolist()), self.most)
        if self.planned is None or self.planned[0] != asked:
            self.planned = asked, self._share(asked[0])
        return self.planned[1]

    def _share(self, lengths: Sequence[int]) -> float:
        sizes = self.sizes()
        evicting, others = [size for size in sizes if size.evicts], [size for size in sizes if not size.evicts]
        width, held = sum(size.width for size in evicting), self._held_by_a_token(evicting)
        body, total = sum(max(n - self.exact, 0) for n in lengths), max(sum(lengths), 1)
        waiting = self.every if self.ratio is None else 0  # bytes are a bound; a ratio is that of a move
        fixed = self.extra + sum(
            width * min(n, self.exact + waiting) + sum(size.kept(n, self.exact, waiting) for size in others)
            for n in lengths
        )
        if self.ratio is None:
            assert self.target is not None
            share, self.compression = budget_share(held, body, self.target, width=width, fixed=fixed, limit=self.most)
            self._say_if_larger(fixed + share * held * body, sum(lengths))
        else:
            full = sum(size.full(n) for size in sizes for n in lengths)
            least = max(self.least * total / max(body, 1), width / (self.most * held))
            share = fitting_share(held, body, full / (self.ratio * AIM), fixed=fixed, least=min(least, 1.0))
            self.compression = width / (share * held)
            self._say_if_out_of_reach(full / (fixed + share * held * body), sizes, sum(lengths))
        return share * body / total

    def _held_by_a_token(self, evicting: Sequence[LayerSize]) -> float:
        """Bytes of a body token in all evicting layers together: as measured, before that as computed."""
        kept, size = (sum(column) for column in zip((0, 0), *self.held.values()))
        if not kept:
            return sum(each.packed for each in evicting)
        return size / kept * sum(each.heads for each in evicting)

    def _say_if_larger(self, needed: float, tokens: int) -> None:
        assert self.target is not None
        if needed <= self.target or self.warned:
            return
        self.warned = True
        warnings.warn(
            f"{tokens:,} tokens take up to {needed / 2**20:.3g} MiB with the body at {self.compression:g}x, "
            f"the most that is allowed, and memory is {self.target / 2**20:.3g} MiB; the cache grows beyond that",
            RuntimeWarning,
            stacklevel=2,
        )

    def _say_if_out_of_reach(self, reached: float, sizes: Sequence[LayerSize], tokens: int) -> None:
        assert self.ratio is not None
        missed = reached < self.ratio * (1 - SLACK)
        self.reachable = reached if missed else None
        if not missed or self.warned or self.most < math.inf:  # a guard's bound is no news
            return
        self.warned = True
        kinds = {
            "hold a window": sum(size.window is not None for size in sizes),
            "hold a recurrent state": sum(size.state > 0 or not size.width for size in sizes),
        }
        why = [f"{count} of {len(sizes)} layers {what}" for what, count in kinds.items() if count]
        why.append(f"{self.exact} tokens stay exact, and min_budget keeps {self.least:g} of the context")
        warnings.warn(
            f"target_compression {self.ratio:g}: reachable {reached:.1f}x at {tokens:,} tokens: {'; '.join(why)}",
            RuntimeWarning,
            stacklevel=2,
        )

    def note(self, layer: int, tokens: int, size: int) -> None:
        """Take in what a layer's body holds after a reassignment: tokens and bytes."""
        self.held[layer] = tokens, size
