"""What a collection holds, finished or not, and which heads of its model look far back."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.checks import SHARDS
from data.folder import Folder
from data.trace import Row, Traces, read_manifest, rows_of
from predictor.errors import FadeError


@dataclass
class Group:
    """Documents of one source and split; prompt lengths in tokens."""

    source: str
    split: str
    documents: int
    shortest: int
    median: float
    longest: int


@dataclass
class Contents:
    """What is in the folder of a collection.

    Attributes:
        manifest: as it stands. groups: its documents by source and split, in order.
        shards: that are there, of those the manifest names. rows, bytes: of these shards.
    """

    manifest: dict[str, Any]
    groups: list[Group]
    shards: int
    rows: int
    bytes: int


@dataclass
class FarAttention:
    """How one kv head attends to far tokens, averaged over documents.

    Attributes:
        layer, head: which one. looked_up, fraction: see :func:`far_attention`.
    """

    layer: int
    head: int
    looked_up: float
    fraction: float


def contents_of(place: str) -> Contents:
    """Look into a folder without judging it.

    Raises:
        FadeError: no manifest, or a damaged one, or a damaged shard.
    """
    folder = Folder(place)
    manifest = read_manifest(folder)
    if manifest is None:
        raise FadeError(f"no traces in {place}; collect some with: python -m pipelines.collect_traces")
    named = {shard["name"] for shard in manifest["shards"]}
    found = [name for name in folder.names(SHARDS) if name in named]
    rows = size = 0
    for name in found:
        with folder.fetch(name) as path:
            rows, size = rows + rows_of(path), size + path.stat().st_size
    return Contents(manifest, _groups(manifest), len(found), rows, size)


def far_attention(
    traces: Traces, split: str = "validation", n_sink: int = 4, recent_window: int = 64
) -> list[FarAttention]:
    """Rank kv heads by how much they look up in the far past, most retrieval-like first.

    Far tokens are those of the prompt without its first ``n_sink`` and last ``recent_window``. Let a_t(s) be the
    attention that step t of the T steps after the prompt pays to token s, averaged over the queries of a kv head.

    - ``looked_up`` = sum over far s of max over t of a_t(s): how many far tokens get a full look at some step, between
      0 and T. A head that spreads its attention evenly has at most about 1, one that copies has up to T.
    - ``fraction`` = mean over t of the sum over far s of a_t(s): the part of its attention that goes far back.

    Args:
        traces: a complete collection. split: of the documents that are averaged over.
        n_sink: first tokens that do not count. recent_window: last tokens that do not count.

    Returns:
        All heads, by falling ``looked_up``.
    """
    sums: dict[tuple[int, int], np.ndarray] = {}
    counts: dict[tuple[int, int], int] = {}
    for name in traces.shards(split):
        for row in traces.read(name, ("target_max", "target_sum")):
            key = row["layer"], row["head"]
            sums[key] = sums.get(key, np.zeros(2)) + _far(row, n_sink, recent_window)
            counts[key] = counts.get(key, 0) + 1
    heads = [FarAttention(*key, *(total / counts[key]).tolist()) for key, total in sums.items()]
    return sorted(heads, key=lambda head: -head.looked_up)


def _far(row: Row, n_sink: int, recent_window: int) -> np.ndarray:
    """Sums [2] over far tokens of the largest and the mean attention of the steps."""
    far = slice(n_sink, max(row["length"] - recent_window, n_sink))
    return np.array([np.exp(row[name][far].astype(np.float64)).sum() for name in ("target_max", "target_sum")])


def _groups(manifest: Mapping[str, Any]) -> list[Group]:
    prompts: dict[tuple[str, str], list[int]] = {}
    for document in manifest["documents"]:
        prompts.setdefault((document["source"], document["split"]), []).append(document["prompt"])
    return [
        Group(*key, len(lengths), min(lengths), statistics.median(lengths), max(lengths))
        for key, lengths in prompts.items()
    ]
