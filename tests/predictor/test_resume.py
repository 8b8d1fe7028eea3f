"""A fit that was broken off goes on as if it had not been: the rows that were left, the same learning rates."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from data.datamodule import TraceDataModule
from predictor.module import HeadBudgetModule, PredictorModule
from predictor.nets import TokenMLP

QUIET = dict(
    accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    num_sanity_val_steps=0, deterministic=True,
)  # fmt: skip


class Rates(ModelCheckpoint):
    """Keeps every checkpoint, and the learning rate and the rows of each step."""

    def __init__(self, folder):
        super().__init__(folder, "{step}", save_top_k=-1)
        self.rates, self.rows = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.rates += [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups if group]
        self.rows.append([(int(doc), int(head)) for doc, head in zip(batch["doc"], batch["head"])])


def fit(folder, module, out, *, resume=None, **options):
    seed_everything(0, verbose=False)
    seen = Rates(out)
    trainer = Trainer(**QUIET, callbacks=[seen], **options)
    trainer.fit(module, datamodule=TraceDataModule(str(folder), batch_size=2), ckpt_path=resume)
    return seen


@pytest.mark.parametrize("done", [1, 3])
@pytest.mark.parametrize("interval", [1.0, 2], ids=["after an epoch", "inside an epoch"])
def test_a_network_gets_the_same_weights(traces, tmp_path, done, interval):
    options = dict(max_epochs=5, val_check_interval=interval)
    module = lambda: PredictorModule(TokenMLP(hidden=8), lr=0.02)
    whole, rest = module(), module()
    straight = fit(traces, whole, tmp_path / "whole", **options)
    steps = done * 3 if interval == 1.0 else done * 3 + 2  # 6 rows in batches of 2
    resumed = fit(traces, rest, tmp_path / "rest", resume=tmp_path / "whole" / f"step={steps}.ckpt", **options)
    assert resumed.rates == pytest.approx(straight.rates[steps:], rel=1e-6)
    assert resumed.rows == straight.rows[steps:]
    for one, two in zip(whole.net.state_dict().values(), rest.net.state_dict().values()):
        assert torch.equal(one, two)


def test_more_epochs_than_were_planned_stretch_the_cosine(traces, tmp_path):
    fit(traces, PredictorModule(TokenMLP(hidden=8)), tmp_path / "short", max_epochs=3)
    more = PredictorModule(TokenMLP(hidden=8))
    resumed = fit(traces, more, tmp_path / "long", resume=tmp_path / "short" / "step=9.ckpt", max_epochs=6)
    half, *falling = resumed.rates[::3]
    assert half == pytest.approx(more.lr / 2, rel=1e-6)
    assert half > falling[0] > falling[1] > 0


def test_head_budgets_count_no_row_twice(traces, tmp_path):
    whole, rest = HeadBudgetModule(), HeadBudgetModule()
    fit(traces, whole, tmp_path / "whole", max_epochs=1, val_check_interval=2)
    fit(traces, rest, tmp_path / "rest", max_epochs=1, val_check_interval=2, resume=tmp_path / "whole" / "step=2.ckpt")
    assert whole.counted["max"].rows.sum() == rest.counted["max"].rows.sum() == 6
    torch.testing.assert_close(whole.budgets.lost, rest.budgets.lost)
