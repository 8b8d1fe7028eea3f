"""`python -m pipelines.certify` on a tiny model, and the compression that `FadeConfig.risk` takes from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from data.lm import load_lm
from fade_runtime import FadeConfig, FadeError
from pipelines.certify import certify_bundle
from pipelines.cli import run
from pipelines.evaluation.certificate import LADDER, measure_ladder
from pipelines.evaluation.measure import compare
from pipelines.evaluation.runs import Method
from predictor.bundle import load_bundle
from predictor.certificate import QUANTILE, ladder, upper_bound


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    lines = [" ".join(words[int(digit)] for digit in str(7919 * n**3)) for n in range(300)]
    path = tmp_path / "numbers.txt"
    path.write_text("\n\n".join(lines))
    return path


def test_a_certified_bundle_answers_for_a_risk(
    bundles: dict[str, Path], tiny_model_dir: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    import shutil

    bundle = tmp_path / "bundle"
    shutil.copytree(bundles["mlp"], bundle)
    before = json.loads((bundle / "bundle.json").read_text())
    with pytest.raises(FadeError, match="no certificate of KL at several budgets"):
        FadeConfig.risk(kl=0.1, predictor=bundle)
    asked = [f"--bundle={bundle}", f"--model={tiny_model_dir}", f'--text=["{text}"]']
    assert run(certify_bundle, [*asked, "--documents=14", "--context=300", "--steps=8"]) == 0
    told = capsys.readouterr().out
    after = json.loads((bundle / "bundle.json").read_text())
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"certificate", "sha256"}
    predictor = load_bundle(bundle)
    assert predictor.certificate is not None
    assert predictor.certificate["ladder"]["texts"] == ["numbers.txt"] * 14
    rungs = ladder(predictor.certificate)
    assert [rung.int4_budget for rung in rungs] == list(LADDER)
    bounds = [upper_bound(rung.kl, QUANTILE, 0.95) for rung in rungs]
    assert bounds[0] < bounds[1] < bounds[-1]
    for rung, bound in zip(rungs, bounds):
        assert f"{rung.compression:.2f}x" in told
        assert f"< {bound:.4f}" in told
        assert f"{bound:.4f} |" in (bundle / "README.md").read_text()
    assert FadeConfig.risk(kl=bounds[0], predictor=bundle, n_sink=7) == FadeConfig.safe(n_sink=7)
    most = FadeConfig.risk(kl=100.0, predictor=bundle)
    assert (most.int4_budget, most.eviction_policy) == (LADDER[-1], "learned")
    with pytest.raises(FadeError, match="no compression of .* is certified for KL"):
        FadeConfig.risk(kl=bounds[0] / 2, predictor=bundle)
    with pytest.raises(FadeError, match="has 14 texts, too few for confidence 0.99"):
        FadeConfig.risk(kl=1.0, confidence=0.99, predictor=bundle)


def test_ladder_is_what_each_cache_loses_alone(bundles: dict[str, Path], tiny_model_dir: Path) -> None:
    lm, _ = load_lm(tiny_model_dir)
    predictor = load_bundle(bundles["mlp"])
    texts = [torch.randint(3, 250, (1, 150), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    rungs = measure_ladder(lm, predictor, texts, steps=10, budgets=(None, 0.2))
    evicting = FadeConfig(int4_budget=0.2, eviction_policy="learned", predictor=predictor)
    for rung, config in zip(rungs, (FadeConfig.safe(), evicting)):
        rows = [compare(lm, [Method("full", None), Method("x", config)], t, 10)[1] for t in texts]
        assert rung.kl == pytest.approx([sum(row.kl) / 10 for row in rows], rel=1e-4)
        sizes = (sum(getattr(row, name) for row in rows) for name in ("full_bytes", "resident_bytes"))
        assert rung.compression == pytest.approx(next(sizes) / next(sizes))


def test_bad_input_leaves_the_bundle_as_it_was(
    bundles: dict[str, Path], tiny_model_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    before = (bundles["mlp"] / "bundle.json").read_bytes()
    asked = [f"--bundle={bundles['mlp']}", f"--model={tiny_model_dir}"]
    for more, words in (
        (["--documents=0"], "documents 0"),
        (['--text=["missing.txt"]'], "missing.txt does not exist"),
    ):
        assert run(certify_bundle, [*asked, *more]) == 2
        assert words in capsys.readouterr().err
    assert (bundles["mlp"] / "bundle.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kl": 0.0}, "kl 0.0"),
        ({"confidence": 1.0}, "confidence 1.0"),
        ({"share": 1.0}, "share 1.0"),
        ({}, "risk reads a predictor's certificate"),
    ],
    ids=str,
)
def test_bad_risks_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(FadeError, match=words):
        FadeConfig.risk(**options)
