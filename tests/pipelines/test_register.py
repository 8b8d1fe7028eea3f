"""`pipelines.register` on a tiny model: measured in the cache, promoted by what was measured."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.lm import load_lm
from data.trace import Traces, read_manifest, write_manifest
from fade_runtime import FadeConfig
from pipelines.checkpoints import trace_facts
from pipelines.cli import run
from pipelines.evaluation.certificate import THIS, Figures, certify, copy_of, verdict
from pipelines.evaluation.measure import compare
from pipelines.evaluation.runs import Method
from pipelines.register import (
    NOT_PROMOTED,
    Candidate,
    RegisterSettings,
    advice,
    closed_form_instead,
    evaluate,
    publish,
    register,
)
from predictor.budgets import FRACTIONS, HeadBudgets
from predictor.bundle import Predictor, load_bundle
from predictor.certificate import ladder, smallest_budget
from predictor.errors import FadeError
from predictor.nets import TokenMLP
from predictor.registry import _client, load_predictor

Registers = Callable[..., int]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def other_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of another source than the traces': numbers in words."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    folder = tmp_path_factory.mktemp("other") / "numbers"
    folder.mkdir()
    for file in range(3):
        lines = [" ".join(words[int(d)] for d in str(7919 * (file + 1) * n**3)) for n in range(60)]
        (folder / f"{file}.txt").write_text("\n\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def closed(tiny_traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untrained network as a fit would have left it: it ranks as the closed form does."""
    traces = Traces(tiny_traces)
    return Predictor(TokenMLP(), spec=traces.spec, provenance=traces.provenance,
        metrics={}, manifest=trace_facts(traces),
    ).save(tmp_path_factory.mktemp("closed") / "bundle")  # fmt: skip


@pytest.fixture
def registers(tiny_traces: Path, tiny_model_dir: Path, other_text: Path, store: str, tmp_path: Path) -> Registers:
    """The command with all that the tests share filled in."""

    def call(checkpoint: Path, name: str, **options: Any) -> int:
        given: dict[str, Any] = dict(
            traces=tiny_traces, bundle=tmp_path / name, model=tiny_model_dir, text=[str(other_text)],
            documents=2, context=200, steps=16, tracking_uri=store,
        )  # fmt: skip
        flags = [f"--{key}={json_of(value)}" for key, value in (given | options).items()]
        return run(register, [f"--checkpoint={checkpoint}", f"--name={name}", *flags])

    return call


def json_of(value: Any) -> str:
    return str(value) if isinstance(value, Path | str) else json.dumps(value)


def test_what_is_measured_decides(
    registers: Registers, closed: Path, store: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    status = registers(closed, "first", kl=0.03)
    told = capsys.readouterr()
    bundle = load_bundle(tmp_path / "first")
    certificate = bundle.certificate
    assert certificate is not None
    assert (certificate["sources"], certificate["documents"], certificate["steps"]) == ("numbers", 2, 16)
    figures = {name: Figures(**one) for name, one in certificate["figures"].items()}
    assert set(figures) == {THIS, "closed form", "position", "h2o", "ema"}
    promoted, reason = verdict(figures)
    assert status == (0 if promoted else NOT_PROMOTED)
    assert reason in (told.out if promoted else told.err)
    rungs = ladder(certificate)
    assert (advice(rungs, 0.03) in told.out) == promoted  # advice is for what was promoted
    met = smallest_budget(rungs, 0.03)
    assert met is not None
    assert certificate["budget"] == met.int4_budget  # the comparison is at the recommended budget
    assert sum(met.kl) / 2 <= 0.03
    smaller = rungs[rungs.index(met) + 1]
    assert sum(smaller.kl) / 2 > 0.03
    assert f"at most KL 0.03 is {met.int4_budget:.0%}" in (tmp_path / "first" / "README.md").read_text()
    assert figures[THIS] == figures["closed form"]  # it is the closed form
    tags = _client(store).get_model_version("first", "1").tags
    assert float(tags["cache_kl"]) == pytest.approx(figures[THIS].kl, abs=1e-5)
    assert "## Measured in the cache" in (tmp_path / "first" / "README.md").read_text()
    champion = bool(_client(store).get_registered_model("first").aliases)
    assert champion == promoted
    assert load_predictor("models:/first/1", tracking_uri=store).certificate == certificate


def test_budgets_that_a_checkpoint_brings_are_not_learned_again(
    registers: Registers, closed: Path, store: str, tmp_path: Path
) -> None:
    predictor = load_bundle(closed)
    budgets = HeadBudgets(torch.rand(2, 2, len(FRACTIONS)))
    brought = Predictor(predictor.net, spec=predictor.spec, provenance=predictor.provenance, budgets=budgets,
        metrics={"max/lost_at_0.25": 0.25}, manifest=predictor.manifest,
    ).save(tmp_path / "brought")  # fmt: skip
    registers(brought, "brings")
    bundle = load_predictor("models:/brings/1", tracking_uri=store)
    assert bundle.budgets is not None
    assert replace(bundle.budgets, weights=()).to_dict() == budgets.to_dict()
    assert sum(bundle.budgets.weights) == pytest.approx(2, abs=0.02)  # of its two layers, which are weighed
    assert bundle.metrics["max/lost_at_0.25"] == 0.25
    assert "recovery_at_0.25" in bundle.metrics


def test_figures_are_those_of_the_cache(closed: Path, tiny_model_dir: Path) -> None:
    """Against a plain comparison of one cache on one text at a time."""
    lm, _ = load_lm(tiny_model_dir)
    predictor = load_bundle(closed)
    texts = [torch.randint(3, 250, (1, 150), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    figures = certify(lm, predictor, predictor, texts, budget=0.2, steps=10)
    config = FadeConfig(int4_budget=0.2, eviction_policy="h2o")
    rows = [compare(lm, [Method("full", None), Method("x", config)], t, 10)[1] for t in texts]
    copies = [compare(lm, [Method("full", None), Method("x", config)], copy_of(t, 10), 10)[1] for t in texts]
    kls = [sum(row.kl) / 10 for row in rows]
    assert figures["h2o"].kl == pytest.approx(sum(kls) / 2, rel=1e-4)
    assert figures["h2o"].worst_kl == pytest.approx(max(kls), rel=1e-4)
    assert figures["h2o"].top1 == pytest.approx(sum(sum(row.agree) for row in rows) / 20)
    assert figures["h2o"].copy_kl == pytest.approx(sum(sum(row.kl) for row in copies) / 20, rel=1e-4)


def test_a_copy_repeats_its_beginning() -> None:
    tokens = torch.arange(200)[None]
    copied = copy_of(tokens, steps=20)
    assert copied.shape == tokens.shape
    assert torch.equal(copied[0, :164], tokens[0, :164])
    assert torch.equal(copied[0, 164:], tokens[0, :36])


@pytest.mark.parametrize("length", [20, 36, 71])
def test_no_copy_is_made_of_what_did_not_come_before(length: int) -> None:
    assert copy_of(torch.arange(72)[None], steps=20).shape == (1, 72)
    with pytest.raises(FadeError, match=f"context {length - 20} is too short for a copy of 20 steps; use at least 52"):
        copy_of(torch.arange(length)[None], steps=20)


GOOD = Figures(0.01, 0.02, 0.98, 0.03, 9.0)


@pytest.mark.parametrize(
    ("mine", "promoted", "words"),
    [
        (GOOD, True, "KL 0.0100 against 0.0500 of ema"),
        (Figures(0.0115, 0.022, 0.975, 0.035, 9.0), True, "KL 0.0115"),  # ties with the closed form
        (Figures(0.02, 0.02, 0.98, 0.03, 9.0), False, "kl 0.0200 is worse than 0.0100 of closed form"),
        (Figures(0.01, 0.30, 0.98, 0.03, 9.0), False, "worst_kl 0.3000 is worse"),
        (Figures(0.01, 0.02, 0.90, 0.03, 9.0), False, "top1 0.9000 is worse"),
        (Figures(0.01, 0.02, 0.98, 0.90, 9.0), False, "copy_kl 0.9000 is worse"),
    ],
    ids=str,
)
def test_verdict(mine: Figures, promoted: bool, words: str) -> None:
    poor = Figures(0.05, 0.08, 0.93, 1.2, 9.0)
    worst = Figures(0.2, 0.3, 0.8, 2.0, 9.0)
    found, reason = verdict({THIS: mine, "closed form": GOOD, "position": worst, "ema": poor})
    assert (found, reason[: len(words)]) == (promoted, words)


def test_no_better_than_a_heuristic_is_not_promoted() -> None:
    found, reason = verdict({THIS: GOOD, "closed form": GOOD, "ema": GOOD})
    assert not found
    assert reason.endswith("nowhere better")


def test_what_serves_the_cache_worse_is_not_promoted(
    registers: Registers, closed: Path, store: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    predictor = load_bundle(closed)
    torch.manual_seed(0)
    torch.nn.init.normal_(predictor.net.head.weight, std=1e4)
    bad = Predictor(predictor.net, spec=predictor.spec, provenance=predictor.provenance, metrics={},
        manifest=predictor.manifest,
    ).save(tmp_path / "bad")  # fmt: skip
    status = registers(bad, "guarded")
    told = capsys.readouterr()
    assert "not promoted: " in told.err
    client = _client(store)
    assert "is worse than" in client.get_model_version("guarded", "1").tags["verdict"]
    champions = {name: int(v) for name, v in client.get_registered_model("guarded").aliases.items()}
    assert champions == ({} if status == NOT_PROMOTED else {"champion": 2})  # at most the closed form instead


def test_recovery_on_traces_does_not_decide(
    registers: Registers, closed: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.register.best_heuristic", lambda table: ("a better one", 2.0))
    registers(closed, "below", documents=1)
    tags = _client(store).get_model_version("below", "1").tags
    assert float(tags["recovery_at_0.25"]) < float(tags["best_heuristic_recovery_at_0.25"])
    assert "cache_kl" in tags
    assert "recovery" not in tags["verdict"]


def test_the_closed_form_takes_the_place_of_a_network_that_it_beats(
    closed: Path, tiny_traces: Path, store: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    predictor, closed_form = load_bundle(closed), load_bundle(closed)
    poor = Figures(0.05, 0.08, 0.93, 1.2, 9.0)
    about = {"documents": 1, "sources": "x", "context": 9, "steps": 2, "budget": 0.25}
    figures = {THIS: Figures(0.03, 0.04, 0.97, 0.1, 9.0), "closed form": GOOD, "h2o": poor}
    trained = Candidate(predictor, evaluate(predictor, str(tiny_traces)), {**about, "figures": figures})
    (instead,) = closed_form_instead(trained, closed_form, str(tiny_traces))
    assert "takes its place" in capsys.readouterr().out
    assert instead.reason == "closed form, KL 0.0100 against 0.0500 of h2o, the best heuristic"
    publish(trained, tmp_path / "net", "swap", "champion", store)
    publish(instead, tmp_path / "closed", "swap", "champion", store)
    champion = load_predictor("models:/swap@champion", tracking_uri=store)
    assert int(_client(store).get_model_version_by_alias("swap", "champion").version) == 2
    assert champion.certificate is not None
    assert champion.certificate["figures"][THIS]["kl"] == 0.01
    assert champion.certificate["figures"]["trained network"]["kl"] == 0.03
    figures["h2o"] = GOOD  # where a heuristic is as good, nothing takes its place
    assert closed_form_instead(trained, closed_form, str(tiny_traces)) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"text": ["missing.txt"]}, "missing.txt does not exist"),
        ({"context": 100_000}, "context 100000 and steps 16 pass the 4096 positions of"),
        ({"steps": 1}, "steps 1"),
        ({"budget": 0.0}, "budget 0.0"),
        ({"kl": 0.0}, "kl 0.0"),
        ({"model": "no/such/model"}, "model no/such/model does not exist"),
    ],
    ids=str,
)
def test_bad_input_registers_nothing(
    registers: Registers, closed: Path, store: str, tmp_path: Path, capsys: pytest.CaptureFixture,
    options: dict[str, Any], words: str,
) -> None:  # fmt: skip
    assert registers(closed, "nothing", **options) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert "nothing" not in [model.name for model in _client(store).search_registered_models()]
    assert not (tmp_path / "nothing").exists()


def test_text_that_was_trained_on_is_refused_before_anything_is_measured(
    registers: Registers, closed: Path, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By its content: a copy under another name is found, with other white space and in one file."""
    copied = tmp_path / "other name.txt"
    files = sorted(prose.iterdir())
    copied.write_text("\n\n\n".join(file.read_text().replace(" ", "  ") for file in files))
    assert registers(closed, "cheat", text=[str(copied)]) == 2
    told = capsys.readouterr()
    assert re.search(r"text .*other name.txt:0:0 was trained on: \d+ of \d+ passages", told.err)
    assert "recovery" not in told.out


def test_the_model_and_the_name_come_from_the_traces(
    closed: Path, tiny_traces: Path, tiny_model_dir: Path, other_text: Path, store: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    options = [f"--traces={tiny_traces}", f'--text=["{other_text}"]', "--context=100", "--steps=4", "--documents=1"]
    assert run(register, [f"--checkpoint={closed}", *options, f"--tracking_uri={store}"]) in (0, NOT_PROMOTED)
    name = tiny_model_dir.name.lower()
    assert f"bundle artefacts/bundles/{name}, version 1 of {name}" in capsys.readouterr().out
    assert load_predictor(f"models:/{name}/1", tracking_uri=store).manifest["model"] == str(tiny_model_dir)


def test_a_model_that_is_gone_is_named(closed: Path, tiny_traces: Path, tmp_path: Path) -> None:
    gone = tmp_path / "traces"
    shutil.copytree(tiny_traces, gone)
    stored = read_manifest(gone)
    assert stored is not None
    stored["settings"]["model"] = str(tmp_path / "was" / "here")
    write_manifest(gone, stored)
    asked = RegisterSettings(checkpoint=str(closed), traces=str(gone))
    with pytest.raises(FadeError, match=r"traces .* made with model .*was/here, which is not there; name where"):
        register(asked)


def test_old_names_of_options_still_work(
    registers: Registers, closed: Path, tiny_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = tmp_path / "old.yaml"
    config.write_text("held_out: [missing.txt]\nheld_out_documents: 0\n")
    assert run(register, [f"--checkpoint={closed}", "--config", str(config)]) == 2
    err = capsys.readouterr().err
    assert "option 'held_out' is now called 'text'" in err
    assert "option 'held_out_documents' is now called 'documents'" in err
    assert "documents 0" in err
    assert registers(closed, "old", held_out=["missing.txt"]) == 2
    assert "missing.txt does not exist" in capsys.readouterr().err
