"""Bundles: bit-exact round trip, and every kind of damage refused in one line."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from predictor.bundle import CARD, FACTS, WEIGHTS, Predictor, load_bundle
from predictor.errors import FadeError
from predictor.features import FeatureSpec
from predictor.files import sha256_file
from predictor.nets import BlockCNN, TokenMLP
from predictor.provenance import first_values_fingerprint, model_provenance
from predictor.registry import SHIPPED
from predictor.scorenet import token_scores
from predictor.sealed import sealed


def write(path, net=None, provenance=None, spec=None):
    net = net or TokenMLP(hidden=6, depth=1)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    return Predictor(
        net,
        spec=spec or FeatureSpec(window=8),
        provenance=provenance or {"model_type": "llama", "layers": 2},
        metrics={"recovery_at_0.25": 0.9, "heuristic/ema/recovery_at_0.25": 0.8},
        manifest={"train_documents": 3, "traces_sha256": "abc"},
    ).save(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write(tmp_path_factory.mktemp("bundle") / "whole")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


@pytest.mark.parametrize("net", [TokenMLP(hidden=5, depth=3), BlockCNN(window=8, channels=(2, 3))], ids=["mlp", "cnn"])
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
    again = Predictor(
        loaded.net,
        spec=loaded.spec,
        provenance=loaded.provenance,
        metrics=loaded.metrics,
        manifest=loaded.manifest,
    ).save(tmp_path / "again")
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
    """Other facts, under a checksum that fits them."""
    facts = json.loads((copy / FACTS).read_text())
    (copy / FACTS).write_text(sealed({**facts, **changes}))


def as_written_before(path, **changes):
    """A bundle of format 1, which had no checksum over its facts."""
    facts = {**json.loads((path / FACTS).read_text()), "version": 1, **changes}
    del facts["sha256"]
    (path / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    return path


def test_bad_bundles_say_what_is_wrong(copy):
    edit(copy, version=3)
    with pytest.raises(FadeError, match="format 3.*upgrade"):
        load_bundle(copy)
    edit(copy, version=2, config={"hidden": 7, "depth": 1})
    with pytest.raises(FadeError, match="does not fit"):
        load_bundle(copy)
    edit(copy, config={"hidden": "wide"})
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
    Predictor(net, spec=loaded.spec, provenance={}, metrics={}, manifest={}).save(
        tmp_path / "b"
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


def _reading_takes(path):
    """Peak of the memory that reading takes, in bytes beyond what was there, and seconds, in a process of its own."""
    code = """if True:
        import resource, sys, time, warnings
        from predictor.bundle import load_bundle
        from predictor.errors import FadeError
        warnings.simplefilter("ignore")
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        try:
            load_bundle(sys.argv[1])
        except FadeError as error:
            print(error, file=sys.stderr)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, time.perf_counter() - began)
    """
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    return *map(float, done.stdout.split()), done.stderr


@pytest.mark.parametrize("forge", [edit, as_written_before], ids=["sealed", "of before"])
@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"n_features": 9, "hidden": 40000, "depth": 2}, "a predictor at most 1,000,000"),
        ({"n_features": 9, "hidden": 10**30, "depth": 2}, "use a number up to 1,000,000"),
        ({"n_features": 9, "hidden": 8, "depth": 10**6}, "a depth of 0 to 64"),
        ({"n_features": 9, "hidden": -8, "depth": 1}, "use a number up to"),
        ({"n_features": 9, "hidden": 7, "depth": 1}, "does not fit a mlp"),
        ({"n_features": 9, "hidden": 6, "depth": 2}, "does not fit a mlp"),
        ({"n_features": 9, "hidden": 6.5, "depth": 1}, "does not take"),
        ({"n_features": 9, "hidden": None, "depth": 1}, "does not take"),
    ],
)
@pytest.mark.filterwarnings("ignore:bundle .* has format 1")
def test_a_config_is_compared_with_the_weights_first(copy, forge, config, told):
    forge(copy, config=config)
    with pytest.raises(FadeError, match=told):
        load_bundle(copy)


def test_a_config_that_asks_for_gigabytes_costs_none(copy):
    as_written_before(copy, config={"n_features": 9, "hidden": 40000, "depth": 2})
    memory, seconds, told = _reading_takes(copy)
    assert "a predictor at most" in told
    assert memory < 64e6  # 6.4 GB of weights were asked for; reading a file or two and torch's first tensors take less
    assert seconds < 20  # it took minutes; this is milliseconds, on any machine


@pytest.mark.filterwarnings("ignore:bundle .* has format 1")
@pytest.mark.parametrize("forge", [edit, as_written_before], ids=["sealed", "of before"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": ["mlp"]}, "lacks 'kind', a str"),
        ({"config": [9]}, "lacks 'config', a dict"),
        ({"provenance": None}, "lacks 'provenance', a dict"),
        ({"metrics": 1}, "lacks 'metrics', a dict"),
        ({"spec": {**FeatureSpec(window=8).to_dict(), "window": 10**12}}, "window 1000000000000; use a whole"),
        ({"spec": {**FeatureSpec(window=8).to_dict(), "ema_decay": 9.5}}, "ema_decay 9.5; use a share"),
        ({"spec": {**FeatureSpec(window=8).to_dict(), "horizon": 0}}, "horizon 0; use a whole"),
        (
            {"budgets": {"lost": [[[1, 0]]], "shares": [0, 1]}},
            "for layer 0 .1 kv heads., and its model has 2 layers .3.",
        ),
        ({"budgets": {"lost": [[[1, 0]] * 3] * 3, "shares": [0, 1]}}, "for layers 0 to 2 .3 kv heads., and its"),
        ({"budgets": {"lost": [[[1, 0]] * 3], "shares": [0, 1], "layers": [2]}}, "for layer 2 .3 kv heads., and its"),
        ({"budgets": {"lost": [[[1, 0]] * 3], "shares": [0, 1], "layers": [0, 1]}}, "table of head budgets is damaged"),
        ({"budgets": {"lost": [[[1, 0]] * 3], "shares": [0, 1], "layers": [-1]}}, "table of head budgets is damaged"),
        ({"budgets": {"lost": [[[1, 0]] * 3] * 2, "shares": [0, 1], "layers": [1, 1]}}, "head budgets is damaged"),
        ({"budgets": {"lost": [[[1, 0]] * 3] * 2, "shares": [0, 1], "layers": None}}, "head budgets is damaged"),
        ({"budgets": {"lost": [[[1, -1]] * 3] * 2, "shares": [0, 1]}}, "table of head budgets is damaged"),
        ({"budgets": {"lost": [[[1, 0]] * 3] * 2, "shares": [0, 0.9]}}, "table of head budgets is damaged"),
        ({"offsets": {"offsets": [[0, 1, 2]] * 3, "layers": [0, 1, 2]}}, "head offsets for layers 0 to 2 .3 kv heads."),
        (
            {"offsets": {"offsets": [[0, 1]], "layers": [1]}},
            "head offsets for layer 1 .2 kv heads., and its model has 2",
        ),
        ({"offsets": {"offsets": [[0, 1, 2]], "layers": [0, 1]}}, "the head offsets of .* are damaged"),
        ({"offsets": {"offsets": [[0, 1, 1e99]], "layers": [0]}}, "the head offsets of .* are damaged"),
        ({"offsets": {"offsets": [[0, 1, 2]] * 2, "layers": [1, 1]}}, "the head offsets of .* are damaged"),
        ({"offsets": [[0, 1, 2]]}, "the head offsets of .* are damaged"),
        ({"certificate": {"ladder": {"rungs": [{"int4_budget": 7, "compression": 3, "kl": [1]}]}}}, "certificate of"),
        ({"certificate": [1]}, "certificate of"),
    ],
)
def test_facts_that_cannot_be_are_named(tmp_path, forge, changes, told):
    path = write(tmp_path / "b", provenance={"model_type": "llama", "layers": 2, "kv_heads": 3})
    forge(path, **changes)
    with pytest.raises(FadeError, match=told) as error:
        load_bundle(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [WEIGHTS, FACTS])
def test_no_bit_of_a_bundle_changes_unseen(copy, whole, name):
    content, drawn = (whole / name).read_bytes(), random.Random(0)
    for _ in range(200):
        flipped = bytearray(content)
        flipped[drawn.randrange(len(flipped))] ^= 1 << drawn.randrange(8)
        (copy / name).write_bytes(flipped)
        with pytest.raises(FadeError, match="is damaged|has format"):
            load_bundle(copy)


def test_no_digit_of_the_shipped_bundle_changes_unseen(tmp_path):
    copy = Path(shutil.copytree(SHIPPED / "smollm2-135m-instruct", tmp_path / "shipped"))
    text, drawn = (copy / FACTS).read_text(), random.Random(0)
    digits = [place for place, char in enumerate(text) if char.isdigit()]
    for place in drawn.sample(digits, 50):
        other = drawn.choice([digit for digit in "0123456789" if digit != text[place]])
        (copy / FACTS).write_text(text[:place] + other + text[place + 1 :])
        with pytest.raises(FadeError, match="is damaged|has format"):
            load_bundle(copy)


def test_a_bundle_of_format_1_is_read_with_a_warning_and_saved_in_format_2(whole, copy, tmp_path):
    as_written_before(copy)
    with pytest.warns(UserWarning, match="has format 1, without a checksum over bundle.json") as told:
        old = load_bundle(copy)
    assert len(told) == 1
    new = old.save(tmp_path / "new")
    for name in (WEIGHTS, FACTS, CARD):
        assert (new / name).read_bytes() == (whole / name).read_bytes(), name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_bundle(new)


def test_a_checksum_cannot_be_dropped_by_naming_format_1(copy):
    facts = json.loads((copy / FACTS).read_text())
    (copy / FACTS).write_text(json.dumps({**facts, "version": 1}, indent=1) + "\n")
    with pytest.raises(FadeError, match="does not match its checksum"):
        load_bundle(copy)


def test_weights_from_before_block_networks_had_a_temperature(tmp_path):
    net = BlockCNN(window=8)
    write(tmp_path / "b", net)
    weights = load_file(tmp_path / "b" / WEIGHTS)
    del weights["temperature"]
    save_file(weights, tmp_path / "b" / WEIGHTS)
    as_written_before(tmp_path / "b", weights_sha256=sha256_file(tmp_path / "b" / WEIGHTS))
    with pytest.warns(UserWarning, match="format 1"):
        assert load_bundle(tmp_path / "b").net.temperature == pytest.approx(1.1)


def test_a_fingerprint_of_before_is_renewed_for_its_own_model_only(tmp_path, tiny_model):
    model = tiny_model()
    old = {**model_provenance(model), "weights": first_values_fingerprint(model), "tokenizer": "t"}
    predictor = load_bundle(write(tmp_path / "b", provenance=old))
    with pytest.raises(FadeError, match="another model"):
        predictor.save(tmp_path / "b", model=tiny_model(seed=1))
    with pytest.warns(UserWarning, match="first 256 values"):
        predictor.save(tmp_path / "b", model=model)
    assert load_bundle(tmp_path / "b").provenance == {**model_provenance(model), "tokenizer": "t"}
