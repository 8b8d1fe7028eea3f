"""The model that a command runs is the named one, or the one that its input was made with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data.trace import Traces
from pipelines.certify import certify_bundle
from pipelines.cli import run
from pipelines.models import model_of
from predictor.bundle import Predictor, load_bundle
from predictor.certificate import ladder


@pytest.fixture
def made_with(bundles: dict[str, Path], tmp_path: Path) -> Predictor:
    """A predictor whose bundle says where its model was."""
    predictor = load_bundle(bundles["mlp"])
    predictor.manifest["model"] = str(tmp_path / "model")
    return load_bundle(predictor.save(tmp_path / "bundle"))


def test_what_is_named_then_the_predictor_then_the_traces(
    made_with: Predictor, bundles: dict[str, Path], tiny_traces: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    traces, silent = Traces(tiny_traces), load_bundle(bundles["cnn"])
    (tmp_path / "model").mkdir()
    assert model_of("org/name", [made_with], traces) == "org/name"
    assert model_of(None, [silent, made_with], traces) == str(tmp_path / "model")
    assert model_of(None, [silent], traces) == str(tiny_model_dir)
    made_with.manifest["model"] = "org/hub-id"
    assert model_of(None, [made_with]) == "org/hub-id"


def test_certify_takes_the_model_of_the_bundle_or_says_that_it_is_gone(
    made_with: Predictor, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"{n}: " + "one more word and another " * 4 + str(n) for n in range(40)))
    asked = [f"--bundle={tmp_path / 'bundle'}", f'--text=["{text}"]', "--documents=1", "--context=60", "--steps=3"]
    assert run(certify_bundle, asked) == 2
    assert "predictor " in (err := capsys.readouterr().err)
    assert f"was made with model {tmp_path / 'model'}, which is not there; name where it is (model)" in err
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    assert run(certify_bundle, asked) == 0
    assert len(ladder(load_bundle(tmp_path / "bundle").certificate)) > 1
