"""OUTPUT/best is the bundle with the best monitored value of a run: whoever saves checkpoints, also after a resume."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from pipelines.train import main
from predictor.bundle import load_bundle
from predictor.features import FIRST_FEATURES, FeatureSpec
from predictor.module import MONITOR
from tests.predictor.fitting import write_traces
from tests.processes import run_python

VALUE = MONITOR.removeprefix("val/")


@pytest.fixture(scope="module")
def traces(tiny_model_dir, tmp_path_factory):
    """As an earlier release collected them, with nine features: a large learning rate soon makes a fit worse."""
    return write_traces(tmp_path_factory.mktemp("traces"), tiny_model_dir, FeatureSpec(window=8, names=FIRST_FEATURES))


class Notes(Callback):
    """Writes down each value that is validated, and what was the network then; may spoil it after each step."""

    def __init__(self, folder: str, spoil: bool = False) -> None:
        self.folder, self.spoil = Path(folder), spoil
        self.folder.mkdir(parents=True, exist_ok=True)

    def on_train_batch_end(self, trainer, pl_module, *_):
        if self.spoil:
            torch.nn.init.normal_(pl_module.net.head.weight, std=50)

    def on_validation_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        value = float(trainer.callback_metrics[MONITOR])
        number = len(list(self.folder.glob("*.pt")))
        torch.save({"value": value, **pl_module.net.state_dict()}, self.folder / f"{number:03}.pt")


def arguments(folder, output, *more, notes, mine=None, epochs=6, spoil=False):
    """A fit that soon gets worse again: a large learning rate, validated in the middle of epochs."""
    noted = {"folder": str(notes), "spoil": spoil}
    callbacks = [{"class_path": "tests.predictor.test_best.Notes", "init_args": noted}]
    if mine is not None:
        every = {"dirpath": str(mine), "filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1}
        callbacks.append({"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": every})
    config = {
        "output": str(output),
        "patience": 99,
        "model": {
            "net": {"class_path": "predictor.nets.TokenMLP", "init_args": {"hidden": 8, "n_features": 9}},
            "lr": 0.3,
        },
        "data": {"traces": str(folder), "batch_size": 2},
        "trainer": {
            "max_epochs": epochs, "val_check_interval": 2, "logger": False, "accelerator": "cpu",
            "enable_progress_bar": False, "callbacks": callbacks,
        },
    }  # fmt: skip
    path = Path(output).with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return ["fit", "--config", str(path), *more]


def assert_best(output, *notes):
    """The bundle is the network with the highest value that was noted, or the closed form, if that is higher."""
    seen = [torch.load(path, weights_only=True) for folder in notes for path in sorted(Path(folder).glob("*.pt"))]
    values = [one["value"] for one in seen]
    kept = load_bundle(Path(output) / "best")
    closed_form = kept.metrics["heuristic/ema_ea/recovery_at_0.25"]
    assert kept.metrics[VALUE] == pytest.approx(max(*values, closed_form), abs=1e-7)
    assert values[-1] < max(values)  # the newest is not the best, or this shows nothing
    if kept.manifest["epoch"]:
        best = seen[values.index(max(values))]
        for name, tensor in kept.net.state_dict().items():
            assert torch.equal(tensor, best[name]), name
    else:
        assert kept.net.head.weight.count_nonzero() == 0
    return values


@pytest.mark.parametrize("mine", [False, True], ids=["alone", "beside a checkpoint of each step"])
def test_best_is_the_best_validation(traces, tmp_path, capsys, mine):
    notes, output = tmp_path / "notes", tmp_path / "out"
    assert main(arguments(traces, output, notes=notes, mine=tmp_path / "mine" if mine else None)) == 0
    assert_best(output, notes)
    (row,) = csv.DictReader((output / "layers.csv").open())
    assert float(row["net"]) == pytest.approx(load_bundle(output / "best").metrics[VALUE], abs=1e-4)
    assert f"{MONITOR} {load_bundle(output / 'best').metrics[VALUE]:.4f} at the best epoch" in capsys.readouterr().out
    assert len(list((tmp_path / "mine").glob("*.ckpt"))) == (18 if mine else 0)


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False], ids=["the same folder", "another folder"])
def test_best_of_a_resumed_run_is_that_of_all_of_it(traces, tmp_path, same):
    """Broken off behind the best validation, which the second part does not reach again."""
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "out"
    assert main(arguments(traces, out, notes=first, mine=tmp_path / "mine", epochs=3)) == 0
    values = assert_best(out, first)
    before = load_bundle(out / "best")
    on = ("--ckpt_path", str(tmp_path / "mine" / "step=9.ckpt"))
    output = out if same else tmp_path / "on"
    assert main(arguments(traces, output, *on, notes=second, epochs=5, spoil=True)) == 0
    later = assert_best(output, first, second)[len(values) :]
    assert later
    assert max(later) < before.metrics[VALUE]
    for name in ("bundle.json", "model.safetensors"):
        assert (output / "best" / name).read_bytes() == (out / "best" / name).read_bytes()


def test_a_checkpoint_of_before_begins_with_its_own_network(traces, tmp_path):
    notes, mine = tmp_path / "notes", tmp_path / "mine"
    assert main(arguments(traces, tmp_path / "out", notes=notes, mine=mine, epochs=3)) == 0
    checkpoint = torch.load(mine / "step=9.ckpt", weights_only=True)
    del checkpoint["callbacks"]["KeepBest"]
    torch.save(checkpoint, mine / "old.ckpt")
    on = ("--ckpt_path", str(mine / "old.ckpt"))
    assert main(arguments(traces, tmp_path / "on", *on, notes=tmp_path / "later", epochs=5, spoil=True)) == 0
    kept = load_bundle(tmp_path / "on" / "best")
    later = [torch.load(path, weights_only=True)["value"] for path in sorted((tmp_path / "later").glob("*.pt"))]
    assert kept.metrics[VALUE] > max(later)
    assert torch.equal(kept.net.head.weight, checkpoint["state_dict"]["net.head.weight"])
    assert kept.manifest["epoch"] == 3


@pytest.mark.slow
def test_best_of_two_processes_is_the_best_validation(traces, tmp_path):
    given = arguments(traces, tmp_path / "out", notes=tmp_path / "notes", mine=tmp_path / "mine", epochs=8)
    more = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--data.batch_size", "1")
    done = run_python("-m", "pipelines.train", *given, *more)
    assert done.returncode == 0, done.stderr
    assert_best(tmp_path / "out", tmp_path / "notes")
    assert json.loads((tmp_path / "out" / "best" / "bundle.json").read_text())["metrics"][VALUE] > 0
