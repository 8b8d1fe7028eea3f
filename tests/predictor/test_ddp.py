"""Training on two processes gives what training on one gives."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from data.datamodule import TraceDataModule
from predictor.budgets import learn_budgets
from predictor.bundle import load_bundle
from predictor.nets import TokenMLP
from predictor.scorenet import token_scores
from tests.processes import run_python

NET = ("--model.net", "predictor.nets.TokenMLP", "--model.net.hidden", "16", "--model.lr", "0.02")


def fit(folder, output, devices, *more):
    """Each of ``devices`` processes takes its part of every batch of six rows."""
    options = ["--data.traces", folder, "--output", output, "--data.batch_size", 6 // devices]
    options += ["--trainer.devices", devices, "--trainer.strategy", "ddp" if devices > 1 else "auto"]
    options += ["--trainer.accelerator", "cpu", "--trainer.max_epochs", 12]
    options += ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    done = run_python("-m", "pipelines.train", "fit", *options, *more)
    assert done.returncode == 0, done.stderr
    return load_bundle(output / "best")


@pytest.mark.slow
def test_two_processes_reach_the_loss_of_one(traces, tmp_path):
    alone, together = (fit(traces, tmp_path / str(devices), devices, *NET) for devices in (1, 2))
    assert alone.manifest["epoch"] > 0
    assert together.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=0.02)
    assert together.metrics["recovery_at_0.25"] == pytest.approx(alone.metrics["recovery_at_0.25"], abs=0.01)
    assert together.metrics["oracle/recovery_at_0.25"] == pytest.approx(
        alone.metrics["oracle/recovery_at_0.25"], abs=1e-5
    )
    weights = (torch.cat([p.flatten() for p in predictor.net.parameters()]) for predictor in (alone, together))
    one, two = weights
    assert (one - two).norm() < 0.1 * one.norm()


@pytest.mark.slow
def test_two_processes_learn_the_head_budgets_of_one(traces, tmp_path):
    module = ("--model", "predictor.module.HeadBudgetModule", "--trainer.max_epochs", "1")
    together = fit(traces, tmp_path / "heads", 2, *module)
    data = TraceDataModule(str(traces))
    data.setup("fit")
    alone = learn_budgets(partial(token_scores, TokenMLP(), in_cache=True), data.train_dataloader())
    torch.testing.assert_close(together.budgets.lost, alone.lost, rtol=1e-3, atol=1e-4)  # stored with four digits
    assert together.metrics["max/lost_at_0.25"] > 0
