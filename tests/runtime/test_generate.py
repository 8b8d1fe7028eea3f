"""Plain `model.generate` with the tiered cache, against stock generation."""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, FadeError, TieredCache, create_tiered_cache
from tests.conftest import slow
from tests.runtime.caches import forward, random_ids

KEEP_ALL = FadeConfig(recent_window=500)
LOSSY = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, reassign_every=8)


def _generate(model: Any, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    settings = {"max_new_tokens": 24, "do_sample": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return model.generate(ids, past_key_values=cache, **settings)


@pytest.mark.parametrize("length", [1, 17, 200])
def test_nothing_to_compress_equals_stock_exactly(model: Any, length: int) -> None:
    ids = random_ids(1, length)
    stock = _generate(model, ids, DynamicCache(config=model.config))
    cache = create_tiered_cache(model, KEEP_ALL)
    assert torch.equal(_generate(model, ids, cache), stock)
    assert cache.memory_report()["tokens"]["HIGH"] == 0
    assert cache.get_seq_length() == length + 23


def test_nothing_to_compress_logits_equal_stock_bit_for_bit(model: Any) -> None:
    ids = random_ids(2, 50)
    stock = DynamicCache(config=model.config)
    cache = create_tiered_cache(model, KEEP_ALL)
    parts = [ids[:, :40], *ids[:, 40:].split(1, dim=1)]
    expected = [forward(model, part, stock) for part in parts]
    got = [forward(model, part, cache) for part in parts]
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_left_padded_batch_equals_stock_when_nothing_is_compressed(model: Any) -> None:
    ids, mask = _padded(random_ids(1, 31, 1), random_ids(1, 17, 2))
    stock = _generate(model, ids, DynamicCache(config=model.config), attention_mask=mask)
    cache = create_tiered_cache(model, KEEP_ALL)
    assert torch.equal(_generate(model, ids, cache, attention_mask=mask), stock)


def _padded(*prompts: Tensor) -> tuple[Tensor, Tensor]:
    width = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0), value=257) for p in prompts])
    return ids, (ids != 257).long()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["position", "h2o", "ema"])
@pytest.mark.parametrize("lengths", [(9, 60), *slow((61, 40), (61, 5))], ids=str)
def test_left_padded_row_equals_its_unbatched_run_when_compressed(
    model: Any, policy: str, lengths: tuple[int, int]
) -> None:
    config = LOSSY.with_options(eviction_policy=policy, reassign_every=1)
    prompts = [random_ids(1, n, i) for i, n in enumerate(lengths)]
    ids, mask = _padded(*prompts)
    cache = create_tiered_cache(model, config)
    batched = _generate(model, ids, cache, attention_mask=mask, output_logits=True, return_dict_in_generate=True)
    for row, prompt in enumerate(prompts):
        alone = _generate(
            model, prompt, create_tiered_cache(model, config), output_logits=True, return_dict_in_generate=True
        )
        assert torch.equal(batched.sequences[row, ids.shape[1] :], alone.sequences[0, prompt.shape[1] :])
        for ours, theirs in zip(batched.logits, alone.logits):
            torch.testing.assert_close(ours[row], theirs[0], atol=1e-3, rtol=1e-3)


def test_four_bit_body_stays_close_and_eviction_is_noticed(model: Any) -> None:
    """Guards the tests above against a cache that silently never compresses."""
    ids = random_ids(1, 120)
    full = forward(model, ids, DynamicCache(config=model.config))[:, -20:]
    results = {}
    for name, budget in (("packed", None), ("evicted", 10)):
        cache = create_tiered_cache(model, FadeConfig(n_sink=2, recent_window=8, int4_budget=budget))
        forward(model, ids[:, :100], cache)
        steps = [forward(model, ids[:, i : i + 1], cache) for i in range(100, 120)]
        results[name] = (torch.cat(steps, 1) - full).norm() / full.norm()
    assert 0 < results["packed"] < 0.4 * results["evicted"]


@pytest.mark.parametrize("beams", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_beam_search_equals_stock_when_nothing_is_compressed(model: Any, beams: dict[str, int]) -> None:
    ids = random_ids(2, 30)
    stock = _generate(model, ids, DynamicCache(config=model.config), **beams)
    assert torch.equal(_generate(model, ids, create_tiered_cache(model, KEEP_ALL), **beams), stock)


def test_reordering_a_compressed_cache_moves_whole_rows(model: Any) -> None:
    ids, config = random_ids(3, 90), LOSSY
    cache, swapped = create_tiered_cache(model, config), create_tiered_cache(model, config)
    forward(model, ids, cache)
    forward(model, ids[[2, 0, 0]], swapped)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    step = torch.tensor([[5], [6], [7]])
    torch.testing.assert_close(forward(model, step, cache), forward(model, step, swapped), atol=1e-4, rtol=1e-4)


def test_repeating_a_compressed_cache_repeats_each_row(model: Any) -> None:
    ids = random_ids(2, 90)
    cache, repeated = create_tiered_cache(model, LOSSY), create_tiered_cache(model, LOSSY)
    forward(model, ids, cache)
    forward(model, ids.repeat_interleave(2, 0), repeated)
    cache.batch_repeat_interleave(2)
    step = torch.tensor([[5], [6], [7], [8]])
    torch.testing.assert_close(forward(model, step, cache), forward(model, step, repeated), atol=1e-4, rtol=1e-4)


def test_second_turn_feeds_only_new_tokens_and_equals_stock(model: Any) -> None:
    first, more = random_ids(1, 40), random_ids(1, 9, 3)
    outs = []
    for cache in (DynamicCache(config=model.config), create_tiered_cache(model, KEEP_ALL)):
        out = _generate(model, first, cache)
        seen = cache.get_seq_length()
        out = _generate(model, torch.cat((out, more), 1), cache)
        assert cache.get_seq_length() == seen + 1 + 9 + 23  # the last token of turn one, the new ones, 23 steps
        outs.append(out)
    assert torch.equal(*outs)


def test_prompt_lookup_decoding_equals_stock_when_nothing_is_compressed(model: Any) -> None:
    ids = random_ids(1, 12).repeat(1, 3)
    stock = _generate(model, ids, DynamicCache(config=model.config), prompt_lookup_num_tokens=3)
    ours = _generate(model, ids, create_tiered_cache(model, KEEP_ALL), prompt_lookup_num_tokens=3)
    assert torch.equal(ours, stock)


def test_crop_takes_back_exactly_or_says_no(model: Any) -> None:
    ids = random_ids(1, 60)
    cache, fresh = (create_tiered_cache(model, FadeConfig(n_sink=2, recent_window=16)) for _ in range(2))
    for c in (cache, fresh):
        forward(model, ids[:, :50], c)
    forward(model, ids[:, 50:55], cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 50
    step = ids[:, 59:]
    torch.testing.assert_close(forward(model, step, cache), forward(model, step, fresh))
    with pytest.raises(FadeError, match="give a negative number"):
        cache.crop(50)
    with pytest.raises(FadeError, match=r"cannot take back 40 tokens: only the newest 1 .*activate_past_recording"):
        cache.crop(-40)


@pytest.mark.parametrize("policy", ["position", "h2o", "ema"])
def test_several_tokens_at_once_equal_one_by_one(model: Any, policy: str) -> None:
    """A chunk of queries over a compressed cache, and the statistics it leaves."""
    ids = random_ids(2, 97)
    config = FadeConfig(n_sink=2, recent_window=32, int4_budget=20, eviction_policy=policy)
    one, many = create_tiered_cache(model, config), create_tiered_cache(model, config)
    for cache in (one, many):
        forward(model, ids[:, :90], cache)
    steps = torch.cat([forward(model, ids[:, i : i + 1], one) for i in range(90, 97)], 1)
    torch.testing.assert_close(forward(model, ids[:, 90:], many), steps, atol=2e-4, rtol=1e-3)
    for a, b in zip(one.tiered, many.tiered):
        b.count_held()
        ours, theirs = a.tokens.packed.attention_stats, b.tokens.packed.attention_stats
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_of_the_model_is_taken(tiny_model: Callable[..., Any], dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    cache = create_tiered_cache(model, LOSSY)
    logits = forward(model, random_ids(1, 80), cache)
    logits = forward(model, random_ids(1, 1), cache)
    assert logits.dtype == dtype
    assert bool(logits.isfinite().all())
    assert cache.tiered[0].tokens.full.key.dtype == dtype


def test_foreign_attention_gets_correct_tensors_and_nothing_is_kept(model: Any) -> None:
    ids = random_ids(2, 80)
    config = FadeConfig(n_sink=2, recent_window=8)
    ours = create_tiered_cache(model, config)
    expected = [forward(model, ids[:, :70], ours), forward(model, ids[:, 70:71], ours)]
    foreign = create_tiered_cache(model, config)
    model.set_attn_implementation("eager")
    got = [forward(model, ids[:, :70], foreign), forward(model, ids[:, 70:71], foreign)]
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    assert foreign.memory_report()["resident_bytes"] == ours.memory_report()["resident_bytes"]
    evicting = create_tiered_cache(model, LOSSY)
    forward(model, ids, evicting)
    model.set_attn_implementation("sdpa")
    with pytest.raises(FadeError, match="'sdpa' cannot skip evicted tokens"):
        forward(model, ids[:, :1], evicting)


def test_statistics_are_kept_apart_for_two_caches_and_two_models(tiny_model: Callable[..., Any]) -> None:
    models = [tiny_model(seed=0), tiny_model(seed=1)]
    ids = random_ids(1, 70)
    alone = [_generate(m, ids, create_tiered_cache(m, LOSSY)) for m in models]
    caches = [create_tiered_cache(m, LOSSY) for m in models]
    for m, c in zip(models, caches):
        forward(m, ids, c)
    outs = [ids, ids]
    logits = [forward(m, ids[:, -1:], copy.deepcopy(c)) for m, c in zip(models, caches)]
    assert not torch.equal(*logits)
    for _ in range(3):
        outs = [_generate(m, ids, c.reset() or c) for m, c in zip(models, caches)]  # type: ignore[func-returns-value]
    assert all(torch.equal(a, b) for a, b in zip(alone, outs))


def test_a_cache_does_not_outlive_its_last_reference(model: Any) -> None:
    cache = create_tiered_cache(model, LOSSY)
    _generate(model, random_ids(1, 60), cache)
    del cache
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, TieredCache)]


def test_calls_without_the_cache_are_untouched(model: Any) -> None:
    ids = random_ids(2, 33)
    before = model(ids).logits
    cache = create_tiered_cache(model, LOSSY)
    assert torch.equal(model(ids).logits, before)
    assert cache.get_seq_length() == 0


def test_changed_batch_and_mla_are_refused_by_name(model: Any) -> None:
    cache = create_tiered_cache(model, LOSSY)
    forward(model, random_ids(2, 20), cache)
    with pytest.raises(FadeError, match="batch size changed from 2 to 1; call cache.reset"):
        forward(model, random_ids(1, 1), cache)
    model.config.kv_lora_rank = 8
    with pytest.raises(FadeError, match="multi-head latent attention"):
        create_tiered_cache(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"int4_budget": 1.5}, "int4_budget 1.5 is neither"),
        ({"int4_budget": True}, "int4_budget True is neither"),
        ({"recent_window": 0}, "recent_window 0 is not a whole number of at least 1"),
        ({"eviction_policy": "lru"}, "'lru' is not one of position, h2o, ema, adaptive, learned"),
        ({"eviction_policy": "learned"}, "needs a predictor"),
        ({"predictor": "x"}, "set eviction_policy='learned'"),
        ({"ema_decay": 1.0}, "ema_decay 1.0"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FadeError, match=words):
        FadeConfig(**options)


def test_unknown_option_of_a_preset_is_refused_by_name() -> None:
    with pytest.raises(FadeError, match="unknown option sinks; FadeConfig has .*n_sink"):
        FadeConfig.safe(sinks=3)
