"""Text folders and finished collections of a tiny model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.collect import collect
from data.plan import CollectSettings


def write_prose(folder: Path, files: int = 6, paragraphs: int = 8, seed: int = 0) -> Path:
    """Fill a folder with text files of about 2,000 characters, no paragraph twice."""
    folder.mkdir(exist_ok=True)
    drawn = random.Random(seed)
    words = ["".join(drawn.choices("aeioulnrst", k=drawn.randint(2, 9))) for _ in range(300)]
    for number in range(files):
        text = "\n\n".join(" ".join(drawn.choices(words, k=40)) + "." for _ in range(paragraphs))
        (folder / f"part{number}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prose(tmp_path_factory.mktemp("text") / "prose")


@pytest.fixture(scope="session")
def small(prose: Path, tiny_model_dir: Path) -> Callable[..., CollectSettings]:
    """Settings of a collection that takes a second: four train and two validation documents, odd lengths."""

    def make(out: Path, **changes: Any) -> CollectSettings:
        options = dict(
            text=str(prose),
            model=str(tiny_model_dir),
            out=str(out),
            train_documents=4,
            validation_documents=2,
            min_prompt=101,
            max_prompt=149,
            future=13,
            window=11,
            accelerator="cpu",
        )
        return CollectSettings(**{**options, **changes})

    return make


@pytest.fixture(scope="session")
def collected(small: Callable[..., CollectSettings], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished collection; tests that change it copy it first."""
    out = tmp_path_factory.mktemp("collected") / "traces"
    collect(small(out))
    return out
