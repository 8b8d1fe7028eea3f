"""Bad input leaves the cache as it was; caches, models and threads do not mix; long runs stay flat."""

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fade_runtime import FadeConfig, FadeError, create_tiered_cache
from fade_runtime.storage.tiers import Tier
from tests.runtime.caches import forward, random_ids, reachable_bytes

LOSSY = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, low_budget=10, reassign_every=8)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("begun", [False, True])
def test_keys_that_are_not_finite_are_refused_and_the_cache_goes_on(model: Any, poison: float, begun: bool) -> None:
    cache, clean = create_tiered_cache(model, LOSSY), create_tiered_cache(model, LOSSY)
    if begun:
        for each in (cache, clean):
            forward(model, random_ids(2, 70), each)
    weight = model.model.layers[1].self_attn.k_proj.weight
    kept = weight.clone()
    weight[3, 5] = poison
    before = cache.memory_report()
    with pytest.raises(FadeError, match="layer 1 was given keys that are not finite"):
        forward(model, random_ids(2, 5, 1), cache)
    weight.copy_(kept)
    assert cache.memory_report() == before
    assert torch.equal(forward(model, random_ids(2, 9, 2), cache), forward(model, random_ids(2, 9, 2), clean))


def test_a_changed_dtype_is_refused_and_the_cache_goes_on(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    cache, clean = create_tiered_cache(model, LOSSY), create_tiered_cache(model, LOSSY)
    for each in (cache, clean):
        forward(model, random_ids(1, 70), each)
    half = copy.deepcopy(model).to(torch.bfloat16)
    own = create_tiered_cache(half, LOSSY)  # without one its attention goes over no such cache
    with pytest.raises(FadeError, match="layer 0 holds tokens of dtype torch.float32, the model now gives torch.bf"):
        forward(half, random_ids(1, 1), cache)
    assert torch.equal(forward(model, random_ids(1, 3), cache), forward(model, random_ids(1, 3), clean))
    cache.reset()
    assert forward(half, random_ids(1, 70), cache).dtype == torch.bfloat16
    assert own.get_seq_length() == 0


def test_a_changed_device_is_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    cache = create_tiered_cache(model, LOSSY)
    forward(model, random_ids(1, 70), cache)
    elsewhere = torch.zeros(1, 2, 1, 16, device="meta")
    with pytest.raises(FadeError, match=r"layer 0 holds tokens of device cpu, the model now gives meta; call cache\."):
        cache.update(elsewhere, elsewhere, 0)


@pytest.mark.parametrize("number", [8, 30, 60, 2])
def test_taking_back_is_exact_or_refused_when_something_was_evicted(model: Any, number: int) -> None:
    """What assisted decoding asks for: drop the rejected tokens, then go on as if they had not been there."""
    config = LOSSY.with_options(recent_window=16, reassign_every=64, eviction_policy="position")
    cache, clean = create_tiered_cache(model, config), create_tiered_cache(model, config)
    for each in (cache, clean):
        forward(model, random_ids(1, 90), each)
    forward(model, random_ids(1, number, 1), cache)
    if number >= 30 + 16:
        with pytest.raises(FadeError, match="only the newest 60 have not entered statistics .*activate_past_recording"):
            cache.crop(-(number + 17))
        return
    cache.crop(-number)
    torch.testing.assert_close(forward(model, random_ids(1, 1, 2), cache), forward(model, random_ids(1, 1, 2), clean))


@pytest.mark.parametrize("options", [{}, {"int4_budget": 30}, {"int4_budget": 0, "low_budget": None}], ids=str)
def test_prompt_lookup_runs_on_a_compressed_cache(model: Any, options: dict[str, Any]) -> None:
    """Proposals are checked by the compressed cache itself; with a window above their number nothing is refused."""
    config = FadeConfig(n_sink=2, recent_window=16, reassign_every=8, **options)
    ids = random_ids(1, 20).repeat(1, 4)
    cache = create_tiered_cache(model, config)
    out = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, max_new_tokens=20, do_sample=False)
    assert out.shape == (1, 100)
    assert cache.get_seq_length() == 99
    assert cache.memory_report()["tokens"]["FULL"] < 99 * 4


def test_a_copy_of_the_cache_goes_its_own_way(model: Any) -> None:
    """Transformers' idiom for a shared prefix: deepcopy the cache of the prefix, continue with each."""
    cache = create_tiered_cache(model, LOSSY)
    forward(model, random_ids(1, 70), cache)
    twin = copy.deepcopy(cache)
    ahead = [forward(model, random_ids(1, 1, i), cache) for i in range(12)]
    behind = [forward(model, random_ids(1, 1, i), twin) for i in range(12)]
    assert all(torch.equal(a, b) for a, b in zip(ahead, behind))


def test_two_caches_in_two_threads_do_not_mix(tiny_model: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    models = [tiny_model(seed=0), tiny_model("qwen2", seed=1), tiny_model(seed=0)]
    configs = [LOSSY, LOSSY.with_options(eviction_policy="ema"), FadeConfig.safe(recent_window=8)]

    def run(index: int, out: dict[int, Tensor]) -> None:
        out[index] = models[index].generate(
            random_ids(2, 60, index),
            past_key_values=create_tiered_cache(models[index], configs[index]),
            max_new_tokens=40,
            do_sample=False,
        )

    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(1)  # two pools on few cores crawl
    alone: dict[int, Tensor] = {}
    for index in range(3):
        run(index, alone)
    together: dict[int, Tensor] = {}
    threads = [threading.Thread(target=run, args=(index, together)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(alone[index], together[index]) for index in range(3))


@pytest.mark.slow
def test_memory_is_flat_over_twenty_thousand_steps(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(num_hidden_layers=1, max_position_embeddings=32_768)
    config = FadeConfig(n_sink=4, recent_window=32, int4_budget=64, low_budget=64, reassign_every=64)
    cache = create_tiered_cache(model, config)
    forward(model, random_ids(1, 300), cache)
    sizes: list[int] = []
    with torch.inference_mode():
        for step in range(20_000):
            forward(model, random_ids(1, 1, step), cache)
            if step % 63 == 0:
                sizes.append(cache.memory_report()["resident_bytes"])
    assert cache.get_seq_length() == 20_300
    report = cache.memory_report()
    assert report["tokens"]["HIGH"] == report["tokens"]["LOW"] == 2 * 64
    assert report["resident_bytes"] == reachable_bytes(cache)
    size = len(sizes) // 4
    quarters = [sum(sizes[i * size : (i + 1) * size]) / size for i in range(4)]
    assert quarters[3] <= 1.1 * max(quarters[1:3])  # pages thin out at first, then their number swings
    exact = 2 * (4 + 32 + 64) * (2 * 16 * 4 + 4 + 4)  # keys, values, slots and statistics in full precision
    alone = 2 * (64 + 64) * (8 + 8 + 4 + 4 + 4 + 2 * 16 * 2 + 16)  # body tokens, were each the last of its page
    assert max(sizes) <= exact + alone + 64


# -- configurations ----------------------------------------------------------------------------------------------


def test_fades_published_example_runs(model: Any) -> None:
    config = FadeConfig(
        phase="2", n_sink=4, recent_window=64, int4_budget=400, eviction_policy="h2o", middle_k_bits=4, middle_v_bits=2
    )
    cache = create_tiered_cache(model, config)
    model.generate(random_ids(1, 700), past_key_values=cache, max_new_tokens=8)
    report = cache.memory_report()
    assert report["tokens"]["HIGH"] == 2 * 2 * 400
    assert report["tokens"]["EVICTED"] == 2 * 2 * (700 - 400 - 68)
    packed = cache.tiered[0].tokens.packed
    assert packed.key_codes.shape[1] == 2 * packed.value_codes.shape[1]  # four bits and two


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"int4_budget": "topk"}, (128, 0)),
        ({"int4_budget": 0.25, "low_budget": 0.5}, (100, 200)),
        ({"int4_budget": 30, "low_budget": None}, (30, 302)),
        ({"int4_budget": 0, "low_budget": 20}, (0, 20)),
    ],
    ids=str,
)
def test_budgets_are_what_a_head_keeps(model: Any, options: dict[str, Any], kept: tuple[int, int]) -> None:
    cache = create_tiered_cache(model, FadeConfig(eviction_policy="ema", **options))
    forward(model, random_ids(1, 400), cache)
    store = cache.tiered[1].tokens
    row, low = store.packed.token_row(), store.packed.low()
    assert torch.bincount(row[~low], minlength=2).tolist() == [kept[0]] * 2
    assert torch.bincount(row[low], minlength=2).tolist() == [kept[1]] * 2
    assert store.evicted == 2 * (400 - 68 - sum(kept))


def test_adaptive_lets_scores_fill_the_tiers(tiny_model: Callable[..., Any]) -> None:
    """Brute force over each head's scores: the best that hold 60 % in the high tier, up to 90 % low, the rest gone."""
    model = tiny_model(num_hidden_layers=1)
    config = FadeConfig(
        n_sink=2, recent_window=8, int4_budget=1.0, low_budget=1.0, eviction_policy="adaptive", tau=0.6, low_tau=0.9
    )
    model.set_attn_implementation("eager")
    rows = (
        model(random_ids(1, 100), output_attentions=True, use_cache=False).attentions[0].unflatten(1, (2, 2)).mean(2)[0]
    )
    weights = 0.95 ** torch.arange(63, -1, -1.0)
    scores = (rows[:, -64:] * (weights / weights.sum())[:, None]).sum(1)[:, 2:92]
    cache = create_tiered_cache(model, config)
    forward(model, random_ids(1, 100), cache)
    store = cache.tiered[0].tokens
    counts = []
    for head in range(2):
        ranked = scores[head].sort(descending=True)
        before = (ranked.values.cumsum(0) - ranked.values) / scores[head].sum()
        mine = store.packed.token_row() == head
        for chosen, low in ((before < 0.6, False), ((before >= 0.6) & (before < 0.9), True)):
            slots = store.packed.slots()[mine & (store.packed.low() == low)]
            assert slots.sort().values.tolist() == (ranked.indices[chosen] + 2).sort().values.tolist()
            counts.append(len(slots))
    assert counts[:2] != counts[2:]  # heads differ


def test_a_token_only_moves_down(model: Any) -> None:
    """No token comes back from the low tier or from the dead, none is quantised again."""
    cache = create_tiered_cache(model, LOSSY.with_options(eviction_policy="ema"))
    forward(model, random_ids(2, 90), cache)
    where: dict[tuple[int, int, int], int] = {}
    for step in range(80):
        forward(model, random_ids(2, 1, step), cache)
        now: dict[tuple[int, int, int], int] = {}
        for layer in cache.tiered:
            packed = layer.tokens.packed
            tiers = torch.where(packed.low(), int(Tier.LOW), int(Tier.HIGH))
            for row, slot, tier in zip(packed.token_row().tolist(), packed.slots().tolist(), tiers.tolist()):
                now[layer.index, row, slot] = tier
        oldest_new = 90 - 8
        assert all(token in where or token[2] >= oldest_new or not where for token in now)
        assert all(tier >= where.get(token, 0) for token, tier in now.items())
        where = now


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"int4_budget": 3}, "a budget of 3 tokens is smaller than n_sink 4"),
        ({"low_budget": 5}, "int4_budget None takes every token"),
        ({"int4_budget": "best"}, "int4_budget 'best' is neither .* nor 'topk' nor None"),
        ({"low_budget": "topk", "int4_budget": 9}, "low_budget 'topk' is neither"),
        ({"middle_k_bits": 3}, "middle_k_bits 3 is not 2, 4 or 8"),
        ({"page_tokens": 65}, "page_tokens 65 is not a whole number from 8 to 64"),
        ({"page_tokens": 4.0}, "page_tokens 4.0 is not a whole number from 8 to 64"),
        ({"int4_budget": 9, "low_budget": 9, "low_v_bits": 8}, "low_v_bits 8 is more than middle_v_bits 4"),
        ({"low_tier": "int3"}, "low_tier 'int3' is not one of int2, pq"),
        ({"int4_budget": 9, "low_budget": 9, "low_tier": "pq"}, "needs a codebook; train one with"),
        ({"codebook": "x"}, "codebook is given but no low tier uses it"),
        ({"positions": "rolling"}, "positions 'rolling' is not one of original, streaming"),
        ({"phase": "1a", "int4_budget": 9}, "phase '1a' evicts nothing"),
        ({"phase": "3"}, "phase '3' is not one of"),
        ({"tau": 1.5}, "tau 1.5 is not a share"),
        ({"tau": 0.5}, "tau 0.5 needs int4_budget"),
        ({"tau": 0.5, "int4_budget": 9, "eviction_policy": "position"}, "'position' has none"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FadeError, match=words):
        FadeConfig(**options)


def test_two_bit_keys_warn_with_what_they_cost() -> None:
    with pytest.warns(UserWarning, match=r"2-bit keys cost much quality: K2V2 measured KL \.02 to \.22"):
        FadeConfig(int4_budget=9, low_budget=9, low_k_bits=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FadeConfig(int4_budget=9, low_budget=9)
