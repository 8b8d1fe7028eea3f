"""A tiny main job on disk: text, traces of a tiny model over it, untrained bundles for that model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from predictor.bundle import Predictor
from predictor.features import FeatureSpec
from predictor.nets import BlockCNN, TokenMLP
from predictor.provenance import model_provenance


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """Commands set the number of threads; the next test has as many as the one before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of six text files of 3,000 characters, no paragraph twice."""
    folder = tmp_path_factory.mktemp("prose")
    drawn = random.Random(0)
    words = ["".join(drawn.choices("aeioulnrst", k=drawn.randint(2, 9))) for _ in range(400)]
    for number in range(6):
        paragraphs = [" ".join(drawn.choices(words, k=50)).capitalize() + "." for _ in range(10)]
        (folder / f"part{number}.txt").write_text("\n\n".join(paragraphs))
    return folder


@pytest.fixture(scope="session")
def tiny_traces(prose: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of the tiny model over that text: two train and two validation documents."""
    from data.collect import collect
    from data.plan import CollectSettings

    out = tmp_path_factory.mktemp("traces") / "tiny"
    collect(
        CollectSettings(
            text=str(prose),
            model=str(tiny_model_dir),
            out=str(out),
            train_documents=2,
            validation_documents=2,
            min_prompt=200,
            max_prompt=230,
            future=40,
            accelerator="cpu",
        )
    )
    return out


@pytest.fixture(scope="session")
def bundles(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained networks for the tiny model: by construction the closed form and the moving average."""
    folder = tmp_path_factory.mktemp("bundles")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    provenance = model_provenance(model, AutoTokenizer.from_pretrained(tiny_model_dir))
    return {
        net.kind: Predictor(
            net,
            spec=FeatureSpec(horizon=40),
            provenance=provenance,
            metrics={},
            manifest={},
        ).save(folder / net.kind)
        for net in (TokenMLP(), BlockCNN())
    }
