"""The tiered cache over every family of language models, against stock generation."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, FadeError, TieredCache, create_tiered_cache
from fade_runtime.transformers_api import is_attached
from tests.families import FAMILIES, REFUSED, TIERED
from tests.runtime.caches import decode, forward, random_ids, reachable_bytes

KEEP_ALL = FadeConfig(recent_window=500)
PACKED = FadeConfig(n_sink=2, recent_window=8, reassign_every=8)
LOSSY = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, reassign_every=1)
SOFTCAPPED = {"gemma2"}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_tiered_family = pytest.mark.parametrize("family", TIERED)


def _stock(family: str) -> Any:
    """The oracle. SDPA knows no softcap: the newest transformers refuses it there, 5.17 forgets it silently."""
    model = FAMILIES[family]()
    if family in SOFTCAPPED:
        model.set_attn_implementation("eager")
    return model


def _cache(model: Any, config: FadeConfig) -> TieredCache:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no full-attention layer", RuntimeWarning)
        return create_tiered_cache(model, config)


def _generate(model: Any, ids: Tensor, cache: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return model.generate(ids, past_key_values=cache, **{"max_new_tokens": 10, "do_sample": False, **options})


@every_family
def test_nothing_to_compress_equals_stock(family: str) -> None:
    model, ids = _stock(family), random_ids(2, 40)
    options = {"output_logits": True, "return_dict_in_generate": True}
    stock = _generate(model, ids, DynamicCache(config=model.config), **options)
    ours = _generate(model, ids, _cache(model, KEEP_ALL), **options)
    assert torch.equal(ours.sequences, stock.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), atol=1e-4, rtol=0)


@pytest.mark.slow
@every_family
def test_left_padded_row_equals_its_unbatched_run_when_evicting(family: str) -> None:
    model, prompts = FAMILIES[family](), [random_ids(1, length, length) for length in (47, 29)]
    ids = torch.cat([torch.nn.functional.pad(p, (47 - p.shape[1], 0), value=257) for p in prompts])
    options = {"output_logits": True, "return_dict_in_generate": True}
    cache = _cache(model, LOSSY)
    batched = _generate(model, ids, cache, attention_mask=(ids != 257).long(), **options)
    assert (cache.memory_report()["tokens"]["EVICTED"] > 0) == (family in TIERED)
    for row, prompt in enumerate(prompts):
        alone = _generate(model, prompt, _cache(model, LOSSY), **options)
        assert torch.equal(batched.sequences[row, 47:], alone.sequences[0, prompt.shape[1] :])
        for ours, theirs in zip(batched.logits, alone.logits, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], atol=1e-3, rtol=1e-3)


@every_family
def test_beam_search_equals_stock_when_nothing_is_compressed(family: str) -> None:
    model, ids = _stock(family), random_ids(2, 20)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    stock = _generate(model, ids, DynamicCache(config=model.config), **beams)
    assert torch.equal(_generate(model, ids, _cache(model, KEEP_ALL), **beams), stock)


@every_family
def test_prompt_lookup_equals_stock_when_nothing_is_compressed(family: str) -> None:
    model, ids = _stock(family), random_ids(1, 10).repeat(1, 3)
    if model._is_stateful:  # transformers itself says no
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            _generate(model, ids, _cache(model, KEEP_ALL), prompt_lookup_num_tokens=3)
        return
    stock = _generate(model, ids, DynamicCache(config=model.config), prompt_lookup_num_tokens=3)
    assert torch.equal(_generate(model, ids, _cache(model, KEEP_ALL), prompt_lookup_num_tokens=3), stock)


@every_family
def test_second_turn_feeds_only_new_tokens_and_equals_stock(family: str) -> None:
    model, first, more = _stock(family), random_ids(1, 30), random_ids(1, 7, 3)
    outs, fed = [], []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: fed.append(args[0].shape[1]))
    for make in (lambda: DynamicCache(config=model.config), lambda: _cache(model, KEEP_ALL)):
        cache = make()
        out = _generate(model, first, cache)
        fed.clear()
        outs.append(_generate(model, torch.cat((out, more), 1), cache))
        assert fed == [1 + 7, *[1] * 9]  # the last token of turn one, the new ones, and step by step
    assert torch.equal(*outs)


@every_tiered_family
def test_bare_forward_compresses_every_full_attention_layer_and_stays_close(family: str) -> None:
    model, ids = _stock(family), random_ids(2, 60)
    stock = decode(model, ids, 50, DynamicCache(config=model.config))[:, 50:]
    cache = _cache(model, PACKED)
    ours = decode(model, ids, 50, cache)[:, 50:]
    assert 0 < (ours - stock).norm() < 0.5 * stock.norm()
    assert cache.get_seq_length() == 60
    for layer in cache.tiered:
        assert layer.store.full is not None
        rows = 2 * layer.store.full.key.shape[1]
        assert len(layer.store.packed) == rows * (60 - len(layer.store.full))


@every_tiered_family
def test_model_in_bfloat16_needs_no_argument(family: str) -> None:
    model, ids = FAMILIES[family]().to(torch.bfloat16), random_ids(2, 40)
    cache = _cache(model, LOSSY)
    logits = decode(model, ids, 36, cache)
    assert logits.dtype == torch.bfloat16
    assert bool(logits.isfinite().all())
    assert {layer.store.full.key.dtype for layer in cache.tiered if layer.store.full is not None} == {torch.bfloat16}


@every_tiered_family
def test_eager_attention_over_a_compressed_cache_is_the_same(family: str) -> None:
    """Also the oracle of attention over packed codes: eager sees them dequantised, as full keys and values."""
    if family.startswith("falcon"):
        pytest.skip("Falcon cannot change its attention implementation once it is loaded")
    model, ids = FAMILIES[family](), random_ids(2, 60)
    cache = _cache(model, PACKED)
    decode(model, ids[:, :50], 44, cache)
    foreign = copy.deepcopy(cache)
    expected = decode(model, ids[:, 50:], 4, cache)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(decode(model, ids[:, 50:], 4, foreign), expected, atol=1e-3, rtol=1e-3)
    assert foreign.memory_report()["resident_bytes"] == cache.memory_report()["resident_bytes"]


@every_family
def test_reported_bytes_are_all_that_is_reachable(family: str) -> None:
    model, ids = FAMILIES[family](), random_ids(2, 70)
    cache = _cache(model, LOSSY)
    for part in (ids[:, :50], *ids[:, 50:].split(5, dim=1)):
        forward(model, part, cache)
        assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache) > 0


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("deepseek_v2", r"deepseek_v2 uses multi-head latent attention \(kv_lora_rank\)"),
        ("deepseek_v3", r"deepseek_v3 uses multi-head latent attention \(kv_lora_rank\)"),
        ("mamba", "mamba is a recurrent model"),
        ("mamba2", "mamba2 is a recurrent model"),
        ("rwkv", "rwkv is a recurrent model"),
        (
            "falcon_h1",
            r"falcon_h1 has no full-attention layer but \['LinearAttentionAndFullAttentionLayer'\]",
        ),
        ("falcon_eager", "cannot change its attention from 'eager' to 'sdpa'; load it with"),
        ("bloom", "BloomForCausalLM cannot change its attention"),
        ("t5", "t5 has an encoder"),
    ],
)
def test_family_is_refused_by_name(family: str, words: str) -> None:
    model = REFUSED[family]()
    before = model.config._attn_implementation
    with pytest.raises(FadeError, match=words):
        create_tiered_cache(model)
    assert model.config._attn_implementation == before


def test_model_of_sliding_windows_only_is_left_alone_with_a_warning() -> None:
    model = FAMILIES["mistral_sliding"]()
    with pytest.warns(RuntimeWarning, match="mistral has no full-attention layer: .* nothing will be compressed"):
        cache = create_tiered_cache(model, FadeConfig(sliding="exact"))
    assert cache.tiered == cache.own == []
    cache = create_tiered_cache(model, FadeConfig(recent_window=8))
    assert cache.tiered == []
    assert all(layer.is_sliding for layer in cache.own)


@every_tiered_family
def test_other_caches_are_served_as_before(family: str) -> None:
    """A stock cache and no cache at all, after the model was switched to the tiered attention."""
    model, ids = _stock(family), random_ids(2, 40)
    before = decode(model, ids, 36, DynamicCache(config=model.config)), model(ids).logits
    cache = _cache(model, PACKED)
    assert is_attached(model.config)
    after = decode(model, ids, 36, DynamicCache(config=model.config)), model(ids).logits
    for ours, stock in zip(after, before, strict=True):
        assert torch.equal(ours, stock)
    assert cache.get_seq_length() == 0
