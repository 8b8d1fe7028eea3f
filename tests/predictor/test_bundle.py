"""Bundles: bit-exact round trip, and every kind of damage refused in one line."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictor.bundle import FACTS, WEIGHTS, load_bundle, save_bundle
from predictor.errors import FadeError
from predictor.features import FeatureSpec
from predictor.files import sha256_file
from predictor.nets import BlockCNN, TokenMLP
from predictor.provenance import model_provenance
from predictor.scoreboard import token_scores


def write(path, net=None, provenance=None, spec=None):
    net = net or TokenMLP(hidden=6, depth=1)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    return save_bundle(
        path,
        net,
        spec=spec or FeatureSpec(window=8),
        provenance=provenance or {"model_type": "llama", "layers": 2},
        metrics={"recovery_at_0.25": 0.9, "heuristic/ema/recovery_at_0.25": 0.8},
        manifest={"train_documents": 3, "traces_sha256": "abc"},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write(tmp_path_factory.mktemp("bundle") / "whole")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


@pytest.mark.parametrize(
    "net", [TokenMLP(hidden=5, depth=3), BlockCNN(window=8, channels=(2, 3))], ids=["mlp", "cnn"]
)
def test_round_trip_is_bit_exact(tmp_path, make_batch, net):
    write(tmp_path / "b", net)
    loaded = load_bundle(tmp_path / "b")
    for name, tensor in net.state_dict().items():
        assert torch.equal(loaded.net.state_dict()[name], tensor), name
    batch = make_batch([111, 140])
    assert torch.equal(token_scores(loaded.net, batch), token_scores(net, batch))
    assert loaded.spec == FeatureSpec(window=8)
    assert loaded.metrics["recovery_at_0.25"] == 0.9
    assert loaded.manifest["train_documents"] == 3
    assert not any(p.requires_grad for p in loaded.parameters())


def test_saving_the_loaded_bundle_gives_the_same_bytes(whole, tmp_path):
    loaded = load_bundle(whole)
    again = save_bundle(
        tmp_path / "again",
        loaded.net,
        spec=loaded.spec,
        provenance=loaded.provenance,
        metrics=loaded.metrics,
        manifest=loaded.manifest,
    )
    for file in sorted(whole.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_card_is_for_people(whole):
    card = (whole / "README.md").read_text()
    for needed in (
        "| **this predictor** | 0.9000 |",
        "| ema | 0.8000 |",
        "train_documents | 3",
        "llama",
        "create_tiered_cache",
        "safetensors",
    ):
        assert needed in card


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data(), name=st.sampled_from([WEIGHTS, FACTS]))
def test_truncated_at_any_byte_is_refused(copy, whole, data, name):
    content = (whole / name).read_bytes()
    cut = data.draw(st.integers(0, len(content) - 2))  # the last byte of the JSON is a newline
    (copy / name).write_bytes(content[:cut])
    with pytest.raises(FadeError, match="damaged") as error:
        load_bundle(copy)
    assert "\n" not in str(error.value)
    shutil.copytree(whole, copy, dirs_exist_ok=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_one_flipped_bit_of_the_weights_is_refused(copy, whole, data):
    content = bytearray((whole / WEIGHTS).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (copy / WEIGHTS).write_bytes(content)
    with pytest.raises(FadeError, match="checksum"):
        load_bundle(copy)


def edit(copy, **changes):
    facts = json.loads((copy / FACTS).read_text())
    (copy / FACTS).write_text(json.dumps({**facts, **changes}))


def test_bad_bundles_say_what_is_wrong(copy):
    edit(copy, version=2)
    with pytest.raises(FadeError, match="format 2.*upgrade"):
        load_bundle(copy)
    edit(copy, version=1, config={"hidden": 7, "depth": 1})
    with pytest.raises(FadeError, match="does not fit"):
        load_bundle(copy)
    edit(copy, version=1, config={"hidden": "wide"})
    with pytest.raises(FadeError, match="does not take"):
        load_bundle(copy)
    edit(copy, kind="gnn")
    with pytest.raises(FadeError, match="'gnn'"):
        load_bundle(copy)
    edit(copy, version="one")
    with pytest.raises(FadeError, match="no known format"):
        load_bundle(copy)
    (copy / FACTS).write_text("[1, 2]")
    with pytest.raises(FadeError, match="no known format"):
        load_bundle(copy)
    (copy / FACTS).write_text(json.dumps({"version": 1}))
    with pytest.raises(FadeError, match="lacks 'kind'"):
        load_bundle(copy)
    (copy / FACTS).unlink()
    with pytest.raises(FadeError, match="not a bundle"):
        load_bundle(copy)


def test_weights_that_are_not_numbers_are_refused(tmp_path):
    net = TokenMLP(hidden=6, depth=1)
    write(tmp_path / "b", net)
    net.head.bias.data.fill_(float("inf"))
    loaded = load_bundle(tmp_path / "b")
    save_bundle(
        tmp_path / "b", net, spec=loaded.spec, provenance={}, metrics={}, manifest={}
    )  # replaces what was there
    with pytest.raises(FadeError, match="finite"):
        load_bundle(tmp_path / "b")


def test_missing_files(copy):
    (copy / WEIGHTS).unlink()
    with pytest.raises(FadeError, match="cannot be read"):
        load_bundle(copy)
    with pytest.raises(FadeError, match="no bundle at .*nowhere"):
        load_bundle(copy / "nowhere")


def test_spec_of_another_window_is_refused(tmp_path):
    write(tmp_path / "b", BlockCNN(window=8))
    edit(tmp_path / "b", spec=FeatureSpec(window=16).to_dict())
    with pytest.raises(FadeError, match="window=8.*window=16"):
        load_bundle(tmp_path / "b")


def test_a_folder_that_is_no_bundle_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(FadeError, match="not a bundle"):
        write(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_a_failed_save_leaves_the_old_bundle(copy, monkeypatch):
    before = sha256_file(copy / WEIGHTS)
    monkeypatch.setattr("predictor.bundle.model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(copy)
    assert sha256_file(copy / WEIGHTS) == before
    load_bundle(copy)
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_another_model_is_refused_unless_not_strict(tmp_path, tiny_model):
    mine, other = tiny_model(), tiny_model(seed=1)
    write(tmp_path / "b", provenance=model_provenance(mine))
    predictor = load_bundle(tmp_path / "b")
    predictor.check(mine)
    with pytest.raises(FadeError, match="another model: weights"):
        predictor.check(other)
    with pytest.raises(FadeError, match="another model"):
        predictor.check(tiny_model("qwen2"))
    with pytest.warns(UserWarning, match="strict=False"):
        predictor.check(other, strict=False)


def test_a_bundle_can_be_read_by_others(whole):
    modes = {path.name: path.stat().st_mode & 0o044 for path in whole.iterdir()}
    assert modes[WEIGHTS] == 0o044
    assert set(modes) == {WEIGHTS, FACTS, "README.md"}
