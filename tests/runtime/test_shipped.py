"""The predictor that comes with the package: there at once, small, and worth its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.encoding import encode
from data.lm import load_lm
from data.text import load_documents
from fade_runtime import FadeConfig
from pipelines.evaluation.measure import compare
from pipelines.evaluation.runs import Method
from predictor.errors import FadeError
from predictor.registry import SHIPPED, load_predictor, shipped

NAME = "smollm2-135m-instruct"


def test_it_is_there_and_small() -> None:
    assert shipped() == [NAME]
    assert sum(file.stat().st_size for file in (SHIPPED / NAME).iterdir()) < 300_000
    predictor = load_predictor(NAME)
    assert predictor.budgets is not None
    assert predictor.certificate is not None
    assert NAME in predictor.name


def test_its_files_are_those_that_this_release_writes(tmp_path: Path) -> None:
    again = load_predictor(NAME).save(tmp_path / NAME)
    for file in (SHIPPED / NAME).iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_another_name_lists_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FadeError, match=f"none of that name comes with the package \\({NAME}\\)"):
        load_predictor("smollm3")


@pytest.mark.slow
def test_presets_with_it_lose_little_at_their_size(real_model_dir: Path) -> None:
    """On the front pages of installed packages, which it was not trained on, against h2o at the same size."""
    model, tokenizer = load_lm(real_model_dir)
    measure = lambda text: len(encode(tokenizer, text))
    (document,) = load_documents(["builtin:readmes"], train=0, validation=1, length=2080, measure=measure)
    tokens = torch.tensor(encode(tokenizer, document.text)[:2080])[None]
    configs = {
        "full": None,
        "balanced": FadeConfig.balanced(predictor=NAME),
        "aggressive": FadeConfig.aggressive(predictor=NAME),
        "h2o": FadeConfig.balanced(),
    }
    rows = compare(model, [Method(name, config) for name, config in configs.items()], tokens, steps=32)
    kl = {row.name: sum(row.kl) / len(row.kl) for row in rows}
    size = {row.name: row.full_bytes / row.resident_bytes for row in rows}
    assert size["balanced"] > 5.4  # with 32 tokens that wait in full precision; 6 after each reassignment
    assert size["aggressive"] > 8.5  # 10 after each
    assert kl["balanced"] < min(0.02, kl["h2o"])
    assert kl["aggressive"] < 0.08


def test_it_answers_for_a_risk() -> None:
    """The less is asked, the more is compressed; its certificate has texts enough for the default promise."""
    kept = [FadeConfig.risk(kl=kl, predictor=NAME).int4_budget for kl in (0.003, 0.01, 0.03, 1.0)]
    assert kept[0] is None
    assert [share for share in kept[1:] if isinstance(share, float)] == sorted(kept[1:], reverse=True)
    assert FadeConfig.risk(kl=0.01, confidence=0.5, predictor=NAME).int4_budget <= kept[1]
    with pytest.raises(FadeError, match="no compression of .* is certified for KL 0.0001"):
        FadeConfig.risk(kl=0.0001, predictor=NAME)
    assert FadeConfig.risk(kl=0.01, predictor=NAME).eviction_policy == "learned"
