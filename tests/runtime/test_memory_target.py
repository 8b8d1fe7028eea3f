"""Bytes as the target: the cache stays below them while it may, rises in steps, and obeys a guard's bound."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fade_runtime import FadeConfig, FadeError, create_tiered_cache, load_session
from fade_runtime.config import memory_target as controller
from fade_runtime.config.memory_target import LEAST, MOST, STEPS, LayerSize, budget_share, free_bytes, target_bytes
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import slow

SMALL: dict[str, Any] = dict(n_sink=2, recent_window=8, reassign_every=8)
WIDTH = 2 * 2 * 2 * 16 * 4  # bytes of a token in full: layers, kv heads, key and value, head dim, float32


def _grow(model: Any, cache: Any, prompt: int, tokens: int, every: Callable[[], None] = lambda: None) -> None:
    ids = torch.randint(0, 250, (1, tokens), generator=torch.Generator().manual_seed(0))
    model(ids[:, :prompt], **forward_kwargs(cache, model))
    for step in range(prompt, tokens):
        every()
        model(ids[:, step : step + 1], **forward_kwargs(cache, model))
    every()


@given(
    st.floats(1, 500), st.integers(1, 10**6), st.floats(1, 1e9), st.floats(64, 512), st.floats(0, 1e6), st.floats(1, 40)
)
def test_the_least_step_that_fits_and_never_above_the_limit(
    held: float, tokens: int, target: float, width: float, fixed: float, limit: float
) -> None:
    share, step = budget_share(held, tokens, target, width=width, fixed=fixed, limit=limit)
    needed = lambda step: fixed + tokens * held * min(1.0, width / step / held)
    assert share == pytest.approx(min(1.0, width / step / held))
    assert step <= min(limit, MOST)
    assert step in (*STEPS, limit)
    if step < min(limit, MOST):
        assert needed(step) <= target * (1 + 1e-9)
    assert all(needed(lower) > target * (1 - 1e-9) for lower in STEPS if lower < step)
    assert (STEPS[0], STEPS[-1]) == (LEAST, MOST)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["position", *slow("h2o")])
def test_it_stays_below_the_target_and_rises_in_steps(model: Any, policy: str) -> None:
    """From 4x to 9x on a text that grows; at each moment the bytes are those of the memory report."""
    target = WIDTH * 700 // 9
    cache = create_tiered_cache(model, FadeConfig(memory=target, eviction_policy=policy, **SMALL))
    found, seen = [], []

    def look() -> None:
        assert cache.memory is not None
        seen.append(cache.memory_report()["resident_bytes"])
        found.append(cache.memory.compression)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _grow(model, cache, 100, 700, look)
    assert max(seen) <= 1.05 * target  # pages are filled in steps of 64
    assert max(seen[-60:]) > 0.7 * target  # and it makes use of it
    assert found == sorted(found)
    assert {found[0], found[-1]} <= set(STEPS)
    assert len(set(found)) >= 4


def test_with_room_to_spare_it_is_four_times_smaller(model: Any) -> None:
    cache = create_tiered_cache(model, FadeConfig(memory="1GiB", **SMALL))
    _grow(model, cache, 400, 420)
    assert cache.memory is not None
    assert cache.memory.compression == 4
    assert 3.9 < cache.memory_report()["compression"] < 4.8


def test_a_target_that_is_too_small_is_told_once_and_16x_is_kept(model: Any) -> None:
    cache = create_tiered_cache(model, FadeConfig(memory=2000, **SMALL))
    with pytest.warns(RuntimeWarning, match="at 16x, the most that is allowed, and memory is 0.00191 MiB") as told:
        _grow(model, cache, 600, 640)
    assert len([one for one in told if "allowed" in str(one.message)]) == 1
    assert cache.memory is not None
    assert cache.memory.compression == 16


def test_a_guard_bounds_the_compression(model: Any) -> None:
    target = WIDTH * 400 // 12
    config = FadeConfig(memory=target, **SMALL)
    free, bound = create_tiered_cache(model, config), create_tiered_cache(model, config)
    assert bound.memory is not None
    assert free.memory is not None
    bound.memory.limit(6.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for cache in (free, bound):
            _grow(model, cache, 300, 400)
    assert bound.memory.compression == 6
    assert free.memory.compression > 8
    assert bound.memory_report()["resident_bytes"] > 1.3 * free.memory_report()["resident_bytes"]
    bound.memory.limit(None)
    _grow(model, bound, 8, 16)
    assert bound.memory.compression > 8
    bound.memory.limit(1.0)  # a full cache: from now on nothing is evicted
    evicted = bound.memory_report()["tokens"]["EVICTED"]
    _grow(model, bound, 20, 40)
    assert bound.memory_report()["tokens"]["EVICTED"] == evicted
    with pytest.raises(FadeError, match="compression 0.5 is less than 1"):
        bound.memory.limit(0.5)


def test_copies_resets_and_sessions_plan_for_themselves(model: Any, tmp_path: Any) -> None:
    config = FadeConfig(memory=WIDTH * 40, **SMALL)
    cache = create_tiered_cache(model, config)
    _grow(model, cache, 200, 240)
    copied = copy.deepcopy(cache)
    assert copied.memory is not cache.memory
    assert {id(layer.memory) for layer in copied.tiered} == {id(copied.memory)}
    cache.save_session(tmp_path / "session")
    loaded = load_session(model, tmp_path / "session")
    for each in (copied, loaded):
        _grow(model, each, 20, 100)
    _grow(model, cache, 20, 100)
    reports = [each.memory_report() for each in (cache, copied, loaded)]
    assert reports[0] == reports[1]
    assert reports[0]["resident_bytes"] == pytest.approx(reports[2]["resident_bytes"], rel=0.05)
    cache.reset()
    _grow(model, cache, 60, 80)
    assert cache.memory is not None
    assert cache.memory.compression == 4


def test_a_share_is_of_what_is_free_when_the_cache_is_made(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_bytes(torch.device("cpu")) > 2**20
    monkeypatch.setattr(controller, "free_bytes", lambda device: 10**6)
    assert target_bytes(0.25, torch.device("cpu")) == 250_000
    cache = create_tiered_cache(model, FadeConfig(memory=0.5, **SMALL))
    assert cache.memory is not None
    assert cache.memory.target == 500_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "lots"}, "memory 'lots' is no size"),
        ({"memory": "1.2.3MB"}, "is no size"),
        ({"memory": 0}, "memory 0 is neither a number of bytes"),
        ({"memory": 1.5}, "memory 1.5 is neither"),
        ({"memory": True}, "memory True is neither"),
        ({"memory": "1MB", "int4_budget": 0.5}, "memory sets the budget itself"),
        ({"memory": "1MB", "phase": "1b"}, "evicts nothing"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FadeError, match=words):
        FadeConfig(**options)


def test_a_device_that_cannot_be_asked_is_named() -> None:
    with pytest.raises(FadeError, match="free memory of meta cannot be asked for here"):
        target_bytes(0.5, torch.device("meta"))


def test_what_the_guard_has_raised_is_kept_whatever_the_target(model: Any) -> None:
    calm: dict[str, Any] = dict(guard="rollback", spill="host", monitor_every=1000, kl_target=100.0, kl_alarm=200.0)
    cache = create_tiered_cache(model, FadeConfig(memory=WIDTH * 30, **calm, **SMALL))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        _grow(model, cache, 200, 216)
        evicted = cache.memory_report()["tokens"]["EVICTED"]
        assert evicted > 0
        for layer in cache.tiered:
            assert layer.hooks is not None
            layer.hooks.raised = [True] * 2
        before = {layer.index: layer.tokens.evicted for layer in cache.tiered}
        _grow(model, cache, 4, 60)
        assert {layer.index: layer.tokens.evicted for layer in cache.tiered} == before
        for layer in cache.tiered:
            assert layer.hooks is not None
            layer.hooks.raised = [False] * 2
        _grow(model, cache, 4, 60)
    assert all(layer.tokens.evicted > before[layer.index] for layer in cache.tiered)


def test_the_budget_of_a_batch_is_a_share_of_what_lies_between_sinks_and_window() -> None:
    """By hand: 2 layers of 3 kv heads, rows of 100 and 40 tokens, 10 of each exact and 5 that wait."""
    size = LayerSize(heads=3, width=3 * 64, packed=3 * 32)
    fixed = 6 * 64 * 15 * 2 + 77
    for target, step in ((10**6, 4.0), (fixed + 6 * 120 * 64 // 8, 8.0)):
        made = controller.MemoryController(target, None, extra=77, exact=10, every=5, sizes=lambda: [size, size])
        share = made.share(torch.tensor([100, 40]))
        assert made.compression == step
        assert share * 140 == pytest.approx(min(1.0, 64 / step / 32) * (90 + 30))
    made.note(0, tokens=10, size=200)  # tokens turn out to be smaller than thought
    made.planned = None
    assert made.share(torch.tensor([100, 40])) * 140 == pytest.approx(min(1.0, 64 / 8 / 20) * 120)


def test_bytes_of_layers_that_do_not_evict_are_part_of_the_target() -> None:
    """By hand: a window of 21 tokens and a state of 1,000 bytes leave that much less."""
    full, window = LayerSize(2, 2 * 64, 2 * 32), LayerSize(2, 2 * 64, 2 * 32, window=21)
    state, kept = LayerSize(state=1000), 2 * 64 * 15 + 2 * 32 * (21 - 10)
    assert window.kept(100, exact=10, waiting=5) == kept
    alone = controller.MemoryController(8000, None, 0, exact=10, every=5, sizes=lambda: [full])
    beside = controller.MemoryController(9000 + kept, None, 0, 10, 5, sizes=lambda: [window, state, full])
    assert alone.share(torch.tensor([100])) == beside.share(torch.tensor([100])) < 0.9
