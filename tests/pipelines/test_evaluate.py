"""`python -m pipelines.evaluate`, from text to report, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from data.lm import load_tokenizer
from data.trace import Traces
from fade_runtime.policies.registry import POLICIES
from pipelines import evaluate
from pipelines.checkpoints import trace_facts
from pipelines.evaluation import held_out
from pipelines.evaluation.methods import METHODS, available_methods
from pipelines.evaluation.runs import Method
from predictor.bundle import load_bundle
from predictor.errors import FadeError
from tests.pipelines.peers import Plain

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tiny_model_dir: Path, bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: Any) -> tuple[int, str, str]:
        predictors = json.dumps({f"learned {kind}": str(path) for kind, path in bundles.items()})
        base = ("--model", tiny_model_dir, "--predictors", predictors, "--context", 220, "--steps", 20)
        given = (*base, "--out", tmp_path / "out", *args)
        status = evaluate.main([str(arg) for arg in given])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return {kind: [row for row in rows if row["kind"] == kind] for kind in ("run", "document", "method")}


def test_from_traces_to_report(run: Run, bundles: dict[str, Path], tiny_traces: Path, tmp_path: Path) -> None:
    status, out, err = run("--traces", tiny_traces, "--documents", 2, "--heatmap_layer", 1, "--heatmap_head", 1)
    assert status == 0, err
    rows = read(tmp_path / "out")
    names = ["full", "safe", "position", "h2o", "ema", "adaptive", "learned mlp", "learned cnn", "fastgen"]
    assert [row["method"] for row in rows["method"]] == names
    assert [(row["method"], row["document"]) for row in rows["document"]] == [
        (name, text["document"]) for text in rows["run"][0]["texts"] for name in names
    ]
    known = [one["id"] for one in Traces(tiny_traces).manifest["documents"] if one["split"] == "validation"]
    assert [text["document"] for text in rows["run"][0]["texts"]] == known

    for method in rows["method"]:
        mine = [row for row in rows["document"] if row["method"] == method["method"]]
        steps = np.array([row["kl_steps"] for row in mine])
        assert steps.shape == (2, 20)
        assert method["kl"] == pytest.approx(steps.mean(), abs=1e-6)
        assert method["kl_worst"] == pytest.approx(steps.mean(1).max(), abs=1e-6)
        assert method["compression"] == pytest.approx(method["full_bytes"] / method["resident_bytes"])
        assert f"{method['kl']:.4f}" in out
    by = {row["method"]: row for row in rows["method"]}
    assert by["full"]["kl"] == 0
    assert by["full"]["compression"] == 1
    assert 0 < by["safe"]["kl"] < by["position"]["kl"]
    for name in names[2:]:  # networks are counted too, and a cache this small is no larger than they are
        kind = name.removeprefix("learned ")
        network = sum(t.nbytes for t in load_bundle(bundles[kind]).state_dict().values()) if kind in bundles else 0
        assert by[name]["resident_bytes"] - network < by["safe"]["resident_bytes"] < by["full"]["resident_bytes"]

    report = (tmp_path / "out" / "report.md").read_text()
    assert out.split("\n\nReport")[0].strip() in report
    assert "data:image/png;base64," in (tmp_path / "out" / "report.html").read_text()
    for picture in ("quality.png", "attention.png"):
        assert f"]({picture})" in report
        pixels = np.asarray(Image.open(tmp_path / "out" / picture).convert("L"))
        assert min(pixels.shape) > 400
        assert pixels.std() > 5


def test_files_as_text_need_no_traces(run: Run, prose: Path, tmp_path: Path) -> None:
    status, _, err = run("--traces", "null", "--text", f"[{prose}]", "--documents", 1, "--methods", "[safe]")
    assert status == 0, err
    rows = read(tmp_path / "out")
    assert [row["method"] for row in rows["method"]] == ["full", "safe"]
    assert not (tmp_path / "out" / "attention.png").exists()
    assert "attention.png" not in (tmp_path / "out" / "report.md").read_text()


def test_named_sources_and_own_configurations(run: Run, prose: Path, tmp_path: Path) -> None:
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"q": f"{i} + {i * 7}?", "a": f"That is {i * 8}."}) + "\n" for i in range(99)))
    text = {"prose": [str(prose)], "sums": [f"{sums}:q+a"]}
    configs = {
        "k4v2": {"int4_budget": 0, "low_budget": None},
        "tiered": {"int4_budget": 0.1, "low_budget": 0.1, "eviction_policy": "h2o"},
        "learned, one budget": {
            "int4_budget": 0.25,
            "eviction_policy": "learned",
            "predictor": "learned mlp",
        },
    }
    names = ["full", "safe", *configs]
    status, out, err = run(
        *("--text", json.dumps(text), "--configs", json.dumps(configs), "--methods", json.dumps(names)),
        *("--documents", 2, "--traces", "null"),
    )
    assert status == 0, err
    rows = read(tmp_path / "out")
    assert [text["source"] for text in rows["run"][0]["texts"]] == ["prose", "prose", "sums", "sums"]
    first, second = (text["document"].split("/")[0] for text in rows["run"][0]["texts"][:2])
    assert (first, second) == ("part0.txt", "part1.txt")  # files of a folder take turns
    by = {row["method"]: row for row in rows["method"]}
    assert list(by) == names
    assert by["full"]["compression"] < by["safe"]["compression"] < by["k4v2"]["compression"]
    assert by["k4v2"]["compression"] < by["tiered"]["compression"]
    assert by["safe"]["kl"] < by["k4v2"]["kl"] < by["tiered"]["kl"]

    report = (tmp_path / "out" / "report.md").read_text()
    assert out.split("\n\nReport")[0].strip() in report
    assert all(f"- {name}: `" in report for name in configs)
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if "|" in line]
    for name in names[1:]:
        for source in text:
            mine = [row for row in rows["document"] if (row["method"], row["source"]) == (name, source)]
            kl = np.array([row["kl_steps"] for row in mine]).mean(1)
            top1 = np.mean([row["top1"] for row in mine])
            smaller = sum(row["full_bytes"] for row in mine) / sum(row["resident_bytes"] for row in mine)
            (cells,) = [cells for cells in shown if cells[:2] == [name, source]]
            assert [float(cell) for cell in cells[2:4]] == pytest.approx([kl.mean(), kl.max()], abs=6e-5)
            assert cells[4:] == [f"{top1:.1%}", f"{smaller:.2f}x"]


def test_a_missing_peer_is_named_and_the_rest_is_written(run: Run, prose: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("optimum"):
        pytest.skip("it is installed")
    status, _, err = run(
        *("--traces", "null", "--text", f"[{prose}]", "--documents", 1, "--methods", "[safe, theirs]"),
        *("--configs", "{theirs: {peer: quanto}}"),
    )
    assert status == 2
    assert "skipped: config 'theirs': optimum.quanto cannot be imported" in err
    rows = read(tmp_path / "out")
    assert [row["method"] for row in rows["method"]] == ["full", "safe"]
    (line,) = rows["run"][0]["skipped"]
    assert f"Left out: {line}" in (tmp_path / "out" / "report.md").read_text()


@dataclass(frozen=True)
class Failing(Plain):
    """Fails when its cache is made, when it reads its second prompt, or when it decodes after it."""

    when: str = "read"
    prompts: ClassVar[list[int]] = []

    def cache(self, model: Any) -> Any:
        assert self.when != "made", "will not\nbe made"
        return super().cache(model)

    def read(self, model: Any, tokens: Any, cache: Any) -> Any:
        self.prompts.append(tokens.shape[1])
        if len(self.prompts) == 2:
            assert self.when != "read", "will not read"
            cache.layers = [] if self.when == "decoded" else cache.layers
            return torch.zeros(1, 260)
        return super().read(model, tokens, cache)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["made", "read", "decoded"])
@pytest.mark.parametrize("speed", ["true", "false"])
def test_a_peer_that_fails_midway_is_named_and_the_rest_is_written(
    when: str, speed: str, run: Run, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failing.prompts.clear()
    peer = Method("short", Failing(when=when))
    monkeypatch.setattr(evaluate, "available_methods", lambda *args: [*available_methods(*args), peer])
    status, out, err = run(
        *("--traces", "null", "--text", f"[{prose}]", "--documents", 2, "--methods", "[safe]", "--speed", speed)
    )
    assert status == 2
    (said,) = [line for line in err.splitlines() if line.startswith("skipped: ")]
    assert said.startswith("skipped: short on ")
    assert "transformers failed on " in said
    rows = read(tmp_path / "out")
    assert [row["method"] for row in rows["method"]] == ["full", "safe"]
    assert [row["method"] for row in rows["document"]] == ["full", "safe"] * 2
    report = (tmp_path / "out" / "report.md").read_text()
    assert f"Left out: {said.removeprefix('skipped: ')}" in report
    (line,) = [line for line in out.splitlines() if line.startswith("| short ")]
    assert line in report
    assert {cell.strip() for cell in line.split("|")[2:-1]} == {"failed", "-"}


def test_bad_input_is_one_line_and_leaves_nothing(run: Run, tiny_traces: Path, prose: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    from_traces, from_text = (
        ("--traces", tiny_traces, "--documents", 2),
        ("--traces", "null", "--documents", 1),
    )
    mine = (*from_traces, "--methods", "[mine]", "--predictors", "{}")
    for args, words in [
        ((*from_traces, "--methods", "[fastest]"), "method 'fastest' is not known"),
        ((*from_traces, "--predictors", "{}"), "'learned' needs predictors"),
        ((*from_traces, "--predictors", "{ema: somewhere}"), "predictor name 'ema'"),
        ((*from_traces, "--predictors", "{x: somewhere}"), "somewhere"),
        ((*from_traces, "--budget", 2), "budget 2.0"),
        ((*mine, "--configs", "{mine: {int5_budget: 1}}"), "config 'mine': unknown option int5_budget"),
        ((*mine, "--configs", "{mine: {int4_budget: 2.0}}"), "config 'mine': int4_budget 2.0"),
        ((*mine, "--configs", "{mine: {}, spare: {}}"), "config 'spare' is not in methods"),
        ((*mine, "--configs", "{mine: {}, ema: {}}"), "config name 'ema'"),
        ((*mine, "--configs", "{mine: {}}", "--predictors", "{mine: x}"), "predictor name 'mine'"),
        ((*from_traces, "--steps", 1), "steps 1"),
        ((*from_traces, "--documents", 3), "documents 3"),
        ((*from_traces, "--context", 3000), "lower context or steps"),
        ((*from_traces, "--context", 4077), "context 4077 and steps 20 pass the 4096 positions"),
        ((*from_traces, "--heatmap_layer", 7), "heatmap_layer 7"),
        (from_text, "traces and text are both null"),
        ((*from_text, "--text", f"[{tmp_path}/none.txt]"), "none.txt"),
        ((*from_text, "--text", f"[{empty}]"), "empty.txt"),
        (("--traces", tmp_path / "none"), "no traces in"),
    ]:
        status, _, err = run(*args)
        error = err.splitlines()[-1]
        assert status == 2
        assert words in error
        assert "Traceback" not in err
        assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(run: Run, prose: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    status, _, err = run("--traces", "null", "--text", f"[{prose}]", "--documents", 1, "--methods", "[safe]")
    assert status == 2
    assert "holds other files" in err
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_text_that_has_changed_is_noticed(tiny_traces: Path, tiny_model_dir: Path) -> None:
    traces = Traces(tiny_traces)
    traces.manifest["documents"][-1]["id"] = "prose/0123"
    with pytest.raises(FadeError, match="has changed since"):
        held_out.choose_texts(traces, [], 1, 90, 10, load_tokenizer(tiny_model_dir))


def test_text_that_a_predictor_was_trained_on_is_refused(
    run: Run, bundles: dict[str, Path], tiny_traces: Path, prose: Path, tmp_path: Path
) -> None:
    predictor = load_bundle(bundles["mlp"])
    predictor.manifest |= trace_facts(Traces(tiny_traces))
    trained = json.dumps({"mine": str(predictor.save(tmp_path / "trained"))})
    copied = tmp_path / "copied.txt"
    copied.write_text("\n\n".join(file.read_text() for file in sorted(prose.iterdir())))
    asked = ("--predictors", trained, "--methods", "[safe]", "--documents", 1, "--speed", "false")
    for text in (f"[{copied}]", json.dumps({"named": [str(copied)]})):
        status, _, err = run(*asked, "--traces", "null", "--text", text)
        assert status == 2
        assert "copied.txt:0:0 was trained on: " in err
    assert not (tmp_path / "out").exists()
    assert run(*asked, "--traces", tiny_traces)[0] == 0  # validation documents of the traces are what they are
    other = tmp_path / "other.txt"
    other.write_text(
        "\n\n".join(f"{n} words that are nowhere else, of which there are {n * n} at least" for n in range(90))
    )
    assert run(*asked, "--traces", "null", "--text", f"[{other}]")[0] == 0


def test_every_policy_of_the_runtime_is_on_the_menu() -> None:
    assert METHODS == ("full", "safe", *POLICIES)
