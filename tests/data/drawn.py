"""Random tokens, and rows of traces with random arrays."""

from __future__ import annotations

import numpy as np
import torch

from data.trace import ARRAYS, Row
from predictor.features import FeatureSpec


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


def random_rows(count: int, slots: int, steps: int, spec: FeatureSpec, seed: int) -> list[Row]:
    drawn = np.random.default_rng(seed)
    blocks, total = -(-slots // spec.block), -(-(slots + steps) // spec.block)
    size = {"S": slots, "F": len(spec.names), "W": spec.window, "T": steps, "N": blocks, "M": total, "D": 6}
    return [
        {
            "doc": f"d{i}",
            "split": "train",
            "source": "s",
            "layer": i,
            "head": 1,
            "length": slots,
            "steps": steps,
        }
        | {name: drawn.normal(size=[size[a] for a in axes]).astype(np.float16) for name, axes in ARRAYS.items()}
        for i in range(count)
    ]
