"""A session that is damaged, or was made under other circumstances, is refused by name; the cache stays as it was."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fade_runtime import FadeConfig, FadeError, TieredCache, load_session
from fade_runtime.cache.session import FACTS, TENSORS
from predictor.provenance import first_values_fingerprint
from predictor.sealed import sealed
from tests.conftest import make_tiny_model
from tests.runtime.caches import make_codebook, save_bundle
from tests.runtime.compare import differences
from tests.runtime.sessions import TIGHT, filled


@pytest.fixture(scope="module")
def tiny() -> Any:
    return make_tiny_model(num_hidden_layers=1)


@pytest.fixture(scope="module")
def written(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TieredCache, dict[str, Any]]:
    """A session, another cache that is to survive, and what that cache holds."""
    path = filled(tiny).save_session(tmp_path_factory.mktemp("sessions") / "written")
    cache = filled(tiny, tokens=70)
    return path, cache, cache.cache_state_dict()


def assert_refused(path: Path, cache: TieredCache, before: dict[str, Any], match: str) -> None:
    layers = cache.layers
    with pytest.raises(FadeError, match=match):
        cache.load_session(path)
    assert cache.layers is layers
    assert differences(cache.cache_state_dict(), before) == []


def damaged_copy(path: Path, name: str, content: bytes) -> Path:
    other = path.parent / "damaged"
    other.mkdir(exist_ok=True)
    for each in (TENSORS, FACTS):
        (other / each).write_bytes(content if each == name else (path / each).read_bytes())
    return other


@pytest.mark.parametrize("name", [TENSORS, FACTS])
@given(data=st.data())
def test_a_session_cut_at_any_byte_is_refused(
    name: str, data: st.DataObject, written: tuple[Path, TieredCache, dict[str, Any]]
) -> None:
    path, *receiver = written
    content = (path / name).read_bytes()
    cut = data.draw(st.integers(0, len(content) - 1))
    assert_refused(damaged_copy(path, name, content[:cut]), *receiver, match="session .* is damaged")


@pytest.mark.parametrize("name", [TENSORS, FACTS])
@given(data=st.data())
def test_a_session_with_a_wrong_byte_is_refused(
    name: str, data: st.DataObject, written: tuple[Path, TieredCache, dict[str, Any]]
) -> None:
    path, *receiver = written
    content = bytearray((path / name).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert_refused(damaged_copy(path, name, bytes(content)), *receiver, match="session .* (is damaged|has format)")


def test_the_last_byte_and_no_byte_count_too(written: tuple[Path, TieredCache, dict[str, Any]]) -> None:
    path, *receiver = written
    for name in (TENSORS, FACTS):
        content = (path / name).read_bytes()
        for cut in (b"", content[:1], content[:-1], content + b" "):
            assert_refused(damaged_copy(path, name, cut), *receiver, match="is damaged")
    other = damaged_copy(path, FACTS, (path / FACTS).read_bytes())
    (other / TENSORS).unlink()
    assert_refused(other, *receiver, match="is damaged: session.safetensors cannot be read")
    (other / FACTS).unlink()
    assert_refused(other, *receiver, match="is not a session: it has no session.json")


def test_a_state_that_lacks_something_is_refused(tiny: Any) -> None:
    cache = filled(tiny)
    layers, whole = cache.layers, cache.cache_state_dict()
    for change in (
        lambda state: state.pop("0.packed.key_codes"),
        lambda state: state.update({"0.full.slots": state["0.full.slots"][:, 1:]}),
        lambda state: state.update({"0.full.slots": state["0.full.slots"].long()}),
        lambda state: state["facts"]["layers"][0].pop("seen"),
        lambda state: state["facts"]["layers"].pop(),
        lambda state: state.pop("facts"),
    ):
        state = copy.deepcopy(whole)
        change(state)
        with pytest.raises(FadeError, match="session is damaged"):
            cache.load_cache_state_dict(state)
        assert cache.layers is layers


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_sink": 3}, r"was made with n_sink 2, this cache has 3"),
        ({"int4_budget": 21}, r"int4_budget 20, this cache has 21"),
        ({"int4_budget": 1.0}, r"int4_budget 20, this cache has 1.0"),
        ({"low_v_bits": 4}, r"low_v_bits 2, this cache has 4"),
        ({"eviction_policy": "ema"}, r"eviction_policy 'h2o', this cache has 'ema'"),
        ({"positions": "streaming"}, r"positions 'original', this cache has 'streaming'"),
        ({"chunked_prefill": True}, r"chunked_prefill False, this cache has True"),
    ],
    ids=str,
)
def test_other_options_are_refused(
    options: dict[str, Any], match: str, tiny: Any, written: tuple[Path, TieredCache, dict[str, Any]]
) -> None:
    config = FadeConfig(**{**TIGHT, **options})
    with pytest.raises(FadeError, match=match):
        load_session(tiny, written[0], config)


def test_options_that_change_nothing_may_differ(tiny: Any, written: tuple[Path, TieredCache, dict[str, Any]]) -> None:
    assert load_session(tiny, written[0], FadeConfig(**TIGHT, strict=False, phase="2")).get_seq_length() == 60


def test_another_model_or_dtype_is_refused(written: tuple[Path, TieredCache, dict[str, Any]]) -> None:
    path, cache, _ = written
    with pytest.raises(FadeError, match=r"was made for another model: weights is"):
        load_session(make_tiny_model(num_hidden_layers=1, seed=1), path, cache.config)
    with pytest.raises(FadeError, match=r"was made for another model: layers is 1 there and 2 here"):
        load_session(make_tiny_model(), path)
    with pytest.raises(FadeError, match=r"in torch.float32, this one is in torch.bfloat16"):
        load_session(make_tiny_model(num_hidden_layers=1).to(torch.bfloat16), path)


def test_a_model_that_shares_the_first_values_is_another(tmp_path: Path) -> None:
    model, other = make_tiny_model(), make_tiny_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.view(-1)[256:] *= 1.5
    path = filled(model).save_session(tmp_path / "s")
    with pytest.raises(FadeError, match=r"was made for another model: weights is all:"):
        load_session(other, path)


def test_a_session_with_a_fingerprint_of_before_goes_on(tmp_path: Path) -> None:
    model = make_tiny_model()
    path = filled(model).save_session(tmp_path / "s")
    facts = json.loads((path / FACTS).read_text())
    facts["model"]["weights"] = first_values_fingerprint(model)
    (path / FACTS).write_text(sealed(facts))
    with pytest.warns(UserWarning, match="session .* knows its model by the first 256 values"):
        assert load_session(model, path).get_seq_length() == 60
    with pytest.raises(FadeError, match=r"was made for another model: weights"):
        load_session(make_tiny_model(seed=1), path)


def test_another_codebook_or_predictor_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model()
    ours, theirs = make_codebook(model), make_codebook(model, seed=1)
    path = filled(model, low_tier="pq", codebook=ours).save_session(tmp_path / "s")
    assert load_session(model, path, FadeConfig(**TIGHT, low_tier="pq", codebook=ours)).get_seq_length() == 60
    with pytest.raises(FadeError, match=r"made with another codebook .*give the same one"):
        load_session(model, path, FadeConfig(**TIGHT, low_tier="pq", codebook=theirs))
    assert load_session(model, path, codebook=ours).get_seq_length() == 60
    with pytest.raises(FadeError, match=r"made with another codebook .*give the same one"):
        load_session(model, path, codebook=theirs)

    bundles = [save_bundle(tmp_path / str(seed), model) for seed in (1, 2)]
    facts = json.loads((bundles[1] / "bundle.json").read_text())
    facts["spec"]["horizon"] = 16
    (bundles[1] / "bundle.json").write_text(sealed(facts))
    path = filled(model, eviction_policy="learned", predictor=bundles[0]).save_session(tmp_path / "s")
    with pytest.raises(FadeError, match=r"made with another predictor"):
        load_session(model, path, FadeConfig(**TIGHT, eviction_policy="learned", predictor=bundles[1]))


PLACED = {
    "spill_dir": dict(spill="disk", guard="warn"),
    "predictor": dict(eviction_policy="learned"),
    "codebook": dict(low_tier="pq"),
    "tokenizer": dict(eviction_policy="fastgen"),
    "assistant": {},
}


@pytest.mark.parametrize("name", PLACED)
def test_a_session_does_not_choose_what_is_read_or_written(name: str, tiny: Any, tmp_path: Path) -> None:
    """Whoever wrote it; it is asked for by name, and nothing was touched."""
    path, there = filled(tiny).save_session(tmp_path / "s"), tmp_path / "there"
    facts = json.loads((path / FACTS).read_text())
    facts["options"] |= PLACED[name]
    if name in facts["options"]:
        facts["options"][name] = str(there)
    else:
        facts[name] = {"name": str(there), "sha256": "0" * 64}
    (path / FACTS).write_text(sealed(facts))
    asked = rf"made with {name} '{there}', and .* load_session\(model, path, {name}=\.\.\.\)"
    with pytest.raises(FadeError, match=asked):
        load_session(tiny, path)
    assert not there.exists()


def test_the_caller_chooses_where_a_session_spills(tiny: Any, tmp_path: Path) -> None:
    cache = filled(tiny, guard="warn", spill="disk", spill_dir=tmp_path / "its")
    path = cache.save_session(tmp_path / "s")
    (folder,) = (tmp_path / "its").iterdir()
    loaded = load_session(tiny, path, spill_dir=tmp_path / "mine")
    assert loaded.monitor.report()["spilled"]["tokens"] == cache.monitor.report()["spilled"]["tokens"] > 0
    assert len(list((tmp_path / "mine").glob("*/*.safetensors"))) == 1
    assert list((tmp_path / "its").iterdir()) == [folder]
    given = cache.config.with_options(spill_dir=tmp_path / "other")
    assert load_session(tiny, path, given, spill_dir=tmp_path / "mine").config.spill_dir == tmp_path / "mine"
    with pytest.raises(FadeError, match="unknown option spill_folder"):
        load_session(tiny, path, spill_dir=tmp_path, spill_folder=tmp_path)


@pytest.mark.parametrize("options", [[], None, {"ema_decay": "x"}, {"n_sink": {}}, {"colour": "red"}], ids=str)
def test_options_that_are_none_are_refused_by_name(options: Any, tiny: Any, tmp_path: Path) -> None:
    path = filled(tiny).save_session(tmp_path / "s")
    facts = json.loads((path / FACTS).read_text())
    facts["options"] = {**facts["options"], **options} if isinstance(options, dict) else options
    (path / FACTS).write_text(sealed(facts))
    with pytest.raises(FadeError, match=r"session .*s (cannot be set up as it was: |is damaged: )"):
        load_session(tiny, path)


def test_another_format_is_named(written: tuple[Path, TieredCache, dict[str, Any]]) -> None:
    path, *receiver = written
    for version, remedy in ((99, "upgrade fade-predictor"), (2, "use the release that wrote it")):
        facts = {**json.loads((path / FACTS).read_text()), "version": version}
        other = damaged_copy(path, FACTS, json.dumps(facts).encode())
        assert_refused(other, *receiver, match=f"has format {version}, this release reads 3 to 5; {remedy}")
