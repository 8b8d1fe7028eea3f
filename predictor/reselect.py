"""Re-selection while decoding: which blocks to read next, chosen again every few steps from the rows seen so far.

At each step a selection keeps a fraction of the blocks that exist. The attention sinks and the recent window are always
kept and count in the budget, and so do blocks that are younger than the selection. All contestants are judged on the
same steps: the network, each moving average of the bank, what was fixed at the end of the prompt, and the oracle.

This is a study: networks are trained (``every`` of :class:`predictor.module.PredictorModule`) and compared
(``pipelines.reselect``) on recorded attention. The cache selects once, at the end of a prompt, and uses none of it.

Shapes: R rows (one document, layer, kv head each), W history steps, T recorded steps, M blocks of prompt and future.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from predictor.batches import Batch, block_mass, heads_of
from predictor.calibration import masked_kl
from predictor.errors import FadeError
from predictor.features import block_sizes
from predictor.heuristics import GATE
from predictor.metrics import Calibration, RowMean, RowQuantile, recovery, topk_recall
from predictor.ranking_metrics import WORST_QUANTILE, RecoveryMetrics, calibration_values, recovery_values, without_nan
from predictor.scorenet import BlockNet, ScoreNet
from predictor.temporal import DECAYS, average_weights

AVERAGES = {f"ema{100 * decay:.0f}": decay for decay in DECAYS}
FIXED = "ema95"  # what a selection that is fixed at the end of the prompt ranks by


def timeline(batch: Batch) -> Tensor:
    """Attention mass of each block at each step, first the history and then the future, [R, W + T, M]."""
    past, future = block_mass(batch), batch["future_mean"]
    sizes = torch.zeros(len(future), future.shape[2], device=future.device)
    for row, length in zip(sizes, batch["length"].tolist()):
        real = block_sizes(length + future.shape[1], block_of(batch))
        row[: len(real)] = real
    return torch.cat((pad(past, (0, future.shape[2] - past.shape[2])), future * sizes[:, None]), dim=1)


def block_of(batch: Batch) -> int:
    """Tokens in a block: the largest of ``block_size`` [R, N]."""
    return int(batch["block_size"].max())


def blocks_at(batch: Batch, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Which blocks exist at some steps, and which of them a selection may drop.

    The sinks and the window are as long as those of the prompt's tokens, which ``eligible`` leaves out.

    Args:
        batch: R rows. steps: [P], counted from the end of the prompt.

    Returns:
        two of [R, P, M] bool.
    """
    block, count = block_of(batch), batch["future_mean"].shape[2]
    eligible, length = batch["eligible"], batch["length"][:, None, None]
    first = eligible.int().argmax(-1)[:, None, None]  # sinks
    last = eligible.shape[1] - eligible.flip(-1).int().argmax(-1)[:, None, None]
    start = torch.arange(count, device=eligible.device) * block
    now = length + steps[:, None] + 1  # tokens that a query sees, itself among them
    exist = start < now
    return exist, (start >= first) & (start + block <= now - (length - last)) & eligible.any(-1)[:, None, None]


def horizon_mass(line: Tensor, window: int, steps: Tensor, horizon: int) -> Tensor:
    """Mean mass over the ``horizon`` rows from each step on, or as many as were recorded.

    Args:
        line: [R, L, M] attention mass. window: rows before the first step. steps: [P]. horizon: rows averaged.

    Returns:
        [R, P, M].

    Example:
        >>> line = torch.tensor([[[9.0], [1.0], [3.0], [5.0]]])
        >>> horizon_mass(line, window=1, steps=torch.tensor([0, 2]), horizon=2).flatten().tolist()
        [2.0, 5.0]
    """
    total = pad(line.double().cumsum(1), (0, 0, 1, 0))
    first = window + steps
    last = (first + horizon).clamp(max=line.shape[1])
    return ((total[:, last] - total[:, first]) / (last - first)[:, None]).to(line)


def held(forecasts: Tensor, length: Tensor, made: Tensor, block: int) -> Tensor:
    """Scores in force when blocks that are younger than the selection are kept.

    Args:
        forecasts: [R, P, M] as made. length: [R]. made: [P] the step at which each was made. block: its tokens.

    Returns:
        [R, P, M], inf where a block began after the selection.
    """
    start = torch.arange(forecasts.shape[-1], device=forecasts.device) * block
    return forecasts.masked_fill(start >= (length[:, None] + made + 1)[..., None], torch.inf)


class ReselectMetrics(RecoveryMetrics):
    """Recovery of re-selection, averaged over steps: a network, the averages, the fixed selection and the oracle.

    The oracle knows the mean of the steps that a selection is held for.

    Args:
        every: steps between selections.
        budgets: kept fractions of the blocks; the gate's is always among them.
        stride: judge each stride-th step only; a selection is still held for ``every`` steps.

    Raises:
        FadeError: ``every`` or ``stride`` below 1.
    """

    def __init__(self, every: int = 1, budgets: Sequence[float] = (GATE,), stride: int = 1) -> None:
        super().__init__(("net", "oracle", "fixed", *AVERAGES), budgets)
        if every < 1 or stride < 1:
            raise FadeError(f"every {every} and stride {stride} count steps; use at least 1")
        self.every, self.stride = every, stride
        self.worst = RowQuantile(recovery, WORST_QUANTILE, budgets=[GATE])
        self.recall = RowMean(topk_recall, budget=GATE)
        self.calibration, self.kl = Calibration(), RowMean(masked_kl)

    @torch.no_grad()
    def update(self, net: ScoreNet, batch: Batch) -> None:
        """Add a padded batch of R trace rows with ``history_mean`` [R, W, N] and ``future_mean`` [R, T, M].

        Raises:
            FadeError: a network that does not forecast blocks.
        """
        line, window = timeline(batch), batch["history_mean"].shape[1]
        steps = torch.arange(0, line.shape[1] - window, self.stride, device=line.device)
        made, of_step = (steps // self.every * self.every).unique(return_inverse=True)
        existing, droppable = blocks_at(batch, made)
        forecasts = block_net(net).forecasts(line, window + made, existing, heads_of(batch))
        truth = horizon_mass(line, window, made, self.every)
        forecast_by = {"net": forecasts, "oracle": truth} | averages(line, window + made)

        size, length = block_of(batch), batch["length"]
        inforce = {name: held(each, length, made, size)[:, of_step] for name, each in forecast_by.items()}
        start = averages(line, torch.tensor([window], device=line.device))[FIXED].expand(-1, len(steps), -1)
        inforce["fixed"] = held(start, length, torch.zeros_like(steps), size)

        mask, eligible = (each.flatten(0, 1) for each in blocks_at(batch, steps))
        mass = line[:, window + steps].flatten(0, 1)
        places = [batch[name].repeat_interleave(len(steps)) for name in ("layer", "head")]
        for name, metric in self.recovery.items():
            metric.update(inforce[name].flatten(0, 1), mass, mask, eligible, *places)
        for row_metric in (self.worst, self.recall):
            row_metric.update(inforce["net"].flatten(0, 1), mass, mask, eligible)
        rows = forecasts.flatten(0, 1), truth.flatten(0, 1), droppable.flatten(0, 1)
        self.kl.update(*rows)
        self.calibration.update(*rows)

    def values(self) -> dict[str, float]:
        """Return every number under its readable name, as a tracking server takes it."""
        out = recovery_values(self.table(), ("fixed", *AVERAGES), best_average)
        out[f"worst_percentile_recovery_at_{GATE}"] = float(self.worst.compute())
        out[f"topk_recall_at_{GATE}"] = float(self.recall.compute())
        out |= calibration_values(self.kl, self.calibration)
        return without_nan(out)


def averages(line: Tensor, at: Tensor) -> dict[str, Tensor]:
    """Each moving average over the rows before some places in a timeline.

    Args:
        line: [R, L, M] attention mass. at: [P] places.

    Returns:
        name -> [R, P, M].
    """
    banks = torch.einsum("pkl,rln->krpn", average_weights(at, line.shape[1], DECAYS), line)
    return dict(zip(AVERAGES, banks))


def best_average(table: Mapping[str, Mapping[float, float]], budget: float = GATE) -> tuple[str, float]:
    """Name and recovery of the best moving average at a budget.

    Example:
        >>> best_average({name: {0.25: 1 - decay} for name, decay in AVERAGES.items()})
        ('ema0', 1.0)
    """
    name = max(AVERAGES, key=lambda average: table[average][budget])
    return name, table[name][budget]


def block_net(net: ScoreNet) -> BlockNet:
    """The network, if it can re-select while decoding.

    Raises:
        FadeError: it scores tokens, from features that only a prompt has.
    """
    if not isinstance(net, BlockNet):
        raise FadeError(
            f"{type(net).__name__} scores tokens and cannot re-select blocks while decoding; use a network of "
            "predictor.temporal, or leave out every"
        )
    return net
