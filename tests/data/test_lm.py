"""Loading the language model, and making the demo's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data.encoding import encode
from data.lm import load_lm
from predictor.errors import FadeError


def test_a_loaded_model_answers_as_the_stored_one(tiny_model_dir: Path, tiny_model: Any) -> None:
    model, tokenizer = load_lm(tiny_model_dir)
    assert not model.training
    ids = torch.tensor([encode(tokenizer, "some words")])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_model("llama")(ids).logits)
    assert {p.dtype for p in load_lm(str(tiny_model_dir), "bfloat16")[0].parameters()} == {torch.bfloat16}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory maps are listed on Linux only")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_weight_lies_on_a_mapped_file(dtype: str, tiny_model_dir: Path) -> None:
    model, _ = load_lm(tiny_model_dir, dtype)
    maps = Path("/proc/self/maps").read_text().splitlines()
    regions = [line.split()[0].split("-") for line in maps if ".safetensors" in line]
    for parameter in model.parameters():
        assert not any(int(low, 16) <= parameter.data_ptr() < int(high, 16) for low, high in regions)


def test_mistakes_are_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(FadeError, match="dtype int8 is not known"):
        load_lm(tiny_model_dir, "int8")
    with pytest.raises(FadeError, match=r"model .*nowhere does not exist; .*python -m pipelines.demo_model"):
        load_lm(tmp_path / "nowhere")
    with pytest.raises(FadeError, match=r"model .* cannot be loaded: .*; make it again") as caught:
        load_lm(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tiny_model_dir / name).read_text())
    (tmp_path / "model.safetensors").write_bytes((tiny_model_dir / "model.safetensors").read_bytes()[:999])
    with pytest.raises(FadeError, match="cannot be loaded"):
        load_lm(tmp_path)
