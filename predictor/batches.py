"""What is read off a padded batch of trace rows, a dictionary of tensors as :func:`data.dataset.collate` makes it.

Shapes: R rows (one document, layer, kv head each), S tokens, W history steps, T future steps, N blocks of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from predictor.calibration import masked_probabilities
from predictor.errors import FadeError
from predictor.features import Hidden

Batch = Mapping[str, Tensor]
Target = Literal["sum", "max", "blend"]


def block_mass(batch: Batch) -> Tensor:
    """Attention mass of each prompt block at each history step, [R, W, N]."""
    return batch["history_mean"] * batch["block_size"][:, None]


def heads_of(batch: Batch) -> Tensor:
    """Layer and kv head of each row, [R, 2]."""
    return torch.stack((batch["layer"], batch["head"]), dim=-1)


def hidden_of(batch: Batch, rows: Tensor | slice = slice(None), length: int | None = None) -> Hidden | None:
    """Keys and values of some rows, up to a length; None where the traces have none.

    Args:
        batch: R rows. rows: [n] indices of rows, or a slice. length: tokens of each of them.

    Returns:
        Keys and values [n, length, D] float32, layers and kv heads [n].
    """
    if "key" not in batch:
        return None
    vectors = (batch[name][rows, :length] for name in ("key", "value"))
    return Hidden(*vectors, *(batch[name][rows] for name in ("layer", "head")))


def target_mass(batch: Batch, kind: Target = "sum") -> Tensor:
    """What a token should be ranked by, [R, S], normalised over the tokens that a policy may drop.

    Args:
        batch: R rows.
        kind: ``sum`` or ``max`` of its attention over the recorded steps, or ``blend``, the mean of the two.

    Raises:
        FadeError: another kind.
    """
    total, peak = (masked_probabilities(batch[f"target_{each}"], batch["eligible"]) for each in ("sum", "max"))
    return _blend(kind, total, peak)


def block_targets(batch: Batch, steps: int | None, kind: Target = "sum") -> tuple[Tensor, Tensor]:
    """What a block forecast should be: the mass of each prompt block over the next ``steps`` steps.

    Args:
        batch: R rows. steps: how many of the recorded steps, or None for all.
        kind: ``sum``, as their mean; ``max``, as probabilities; or ``blend``, the mean of the two as probabilities.

    Returns:
        [R, N] mass, and [R, N] bool: blocks with at least one token that a policy may drop.

    Raises:
        FadeError: another kind.
    """
    sizes = batch["block_size"]
    count, block = sizes.shape[1], int(sizes.max())
    future = batch["future_mean"][:, :steps, :count]
    eligible = pad(batch["eligible"], (0, count * block - batch["eligible"].shape[1]))
    mask = eligible.unflatten(-1, (count, block)).any(-1) & batch["block_mask"]
    total, peak = future.mean(1) * sizes, future.amax(1) * sizes
    if kind == "sum":
        return total, mask
    return _blend(kind, masked_probabilities(total, mask), masked_probabilities(peak, mask)), mask


def _blend(kind: str, total: Tensor, peak: Tensor) -> Tensor:
    kinds = {"sum": total, "max": peak, "blend": (total + peak) / 2}
    if kind not in kinds:
        raise FadeError(f"target {kind!r} is not known; use one of {', '.join(kinds)}")
    return kinds[kind]
