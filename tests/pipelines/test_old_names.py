"""Names that the README and the Makefile once had still work, and say what they are called now."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.commands import run_command


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("hf_pipeline", "integrations.hf_pipeline", ["TASK", "FadeTextGenerationPipeline", "register_pipeline"]),
        ("bundle_press", "integrations.bundle_press", ["BundlePress"]),
        ("study", "budget_study", ["budget_study"]),
    ],
)
def test_an_old_module_is_the_new_one(old: str, new: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"pipelines.{old}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"pipelines.{old} is pipelines.{new} now"):
        before = importlib.import_module(f"pipelines.{old}")
    after = importlib.import_module(f"pipelines.{new}")
    for name in names:
        assert getattr(before, name) is getattr(after, name)


@pytest.mark.filterwarnings("ignore:pipelines.study:DeprecationWarning")
def test_the_old_command_takes_the_options_of_the_new_one() -> None:
    outputs = [
        run_command(["python", "-m", f"pipelines.{name}", "--print_config"]) for name in ("study", "budget_study")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == 0
