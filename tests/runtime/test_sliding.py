"""Sliding-window layers in 4 bits: the window is the model's, what has left it is gone, the rest is as in any layer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from fade_runtime import FadeConfig, TieredCache, create_tiered_cache, load_session, save_session
from fade_runtime.kernels.reference import Part, decoded
from fade_runtime.layer.attention import AttentionCall, FullTokens, tiered_attention
from fade_runtime.storage.packed import Bits, pack_tokens
from fade_runtime.transformers_api import forward_kwargs
from tests.families import FAMILIES

WINDOW = 24  # of the families' models
FINE: dict[str, Any] = dict(n_sink=2, recent_window=6, reassign_every=4, middle_k_bits=8, middle_v_bits=8)
FOUR: dict[str, Any] = dict(n_sink=2, recent_window=6, reassign_every=4)
SLIDING = ["gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_shared", "cohere2", "mistral_sliding", "gpt_oss"]


def made(model: Any, **options: Any) -> TieredCache:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.filterwarnings("ignore", ".*no full-attention layer", RuntimeWarning)
        return create_tiered_cache(model, FadeConfig(**options))


@torch.no_grad()
def fed(model: Any, cache: Any, ids: Tensor, steps: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits [B, Q, V] of all tokens that were fed in calls of so many."""
    out, at = [], 0
    for count in steps:
        masked = {} if mask is None else {"attention_mask": mask[:, : at + count]}
        out.append(model(ids[:, at : at + count], **masked, **forward_kwargs(cache, model)).logits)
        at += count
    return torch.cat(out, dim=1)


def text(rows: int, length: int) -> Tensor:
    return torch.randint(1, 200, (rows, length), generator=torch.Generator().manual_seed(5))


def kl(full: Tensor, ours: Tensor) -> float:
    """Mean over tokens."""
    p, q = full.double().log_softmax(-1), ours.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps", [[70, *[1] * 60], [9, *[1] * 80], [50, 13, 2, 30, *[1] * 20]], ids=["decode", "grow", "chunks"]
)
@pytest.mark.parametrize("family", SLIDING)
def test_logits_are_those_of_the_full_cache_but_for_8_bits(family: str, steps: list[int]) -> None:
    """Against windows that transformers keeps exact, beside full layers in the same 8 bits."""
    model, ids = FAMILIES[family](), text(2, sum(steps))
    full = fed(model, DynamicCache(config=model.config.get_text_config(decoder=True)), ids, steps)
    exact = kl(full, fed(model, made(model, **FINE, sliding="exact"), ids, steps))
    cache = made(model, **FINE)
    assert kl(full, fed(model, cache, ids, steps)) < 10 * exact + 2e-4
    windows = [layer for layer in cache.own if layer.is_sliding]
    assert windows
    assert all(layer.tokens.compressed for layer in windows)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_is_off_by_one_would_be_seen(off: int) -> None:
    """What holds the test above to the very token."""
    model, ids, steps = FAMILIES["gemma3"](), text(1, 100), [70, *[1] * 30]
    full = fed(model, DynamicCache(config=model.config), ids, steps)
    right = kl(full, fed(model, made(model, **FINE), ids, steps))
    model.config.sliding_window = WINDOW + off  # what masks and caches are made of
    assert kl(full, fed(model, made(model, **FINE), ids, steps)) > 20 * right


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_part_of_a_window(side: str) -> None:
    model, ids, steps = FAMILIES["gemma3"](), text(2, 90), [60, *[1] * 30]
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[0, slice(0, 17) if side == "left" else slice(43, 60)] = 0
    full = fed(model, DynamicCache(config=model.config), ids, steps, mask)
    ours = fed(model, made(model, **FINE), ids, steps, mask)
    assert kl(full[:, 60:], ours[:, 60:]) < 1e-4


@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(3, 60),
    st.integers(1, 7),
    st.integers(2, 40),
    st.integers(0, 2**16),
)
def test_attention_in_a_window_is_sdpa_with_its_mask(
    batch: int, groups: int, slots: int, steps: int, window: int, seed: int
) -> None:
    generator, heads, dim = torch.Generator().manual_seed(seed), 2, 16
    slots = slots + steps
    key, value = torch.randn(2, batch, heads, slots, dim, generator=generator)
    query = torch.randn(batch, heads * groups, steps, dim, generator=generator)
    exact = min(steps + 3, slots)  # the newest
    stored = slots - exact
    at = torch.arange(stored).repeat(batch * heads)
    rows = torch.arange(batch * heads).repeat_interleave(stored)
    flat = [each[:, :, :stored].reshape(-1, dim) for each in (key, value)]
    parts = []
    if stored:
        part = Part(pack_tokens(*flat, rows, at, None, bits=Bits(8, 8)))
        parts.append(part)
        plain_key, plain_value = decoded(part)
        key, value = key.clone(), value.clone()
        for each, read in ((key, plain_key), (value, plain_value)):
            each[:, :, :stored] = read.view(batch, heads, stored, dim)
    newest = torch.arange(stored, slots, dtype=torch.int32).expand(batch, -1)
    full = FullTokens(key[:, :, stored:], value[:, :, stored:], newest)
    call = AttentionCall(query, None, dim**-0.5, window=window)
    out, _, _ = tiered_attention(call, full, parts, first=slots - steps)
    q, k = torch.arange(slots - steps, slots)[:, None], torch.arange(slots)
    mask = (k <= q) & (k > q - window)
    expected = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


def test_what_has_left_the_window_is_gone_and_the_prompt_is_not_kept() -> None:
    model, ids = FAMILIES["gemma3"](), text(1, 400)
    cache = made(model, **FOUR)
    fed(model, cache, ids, [300])
    sizes = []
    for layer in (each for each in cache.own if each.is_sliding):
        held = len(layer.tokens.packed) // layer.tokens.heads + len(layer.tokens.full)
        assert WINDOW - 1 <= held <= WINDOW + 1
        sizes.append(sum(each.untyped_storage().nbytes() for each in layer.tensors().values()))
        assert sizes[-1] < 300 * 2 * 2 * 16 * 4 / 4  # of all tokens in full precision
    fed(model, cache, ids[:, 300:], [1] * 100)
    for layer in (each for each in cache.own if each.is_sliding):
        held = len(layer.tokens.packed) // layer.tokens.heads + len(layer.tokens.full)
        assert WINDOW - 1 <= held <= WINDOW + FOUR["reassign_every"] + 1
        assert int(layer.tokens.body_tokens().slots.min()) >= 400 - WINDOW - FOUR["reassign_every"]


def test_the_report_counts_compressed_layers_others_and_the_whole() -> None:
    model, ids = FAMILIES["gemma3"](), text(1, 300)
    exact, packed = made(model, **FOUR, sliding="exact"), made(model, **FOUR)
    reports = []
    for cache in (exact, packed):
        fed(model, cache, ids, [280, *[1] * 20])
        reports.append(cache.memory_report())
        layers = reports[-1]["layers"]
        assert layers["whole"]["resident_bytes"] == reports[-1]["resident_bytes"]
        for name in ("resident_bytes", "full_bytes"):
            assert layers["compressed"][name] + layers["others"][name] == layers["whole"][name]
    stock = DynamicCache(config=model.config)
    fed(model, stock, ids, [280, *[1] * 20])
    numbers = sum(tensor.numel() for layer in stock.layers for tensor in (layer.keys, layer.values))
    assert [report["full_bytes"] for report in reports] == [pytest.approx(4 * numbers, abs=64)] * 2
    assert reports[0]["layers"]["others"]["compression"] == pytest.approx(1.0, abs=0.1)
    assert reports[1]["layers"]["others"]["compression"] > 1.6


@pytest.mark.parametrize("family", ["gemma3", "gemma4_shared", "mistral_sliding"])
def test_a_session_and_a_copy_go_on_alike(family: str, tmp_path: Any) -> None:
    model, ids = FAMILIES[family](), text(1, 90)
    cache = made(model, **FOUR)
    fed(model, cache, ids, [50, 3])
    others = [copy.deepcopy(cache), load_session(model, save_session(cache, tmp_path / "s"))]
    expected = fed(model, cache, ids[:, 53:], [1] * 30)
    for other in others:
        assert torch.equal(fed(model, other, ids[:, 53:], [1] * 30), expected)


def test_drafts_that_are_taken_back_leave_nothing() -> None:
    model, ids = FAMILIES["gemma3"](), text(1, 90)
    plain, drafted = made(model, **FOUR), made(model, **FOUR)
    fed(model, plain, ids, [60])
    fed(model, drafted, ids, [60])
    for at in range(60, 80):
        drafted.activate_past_recording()
        fed(model, drafted, torch.cat((ids[:, at : at + 1], text(1, 3)), dim=1), [4])
        drafted.crop(-3)
        fed(model, plain, ids[:, at : at + 1], [1])
        drafted.count_held()
    ours, theirs = (fed(model, cache, ids[:, 80:], [1] * 5) for cache in (drafted, plain))
    assert kl(theirs, ours) < 1e-3


def test_beams_reorder_the_windows_too() -> None:
    model, ids = FAMILIES["gemma3"](), text(3, 90)
    cache = made(model, **FOUR)
    fed(model, cache, ids, [60])
    order = torch.tensor([2, 0, 0])
    alone = copy.deepcopy(cache)
    cache.reorder_cache(order)
    alone.batch_select_indices(torch.tensor([2, 0]))
    ours, theirs = fed(model, cache, ids[:, 60:], [1] * 20), fed(model, alone, ids[:2, 60:], [1] * 20)
    assert kl(theirs, ours[:2]) < 1e-5


def test_a_window_too_short_to_pack_is_named() -> None:
    model = FAMILIES["gemma3"]()
    with pytest.warns(RuntimeWarning, match=r"window of layers? [\d, ]+ is 24 tokens, and n_sink 4 \+ rec"):
        cache = create_tiered_cache(model)
    assert all(not layer.is_sliding for layer in cache.own)
