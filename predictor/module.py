"""Training of a predictor on traces, as a LightningModule."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from predictor.errors import FadeError
from predictor.losses import LOSSES
from predictor.nets import ScoreNet
from predictor.scoreboard import BUDGETS, GATE, Batch, Scoreboard, block_targets

MONITOR = f"val/recovery_at_{GATE}"


class PredictorModule(LightningModule):
    """Fit a network to the attention that tokens really received, and hold it against the heuristics.

    Args:
        net: the network, for example ``class_path: predictor.nets.TokenMLP``.
        loss: ``recovery`` lost at several budgets, ``listwise`` cross-entropy, ``kl``, ``bce`` on the top quarter, or
            ``mse`` on logs (:mod:`predictor.losses`).
        target: what a token network ranks by: ``sum`` or ``max`` of its attention over the following steps.
        steps: following steps whose mean a block network forecasts; null for all recorded, 1 for the next.
        lr: peak learning rate of AdamW; it falls to zero over the epochs along a cosine.
        weight_decay: of AdamW.
        budgets: kept shares of the context at which recovery is reported.
    """

    def __init__(
        self,
        net: ScoreNet,
        loss: Literal["recovery", "listwise", "kl", "bce", "mse"] = "recovery",
        target: Literal["sum", "max"] = "sum",
        steps: int | None = None,
        lr: float = 3e-3,
        weight_decay: float = 1e-4,
        budgets: tuple[float, ...] = BUDGETS,
    ) -> None:
        super().__init__()
        if loss not in LOSSES:
            raise FadeError(f"loss {loss!r} is not known; use one of {', '.join(LOSSES)}")
        if bad := [budget for budget in budgets if not 0 < budget <= 1]:
            raise FadeError(f"budget {bad[0]} is not a share of the context; use floats in (0, 1]")
        self.save_hyperparameters(ignore=["net"])
        self.net, self.loss, self.target, self.steps = net, loss, target, steps
        self.lr, self.weight_decay = lr, weight_decay
        self.board = Scoreboard(budgets)
        self.layer_table: list[dict[str, float]] = []
        self.calibrated: Tensor
        self.register_buffer("calibrated", torch.tensor(False))

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, on the candidates that a policy may drop."""
        if self.net.level == "token":
            logits = self.net(batch["tokens"], batch["mask"])
            mass, mask = batch[f"target_{self.target}"], batch["eligible"]
        else:
            mass, mask = block_targets(batch, self.steps)
            history = batch["history_mean"] * batch["block_size"][:, None]
            logits = self.net(history, batch["block_mask"])
        return LOSSES[self.loss](logits, mass, mask)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if not self.calibrated:
            self.net.calibrate(batch)  # the first batch sets the input scaling, for good
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
        for name, value in self.board.values().items():
            self.log(f"val/{name}", value, prog_bar=f"val/{name}" == MONITOR)
        self.layer_table = self.board.by_layer()
        self.board.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        epochs = self.trainer.max_epochs or -1
        if epochs < 1:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)]
