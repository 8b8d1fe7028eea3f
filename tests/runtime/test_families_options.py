"""Chunked prompts, sessions and streaming positions in every family of language models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fade_runtime import FadeConfig, TieredCache, create_tiered_cache
from tests.families import FAMILIES
from tests.runtime.caches import forward, random_ids

LOSSY: dict[str, Any] = dict(n_sink=2, recent_window=8, int4_budget=12, low_budget=8, reassign_every=8)
every_family = pytest.mark.parametrize("family", FAMILIES)


def make(model: Any, **options: Any) -> TieredCache:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no full-attention layer", RuntimeWarning)
        return create_tiered_cache(model, FadeConfig(**options))


@every_family
@torch.no_grad()
def test_a_prompt_in_chunks_is_one_prompt(family: str) -> None:
    model, ids = FAMILIES[family](), random_ids(2, 75)
    whole, chunks = (make(model, **LOSSY, chunked_prefill=True) for _ in range(2))
    forward(model, ids[:, :63], whole)
    for at in (slice(0, 31), slice(31, 40), slice(40, 63)):
        forward(model, ids[:, at], chunks)
    for at in range(63, 75):
        ours, theirs = (forward(model, ids[:, at : at + 1], cache) for cache in (chunks, whole))
        # a scale that float16 rounds the other way moves a value by its codes times 2^-12
        near = 2e-4 if any(layer.is_sliding for layer in whole.own) else 2e-5
        torch.testing.assert_close(ours, theirs, atol=near * float(theirs.abs().max()), rtol=1e-4)
    assert chunks.memory_report()["tokens"] == whole.memory_report()["tokens"]


@pytest.mark.slow
@every_family
@torch.no_grad()
def test_a_session_goes_on_exactly(family: str) -> None:
    model, ids = FAMILIES[family](), random_ids(2, 80)
    cache = make(model, **LOSSY)
    forward(model, ids[:, :50], cache)
    for at in range(50, 60):
        forward(model, ids[:, at : at + 1], cache)
    other = make(model, **LOSSY)
    other.load_cache_state_dict(cache.cache_state_dict())
    for at in range(60, 80):
        assert torch.equal(*(forward(model, ids[:, at : at + 1], each) for each in (cache, other)))


@pytest.mark.slow
@every_family
@torch.no_grad()
def test_streaming_positions_are_those_of_the_text_until_something_leaves(family: str) -> None:
    """Keys are quantised before rotation instead of after: no further from the full cache, and no error of position."""
    model, ids = FAMILIES[family](), random_ids(2, 90)
    kept = dict(LOSSY, int4_budget=None, low_budget=0, middle_k_bits=8, middle_v_bits=8)
    full = make(model, recent_window=500)
    caches = [make(model, **kept, positions=positions) for positions in ("original", "streaming")]
    lossy = make(model, **LOSSY, positions="streaming")
    off = [0.0, 0.0]
    for at in [slice(0, 60), *(slice(i, i + 1) for i in range(60, 90))]:
        right = forward(model, ids[:, at], full)
        for number, cache in enumerate(caches):
            off[number] += float((forward(model, ids[:, at], cache) - right).norm() / right.norm()) / 31
        assert bool(forward(model, ids[:, at], lossy).isfinite().all())
    original, streaming = off
    assert streaming < 2 * original + 1e-4
    assert streaming < 0.05
