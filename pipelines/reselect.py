"""Predictors against moving averages and the oracle, choosing blocks again while decoding."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pipelines.checkpoints import load_checkpoint
from pipelines.cli import run
from pipelines.reporting.tables import plain_table
from predictor.bundle import Predictor
from predictor.errors import FadeError
from predictor.heuristics import GATE
from predictor.metrics import gap_closed
from predictor.reselect import AVERAGES, ReselectMetrics, block_net
from predictor.scorenet import BlockNet
from predictor.temporal import EmaBank, advance

TOKENS = 2048  # of the context for which a selection is timed
ROWS = 90  # layers x kv heads of it


@dataclass(frozen=True)
class ReselectSettings:
    """Options of `pipelines.reselect`.

    Args:
        predictors: folders that ``lightning fit`` wrote, or bundles, of networks that forecast blocks.
        traces: folder of a collection; its validation documents are used.
        every: steps between choices, one table each.
        stride: judge each stride-th step only.
        batch_size: rows in a batch.
    """

    predictors: list[str]
    traces: str = "artefacts/traces/demo"
    every: list[int] = field(default_factory=lambda: [1, 16])
    stride: int = 1
    batch_size: int = 30


def reselect(settings: ReselectSettings) -> None:
    """Compare predictors that choose again, while a model decodes, which blocks of its context are read.

    Prints, for each number of steps between choices, the recovery on the validation documents of each predictor, of
    moving averages of the attention so far, of the best average fixed at the end of the prompt, and of the oracle,
    with the share of the gap from the best average to the oracle that is closed, KL, temperature and milliseconds.
    """
    loaded = {Path(folder).name: _load(folder) for folder in settings.predictors}
    if len(loaded) < len(settings.predictors):
        raise FadeError(f"predictors {', '.join(settings.predictors)} end in the same name; rename a folder")
    nets = {name: block_net(predictor.net) for name, predictor in loaded.items()}
    for steps in settings.every:
        metrics = measure(loaded, settings.traces, steps, settings.stride, settings.batch_size)
        print(f"choosing again every {steps} steps, recovery at budget {GATE} of the blocks")
        print(format_rows(compare(nets, metrics)))
        print()


def compare(nets: Mapping[str, BlockNet], metrics: Mapping[str, ReselectMetrics]) -> list[dict[str, Any]]:
    """One row for each contestant, best first; the networks' rows say what they cost."""
    table: dict[str, float] = {}
    for name, each in metrics.items():
        own = {who: row[GATE] for who, row in each.table().items()}
        table |= {other: value for other, value in own.items() if other != "net"} | {name: own["net"]}
    best = max(table[average] for average in AVERAGES)
    rows = []
    for name in sorted(table, key=lambda name: -table[name]):
        row: dict[str, Any] = {"by": name, "recovery": table[name]}
        row["gap_closed"] = gap_closed(table[name], best, table["oracle"])
        if name in nets:
            values = metrics[name].values()
            row |= {"worst_1%": values[f"worst_percentile_recovery_at_{GATE}"]}
            row |= {key: values[key] for key in ("block_kl", "block_kl_calibrated", "temperature")}
            row["parameters"] = sum(parameter.numel() for parameter in nets[name].parameters())
            row["ms"] = cost_ms(nets[name])
        rows.append(row)
    return rows


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay rows out in columns for a terminal; what a row lacks stays empty.

    Example:
        >>> print(format_rows([{"by": "net", "recovery": 0.91, "ms": 2.5}, {"by": "ema", "recovery": 0.9}]))
        by   recovery      ms
        net    0.9100  2.5000
        ema    0.9000
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    return plain_table(names, [[_text(row.get(name, "")) for name in names] for row in rows], words=1)


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _load(folder: str) -> Predictor:
    predictor = load_checkpoint(folder, "predictor")
    block_net(predictor.net)  # refuses a network that does not forecast blocks
    return predictor


def measure(
    predictors: Mapping[str, Predictor], traces: str, every: int, stride: int = 1, batch_size: int = 30
) -> dict[str, ReselectMetrics]:
    """Fill one ReselectMetrics for each predictor from the validation documents."""
    from data.datamodule import TraceDataModule  # lightning: five seconds

    module = TraceDataModule(traces, batch_size=batch_size)
    module.setup("validate")
    for predictor in predictors.values():
        predictor.net.check_spec(module.traces.spec)
    metrics = {name: ReselectMetrics(every, stride=stride) for name in predictors}
    for batch in tqdm(module.val_dataloader(), desc="Validation documents", unit="batch"):
        for name, each in metrics.items():
            each.update(predictors[name].net, batch)
    return metrics


def cost_ms(net: BlockNet, rounds: int = 5) -> float:
    """Milliseconds that one selection takes, the least of some: bring the state up to date, and forecast."""
    blocks = TOKENS // net.block
    history, best = torch.rand(ROWS, 64, blocks).softmax(-1), float("inf")
    heads = torch.zeros(ROWS, 2, dtype=torch.long)  # which they are costs the same
    with torch.inference_mode():
        for _ in range(rounds):
            bank = net.bank(history) if isinstance(net, EmaBank) else history
            start = time.perf_counter()
            if isinstance(net, EmaBank):
                net.forecast(advance(bank, history[:, -1], 64, net.decays), heads=heads)
            else:
                net(history, heads=heads)
            best = min(best, 1000 * (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    sys.exit(run(reselect))
