"""`lightning fit` of head budgets on tiny traces: the table, what it is held against, what is kept, what is refused."""

from __future__ import annotations

import csv
from functools import partial

import pytest
import torch
import yaml

from data.datamodule import TraceDataModule
from pipelines.plots.head_budgets import format_lost
from pipelines.train import main
from predictor.budgets import learn_budgets, lost_attention
from predictor.bundle import Predictor, load_bundle
from predictor.errors import FadeError
from predictor.head_metrics import HeadBudgetMetrics
from predictor.module import HeadBudgetModule
from predictor.nets import TokenMLP
from predictor.registry import _client
from predictor.scorenet import token_scores
from tests.predictor.fitting import one_line, runs


def fit(folder, output, *more):
    quiet = ("--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu", "--trainer.max_epochs", "1")
    module = ("--model", "predictor.module.HeadBudgetModule", "--data.traces", str(folder), "--data.batch_size", "4")
    return main(["fit", *module, "--output", str(output), *quiet, *more])


@pytest.fixture(scope="module")
def fitted(traces, store, tmp_path_factory):
    output = tmp_path_factory.mktemp("fit") / "heads"
    assert fit(traces, output, "--tracking_uri", store, "--experiment", "heads") == 0
    return output


def batches(folder, split):
    module = TraceDataModule(str(folder))
    module.setup("fit")
    return list(module.train_dataloader() if split == "train" else module.val_dataloader())


@pytest.mark.slow
def test_the_bundle_has_the_mean_over_all_rows(fitted, traces):
    bundle, score = load_bundle(fitted / "best"), partial(token_scores, TokenMLP(), in_cache=True)
    assert bundle.budgets is not None
    expected = learn_budgets(score, batches(traces, "train"))
    torch.testing.assert_close(bundle.budgets.lost, expected.lost, rtol=1e-3, atol=1e-4)  # stored with four digits
    assert bundle.manifest["epoch"] == 0  # its network is the closed form
    assert bundle.manifest["train_documents"] == 3


@pytest.mark.parametrize("kind", ["max", "sum"])
def test_what_is_lost_is_chosen(make_batch, kind):
    module, rows = HeadBudgetModule(lost=kind), [make_batch([400, 411], seed=1), make_batch([440, 402], seed=2)]
    for batch in rows:
        module.training_step(batch, 0)
    module.on_validation_start()
    tables = {
        name: learn_budgets(partial(token_scores, TokenMLP(), in_cache=True), rows, f"target_{name}")
        for name in ("max", "sum")
    }
    assert torch.equal(module.budgets.lost, tables[kind].lost)
    assert not torch.equal(tables["max"].lost, tables["sum"].lost)


def test_the_defaults_are_its_own(capsys):
    """And not those of the module that is trained when none is named."""
    with pytest.raises(SystemExit):
        main(["fit", "--model", "predictor.module.HeadBudgetModule", "--data.traces", "x", "--print_config"])
    arguments = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
    assert arguments == {"scorer": None, "lost": "max", "shares": [0.5, 0.25, 0.125, 0.0625]}


def test_it_is_held_against_the_others_on_validation_rows(fitted, traces):
    metrics, budgets = load_bundle(fitted / "best").metrics, load_bundle(fitted / "best").budgets
    score = partial(token_scores, TokenMLP(), in_cache=True)
    for share in (0.5, 0.25, 0.125, 0.0625):
        found = {"uniform": [], "max": []}
        for batch in batches(traces, "validation"):
            for row in range(len(batch["length"])):
                one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
                own = budgets.allocate(share)[int(one["layer"])][int(one["head"])]
                for kind, kept in (("uniform", share), ("max", own)):
                    rows = one["target_max"], one["eligible"], one["length"]
                    found[kind].append(float(lost_attention(score(batch)[row : row + 1], *rows, (kept,))))
        for kind, lost in found.items():
            assert metrics[f"{kind}/lost_at_{share}"] == pytest.approx(sum(lost) / len(lost), rel=1e-3)


def test_what_is_kept_is_tracked(fitted, store):
    files = {"best", "best.ckpt", "config.yaml", "heads.csv", "heads.png"}
    assert {path.name for path in fitted.iterdir()} == files
    client = _client(store)
    run = runs(client, "heads")[0]
    assert {f"val/{kind}/lost_at_0.25" for kind in ("max", "sum", "uniform")} <= set(run.data.metrics)
    assert {item.path for item in client.list_artifacts(run.info.run_id)} >= files - {"best", "best.ckpt"}
    rows = list(csv.DictReader((fitted / "heads.csv").open()))
    kept = [float(row["kept_at_0.25"]) for row in rows]
    assert sum(kept) / len(kept) == pytest.approx(0.25, abs=1e-4)
    card = (fitted / "best" / "README.md").read_text()
    assert "all heads alike" in card
    assert "Recovery is the share" not in card  # not measured yet


def test_a_checkpoint_can_be_validated(fitted, store):
    options = ["--config", str(fitted / "config.yaml"), "--ckpt_path", str(fitted / "best.ckpt")]
    assert main(["validate", *options, "--experiment", "heads-validate"]) == 0
    found = runs(_client(store), "heads-validate")[0].data.metrics["val/max/lost_at_0.25"]
    assert found == pytest.approx(load_bundle(fitted / "best").metrics["max/lost_at_0.25"], abs=1e-6)


def test_a_finished_fit_has_nothing_to_go_on_with(fitted, traces, tmp_path, capsys):
    options = ("--trainer.logger", "false", "--ckpt_path", str(fitted / "best.ckpt"))
    assert fit(traces, tmp_path / "done", *options) == 0
    assert "kept in" not in capsys.readouterr().out
    assert not (tmp_path / "done").exists()
    assert fit(traces, tmp_path / "more", *options, "--trainer.max_epochs", "2") == 0
    assert "kept in" in capsys.readouterr().out
    first, second = (load_bundle(folder / "best").budgets.lost for folder in (fitted, tmp_path / "more"))
    torch.testing.assert_close(first, second)  # every row counts twice now


def test_budgets_by_head_lose_less_than_the_same_for_all(make_batch):
    """One head looks everywhere, the other at one token: what the second does not need, the first gets."""
    batch = make_batch([400])
    where = batch["eligible"][0].nonzero().flatten()
    batch["target_max"] = torch.zeros_like(batch["target_max"])
    batch["target_max"][0, where] = 1 / len(where)
    batch["target_max"][1, where[7]] = 1.0
    batch["layer"][:] = 0
    net = TokenMLP()
    net.log_importance = lambda features: batch["target_max"][:, : features.tokens.shape[1]]
    tables = {kind: learn_budgets(partial(token_scores, net, in_cache=True), [batch]) for kind in ("max", "sum")}
    metrics = HeadBudgetMetrics((0.25,))
    metrics.update(net, batch, tables)
    values = metrics.values()
    assert values["max/lost_at_0.25"] < 0.75 * values["uniform/lost_at_0.25"]
    with pytest.raises(FadeError, match="of layer 0 with 2 kv heads were seen, and validation has more"):
        metrics.update(net, {**batch, "layer": batch["layer"] + 1}, tables)


def test_a_scorer_ranks_the_tokens(fitted, traces, tmp_path, capsys):
    """A scorer that ranks by age loses more; one that was trained on other traces is refused."""
    mine = load_bundle(fitted / "best")
    mine.net.head.weight.normal_(std=1e3, generator=torch.Generator().manual_seed(3))
    for name, changes in (("own", {}), ("other", {"traces_sha256": "0"})):
        given = dict(spec=mine.spec, provenance=mine.provenance, metrics={})
        Predictor(mine.net, **given, manifest={**mine.manifest, **changes, "epoch": 7}).save(tmp_path / name)
    options = ("--trainer.logger", "false", "--model.scorer")
    assert fit(traces, tmp_path / "out", *options, str(tmp_path / "own")) == 0
    bundle = load_bundle(tmp_path / "out" / "best")
    assert bundle.manifest["epoch"] == 7
    assert torch.equal(bundle.net.head.weight, load_bundle(tmp_path / "own").net.head.weight)
    lost = [sum(each.metrics[f"max/lost_at_{share}"] for share in (0.5, 0.25, 0.125)) for each in (bundle, mine)]
    assert lost[0] > lost[1]
    capsys.readouterr()
    assert fit(traces, tmp_path / "refused", *options, str(tmp_path / "other")) == 2
    assert "was trained on other traces" in one_line(capsys)
    assert not (tmp_path / "refused").exists()


def test_bad_options_are_named():
    with pytest.raises(FadeError, match="'mean'.*max, sum"):
        HeadBudgetModule(lost="mean")
    with pytest.raises(FadeError, match="budget 2 is not a share"):
        HeadBudgetModule(shares=(2,))


def test_the_table_for_a_terminal():
    lines = format_lost({"uniform/lost_at_0.5": 0.5, "max/lost_at_0.5": 0.25, "max/lost_at_0.25": 0.5}).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["0.25", "0.5000", "0.5000"]
