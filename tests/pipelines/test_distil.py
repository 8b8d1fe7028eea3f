"""`lightning fit` through a tiny language model: what it writes, how it goes on, what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from data.documents import DocumentDataModule
from data.lm import load_model
from pipelines.distil import DistilModule
from pipelines.train import main
from predictor.budgets import HeadBudgets
from predictor.bundle import Predictor, load_bundle
from predictor.errors import FadeError
from predictor.features import FeatureSpec
from predictor.nets import HiddenMLP, TokenMLP
from predictor.provenance import model_provenance
from predictor.temporal import BlockCNN
from tests.predictor.fitting import one_line
from tests.processes import run_python

QUIET = dict(
    accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0
)
MEASURED = (0.4, 0.2, 0.1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some files of words, no passage twice."""
    folder = tmp_path_factory.mktemp("text")
    for file in range(4):
        lines = (
            f"{file} and {line} make {file + line}, but {file * line} is what they bear.\n\n" for line in range(400)
        )
        (folder / f"{file}.txt").write_text("".join(lines))
    return folder


def documents(model: Path, text: Path, **options: Any) -> DocumentDataModule:
    sizes = dict(
        train_documents=6, validation_documents=4, epoch_documents=3, min_prompt=250, max_prompt=300, future=12
    )
    mixed = {str(text): 1.0, "generated:lines": 1.0}
    return DocumentDataModule(mixed, model=str(model), **{**sizes, **options})


def small(**options: Any) -> DistilModule:
    net = TokenMLP(hidden=8, depth=1, layers=2, kv_heads=2, embedding=3)
    return DistilModule(net, **{"measured": MEASURED, "lr": 0.02, "warmup": 2, "level_documents": 2, **options})


def fit(
    module: DistilModule, data: DocumentDataModule, out: Path, resume: Path | None = None, **options: Any
) -> Trainer:
    seed_everything(0, verbose=False)
    keep = ModelCheckpoint(out, "{epoch}", save_top_k=-1)
    trainer = Trainer(**QUIET, callbacks=[keep], **{"max_epochs": 2, "gradient_clip_val": 1.0, **options})
    trainer.fit(module, datamodule=data, ckpt_path=None if resume is None else str(resume))
    return trainer


def same(one: DistilModule, other: DistilModule) -> bool:
    both = one.state_dict(), other.state_dict()
    return both[0].keys() == both[1].keys() and all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def config(path: Path, model: Path, text: Path, **trainer: Any) -> Path:
    """A YAML as a user writes it."""
    net = {"class_path": "predictor.nets.TokenMLP", "init_args": {"hidden": 8, "layers": 2, "kv_heads": 2}}
    arguments = {"net": net, "measured": list(MEASURED), "lr": 0.02, "warmup": 2, "level_documents": 2}
    read = {"text": {str(text): 2, "generated:key-value": 1}, "model": str(model), "train_documents": 9, "future": 12}
    sizes = {"validation_documents": 3, "epoch_documents": 9, "min_prompt": 250, "max_prompt": 300}
    options = {
        "seed_everything": 1,
        "output": str(path / "fit"),
        "tracking_uri": f"sqlite:///{path}/mlflow.db",
        "model": {"class_path": "pipelines.distil.DistilModule", "init_args": arguments},
        "data": {"class_path": "data.documents.DocumentDataModule", "init_args": read | sizes},
        "trainer": {"max_epochs": 2, "logger": False, "enable_progress_bar": False, "accelerator": "cpu", **trainer},
    }
    (path / "fit.yaml").write_text(yaml.safe_dump(options))
    return path / "fit.yaml"


def test_the_command_writes_a_bundle_whose_scores_are_comparable(tmp_path, tiny_model_dir, text, capsys):
    assert main(["fit", "--config", str(config(tmp_path, tiny_model_dir, text))]) == 0
    assert "val/kl" in capsys.readouterr().out
    bundle = load_bundle(tmp_path / "fit" / "best")
    model = load_model(tiny_model_dir)
    bundle.check(model)
    assert bundle.offsets.shape == (2, 2)
    assert bundle.layers == (0, 1)
    assert bundle.manifest["shares"] == "0.1 to 0.43"
    assert len(bundle.manifest["passages"]) == 12
    first = Trainer(**QUIET)
    data = DocumentDataModule(**yaml.safe_load((tmp_path / "fit.yaml").read_text())["data"]["init_args"])
    data.setup()
    module = small(measured=MEASURED)
    module.trainer, first.datamodule = first, data
    module.setup("fit")
    module.net, module.offsets.data = bundle.net, bundle.offsets
    for number, document in enumerate(data.val_dataloader()):
        module.validation_step(document, number)
    for name, value in module._measured().items():
        assert bundle.metrics[name] == pytest.approx(value, rel=1e-4), name
    assert (
        bundle.metrics["kl"]
        <= math.exp(
            sum(
                math.log(bundle.metrics[f"heads/{kind}/kl_at_{share:g}"])
                for kind in ("text", "retrieval")
                for share in MEASURED
            )
            / 6
        )
        * 1.5
    )


def test_training_lowers_the_loss(tmp_path, tiny_model_dir, text):
    """On one document, at one budget and temperature, so that losses of different steps compare."""
    module, seen = small(shares=(0.15,), measured=(0.15,), hot=0.3, cold=0.3), []
    log = module.log
    module.log = lambda name, value, **more: (
        seen.append(float(value)) if name == "train/kl" else 0,
        log(name, value, **more),
    )
    data = documents(tiny_model_dir, text, train_documents=1, validation_documents=1, epoch_documents=25)
    fit(module, data, tmp_path, max_epochs=1)
    assert len(seen) == 25
    assert seen[-1] < 0.8 * seen[0]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_fit_that_was_broken_off_goes_on_exactly(tmp_path, tiny_model_dir, text, accumulate):
    options = dict(max_epochs=4, accumulate_grad_batches=accumulate)
    whole, rest = small(), small()
    fit(whole, documents(tiny_model_dir, text), tmp_path / "whole", **options)
    fit(rest, documents(tiny_model_dir, text), tmp_path / "rest", resume=tmp_path / "whole" / "epoch=1.ckpt", **options)
    assert same(whole, rest)


def test_accumulated_gradients_are_one_step(tmp_path, tiny_model_dir, text):
    module = small()
    trainer = fit(module, documents(tiny_model_dir, text), tmp_path, accumulate_grad_batches=3)
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    "net", [BlockCNN(channels=(2, 3)), HiddenMLP(2, 2, 16, hidden=8, depth=1)], ids=["cnn", "hidden"]
)
def test_other_networks_train_too(tmp_path, tiny_model_dir, text, net):
    before = {name: each.clone() for name, each in net.named_parameters()}
    module = DistilModule(net, measured=(0.2,), level_documents=1)
    fit(module, documents(tiny_model_dir, text), tmp_path, max_epochs=1)
    assert module.offsets.grad is None or module.offsets.abs().sum() > 0
    assert any(not torch.equal(each, before[name]) for name, each in module.net.named_parameters())


def test_offsets_reproduce_head_budgets_before_training(tmp_path, tiny_model_dir, text):
    lost = torch.tensor([[[1.0, 0.9, 0.1, 0.0], [1.0, 0.0, 0.0, 0.0]], [[1.0, 0.2, 0.0, 0.0], [1.0, 0.9, 0.8, 0.0]]])
    budgets = HeadBudgets(lost, fractions=(0.0, 0.1, 0.3, 1.0))
    provenance = model_provenance(load_model(tiny_model_dir))
    Predictor(TokenMLP(), FeatureSpec(), provenance, budgets=budgets).save(tmp_path / "start")
    module, data = small(warm_start=str(tmp_path / "start"), level_documents=1), documents(tiny_model_dir, text)
    fit(module, data, tmp_path, max_epochs=1)
    module._start()
    prompt = module.language_model.read(data.first(1)[0]["prompt"])
    kept = (module._body(prompt) >= 0).sum(-1) / prompt.length
    assert kept.flatten().tolist() == pytest.approx(module._head_shares(0.2).flatten().tolist(), abs=0.01)


def test_mistakes_are_one_line(tmp_path, tiny_model_dir, text, capsys):
    path = str(config(tmp_path, tiny_model_dir, text))
    wrong = {
        "max_prompt 5000 passes the 4096 positions": ["--data.init_args.max_prompt", "5000"],
        "text generated:songs is not known": ["--data.init_args.text", "generated:songs"],
        "is for 1 layers of 2 kv heads, and meets 2 and 2": ["--model.init_args.net.init_args.layers", "1"],
        "min_prompt 64 is too small": ["--data.init_args.min_prompt", "64"],
    }
    for message, options in wrong.items():
        assert main(["fit", "--config", path, *options]) == 2
        assert message in one_line(capsys)
    net = ["--model.net", "predictor.nets.TokenMLP", "--trainer.logger", "false", "--output", str(tmp_path / "other")]
    read = ["--data", "data.documents.DocumentDataModule", "--data.text", str(text)]
    assert main(["fit", *net, *read]) == 2
    assert "PredictorModule does not learn from DocumentDataModule" in one_line(capsys)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shares": (0.2, 1.5)}, "budget 1.5 is not a share"),
        ({"measured": (0.0,)}, "budget 0.0 is not a share"),
        ({"hot": 0.1}, "temperatures hot 0.1, cold 0.2: use hot >= cold > 0"),
    ],
)
def test_options_that_cannot_be_are_named(options, told):
    with pytest.raises(FadeError, match=told):
        small(**options)


def test_a_loss_that_is_no_number_names_the_document(tmp_path, tiny_model_dir, text):
    module = small()
    data = documents(tiny_model_dir, text)
    fit(module, data, tmp_path, max_epochs=1)
    module.net.head.bias.data.fill_(math.nan)
    with pytest.raises(
        FadeError, match=r"score of document .+/[0-9a-f]+ is not a finite number; lower the learning rate"
    ):
        module.training_step(data.first(1)[0], 0)


@pytest.mark.slow
def test_two_processes_train_together(tmp_path, tiny_model_dir, text):
    path = config(tmp_path, tiny_model_dir, text, devices=2, strategy="ddp")
    done = run_python("-m", "pipelines.train", "fit", "--config", path, "--data.init_args.epoch_documents", "8")
    assert done.returncode == 0, done.stderr
    bundle = load_bundle(tmp_path / "fit" / "best")
    assert bundle.offsets.isfinite().all()
    assert bundle.metrics["kl"] > 0
