"""Trace shards -> rows -> padded batches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.trace import ARRAYS, Row, Traces
from predictor.errors import FadeError
from predictor.features import FeatureSpec, block_sizes

Batch = dict[str, Tensor]
LINEAR = ("target_sum", "target_max")  # stored as logs, handed out as probabilities


class TraceDataset(IterableDataset):
    """Streams the rows of one split, one shard in memory at a time.

    Under torch.distributed, and in several loader workers, each process gets its own rows of every shard; train
    rows are dealt evenly, so that no process waits for another.

    Args:
        traces: an open collection.
        split: ``"train"`` or ``"validation"``.
        shuffle: draw the order of shards, and of rows within a shard, anew for each pass.
        seed: of the order.
        number: of a pass, which decides its order; by default passes are counted.

    Attributes:
        yielded: rows of the newest pass that this process has had.

    Raises:
        FadeError: the collection has no such split.
    """

    def __init__(
        self,
        traces: Traces,
        split: str,
        shuffle: bool = False,
        seed: int = 0,
        number: Callable[[], int] | None = None,
    ):
        self.traces, self.split, self.shuffle, self.seed = traces, split, shuffle, seed
        self.number = number or count().__next__
        self.yielded, self._skip = 0, 0
        if not traces.shards(split):
            raise FadeError(f"traces in {traces.folder} have no {split} documents; collect some")
        self._documents = {one["id"]: i for i, one in enumerate(traces.manifest["documents"])}

    def __len__(self) -> int:
        """Rows that this process gets in one pass."""
        rank, world = _process()
        counts = [shard["rows"] for shard in self.traces.manifest["shards"] if shard["split"] == self.split]
        return sum(len(self._mine(range(count), rank, world)) for count in counts)

    def __iter__(self) -> Iterator[Row]:
        """Yield rows as dictionaries, arrays as float16 numpy and ``doc`` as its place in the manifest."""
        drawn = random.Random(f"{self.seed} {self.number()}")
        skip, self._skip, self.yielded = self._skip, 0, 0
        rank, world = _process()
        shards = self.traces.shards(self.split)
        if self.shuffle:
            drawn.shuffle(shards)
        for name in shards:
            rows = self.traces.read(name)
            if self.shuffle:
                drawn.shuffle(rows)
            for row in self._mine(rows, rank, world):
                self.yielded += 1
                if self.yielded > skip:
                    yield {**row, "doc": self._documents[row["doc"]]}

    def skip(self, rows: int) -> None:
        """Begin the next pass after its first ``rows``; a pass that was finished is not begun again."""
        self._skip = rows if rows < len(self) else 0

    def _mine(self, rows: Sequence, rank: int, world: int) -> Sequence:
        even = len(rows) // world * world if self.split == "train" else len(rows)
        return rows[:even][rank::world]


class TraceLoader(DataLoader):
    """A loader of trace rows whose place is kept in checkpoints: a fit that was broken off sees no row twice."""

    dataset: TraceDataset

    def state_dict(self) -> dict[str, int]:
        """Return how far the pass is; rows are loaded in this process, and none ahead of its batch."""
        return {"given": self.dataset.yielded}  # the name in checkpoints

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.dataset.skip(state["given"])


def collate(rows: Sequence[Row], spec: FeatureSpec, n_sink: int = 4, recent_window: int = 64) -> Batch:
    """Pad rows on the right to the longest and say what is real.

    Args:
        rows: from :class:`TraceDataset`. spec: their features.
        n_sink: first tokens that no policy may drop. recent_window: last tokens that no policy may drop.

    Returns:
        R rows, S tokens, F features, W history steps, N blocks of the prompt, T future steps, M blocks of prompt and
        future; float32 unless said otherwise, zero where padded:

        - ``tokens`` [R, S, F]; ``h2o`` [R, S] log, only when recorded
        - ``target_sum``, ``target_max`` [R, S] probabilities
        - ``history_mean``, ``history_max`` [R, W, N]; ``future_mean``, ``future_max`` [R, T, M]
        - ``mask``, ``eligible`` [R, S] bool: real tokens, and those of them that a policy may drop
        - ``block_size`` [R, N] real tokens of a block; ``block_mask`` [R, N] bool
        - ``length``, ``layer``, ``head``, ``doc`` [R] int64

    Raises:
        FadeError: rows with different numbers of future steps.

    Example:
        >>> import numpy as np
        >>> place = {"length": 70, "steps": 1, "layer": 0, "head": 0, "doc": 0}
        >>> row = place | {"target_sum": np.zeros(70), "target_max": np.zeros(70)}
        >>> batch = collate([row], FeatureSpec())
        >>> batch["eligible"].nonzero()[:, 1].tolist(), batch["block_size"].tolist()
        ([4, 5], [[16.0, 16.0, 16.0, 16.0, 6.0]])
    """
    if len(steps := {row["steps"] for row in rows}) > 1:
        raise FadeError(f"trace rows have {sorted(steps)} future steps; a batch needs one number: collect again")
    length = torch.tensor([row["length"] for row in rows])
    batch: Batch = {"length": length}
    for name in ("layer", "head", "doc"):
        batch[name] = torch.tensor([row[name] for row in rows])
    for name in ARRAYS:
        if all(name in row for row in rows):
            batch[name] = _padded([torch.from_numpy(row[name].copy()) for row in rows])
    for name in LINEAR:
        batch[name] = batch[name].exp()
    slot = torch.arange(int(length.max()))
    batch["mask"] = slot < length[:, None]  # [R, S]
    for name in LINEAR:
        batch[name] *= batch["mask"]  # the exponential of padding is 1
    batch["eligible"] = (slot >= n_sink) & (slot < length[:, None] - recent_window)
    blocks = math.ceil(int(length.max()) / spec.block)
    batch["block_size"] = torch.zeros(len(rows), blocks)
    for row, slots in zip(batch["block_size"], length.tolist()):
        sizes = block_sizes(slots, spec.block)
        row[: len(sizes)] = sizes.float()
    batch["block_mask"] = batch["block_size"] > 0
    return batch


def _padded(parts: list[Tensor]) -> Tensor:
    """Stack tensors of one rank, zero where a part is smaller than the largest, as float32."""
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts))]
    out = torch.zeros(len(parts), *shape)
    for i, part in enumerate(parts):
        corner: Any = (i, *map(slice, part.shape))
        out[corner] = part.float()
    return out


def _process() -> tuple[int, int]:
    """Number of this process among all that read, and how many there are."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    world = torch.distributed.get_world_size() if distributed else 1
    worker = get_worker_info()
    if worker is None:
        return rank, world
    return rank * worker.num_workers + worker.id, world * worker.num_workers
