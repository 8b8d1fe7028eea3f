"""A predictor against the oracle and every built-in heuristic, on the same traces.

Training's validation and the promotion gate both read this board, so both mean the same numbers.
A batch is a dictionary of padded rows as ``data.TraceDataModule`` yields them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from predictor import scores
from predictor.calibration import kl_divergence, masked_share
from predictor.errors import FadeError
from predictor.features import FEATURES, Hidden, PrefillFeatures
from predictor.metrics import (
    Calibration,
    Recovery,
    RowMean,
    RowQuantile,
    gap_closed,
    middle_recovery,
    recovery,
    spearman,
    topk_recall,
)
from predictor.scorenet import ScoreNet
from predictor.temporal import block_mass, heads_of

Batch = Mapping[str, Tensor]
Target = Literal["sum", "max", "blend"]
BUDGETS = (0.5, 0.25, 0.125)
GATE = 0.25  # the budget at which a predictor is chosen and promoted
WORST = 0.01  # quantile over rows that stands for the worst ones


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
            hidden_of(batch, rows, length),
            heads=heads_of(batch)[rows],
        )
        out[rows, :length] = net.score(features).float()
    if not out.isfinite().all():
        raise FadeError(f"{type(net).__name__} gives scores that are not numbers; train it again")
    return out


def hidden_of(batch: Batch, rows: Tensor | slice = slice(None), length: int | None = None) -> Hidden | None:
    """Keys and values of some rows, up to a length; None where the traces have none."""
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
    return _blend(kind, *(masked_share(batch[name], batch["eligible"]) for name in ("target_sum", "target_max")))


def block_targets(batch: Batch, steps: int | None, kind: Target = "sum") -> tuple[Tensor, Tensor]:
    """What a block forecast should be: the mass of each prompt block over the next ``steps`` steps.

    Args:
        batch: R rows. steps: how many of the recorded steps, or None for all.
        kind: ``sum``, as their mean; ``max``, as shares; or ``blend``, the mean of the two as shares.

    Returns:
        [R, N] mass, and [R, N] bool: blocks with at least one token that a policy may drop.

    Raises:
        FadeError: another kind.
    """
    sizes = batch["block_size"]
    count, block = sizes.shape[1], int(sizes.max())
    future = batch["future_mean"][:, :steps, :count]
    eligible = nn.functional.pad(batch["eligible"], (0, count * block - batch["eligible"].shape[1]))
    mask = eligible.unflatten(-1, (count, block)).any(-1) & batch["block_mask"]
    total, peak = future.mean(1) * sizes, future.amax(1) * sizes
    return (total if kind == "sum" else _blend(kind, masked_share(total, mask), masked_share(peak, mask))), mask


def _blend(kind: str, total: Tensor, peak: Tensor) -> Tensor:
    kinds = {"sum": total, "max": peak, "blend": (total + peak) / 2}
    if kind not in kinds:
        raise FadeError(f"target {kind!r} is not known; use one of {', '.join(kinds)}")
    return kinds[kind]


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
        self._rows = nn.ModuleDict(
            {
                "topk_recall": RowMean(topk_recall, budget=GATE),
                "middle_recovery": RowMean(middle_recovery, budget=GATE),
                "worst_percentile_recovery": RowQuantile(recovery, WORST, budgets=[GATE]),
            }
        )
        self.spearman = RowMean(_spearman)
        self.kl, self.calibration = RowMean(kl_divergence), Calibration()

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
            self.recovery[name].update(score, target, mask, eligible, batch["layer"], batch["head"])
        for metric in self._row_metrics():
            metric.update(given["net"], target, mask, eligible)
        if net.level == "block":
            mass, blocks = block_targets(batch, None)
            logits = net(block_mass(batch), batch["block_mask"], heads_of(batch)).detach()
            self.kl.update(logits, mass, blocks)
            self.calibration.update(logits, mass, blocks)

    def reset(self) -> None:
        """Forget all batches."""
        for metric in (*self.recovery.values(), *self._row_metrics(), self.kl, self.calibration):
            metric.reset()

    def _row_metrics(self) -> Iterable[RowMean]:
        return cast("Iterable[RowMean]", (*self._rows.values(), self.spearman))

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
        for name, metric in zip(self._rows, self._row_metrics()):
            out[f"{name}_at_{GATE}"] = float(metric.compute())
        out["spearman"] = float(self.spearman.compute())
        out |= calibration_values(self.kl, self.calibration)
        return {name: value for name, value in out.items() if value == value}  # a gap of nothing is nan

    def by_layer(self) -> list[dict[str, float]]:
        """Return one row a layer: recovery at the gate's budget of everything on the board."""
        return rows_by_layer(self.recovery, self.budgets.index(GATE))

    def by_head(self) -> list[dict[str, float]]:
        """Return one row a layer and kv head: recovery at the gate's budget of everything on the board."""
        return rows_by_head(self.recovery, self.budgets.index(GATE))


def _spearman(scores: Tensor, target: Tensor, mask: Tensor, eligible: Tensor) -> Tensor:
    return spearman(scores, target, eligible)


def rows_by_layer(metrics: Mapping[str, Recovery], at: int) -> list[dict[str, float]]:
    """One row a layer: recovery of each metric at its ``at``-th budget."""
    layers = {name: metric.by_layer() for name, metric in metrics.items()}
    return [
        {"layer": layer, **{name: round(float(rows[layer][at]), 5) for name, rows in layers.items() if rows}}
        for layer in layers["net"]
    ]


def rows_by_head(metrics: Mapping[str, Recovery], at: int) -> list[dict[str, float]]:
    """One row a layer and kv head: recovery of each metric at its ``at``-th budget."""
    heads = {name: metric.by_head() for name, metric in metrics.items()}
    return [
        {
            "layer": place[0],
            "head": place[1],
            **{name: round(float(rows[place][at]), 5) for name, rows in heads.items() if rows},
        }
        for place in heads["net"]
    ]


def calibration_values(kl: RowMean, calibration: Calibration) -> dict[str, float]:
    """KL of a block forecast from the truth as it is and at its best temperature, under their readable names."""
    if kl.rows == 0:
        return {}
    temperature, lowest = calibration.compute().tolist()
    return {"block_kl": float(kl.compute()), "block_kl_calibrated": lowest, "temperature": temperature}


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
