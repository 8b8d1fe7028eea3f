"""The two commands on tiny traces: `lightning fit`, then `pipelines.register`, and what each refuses."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from data.trace import Traces, write_manifest
from pipelines.checkpoints import trace_facts
from pipelines.cli import run
from pipelines.register import format_table, register
from pipelines.train import main
from predictor.bundle import load_bundle
from predictor.nets import BlockCNN
from predictor.registry import _client
from tests.predictor.fitting import LENGTHS, SPEC, one_line, runs


def fit(traces, store, output, *more):
    return main(
        [
            "fit",
            *("--model.net", "predictor.nets.TokenMLP", "--model.net.hidden", "16", "--model.lr", "0.02"),
            *("--data.traces", str(traces), "--output", str(output), "--tracking_uri", store),
            *(
                "--trainer.max_epochs",
                "12",
                "--trainer.enable_progress_bar",
                "false",
                "--trainer.accelerator",
                "cpu",
            ),
            *more,
        ]
    )


@pytest.fixture(scope="module")
def fitted(traces, store, tmp_path_factory):
    output = tmp_path_factory.mktemp("fit") / "mlp"
    assert fit(traces, store, output) == 0
    return output


def test_fit_leaves_the_best_epoch(fitted, traces):
    assert {p.name for p in fitted.iterdir()} == {
        "best",
        "best.ckpt",
        "config.yaml",
        "layers.csv",
        "heads.csv",
    }
    predictor = load_bundle(fitted / "best")
    assert predictor.spec == SPEC
    assert predictor.provenance == Traces(traces).provenance
    assert predictor.manifest["train_documents"] == 3
    assert predictor.metrics["recovery_at_0.5"] > predictor.metrics["heuristic/ema_ea/recovery_at_0.5"]
    table = list(csv.DictReader((fitted / "layers.csv").open()))
    assert float(table[0]["oracle"]) >= float(table[0]["net"])
    heads = list(csv.DictReader((fitted / "heads.csv").open()))
    assert [(row["layer"], row["head"]) for row in heads] == [("0", "0"), ("0", "1")]
    mean = sum(float(row["net"]) for row in heads) / 2
    assert float(table[0]["net"]) == pytest.approx(mean, abs=1e-4)


def test_fit_is_tracked(fitted, store):
    client = _client(store)
    run = runs(client, "fade-fit")[0]
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.note.content"].startswith("fit: TokenMLP on /")  # the description on the run's page
    assert {"val/recovery_at_0.25", "val/gap_closed_at_0.5", "val/heuristic/h2o/recovery_at_0.125"} <= set(
        run.data.metrics
    )
    assert {item.path for item in client.list_artifacts(run.info.run_id)} >= {"config.yaml", "layers.csv"}
    local = client.download_artifacts(run.info.run_id, "config.yaml")
    assert yaml.safe_load(Path(local).read_text()) == yaml.safe_load((fitted / "config.yaml").read_text())


def test_the_resolved_config_gives_the_same_predictor_again(fitted, store, tmp_path):
    again = ["fit", "--config", str(fitted / "config.yaml"), "--output", str(tmp_path / "again")]
    assert main(again) == 0
    first, second = (load_bundle(folder / "best").net.state_dict() for folder in (fitted, tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_training_resumes_from_the_checkpoint(fitted, traces, store, tmp_path, capsys):
    more = ("--ckpt_path", str(fitted / "best.ckpt"), "--trainer.max_epochs", "14")
    assert fit(traces, store, tmp_path / "on", *more) == 0
    assert load_bundle(tmp_path / "on" / "best").manifest["epoch"] > load_bundle(fitted / "best").manifest["epoch"]


def test_a_checkpoint_can_be_validated(fitted, store, capsys):
    options = ["--config", str(fitted / "config.yaml"), "--ckpt_path", str(fitted / "best.ckpt")]
    assert main(["validate", *options, "--experiment", "fade-validate"]) == 0
    run = runs(_client(store), "fade-validate")[0]
    expected = load_bundle(fitted / "best").metrics["recovery_at_0.25"]
    assert run.data.metrics["val/recovery_at_0.25"] == pytest.approx(expected, abs=1e-5)


def test_a_checkpoint_with_code_in_it_is_not_run(traces, store, tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    torch.save({"state_dict": Payload()}, tmp_path / "bad.ckpt")
    assert fit(traces, store, tmp_path / "out", "--ckpt_path", str(tmp_path / "bad.ckpt")) != 0
    assert not (tmp_path / "ran").exists()


def test_cnn_fits_too(traces, store, tmp_path):
    net = (
        "--model.net",
        "predictor.nets.BlockCNN",
        "--model.net.window",
        "8",
        "--model.net.channels",
        "[4, 4]",
    )
    arguments = [
        "fit",
        *net,
        "--model.loss",
        "mse",
        "--data.traces",
        str(traces),
        "--output",
        str(tmp_path / "cnn"),
    ]
    trainer = [
        "--trainer.max_epochs",
        "1",
        "--trainer.enable_progress_bar",
        "false",
        "--trainer.logger",
        "false",
    ]
    assert main([*arguments, *trainer]) == 0
    assert isinstance(load_bundle(tmp_path / "cnn" / "best").net, BlockCNN)


def test_an_epoch_no_better_than_the_closed_form_is_not_kept(traces, store, tmp_path):
    """With a learning rate of nothing the untrained network stays the best one, and it is the closed form."""
    assert fit(traces, store, tmp_path / "out", "--model.lr", "0", "--trainer.max_epochs", "2") == 0
    predictor = load_bundle(tmp_path / "out" / "best")
    assert predictor.manifest["epoch"] == 0
    assert predictor.metrics["recovery_at_0.25"] == predictor.metrics["heuristic/ema_ea/recovery_at_0.25"]


def test_bad_input_to_fit_is_one_line(traces, store, tmp_path, capsys):
    assert fit(tmp_path / "nowhere", store, tmp_path / "out") == 2
    assert "no traces in" in one_line(capsys)
    assert fit(traces, store, tmp_path / "out", "--model.losss", "bce") == 2
    assert "losss" in one_line(capsys)
    assert fit(traces, store, tmp_path / "out", "--model.loss", "hinge") == 2
    assert "hinge" in one_line(capsys)
    assert fit(traces, "mlruns", tmp_path / "out") == 2
    assert "sqlite:///" in one_line(capsys)
    assert main(["fit", "--config", str(tmp_path / "nowhere.yaml")]) == 2
    assert "nowhere.yaml" in one_line(capsys)
    broken = shutil.copytree(traces, tmp_path / "broken")
    shard = broken / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert fit(broken, store, tmp_path / "out") == 2
    assert "damaged" in one_line(capsys)
    assert not (tmp_path / "out" / "best").exists()


def test_a_network_for_another_window_is_refused(traces, store, tmp_path, capsys):
    assert fit(traces, store, tmp_path / "out", "--model.net", "predictor.nets.BlockCNN") == 2
    assert "window" in one_line(capsys)


def test_bad_input_to_register_is_one_line(fitted, traces, store, tmp_path, capsys):
    def told(checkpoint, folder=traces):
        arguments = ["--checkpoint", str(checkpoint), "--traces", str(folder), "--tracking_uri", store]
        assert run(register, [*arguments, "--name", "nothing", "--bundle", str(tmp_path / "bundle")]) == 2
        return one_line(capsys)

    assert "no checkpoint folder" in told(tmp_path / "nowhere")
    assert "give its folder" in told(fitted / "best.ckpt")
    assert "not a bundle" in told(tmp_path)
    assert "no traces in" in told(fitted, tmp_path / "nowhere")
    other = shutil.copytree(traces, tmp_path / "other")
    manifest = Traces(traces).manifest
    manifest["shards"][0]["sha256"] = "0" * 64
    write_manifest(other, manifest)
    assert "trained on other traces" in told(fitted, other)
    broken = shutil.copytree(traces, tmp_path / "broken")
    (broken / "shard-00001.parquet").write_bytes(b"half")
    assert "damaged" in told(fitted, broken)
    assert "nothing" not in [model.name for model in _client(store).search_registered_models()]
    assert not (tmp_path / "bundle").exists()


def test_trace_facts_count(traces):
    facts = trace_facts(Traces(traces))
    assert (facts["train_documents"], facts["validation_documents"]) == (3, 2)
    assert facts["rows"] == 2 * 5
    assert facts["prompt_tokens"] == sum(map(sum, LENGTHS.values()))
    assert facts["sources"] == "made 5"
    assert facts["recorded"] == "layer 0 of 1"


def test_table_is_sorted_by_the_tightest_budget():
    lines = format_table({"net": {0.5: 0.9, 0.25: 0.8}, "ema": {0.5: 0.91, 0.25: 0.7}, "oracle": {0.5: 1, 0.25: 1}})
    assert [line.split()[0] for line in lines.splitlines()[1:]] == ["oracle", "net", "ema"]
