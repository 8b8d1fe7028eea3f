"""Training of a predictor on traces, as a LightningModule."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from predictor.errors import FadeError
from predictor.losses import LOSSES
from predictor.reselect import ReselectBoard, block_net, blocks_at, horizon_mass, timeline
from predictor.scoreboard import BUDGETS, GATE, Batch, Scoreboard, Target, block_targets, target_mass
from predictor.scorenet import BlockNet, ScoreNet, check_size
from predictor.temporal import block_mass

MONITOR = f"val/recovery_at_{GATE}"


class PredictorModule(LightningModule):
    """Fit a network to the attention that tokens really received, and hold it against the heuristics.

    Args:
        net: the network, for example ``class_path: predictor.nets.TokenMLP``.
        loss: ``recovery`` lost at several budgets, ``listwise`` cross-entropy, ``kl``, ``bce`` on the top quarter,
            ``mse`` on logs or ``mse_share`` on shares (:mod:`predictor.losses`).
        target: what is ranked by: ``sum`` or ``max`` of the attention over the following steps, or a ``blend``.
        steps: following steps that a block network forecasts from the end of the prompt; null for all recorded.
        every: steps between selections of a block network that re-selects while decoding: it forecasts their mean,
            from places all over the recorded steps; null to select once, at the end of the prompt.
        places: of a row in each training step, when it re-selects.
        stride: judge each stride-th recorded step only after an epoch, when it re-selects.
        lr: peak learning rate of AdamW; it falls to zero over the epochs along a cosine.
        weight_decay: of AdamW.
        budgets: kept shares of the context at which recovery is reported.
    """

    def __init__(
        self,
        net: ScoreNet,
        loss: Literal["recovery", "listwise", "kl", "bce", "mse", "mse_share"] = "recovery",
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
        if bad := [budget for budget in budgets if not 0 < budget <= 1]:
            raise FadeError(f"budget {bad[0]} is not a share of the context; use floats in (0, 1]")
        check_size(net)
        self.save_hyperparameters(ignore=["net"])
        self.net, self.loss, self.target, self.steps = net, loss, target, steps
        self.every, self.places = every, places
        self.lr, self.weight_decay = lr, weight_decay
        self.board: Scoreboard | ReselectBoard = Scoreboard(budgets)
        if every is not None:
            block_net(net)
            if steps is not None or target != "sum":
                raise FadeError(
                    f"every {every} forecasts the mean of as many steps; leave out steps {steps} and target {target!r}"
                )
            self.board = ReselectBoard(every, budgets, stride=stride)
        self.layer_table: list[dict[str, float]] = []
        self.head_table: list[dict[str, float]] = []
        self.calibrated: Tensor
        self.register_buffer("calibrated", torch.tensor(False))

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, on the candidates that a policy may drop."""
        if self.every is not None:
            return LOSSES[self.loss](*self._decode_rows(batch, self.every))
        if self.net.level == "token":
            logits = self.net(batch["tokens"], batch["mask"])
            return LOSSES[self.loss](logits, target_mass(batch, self.target), batch["eligible"])
        mass, mask = block_targets(batch, self.steps, self.target)
        return LOSSES[self.loss](self.net(block_mass(batch), batch["block_mask"]), mass, mask)

    def _decode_rows(self, batch: Batch, every: int) -> tuple[Tensor, Tensor, Tensor]:
        """Forecasts, what came and the candidates, each [R * places, M]: at random when training, evenly otherwise."""
        line, window = timeline(batch), batch["history_mean"].shape[1]
        count = line.shape[1] - window
        if self.training:
            steps = torch.randint(count, (self.places,), device=line.device)
        else:
            steps = torch.arange(0, count, max(count // self.places, 1), device=line.device)
        exist, candidates = blocks_at(batch, steps)
        logits = block_net(self.net).forecasts(line, window + steps, exist)
        mass = horizon_mass(line, window, steps, every)
        return logits.flatten(0, 1), mass.flatten(0, 1), candidates.flatten(0, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
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
        self.board.update(self.net, batch)
        size = len(batch["length"])
        self.log("val/loss", self.loss_of(batch), batch_size=size, on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        for name, value in self.read_board().items():
            self.log(f"val/{name}", value, prog_bar=f"val/{name}" == MONITOR)

    def read_board(self) -> dict[str, float]:
        """Take the numbers off the board, clear it, and give the network the temperature that was found."""
        values = self.board.values()
        self.layer_table, self.head_table = self.board.by_layer(), self.board.by_head()
        if isinstance(self.net, BlockNet) and "temperature" in values:
            self.net.temperature.fill_(values["temperature"])
        self.board.reset()
        return values

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        epochs = self.trainer.max_epochs or -1
        if epochs < 1:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)]
