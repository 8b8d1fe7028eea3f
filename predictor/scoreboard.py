"""A predictor against the oracle and every built-in heuristic, on the same traces.

Training's validation and the promotion gate both read this board, so both mean the same numbers.
A batch is a dictionary of padded rows as ``data.TraceDataModule`` yields them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from predictor import scores
from predictor.errors import FadeError
from predictor.features import FEATURES, PrefillFeatures
from predictor.metrics import Recovery, RowMean, gap_closed, kl_divergence, topk_recall
from predictor.nets import ScoreNet

Batch = Mapping[str, Tensor]
BUDGETS = (0.5, 0.25, 0.125)
GATE = 0.25  # the budget at which a predictor is chosen and promoted


def _feature(batch: Batch, name: str) -> Tensor:
    return batch["tokens"][..., FEATURES.index(name)]


HEURISTICS: dict[str, Callable[[Batch], Tensor]] = {
    "position": lambda batch: scores.position(batch["mask"].cumsum(-1)),
    "h2o": lambda batch: batch["h2o"],
    "ema": lambda batch: _feature(batch, "log_ema"),
    "snapkv": lambda batch: _feature(batch, "log_snap"),
    "ea": lambda batch: _feature(batch, "log_ea"),
    "ema_ea": lambda batch: scores.ema_ea(_feature(batch, "log_ema"), _feature(batch, "log_ea")),
}


@torch.no_grad()
def token_scores(net: ScoreNet, batch: Batch) -> Tensor:
    """Score a padded batch exactly as the runtime scores a prompt: rows of one length at a time, no padding.

    Returns:
        [R, S]; 0 on padding.

    Raises:
        FadeError: the network gives something that is not a number.
    """
    out = torch.zeros(batch["mask"].shape, device=batch["mask"].device)
    for length in batch["length"].unique().tolist():
        rows = (batch["length"] == length).nonzero().flatten()
        blocks = int(batch["block_mask"][rows[0]].sum())
        features = PrefillFeatures(
            batch["tokens"][rows, :length],
            batch["history_mean"][rows, :, :blocks],
            batch["history_max"][rows, :, :blocks],
        )
        out[rows, :length] = net.score(features).float()
    if not out.isfinite().all():
        raise FadeError(f"{type(net).__name__} gives scores that are not numbers; train it again")
    return out


def block_targets(batch: Batch, steps: int | None) -> tuple[Tensor, Tensor]:
    """What a block forecast should be: the mean mass of each prompt block over the next ``steps`` steps.

    Args:
        batch: R rows. steps: how many of the recorded steps, or None for all.

    Returns:
        [R, N] mass, and [R, N] bool: blocks with at least one token that a policy may drop.
    """
    sizes = batch["block_size"]
    count, block = sizes.shape[1], int(sizes.max())
    mass = batch["future_mean"][:, :steps, :count].mean(1) * sizes
    eligible = nn.functional.pad(batch["eligible"], (0, count * block - batch["eligible"].shape[1]))
    return mass, eligible.unflatten(-1, (count, block)).any(-1) & batch["block_mask"]


class Scoreboard(nn.Module):
    """Recovery of a network, the oracle and the heuristics at several budgets; recall and block KL beside it.

    Args:
        budgets: kept shares of the context; the gate's is always among them.
    """

    def __init__(self, budgets: Sequence[float] = BUDGETS) -> None:
        super().__init__()
        self.budgets = sorted({*budgets, GATE}, reverse=True)
        names = ("net", "oracle", *HEURISTICS)
        self._recovery = nn.ModuleDict({name: Recovery(self.budgets) for name in names})
        self.recall = RowMean(topk_recall, budget=GATE)
        self.block_kl = RowMean(kl_divergence)

    @property
    def recovery(self) -> dict[str, Recovery]:
        """The metric of everything on the board, by name."""
        return cast("dict[str, Recovery]", dict(self._recovery.items()))

    def update(self, net: ScoreNet, batch: Batch) -> None:
        """Add a batch."""
        mask, eligible, target = batch["mask"], batch["eligible"], batch["target_sum"]
        given = {"net": token_scores(net, batch), "oracle": target}
        given |= {name: score(batch) for name, score in HEURISTICS.items() if name != "h2o" or "h2o" in batch}
        for name, score in given.items():
            self.recovery[name].update(score, target, mask, eligible, batch["layer"])
        self.recall.update(given["net"], target, mask, eligible)
        if net.level == "block":
            mass, blocks = block_targets(batch, None)
            history = batch["history_mean"] * batch["block_size"][:, None]
            self.block_kl.update(net(history, batch["block_mask"]), mass, blocks)

    def reset(self) -> None:
        """Forget all batches."""
        for metric in (*self.recovery.values(), self.recall, self.block_kl):
            metric.reset()

    def table(self) -> dict[str, dict[float, float]]:
        """Return the mean recovery of ``net``, ``oracle`` and each heuristic at each budget."""
        return {
            name: dict(zip(self.budgets, metric.compute().reshape(-1).tolist()))
            for name, metric in self.recovery.items()
            if metric.rows.any()
        }

    def values(self) -> dict[str, float]:
        """Return every number under its readable name, as a tracking server takes it."""
        table, out = self.table(), {}
        for budget in self.budgets:
            _, best = best_heuristic(table, budget)
            net, oracle = table["net"][budget], table["oracle"][budget]
            out[f"recovery_at_{budget}"] = net
            out[f"gap_closed_at_{budget}"] = gap_closed(net, best, oracle)
            out[f"oracle/recovery_at_{budget}"] = oracle
            for name in measured(table):
                out[f"heuristic/{name}/recovery_at_{budget}"] = table[name][budget]
        out[f"topk_recall_at_{GATE}"] = float(self.recall.compute())
        if self.block_kl.rows > 0:
            out["block_kl"] = float(self.block_kl.compute())
        return {name: value for name, value in out.items() if value == value}  # a gap of nothing is nan

    def by_layer(self) -> list[dict[str, float]]:
        """Return one row a layer: recovery at the gate's budget of everything on the board."""
        at = self.budgets.index(GATE)
        layers = {name: metric.by_layer() for name, metric in self.recovery.items()}
        return [
            {
                "layer": layer,
                **{name: round(float(rows[layer][at]), 5) for name, rows in layers.items() if rows},
            }
            for layer in layers["net"]
        ]


def measured(table: Mapping[str, Mapping[float, float]]) -> list[str]:
    """Names of the heuristics in a table: traces without the ``h2o`` column lack that one."""
    return [name for name in HEURISTICS if name in table]


def best_heuristic(table: Mapping[str, Mapping[float, float]], budget: float = GATE) -> tuple[str, float]:
    """Name and recovery of the best built-in heuristic at a budget.

    Example:
        >>> best_heuristic({name: {0.25: i / 10} for i, name in enumerate(HEURISTICS)})
        ('ema_ea', 0.5)
    """
    name = max(measured(table), key=lambda heuristic: table[heuristic][budget])
    return name, table[name][budget]
