"""How well a network ranks tokens, beside the oracle and every heuristic, on the same traces.

Training's validation and the promotion gate both compute these, so both mean the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from predictor.batches import Batch, block_mass, block_targets, heads_of
from predictor.calibration import masked_kl
from predictor.heuristics import GATE, HEURISTICS, best_heuristic, measured
from predictor.metrics import (
    Calibration,
    Recovery,
    RowMean,
    RowQuantile,
    gap_closed,
    middle_recovery,
    recovery,
    reset_metrics,
    spearman,
    topk_recall,
)
from predictor.scorenet import ScoreNet, token_scores

BUDGETS = (0.5, 0.25, 0.125)
WORST_QUANTILE = 0.01  # quantile over rows that stands for the worst ones
Table = Mapping[str, Mapping[float, float]]  # name of a ranking -> budget -> mean recovery


class RecoveryMetrics(nn.Module):
    """Recovery of several rankings of the same rows, by name, at several budgets.

    Args:
        names: of the rankings; ``net`` and ``oracle`` are among them.
        budgets: fractions of the context that are kept; the gate's is always among them.
    """

    def __init__(self, names: Iterable[str], budgets: Sequence[float]) -> None:
        super().__init__()
        self.budgets = sorted({*budgets, GATE}, reverse=True)
        self._recovery = nn.ModuleDict({name: Recovery(self.budgets) for name in names})

    @property
    def recovery(self) -> dict[str, Recovery]:
        """The metric of each ranking, by name."""
        return cast("dict[str, Recovery]", dict(self._recovery.items()))

    def reset(self) -> None:
        """Forget all batches."""
        reset_metrics(self)

    def table(self) -> dict[str, dict[float, float]]:
        """Return the mean recovery of each ranking at each budget, of those that had rows."""
        return {
            name: dict(zip(self.budgets, metric.compute().reshape(-1).tolist()))
            for name, metric in self.recovery.items()
            if metric.rows.any()
        }

    def by_layer(self) -> list[dict[str, float]]:
        """Return one row a layer: recovery of each ranking at the gate's budget."""
        at = self.budgets.index(GATE)
        layers = {name: metric.by_layer() for name, metric in self.recovery.items()}
        return [
            {"layer": layer, **{name: round(float(rows[layer][at]), 5) for name, rows in layers.items() if rows}}
            for layer in layers["net"]
        ]

    def by_head(self) -> list[dict[str, float]]:
        """Return one row a layer and kv head: recovery of each ranking at the gate's budget."""
        at = self.budgets.index(GATE)
        heads = {name: metric.by_head() for name, metric in self.recovery.items()}
        return [
            {
                "layer": place[0],
                "head": place[1],
                **{name: round(float(rows[place][at]), 5) for name, rows in heads.items() if rows},
            }
            for place in heads["net"]
        ]


class RankingMetrics(RecoveryMetrics):
    """Recovery of a network, the oracle and the heuristics at several budgets; recall and block KL beside it.

    Args:
        budgets: fractions of the context that are kept; the gate's is always among them.
    """

    def __init__(self, budgets: Sequence[float] = BUDGETS) -> None:
        super().__init__(("net", "oracle", *HEURISTICS), budgets)
        self._rows = nn.ModuleDict(
            {
                "topk_recall": RowMean(topk_recall, budget=GATE),
                "middle_recovery": RowMean(middle_recovery, budget=GATE),
                "worst_percentile_recovery": RowQuantile(recovery, WORST_QUANTILE, budgets=[GATE]),
            }
        )
        self.spearman = RowMean(_spearman)
        self.kl, self.calibration = RowMean(masked_kl), Calibration()

    def update(self, net: ScoreNet, batch: Batch) -> None:
        """Add a padded batch of R trace rows of S tokens (``mask`` [R, S] and so on), ranked by ``net``."""
        mask, eligible, target = batch["mask"], batch["eligible"], batch["target_sum"]
        scored = {"net": token_scores(net, batch), "oracle": target}  # [R, S] each
        scored |= {name: score(batch) for name, score in HEURISTICS.items() if name != "h2o" or "h2o" in batch}
        for name, score in scored.items():
            self.recovery[name].update(score, target, mask, eligible, batch["layer"], batch["head"])
        for metric in self._row_metrics():
            metric.update(scored["net"], target, mask, eligible)
        if net.level == "block":
            mass, blocks = block_targets(batch, None)
            logits = net(block_mass(batch), batch["block_mask"], heads_of(batch)).detach()
            self.kl.update(logits, mass, blocks)
            self.calibration.update(logits, mass, blocks)

    def _row_metrics(self) -> Iterable[RowMean]:
        return cast("Iterable[RowMean]", (*self._rows.values(), self.spearman))

    def values(self) -> dict[str, float]:
        """Return every number under its readable name, as a tracking server takes it."""
        table = self.table()
        out = recovery_values(table, measured(table), best_heuristic)
        for name, metric in zip(self._rows, self._row_metrics()):
            out[f"{name}_at_{GATE}"] = float(metric.compute())
        out["spearman"] = float(self.spearman.compute())
        out |= calibration_values(self.kl, self.calibration)
        return without_nan(out)


def recovery_values(
    table: Table, heuristics: Sequence[str], best: Callable[[Table, float], tuple[str, float]]
) -> dict[str, float]:
    """Recovery at each budget under its readable name, and the part of the way to the oracle that the network goes.

    Args:
        table: of ``net``, ``oracle`` and the heuristics. heuristics: their names.
        best: gives name and recovery of the one to beat at a budget.

    Example:
        >>> table = {"net": {0.5: 0.75}, "oracle": {0.5: 1.0}, "ema": {0.5: 0.5}}
        >>> recovery_values(table, ["ema"], lambda table, budget: ("ema", table["ema"][budget]))
        {'recovery_at_0.5': 0.75, 'gap_closed_at_0.5': 0.5, 'oracle/recovery_at_0.5': 1.0,
         'heuristic/ema/recovery_at_0.5': 0.5}
    """
    out: dict[str, float] = {}
    for budget, net in table["net"].items():
        oracle = table["oracle"][budget]
        out[f"recovery_at_{budget}"] = net
        out[f"gap_closed_at_{budget}"] = gap_closed(net, best(table, budget)[1], oracle)
        out[f"oracle/recovery_at_{budget}"] = oracle
        out |= {f"heuristic/{name}/recovery_at_{budget}": table[name][budget] for name in heuristics}
    return out


def calibration_values(kl: RowMean, calibration: Calibration) -> dict[str, float]:
    """KL of a block forecast from the truth as it is and at its best temperature, under their readable names."""
    if kl.rows == 0:
        return {}
    temperature, lowest = calibration.compute().tolist()
    return {"block_kl": float(kl.compute()), "block_kl_calibrated": lowest, "temperature": temperature}


def without_nan(values: Mapping[str, float]) -> dict[str, float]:
    """The values that are numbers: the part that is closed of a gap of nothing is nan."""
    return {name: value for name, value in values.items() if value == value}


def _spearman(scores: Tensor, target: Tensor, mask: Tensor, eligible: Tensor) -> Tensor:
    return spearman(scores, target, eligible)
