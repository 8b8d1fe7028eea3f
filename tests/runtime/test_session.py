"""A session goes on in another process as if nothing had happened, or is refused by name."""

import copy
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fade_runtime import FadeConfig, FadeError, create_tiered_cache, load_session, save_session
from fade_runtime.cache.session import FACTS, TENSORS
from fade_runtime.layer.layer import RunningCall
from fade_runtime.transformers_api import forward_kwargs
from predictor.budgets import HeadBudgets
from tests.conftest import make_tiny_model
from tests.families import FAMILIES
from tests.processes import run_python
from tests.runtime.caches import make_codebook, reachable_bytes, save_bundle
from tests.runtime.sessions import AFTER, BEFORE, PROMPT, TIGHT, feed, filled, ids_and_mask

from .compare import differences

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}

CASES: dict[str, dict[str, Any]] = {
    "nothing compressed": dict(recent_window=500),
    "int4": dict(recent_window=8),
    "share of the context": dict(TIGHT, int4_budget=0.2, low_budget=0.1),
    "position": dict(TIGHT, eviction_policy="position"),
    "h2o": TIGHT,
    "ema": dict(TIGHT, eviction_policy="ema", middle_k_bits=8, middle_v_bits=8),
    "adaptive": dict(TIGHT, eviction_policy="adaptive"),
    "learned": dict(TIGHT, eviction_policy="learned"),
    "streaming": dict(TIGHT, positions="streaming"),
    "pq": dict(TIGHT, low_tier="pq"),
    "pq streaming": dict(TIGHT, low_tier="pq", positions="streaming", eviction_policy="position"),
    "in the middle of a prompt": dict(TIGHT, chunked_prefill=True),
    "before the first single token": dict(TIGHT, chunked_prefill=True, eviction_policy="ema"),
    "small pages": dict(TIGHT, page_tokens=9),
    "guard": dict(TIGHT, guard="rollback", spill="host", monitor_every=4),
    "prefetch": dict(TIGHT, guard="warn", spill="host", monitor_every=1, prefetch=True, kl_alarm=1e9),
    "bf16": TIGHT,
    "dynamic rope": dict(TIGHT, positions="streaming"),
    "gemma3": TIGHT,
    "gemma4_shared": TIGHT,
    "qwen3_next": TIGHT,
    "qwen3_5": TIGHT,
    "lfm2": TIGHT,
}


def make_model(case: str) -> Any:
    if case in FAMILIES:
        return FAMILIES[case]()
    if case == "dynamic rope":
        return make_tiny_model(max_position_embeddings=64, rope_parameters=DYNAMIC)
    return make_tiny_model().to(torch.bfloat16 if case == "bf16" else torch.float32)


def play(model: Any, cache: Any, case: str) -> int:
    """Feed what comes before the session; returns the tokens fed."""
    if CASES[case].get("chunked_prefill"):
        fed = PROMPT if case.startswith("before") else 50
        feed(model, cache, 0, fed, step=25)
        return fed
    feed(model, cache, 0, PROMPT, step=PROMPT)
    feed(model, cache, PROMPT, PROMPT + BEFORE)
    return PROMPT + BEFORE


def play_on(model: Any, cache: Any, fed: int) -> Tensor:
    """Logits of what comes after it."""
    parts = [feed(model, cache, fed, PROMPT, step=25)] if fed < PROMPT else []
    return torch.cat([*parts, feed(model, cache, max(fed, PROMPT), PROMPT + BEFORE + AFTER)], dim=1)


def resume_all(folder: str, cases: list[str]) -> None:
    """What the other process does."""
    for case in cases:
        model = make_model(case)
        cache = load_session(model, Path(folder, case), **places(case, Path(folder)))
        assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)
        save_file({"logits": play_on(model, cache, cache.get_seq_length())}, Path(folder, f"{case}.logits"))


def places(case: str, folder: Path) -> dict[str, Path]:
    """What a session does not say by itself."""
    known = {"learned": ("predictor", "bundle"), "pq": ("codebook", "codebook")}
    used = {CASES[case].get("eviction_policy"), CASES[case].get("low_tier")} & set(known)
    return {option: folder / name for option, name in map(known.__getitem__, used)}


def make_config(case: str, model: Any, folder: Path) -> FadeConfig:
    options = dict(CASES[case])
    if options.get("eviction_policy") == "learned":
        lost = torch.tensor([[[1.0, 0.2, 0.0], [0.5, 0.1, 0.0]], [[0.1, 0.05, 0.0], [1.0, 0.9, 0.0]]])
        budgets = HeadBudgets(lost, fractions=(0.0, 0.5, 1.0))
        options["predictor"] = str(save_bundle(folder, model, budgets=budgets))
    if options.get("low_tier") == "pq":
        options["codebook"] = make_codebook(model).save(folder / "codebook")
    return FadeConfig(**options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture(scope="module")
def resumed(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each case, logits with and without a session in between."""
    expected, skipped = {}, []
    for case in CASES:
        try:
            model = make_model(case)
        except pytest.skip.Exception:
            skipped.append(case)
            continue
        cache = create_tiered_cache(model, make_config(case, model, folder))
        fed = play(model, cache, case)
        save_session(cache, folder / case)
        expected[case] = play_on(model, cache, fed)
    code = (  # as many threads as here: sums in another order round differently
        f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
        f"from tests.runtime.test_session import resume_all; resume_all({str(folder)!r}, {list(expected)!r})"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    got = {case: load_file(folder / f"{case}.logits")["logits"] for case in expected}
    return {case: (got[case], logits) for case, logits in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_another_process_goes_on_with_exactly_the_same_logits(
    case: str, resumed: dict[str, tuple[Tensor, Tensor]]
) -> None:
    if case not in resumed:
        pytest.skip(f"this transformers has no {case}")
    got, expected = resumed[case]
    assert bool(expected.isfinite().all())
    assert torch.equal(got, expected)


@pytest.mark.parametrize("case", ["learned", "pq streaming", "in the middle of a prompt", "qwen3_next", "gemma3"])
def test_every_attribute_comes_back(case: str, tmp_path: Path) -> None:
    """So that a new attribute of a layer cannot be forgotten."""
    model = make_model(case)
    config = make_config(case, model, tmp_path)
    cache, other = create_tiered_cache(model, config), create_tiered_cache(model, config)
    play(model, cache, case)
    feed(model, other, 0, 33, step=33)  # it is used when the session comes
    assert differences(cache.layers, other.layers) != []
    other.load_cache_state_dict(cache.cache_state_dict())
    for layer in (*cache.own, *other.own):
        layer.running = RunningCall()
    assert differences(cache.layers, other.layers) == []
    assert other.memory_report()["resident_bytes"] == reachable_bytes(other)
    assert other.memory_report()["tokens"] == cache.memory_report()["tokens"]


@pytest.fixture(scope="module")
def tiny() -> Any:
    return make_tiny_model(num_hidden_layers=1)


def test_a_state_is_a_copy_and_plain(tiny: Any) -> None:
    cache = filled(tiny)
    state = cache.cache_state_dict()
    kept = copy.deepcopy(state)
    feed(tiny, cache, 60, 80)
    facts, known = state.pop("facts"), kept.pop("facts")
    assert json.loads(json.dumps(facts)) == known
    assert all(isinstance(t, Tensor) and torch.equal(t, kept[name]) for name, t in state.items())
    assert {name for name in state if "full" in name} == {f"0.full.{n}" for n in ("key", "value", "slots", "state")}


def test_an_empty_cache_is_a_session_too(tiny: Any, tmp_path: Path) -> None:
    used = filled(tiny)
    used.load_session(create_tiered_cache(tiny, used.config).save_session(tmp_path / "empty"))
    assert used.get_seq_length() == 0
    assert torch.equal(
        feed(tiny, used, 0, 60, step=60), feed(tiny, create_tiered_cache(tiny, used.config), 0, 60, step=60)
    )


def test_a_session_replaces_a_session_and_nothing_else(tiny: Any, tmp_path: Path) -> None:
    cache = filled(tiny)
    path = cache.save_session(tmp_path / "s")
    feed(tiny, cache, 60, 70)
    cache.save_session(path)
    assert load_session(tiny, path).get_seq_length() == 70
    assert sorted(each.name for each in path.iterdir()) == sorted((TENSORS, FACTS))
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to.txt").write_text("dear")
    with pytest.raises(FadeError, match=r"letters is there already and is not a session"):
        cache.save_session(tmp_path / "letters")
    with pytest.raises(FadeError, match=r"cannot be written"):
        cache.save_session(tmp_path / "letters" / "to.txt" / "s")
    assert (tmp_path / "letters" / "to.txt").read_text() == "dear"


def test_a_cache_does_not_keep_its_model_alive() -> None:
    model = make_tiny_model(num_hidden_layers=1)
    cache, gone = filled(model), weakref.ref(model)
    state = cache.cache_state_dict()
    del model
    gc.collect()
    assert gone() is None
    for call in (cache.cache_state_dict, lambda: cache.load_cache_state_dict(state)):
        with pytest.raises(FadeError, match="model is gone"):
            call()


def test_a_cache_outlives_none_of_its_references(tiny: Any, tmp_path: Path) -> None:
    cache = load_session(tiny, filled(tiny).save_session(tmp_path / "s"))
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_a_layer_of_another_transformers_is_named(tmp_path: Path) -> None:
    model = FAMILIES["gemma3"]()
    cache = create_tiered_cache(model, FadeConfig(**TIGHT, sliding="exact"))
    feed(model, cache, 0, 60, step=60)
    state = cache.cache_state_dict()
    attributes = state["facts"]["layers"][1]["attributes"]["dict"]
    attributes[:] = [item for item in attributes if item[0] != "record_past"]
    with pytest.raises(FadeError, match=r"has no 'record_past' for layer 1, a DynamicSlidingWindowLayer"):
        cache.load_cache_state_dict(state)
    cache.layers[1].thing = object()
    with pytest.raises(FadeError, match=r"layer 1.thing holds a object, which a session cannot store"):
        cache.save_session(tmp_path / "s")


def test_generation_goes_on(tmp_path: Path, tiny: Any) -> None:
    """Several turns of plain ``generate`` with a session between them."""
    ids = ids_and_mask()[0][:1, :60]
    whole = create_tiered_cache(tiny, FadeConfig(**TIGHT))
    options = dict(max_new_tokens=20, do_sample=False)
    first = tiny.generate(ids, **forward_kwargs(whole, tiny), **options)
    parted = load_session(tiny, save_session(whole, tmp_path / "s"))
    turn = torch.cat((first, ids[:, :9]), dim=1)
    expected = tiny.generate(turn, **forward_kwargs(whole, tiny), **options)
    assert torch.equal(tiny.generate(turn, **forward_kwargs(parted, tiny), **options), expected)
