"""SIGTERM ends every long command as Ctrl-C does: status 143, one line, nothing half-written."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines import cli, evaluate, evaluate_tasks, train, train_codebook
from pipelines.budget_study import budget_study
from pipelines.certify import certify_bundle


def terminated(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal was not heard")


def lightning(args: list[str]) -> int:
    return train.main(["fit", "--trainer.logger=false", "--trainer.max_epochs=1", *args])


SMALL = ["--documents=1", "--context=400"]
COMMANDS: dict[str, tuple[Callable[[list[str]], int], str, list[str]]] = {
    "evaluate": (
        evaluate.main,
        "pipelines.evaluate.compare",
        ["--methods=[safe]", "--documents=1", "--context=220"],
    ),
    "evaluate_tasks": (
        evaluate_tasks.main,
        "pipelines.evaluation.task_runner.TaskRunner.run",
        ["--tasks=[lines]", "--n=1"],
    ),
    "budget_study": (lambda args: cli.run(budget_study, args), "pipelines.budget_study.learned", ["--parts=2"]),
    "certify": (lambda args: cli.run(certify_bundle, args), "pipelines.evaluation.certificate.compare", SMALL),
    "fit": (lightning, "predictor.module.PredictorModule.training_step", ["--model.net=TokenMLP"]),
    "train_codebook": (train_codebook.main, "pipelines.train_codebook._join", [*SMALL, "--sub_dim=8"]),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_sigterm_ends_each_long_command(
    name: str,
    tiny_model_dir: Path,
    tiny_traces: Path,
    bundles: dict[str, Path],
    prose: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main, stopped, options = COMMANDS[name]
    monkeypatch.setattr(stopped, terminated)
    model, out = f"--model={tiny_model_dir}", f"--out={tmp_path / 'out'}"
    text = json.dumps([str(prose)])
    given = {
        "evaluate": [model, out, f"--traces={tiny_traces}", "--steps=20"],
        "evaluate_tasks": [model, out],
        "budget_study": [out, f"--traces={tiny_traces}"],
        "certify": [model, f"--bundle={bundles['mlp']}", f"--text={text}"],
        "fit": [f"--data.traces={tiny_traces}", f"--output={tmp_path / 'out'}", "--trainer.accelerator=cpu"],
        "train_codebook": [model, out, f"--text={text}"],
    }[name]
    before = sorted(bundles["mlp"].iterdir())
    assert main([*given, *options]) == 143
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: terminated; ")
    assert sorted(bundles["mlp"].iterdir()) == before
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "out"] if name == "fit" else [])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
