"""GGUF files: found in packages and wheels, whole or in parts, and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data.encoding import encode
from data.gguf import in_package, join
from data.lm import load_lm
from predictor.errors import FadeError
from tests.data.gguf_files import write_gguf, write_wheel

pytest.importorskip("gguf")
PARTS = tuple(f"tiny-part{number}" for number in range(1, 13))


def wheels(folder: Path, first: int = 0, left_out: int | None = None) -> tuple[Path, bytes]:
    """A wheel without the file, whose twelve parts lie in wheels beside it; and what they hold together."""
    content = bytes(range(240)) * 5
    for number, name in enumerate(PARTS):
        if number != left_out:
            part = {f"tiny.gguf.part{number + first}": content[number * 100 : number * 100 + 100]}
            write_wheel(folder, name, part)
    return write_wheel(folder, "tiny", {"README.md": b"parts"}, tuple(f"{name}==1.0.0" for name in PARTS)), content


def test_a_model_from_a_gguf_file_is_the_model(tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    loaded, tokenizer = load_lm(write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer))
    ids = encode(tiny_tokenizer, "some words, äöü")
    assert encode(tokenizer, "some words, äöü") == ids
    assert tokenizer.eos_token_id == 256
    tokens = torch.tensor([ids])
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert {p.dtype for p in load_lm(tmp_path / "tiny.gguf", "bfloat16")[0].parameters()} == {torch.bfloat16}
    loaded.save_pretrained(tmp_path / "saved")  # transformers refuses to save a model that says it is quantised


def test_a_whole_file_in_an_installed_package_is_taken_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path, "tiny", {"tiny.gguf": b"whole"}, ("not-installed",))
    monkeypatch.syspath_prepend(str(tmp_path / "tiny-1.0.0-py3-none-any.whl"))  # importable, as an installed one
    (found,) = in_package("tiny")
    assert found.read_bytes() == b"whole"
    assert join([found], tmp_path).read_bytes() == b"whole"
    disk = tmp_path / "mine.gguf"
    disk.write_bytes(b"mine")
    assert join([disk], tmp_path / "nowhere") == disk


@pytest.mark.parametrize("first", [0, 1])
def test_parts_in_several_wheels_are_joined_in_order(first: int, tmp_path: Path) -> None:
    wheel, content = wheels(tmp_path, first)
    whole = join(in_package(str(wheel)), tmp_path)
    assert whole.name == "tiny.gguf"
    assert whole.read_bytes() == content


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FadeError, match=r"package tiny-\S+whl is not there; install it"):
        in_package("tiny-1.0.0-py3-none-any.whl")
    with pytest.raises(FadeError, match="package no-such-package is not there; install it"):
        in_package("no-such-package")
    wheel, _ = wheels(tmp_path)
    (tmp_path / "tiny_part3-1.0.0-py3-none-any.whl").unlink()
    with pytest.raises(FadeError, match="package .*tiny.* requires tiny-part3, which is not there"):
        in_package(str(wheel))
    write_wheel(tmp_path, "tiny-part3", {"README.md": b"empty"})
    with pytest.raises(FadeError, match="lacks part 2 of its GGUF file"):
        in_package(str(wheel))
    two = write_wheel(tmp_path, "two", {"a.gguf": b"", "b.gguf": b""})
    with pytest.raises(FadeError, match="two-1.0.0-py3-none-any.whl holds the GGUF files a.gguf, b.gguf; name"):
        in_package(str(two))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF and nothing")
    with pytest.raises(FadeError, match=r"model .*damaged.gguf cannot be loaded: .*; make it again") as caught:
        load_lm(tmp_path / "damaged.gguf")
    assert "\n" not in str(caught.value)
    with pytest.raises(FadeError, match="model .*nowhere.gguf does not exist"):
        load_lm(tmp_path / "nowhere.gguf")
    with pytest.raises(FadeError, match="model nowhere.gguf does not exist"):  # never taken for a hub id
        load_lm("nowhere.gguf")
