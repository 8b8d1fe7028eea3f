"""Recorded attention of one kv head and what predictors forecast of it, from a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.trace import HIDDEN, Row, Traces
from pipelines.plots.quality import attention_and_forecasts
from predictor import scores
from predictor.batches import heads_of, hidden_of
from predictor.bundle import Predictor
from predictor.cache_layers import in_words
from predictor.errors import FadeError
from predictor.features import PrefillFeatures, block_sizes

EVERY = 16  # steps between two forecasts of a network that reads attention history


@dataclass
class HeadMap:
    """One kv head's attention after the prompt, as fractions over the prompt's N blocks.

    Attributes:
        where: document, layer and head in words.
        recorded: [T, N]. forecast: [T, N], by the network called ``by``.
        once: name -> [N] forecasts of the mean, made before the first step.
        block: tokens in a block.
    """

    where: str
    recorded: np.ndarray
    forecast: np.ndarray
    by: str
    once: dict[str, np.ndarray]
    block: int


def head_map(traces: Traces, predictors: Mapping[str, Predictor], layer: int | None, head: int) -> HeadMap:
    """Forecast one head of the first validation document.

    Args:
        traces: the collection.
        predictors: name -> predictor; one that forecasts blocks does so again every 16 steps.
        layer: of the language model; None for the middle one of those that were recorded. head: kv head of that layer.

    Raises:
        FadeError: there is no such layer or head.
    """
    row = _row(traces, layer, head)
    layer = row["layer"]
    block, slots = traces.spec.block, row["length"]
    sizes = block_sizes(slots, block).float()  # [N]
    history = torch.tensor(row["history_mean"], dtype=torch.float32) * sizes  # [W, N]
    future = torch.tensor(row["future_mean"], dtype=torch.float32)[:, : len(sizes)] * sizes  # [T, N]
    names = [name for name in ("tokens", "history_mean", "history_max", *HIDDEN) if name in row]
    batch = {name: torch.tensor(row[name], dtype=torch.float32)[None] for name in names}
    batch |= {"layer": torch.tensor([layer]), "head": torch.tensor([head])}
    features = PrefillFeatures(
        batch["tokens"], batch["history_mean"], batch["history_max"], hidden_of(batch), heads_of(batch)
    )
    once = {"ema": _fractions(scores.ema(history, traces.spec.ema_decay).clamp(min=1e-9).log())}
    by, forecast = "ema", once["ema"].expand(len(future), -1)
    for name, predictor in predictors.items():
        blocks = torch.nn.functional.pad(predictor.forecast(features)[0], (0, len(sizes) * block - slots)).unflatten(
            -1, (-1, block)
        )
        once[name] = blocks.sum(-1)
        by, forecast = name, once[name].expand(len(future), -1)
    for name, predictor in predictors.items():
        if predictor.net.level == "block":
            by = f"{name}, every {EVERY} steps"
            forecast = _rolling(predictor, history, future, heads_of(batch))
    return HeadMap(
        where=f"layer {layer}, kv head {head}, a {row['source']} text of {slots:,} tokens",
        recorded=(future / future.sum(-1, keepdim=True)).numpy(),
        forecast=forecast.numpy(),
        by=by,
        once={name: values.numpy() for name, values in once.items()},
        block=block,
    )


def draw(path: Path, head: HeadMap) -> None:
    """Draw a head map to a PNG."""
    attention_and_forecasts(
        path,
        head.recorded,
        head.forecast,
        head.once,
        head.block,
        (f"Attention after the prompt: {head.where}", f"forecast ({head.by})"),
    )


def _rolling(predictor: Predictor, history: Tensor, future: Tensor, heads: Tensor) -> Tensor:
    """Forecasts [T, N] from the latest W recorded steps, made anew every :data:`EVERY` steps."""
    steps = torch.cat((history, future))
    window = len(history)
    starts = torch.arange(0, len(future), EVERY)
    windows = torch.stack([steps[start : start + window] for start in starts])  # [R, W, N]
    with torch.no_grad():
        fractions = _fractions(predictor.net(windows, heads=heads.expand(len(windows), -1)))
    return fractions.repeat_interleave(EVERY, 0)[: len(future)]


def _fractions(logs: Tensor) -> Tensor:
    return logs.softmax(-1)


def _row(traces: Traces, layer: int | None, head: int) -> Row:
    shard = traces.shards("validation")[0]
    rows = traces.read(shard, ("tokens", "history_mean", "history_max", "future_mean"))
    first = [row for row in rows if row["doc"] == rows[0]["doc"]]
    layer = traces.layers[len(traces.layers) // 2] if layer is None else layer
    for row in first:
        if (row["layer"], row["head"]) == (layer, head):
            return row
    heads = sorted({row["head"] for row in first})
    raise FadeError(
        f"heatmap_layer {layer}, heatmap_head {head} is not in the traces; they hold {in_words(traces.layers)} "
        f"and {in_words(heads, 'kv head')}"
    )
