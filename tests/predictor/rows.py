"""Random but lawful trace rows: what the data module yields, without a language model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from predictor.features import FeatureSpec, attention_rows, block_sizes, h2o_mass, pool_blocks, prefill_features

SINKS, RECENT = 4, 64


def sequence(length: int, steps: int, spec: FeatureSpec, seed: int, heads: int = 2) -> list[dict[str, Tensor]]:
    """Rows of one layer of one random document: queries that drift, so that the future is not the past."""
    make = torch.Generator().manual_seed(seed)
    total, dim, groups = length + steps, 16, 2
    drift = torch.randn(heads * groups, 1, dim, generator=make) + torch.randn(
        heads * groups, total, dim, generator=make
    ).cumsum(1) / math.sqrt(total)
    query = 1.5 * drift + 0.5 * torch.randn(heads * groups, total, dim, generator=make)
    key, value = (torch.randn(heads, total, dim, generator=make) for _ in range(2))
    scaling = dim**-0.5
    past = query[:, :length], key[:, :length], value[:, :length]
    seen = prefill_features(*past, scaling=scaling, table=None, spec=spec)
    future = attention_rows(query[:, length:], key, scaling, first=length)
    mass = h2o_mass(past[0], past[1], scaling) / torch.arange(length, 0, -1)
    return [
        {
            "tokens": seen.tokens[head],
            "history_mean": seen.history_mean[head],
            "history_max": seen.history_max[head],
            "future_mean": pool_blocks(future, spec.block)[0][head],
            "target_sum": future[head, :, :length].mean(0),
            "target_max": future[head, :, :length].amax(0),
            "h2o": mass[head].log(),
        }
        | ({} if seen.hidden is None else {"key": seen.hidden.key[head], "value": seen.hidden.value[head]})
        for head in range(heads)
    ]


def collate(rows: list[dict[str, Tensor]], spec: FeatureSpec) -> dict[str, Tensor]:
    """Pad rows on the right to the longest, with masks, as the data module does."""
    lengths = torch.tensor([len(row["tokens"]) for row in rows])
    slots, blocks = int(lengths.max()), math.ceil(int(lengths.max()) / spec.block)
    steps = rows[0]["future_mean"].shape[0]
    count, place = len(rows), torch.arange(slots)
    batch = {
        "tokens": torch.zeros(count, slots, len(spec.names)),
        "h2o": torch.zeros(count, slots),
        "target_sum": torch.zeros(count, slots),
        "target_max": torch.zeros(count, slots),
        "history_mean": torch.zeros(count, spec.window, blocks),
        "history_max": torch.zeros(count, spec.window, blocks),
        "future_mean": torch.zeros(count, steps, max(row["future_mean"].shape[1] for row in rows)),
        "block_size": torch.zeros(count, blocks),
        "mask": place < lengths[:, None],
        "eligible": (place >= SINKS) & (place < lengths[:, None] - RECENT),
        "length": lengths,
        "layer": torch.arange(count) // 2,
        "head": torch.arange(count) % 2,
        "doc": torch.zeros(count, dtype=torch.long),
    }
    for name in rows[0].keys() - batch.keys():
        batch[name] = torch.zeros(count, slots, rows[0][name].shape[-1])
    for i, row in enumerate(rows):
        for name, value in row.items():
            batch[name][(i, *map(slice, value.shape))] = value
        sizes = block_sizes(int(lengths[i]), spec.block)
        batch["block_size"][i, : len(sizes)] = sizes.float()
    batch["block_mask"] = batch["block_size"] > 0
    return batch
