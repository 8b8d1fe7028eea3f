"""The size of the whole cache as the target: what full-attention layers keep is solved from it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from fade_runtime import FadeConfig, FadeError, TieredCache, create_tiered_cache, load_session
from fade_runtime.cache.accounting import full_cache_bytes
from fade_runtime.config.memory_target import fitting_share
from fade_runtime.transformers_api import forward_kwargs
from tests.families import FAMILIES

SMALL: dict[str, Any] = dict(n_sink=2, recent_window=6, reassign_every=8, page_tokens=8, eviction_policy="position")
MODELS = ["llama", "gemma2", "gemma3", "gemma4", "gemma4_shared", "gpt_oss", "mimo_v2_flash", "qwen3_next", "lfm2"]


def fed(model: Any, cache: Any, length: int, rows: int = 1) -> Any:
    ids = torch.randint(1, 200, (rows, length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model(ids, **forward_kwargs(cache, model))
    return cache


def made(model: Any, length: int, **options: Any) -> TieredCache:
    return fed(model, create_tiered_cache(model, FadeConfig(**{**SMALL, **options})), length)


def others_alone(model: Any, length: int) -> float:
    """How much smaller the cache could be if full-attention layers kept nothing but sinks and window."""
    layers = made(model, length, int4_budget=2).memory_report(as_16_bit=True)
    return float(layers["compression"])


@given(
    st.floats(1, 500), st.integers(1, 10**6), st.floats(1, 1e9), st.floats(0, 1e6), st.floats(0.001, 1)
)  # fmt: skip
def test_the_share_fills_the_target_or_is_the_least(
    held: float, tokens: int, target: float, fixed: float, least: float
) -> None:
    share = fitting_share(held, tokens, target, fixed=fixed, least=least)
    needed = fixed + share * held * tokens
    assert least <= share <= 1
    assert needed == pytest.approx(target) or (needed > target and share == least) or (needed < target and share == 1)


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_cache_is_as_small_as_asked(name: str) -> None:
    """With 300 tokens in windows of 24, recurrent states and layers that share: bytes of all that is reachable."""
    model = FAMILIES[name]()
    ratio = 1 + 0.6 * (others_alone(model, 300) - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        cache = made(model, 300, target_compression=ratio, min_budget=0.001)
        known = name in ("llama", "gemma2", "gemma3", "gemma4", "gpt_oss")  # else what the first layers hold differs
        assert cache.memory_report(as_16_bit=True)["compression"] == pytest.approx(ratio, rel=0.04 if known else 0.25)
        fed(model, cache, 150)
    report = cache.memory_report(as_16_bit=True)
    full = fed(model, fed(model, DynamicCache(config=model.config.get_text_config(decoder=True)), 300), 150)
    assert report["full_bytes"] == full_cache_bytes(full.layers)
    assert 0.97 * ratio < report["compression"] < 1.1 * ratio  # pages of a few tokens weigh more than full ones
    assert report["layers"]["whole"]["compression"] == report["compression"]
    assert report["reachable"] is None
    assert 0 < report["tokens"]["HIGH"]
    assert 0 < report["tokens"]["EVICTED"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma3", "2 of 4 layers hold a window"),
        ("qwen3_next", "hold a recurrent state"),
        ("llama", "8 tokens stay exact"),
    ],
)
def test_what_cannot_be_reached_is_said_once_with_the_reason(name: str, why: str) -> None:
    model = FAMILIES[name]()
    with pytest.warns(RuntimeWarning, match=f"target_compression 30: reachable .*x at 120 tokens: .*{why}"):
        cache = made(model, 120, target_compression=30.0, min_budget=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fed(model, cache, 20)
    report = cache.memory_report(as_16_bit=True)
    assert report["reachable"] is not None
    assert report["reachable"] < 30


def test_no_less_than_min_budget_is_kept() -> None:
    model = FAMILIES["llama"]()
    with pytest.warns(RuntimeWarning, match="reachable"):
        cache = made(model, 200, target_compression=50.0, min_budget=0.25)
    kept = cache.memory_report()["tokens"]
    rows = kept["HIGH"] + kept["FULL"] + kept["EVICTED"]
    assert kept["HIGH"] == pytest.approx(0.25 * rows, rel=0.03)


def test_a_model_in_float32_keeps_what_it_keeps_in_bfloat16() -> None:
    model = FAMILIES["gemma3"]()
    tokens = [
        made(each, 300, target_compression=2.5, min_budget=0.01).memory_report(as_16_bit=True)
        for each in (model, copy.deepcopy(model).bfloat16())
    ]
    assert tokens[0]["tokens"] == tokens[1]["tokens"]
    assert tokens[0]["resident_bytes"] == pytest.approx(tokens[1]["resident_bytes"], rel=0.01)


def test_a_longer_text_may_keep_more_of_it_and_sessions_go_on(tmp_path: Any) -> None:
    model = FAMILIES["gemma3"]()
    cache = made(model, 200, target_compression=2.5, min_budget=0.01)
    assert cache.memory is not None
    cache.save_session(tmp_path / "session")
    for each in (cache, copy.deepcopy(cache), load_session(model, tmp_path / "session")):
        fed(model, each, 100)
        assert each.memory is not None
        assert each.memory_report(as_16_bit=True)["compression"] == pytest.approx(2.5, rel=0.05)
        assert each.memory.planned == cache.memory.planned


def test_presets_are_sizes_of_the_whole_cache_and_another_size_takes_their_place() -> None:
    assert (FadeConfig.balanced().target_compression, FadeConfig.aggressive().target_compression) == (6.0, 10.0)
    for name, value in (("int4_budget", 0.2), ("memory", "1MiB")):
        config = FadeConfig.balanced(**{name: value})
        assert (config.target_compression, getattr(config, name)) == (None, value)
    assert FadeConfig.balanced(target_compression=3.0).min_budget == FadeConfig().min_budget


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_compression": 1.0}, "target_compression 1.0 is no number above 1; give 6.0"),
        ({"target_compression": "six"}, "target_compression 'six' is no number"),
        ({"target_compression": True}, "target_compression True is no number"),
        ({"target_compression": 6.0, "int4_budget": 0.3}, "target_compression sets the budget itself"),
        ({"target_compression": 6.0, "memory": "1MiB"}, "target_compression sets the budget itself"),
        ({"target_compression": 6.0, "low_budget": 0.1}, "target_compression sets the budget itself"),
        ({"min_budget": 0.0}, "min_budget 0.0 is not a share"),
        ({"target_compression": 6.0, "phase": "1a"}, "phase '1a' evicts nothing"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FadeError, match=words):
        FadeConfig(**options)
