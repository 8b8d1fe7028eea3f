"""Presets by name, by file and by options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fade_runtime import FadeConfig
from pipelines.integrations.presets import read_config
from predictor.bundle import Predictor
from predictor.errors import FadeError


def test_a_preset_a_file_and_options_mean_the_same(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("preset: aggressive\nrecent_window: 30\n")
    wanted = FadeConfig.aggressive(recent_window=30)
    given = [file, str(file), {"preset": "aggressive", "recent_window": 30}, wanted]
    assert [read_config(each) for each in given] == [wanted] * 4
    assert read_config("aggressive", recent_window=30) == wanted
    assert read_config(file, recent_window=20) == FadeConfig.aggressive(recent_window=20)
    assert read_config() == FadeConfig.safe()


def test_a_predictor_is_loaded_once_and_evicts(bundles: dict[str, Path], tmp_path: Path) -> None:
    made = read_config(predictor=bundles["mlp"])
    assert isinstance(made.predictor, Predictor)
    assert (made.target_compression, made.eviction_policy) == (6.0, "learned")
    assert read_config(made).predictor is made.predictor
    file = tmp_path / "cache.yaml"
    file.write_text(f"preset: aggressive\npredictor: {bundles['mlp']}\n")
    assert isinstance(read_config(str(file)).predictor, Predictor)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ("brave", {}, "config 'brave' is neither safe, balanced, aggressive nor a YAML file"),
        ("broken.yaml", {}, "broken.yaml is not YAML: "),
        ("words.yaml", {}, "words.yaml holds no options"),
        ({"preset": "brave"}, {}, "preset 'brave' is not one of safe, balanced, aggressive"),
        ("safe", {"budget": 1}, "unknown option budget"),
        ("safe", {"predictor": "smollm2-135m-instruct"}, "predictor is given but eviction_policy is 'h2o'"),
        ("balanced", {"predictor": "nobody"}, "there is no bundle at nobody"),
    ],
    ids=str,
)
def test_bad_input_is_named(
    config: Any, options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("a: [")
    Path("words.yaml").write_text("only words")
    with pytest.raises(FadeError, match=said):
        read_config(config, **options)
