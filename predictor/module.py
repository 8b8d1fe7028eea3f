"""Training on traces, as LightningModules: a network that scores tokens, and how much each kv head must keep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed
from lightning.pytorch import LightningModule
from torch import Tensor

from predictor.batches import Batch, Target, block_mass, block_targets, heads_of, target_mass
from predictor.budgets import HeadBudgets, LossTable, lost_attention
from predictor.errors import FadeError
from predictor.head_metrics import TARGETS, HeadBudgetMetrics, rows_of_heads
from predictor.heuristics import GATE
from predictor.losses import LOSSES
from predictor.nets import TokenMLP
from predictor.ranking_metrics import BUDGETS, RankingMetrics
from predictor.registry import load_predictor
from predictor.reselect import ReselectMetrics, block_net, blocks_at, horizon_mass, timeline
from predictor.scorenet import BlockNet, ScoreNet, check_size, token_scores

MONITOR = f"val/recovery_at_{GATE}"
LAYERS, HEADS = "layers.csv", "heads.csv"
Rows = list[dict[str, float]]


class TraceModule(LightningModule):
    """What ``lightning fit`` trains on traces and keeps as a bundle.

    Attributes:
        monitor: the validation number whose best epoch is kept; None: the newest is kept.
        mode: whether that number is better when higher, "max", or when lower, "min".
        net: scores the tokens.
        manifest: of the bundle that the network comes from; None when it is trained here, or not at all.
        learned: head budgets by target, when they are what is learned here.
        target: what is ranked by, or lost.
    """

    monitor: ClassVar[str | None] = None
    mode: ClassVar[str] = "max"
    net: ScoreNet
    target: Target
    manifest: Mapping[str, Any] | None = None
    learned: Mapping[str, HeadBudgets] = {}

    @property
    def budgets(self) -> HeadBudgets | None:
        """How much each kv head must keep, if that is known."""
        return self.learned.get(self.target)

    @property
    def epochs(self) -> int:
        """Epochs that the network was trained for."""
        return self.current_epoch + 1

    def head_offsets(self) -> tuple[Tensor, list[int]] | None:
        """Offsets [L, H] that make scores of different heads comparable and their layers, if they are learned."""
        return None

    def first_metrics(self, batches: Iterable[Any]) -> dict[str, float]:
        """Validation numbers of the network before it is trained, from batches on the module's device.

        Training must beat them to be kept. None where there is nothing to be better than.
        """
        return {}

    def tables(self) -> dict[str, Rows]:
        """Return what was measured by layer or by head: file name -> rows."""
        raise NotImplementedError


class PredictorModule(TraceModule):
    """Fit a network to the attention that tokens really received, and hold it against the heuristics.

    Args:
        net: the network, for example ``class_path: predictor.nets.TokenMLP``.
        loss: ``recovery`` lost at several budgets, ``listwise`` cross-entropy, ``listwise_mass``, where rows count by
            their candidates' mass, ``kl``, ``bce`` on the top quarter, ``mse`` on logs or ``mse_share`` on
            probabilities (:mod:`predictor.losses`).
        target: what is ranked by: ``sum`` or ``max`` of the attention over the following steps, or a ``blend``.
        steps: following steps that a block network forecasts from the end of the prompt; null for all recorded.
        every: steps between selections of a block network that re-selects while decoding: it forecasts their mean,
            from places all over the recorded steps; null to select once, at the end of the prompt.
        places: of a row in each training step, when it re-selects.
        stride: judge each stride-th recorded step only after an epoch, when it re-selects.
        lr: peak learning rate of AdamW; it falls to zero over the epochs along a cosine.
        weight_decay: of AdamW.
        budgets: kept fractions of the context at which recovery is reported.
    """

    monitor = MONITOR

    def __init__(
        self,
        net: ScoreNet,
        loss: Literal["recovery", "listwise", "listwise_mass", "kl", "bce", "mse", "mse_share"] = "recovery",
        target: Target = "sum",
        steps: int | None = None,
        every: int | None = None,
        places: int = 8,
        stride: int = 4,
        lr: float = 3e-3,
        weight_decay: float = 1e-4,
        budgets: tuple[float, ...] = BUDGETS,
    ) -> None:
        super().__init__()
        if loss not in LOSSES:
            raise FadeError(f"loss {loss!r} is not known; use one of {', '.join(LOSSES)}")
        check_fractions(budgets)
        check_size(net)
        self.save_hyperparameters(ignore=["net"])
        self.net, self.loss, self.target, self.steps = net, loss, target, steps
        self.every, self.places = every, places
        self.lr, self.weight_decay = lr, weight_decay
        self.metrics: RankingMetrics | ReselectMetrics = RankingMetrics(budgets)
        if every is not None:
            block_net(net)
            if steps is not None or target != "sum":
                raise FadeError(
                    f"every {every} forecasts the mean of as many steps; leave out steps {steps} and target {target!r}"
                )
            self.metrics = ReselectMetrics(every, budgets, stride=stride)
        self._tables: dict[str, Rows] = {}
        self.calibrated: Tensor
        self.register_buffer("calibrated", torch.tensor(False))

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the loss [] of a batch of R padded trace rows, on the candidates that a policy may drop."""
        if self.every is not None:
            return LOSSES[self.loss](*self._decode_rows(batch, self.every))
        if self.net.level == "token":
            logits = cast("TokenMLP", self.net).logits(batch)
            return LOSSES[self.loss](logits, target_mass(batch, self.target), batch["eligible"])
        mass, mask = block_targets(batch, self.steps, self.target)
        logits = self.net(block_mass(batch), batch["block_mask"], heads_of(batch))
        return LOSSES[self.loss](logits, mass, mask)

    def _decode_rows(self, batch: Batch, every: int) -> tuple[Tensor, Tensor, Tensor]:
        """Forecasts, what came and the candidates, each [R * places, M]: at random when training, evenly otherwise."""
        line, window = timeline(batch), batch["history_mean"].shape[1]
        count = line.shape[1] - window
        if self.training:
            steps = torch.randint(count, (self.places,), device=line.device)
        else:
            steps = torch.arange(0, count, max(count // self.places, 1), device=line.device)
        exist, candidates = blocks_at(batch, steps)
        logits = block_net(self.net).forecasts(line, window + steps, exist, heads_of(batch))
        mass = horizon_mass(line, window, steps, every)
        return logits.flatten(0, 1), mass.flatten(0, 1), candidates.flatten(0, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss [] of a padded batch of R trace rows; the first of all sets the input scaling."""
        if not self.calibrated:
            self.net.calibrate(batch)  # the first batch sets the input scaling, for good
            for buffer in self.net.buffers():  # the same one in all processes
                buffer.copy_(self.trainer.strategy.broadcast(buffer))
            self.calibrated.fill_(True)
        loss = self.loss_of(batch)
        size = len(batch["length"])
        self.log("train/loss", loss, batch_size=size, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add a padded batch of R trace rows, [R, S] tokens, to the metrics."""
        self.metrics.update(self.net, batch)
        size = len(batch["length"])
        self.log("val/loss", self.loss_of(batch), batch_size=size, on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        for name, value in self.compute_metrics().items():
            self.log(f"val/{name}", value, prog_bar=f"val/{name}" == MONITOR)

    def first_metrics(self, batches: Iterable[Batch]) -> dict[str, float]:
        for batch in batches:
            self.metrics.update(self.net, batch)
        return self.compute_metrics()

    def compute_metrics(self) -> dict[str, float]:
        """Return the validation numbers, start anew, and give the network the temperature that was found."""
        values = self.metrics.values()
        self._tables = {LAYERS: self.metrics.by_layer(), HEADS: self.metrics.by_head()}
        if isinstance(self.net, BlockNet) and "temperature" in values:
            self.net.temperature.fill_(values["temperature"])
        self.metrics.reset()
        return values

    def tables(self) -> dict[str, Rows]:
        return self._tables

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def on_train_epoch_start(self) -> None:
        """Set the learning rate from the epoch alone.

        A fit that is resumed goes on with the rates it would have had, and one that is resumed for more epochs falls
        to zero at their end; a scheduler's state would keep the end that was planned first, and rise again behind it.
        """
        if (epochs := self.trainer.max_epochs or 0) > 0:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = self.lr * (1 + math.cos(math.pi * self.current_epoch / epochs)) / 2


class HeadBudgetModule(TraceModule):
    """Learn how much each kv head must keep, and hold that against the same for all on held-out documents.

    What each head loses at each fraction is the mean over the rows, so one epoch is all that it takes and nothing is
    differentiated; sums are kept in float64, and those of several processes are added up.

    Args:
        scorer: bundle, reference or shipped name whose scores rank the tokens; null for the untrained closed form.
        lost: what a dropped token would have received: ``max``, at its worst coming step, or ``sum``, over all. Both
            are learned and compared; this one is kept.
        shares: fractions of the context, kept besides sinks and window, at which lost attention is reported.
    """

    # no argument has the name of one of PredictorModule's: jsonargparse would carry that one's default over

    def __init__(
        self,
        scorer: str | None = None,
        lost: Literal["max", "sum"] = "max",
        shares: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625),
    ) -> None:
        super().__init__()
        if lost not in TARGETS:
            raise FadeError(f"lost {lost!r} is not known; use one of {', '.join(TARGETS)}")
        check_fractions(shares)
        self.save_hyperparameters()
        self.target, self.metrics = lost, HeadBudgetMetrics(shares)
        net: ScoreNet = TokenMLP()
        if scorer is not None:
            predictor = load_predictor(scorer)
            net, self.manifest = predictor.net, predictor.manifest
        self.net = net.requires_grad_(True)  # ddp refuses a module that has nothing to differentiate
        self.counted = {kind: LossTable() for kind in TARGETS}
        self.learned = {}

    @property
    def epochs(self) -> int:
        return (self.manifest or {}).get("epoch", 0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Add what R rows lose, [R, K], to the tables; return the mean [], which is not differentiated."""
        scores = token_scores(self.net, batch, in_cache=True)
        for kind, table in self.counted.items():
            lost = lost_attention(scores, batch[f"target_{kind}"], batch["eligible"], batch["length"])
            table.add(lost, batch["layer"], batch["head"])
            if kind == self.target:
                loss = lost.mean()
        self.log("train/loss", loss, batch_size=len(scores), prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Nothing: the mean [] needs no gradient."""

    def configure_optimizers(self) -> None:
        return None

    def on_validation_start(self) -> None:
        self._learn()

    def on_train_epoch_end(self) -> None:
        self._learn()  # there may have been rows since the last validation

    def _learn(self) -> None:
        self.learned = {kind: table.budgets() for kind, table in self._pooled().items()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add a padded batch of R trace rows, [R, S] tokens, to the metrics."""
        self.metrics.update(self.net, batch, self.learned)

    def on_validation_epoch_end(self) -> None:
        for name, value in self.metrics.values().items():
            self.log(f"val/{name}", value)
        self.metrics.reset()

    def tables(self) -> dict[str, Rows]:
        return {HEADS: rows_of_heads(self.learned[self.target], self.metrics.budgets)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lost"] = {kind: table.state() for kind, table in self._pooled().items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counted = {kind: LossTable() for kind in TARGETS}
        if self.global_rank == 0:  # once, not once in each process
            for kind, state in checkpoint["lost"].items():
                self.counted[kind].merge(state)

    def _pooled(self) -> dict[str, LossTable]:
        """The sums of all processes."""
        states = [{kind: table.state() for kind, table in self.counted.items()}]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            mine, states = states[0], [{}] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(states, mine)
        pooled = {kind: LossTable() for kind in TARGETS}
        for state in states:
            for kind, table in pooled.items():
                table.merge(state[kind])
        return pooled


def check_fractions(budgets: tuple[float, ...]) -> None:
    """Refuse budgets that are not fractions.

    Raises:
        FadeError: names the first of them.

    Example:
        >>> check_fractions((0.5, 1.0))
    """
    if bad := [budget for budget in budgets if not 0 < budget <= 1]:
        raise FadeError(f"budget {bad[0]} is not a share of the context; use floats in (0, 1]")
