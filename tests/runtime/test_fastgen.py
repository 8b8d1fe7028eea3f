"""FastGen: profiles against loops over stock attention, token classes, and a cache that learns its token ids."""

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, FadeError, create_tiered_cache, load_session
from fade_runtime.layer import AttentionCall
from fade_runtime.policies.fastgen import Keeps, Shares, kept, profile
from fade_runtime.policies.text import OTHER, PUNCTUATION, SPECIAL, token_classes
from fade_runtime.transformers_api import forward_kwargs
from predictor.budgets import HeadBudgets
from predictor.bundle import Predictor, load_bundle
from predictor.features import FeatureSpec
from predictor.nets import TokenMLP
from predictor.provenance import model_provenance
from tests.families import FAMILIES
from tests.runtime.caches import reachable_bytes

PROMPT = 90
LEVELS = (0.1, 0.2, 0.5, 0.7, 0.95)  # of recovery: on random models each lets another policy win
SMALL: dict[str, Any] = dict(eviction_policy="fastgen", n_sink=2, recent_window=8)


def _ids(batch: int = 1, length: int = PROMPT, seed: int = 5) -> Tensor:
    """Bytes, now and then a comma (11) or an end token (256)."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(34, 90, (batch, length), generator=random)
    draw = torch.rand(batch, length, generator=random)
    return ids.masked_fill(draw < 0.1, 11).masked_fill(draw > 0.95, 256)


def _config(tokenizer: Any, **options: Any) -> FadeConfig:
    return FadeConfig(**{**SMALL, "tokenizer": tokenizer, **options})


def _rows(model: Any, ids: Tensor) -> list[Tensor]:
    """[B, H, S, S] attention of each layer by the stock eager implementation, averaged over the query group."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True, **forward_kwargs(DynamicCache(config=model.config), model))
    return [a.unflatten(1, (2, -1)).mean(2) for a in out.attentions]


def _members(policy: int, mass: list[float], classes: list[int], body: list[int], sizes: Shares) -> set[int]:
    """What a policy keeps of the body, by loops."""
    length = len(mass)
    frequent = sorted(body, key=lambda slot: -mass[slot])[: int(sizes.frequent * length)]
    held = {slot for slot in body if classes[slot] == SPECIAL}
    if policy >= Keeps.PUNCTUATION:
        held |= {slot for slot in body if classes[slot] == PUNCTUATION}
    if policy >= Keeps.FREQUENT:
        held |= set(frequent)
    if policy >= Keeps.LOCAL:
        held |= {slot for slot in body if slot >= length - int(sizes.local * length)}
    return set(body) if policy == Keeps.FULL else held


def _cheapest(mass: list[float], classes: list[int], body: list[int], sizes: Shares, slack: float = 1e-6) -> int:
    for policy in Keeps:
        held = _members(policy, mass, classes, body, sizes)
        lost = sum(mass[slot] for slot in body if slot not in held)
        if lost <= (1 - sizes.recover) * sum(mass) + slack:
            return int(policy)
    raise AssertionError("full recovers everything")


def _kept(cache: Any, layer: int, row: int) -> set[int]:
    packed = cache.tiered[layer].tokens.packed
    return set(packed.slots()[packed.token_row() == row].tolist())


@pytest.mark.parametrize("recover", LEVELS)
@pytest.mark.parametrize("batch", [1, 2])
def test_each_head_keeps_what_its_cheapest_policy_holds(
    model: Any, tiny_tokenizer: Any, recover: float, batch: int
) -> None:
    """The profile and the sets that it keeps, both by loops over eager attention of the last 64 queries."""
    ids, sizes = _ids(batch), Shares(recover, frequent=0.2, local=0.25)
    rows = _rows(model, ids)
    config = _config(tiny_tokenizer, recover=recover, frequent_share=0.2, local_share=0.25)
    cache = create_tiered_cache(model, config)
    model.generate(ids, past_key_values=cache, max_new_tokens=1)
    classes, body = token_classes(tiny_tokenizer), list(range(2, PROMPT - 8))
    for layer, attention in enumerate(rows):
        for row in range(2 * batch):
            mass = attention[row // 2, row % 2, -64:].sum(0)
            score = mass / torch.arange(PROMPT, 0, -1).clamp(max=64)
            found = classes[ids[row // 2]].tolist()
            policy = _cheapest(mass.tolist(), found, body, sizes)
            assert int(cache.tiered[layer].tokens.profiles.flatten()[row]) == policy
            assert _kept(cache, layer, row) == _members(policy, score.tolist(), found, body, sizes)


def test_the_test_above_meets_several_policies(model: Any, tiny_tokenizer: Any) -> None:
    found = set()
    for recover in LEVELS:
        config = _config(tiny_tokenizer, recover=recover, frequent_share=0.2, local_share=0.25)
        cache = create_tiered_cache(model, config)
        model(_ids(), **forward_kwargs(cache, model))
        found |= {int(one) for layer in cache.tiered for one in layer.tokens.profiles.flatten()}
    assert len(found) >= 4


@given(st.integers(0, 10_000), st.floats(0.05, 1.0), st.floats(0.05, 1.0), st.floats(0.05, 1.0))
def test_profile_is_the_cheapest_that_recovers_and_policies_are_nested(
    seed: int, recover: float, frequent: float, local: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    length, sizes = int(torch.randint(5, 60, (1,), generator=random)), Shares(recover, frequent, local)
    mass = torch.rand(3, length, generator=random, dtype=torch.float64) ** 6
    classes = torch.randint(0, 3, (length,), generator=random)
    body = list(range(2, max(2, length - 3)))
    chosen = profile(mass, classes, sizes, n_sink=2, recent_window=3).tolist()
    assert chosen == [_cheapest(row, classes.tolist(), body, sizes, slack=0) for row in mass.tolist()]
    rank, age = mass[0].argsort(descending=True).argsort(), torch.arange(length - 1, -1, -1)
    held = [kept(policy, classes, rank, age, length, sizes) for policy in Keeps]
    assert all(bool((less <= more).all()) for less, more in pairwise(held))
    assert bool(held[-1].all())


def test_while_decoding_new_marks_stay_and_the_local_part_moves(model: Any, tiny_tokenizer: Any) -> None:
    """Heads of each policy, forced, over 60 steps: what they hold at the end by the rule, never more than the rule."""
    ids = _ids(length=150)
    config = _config(tiny_tokenizer, reassign_every=4, local_share=0.2, frequent_share=0.1)
    cache = create_tiered_cache(model, config)
    model(ids[:, :PROMPT], **forward_kwargs(cache, model))
    forced = torch.tensor([[Keeps.SPECIAL, Keeps.PUNCTUATION]]), torch.tensor([[Keeps.LOCAL, Keeps.FULL]])
    before = [_kept(cache, layer, row) for layer in (0, 1) for row in (0, 1)]
    for layer, policies in zip(cache.tiered, forced):
        layer.tokens.profiles = policies.to(torch.int8)
    for step in range(PROMPT, 150):
        model(ids[:, step : step + 1], **forward_kwargs(cache, model))
    upto = 150 - len(cache.tiered[0].tokens.full) + 2 + 8  # tokens when the body was planned last
    young = set(range(PROMPT - 8, upto - 8))
    classes = token_classes(tiny_tokenizer)[ids[0]].tolist()
    special, punctuation, local, full = (_kept(cache, layer, row) for layer in (0, 1) for row in (0, 1))
    assert special & young == {slot for slot in young if classes[slot] == SPECIAL}
    assert punctuation & young == {slot for slot in young if classes[slot] != OTHER}
    assert punctuation <= before[1] | young
    assert full == before[3] | young
    moving = set(range(upto - int(0.2 * upto), upto - 8))
    assert moving <= local
    others = {slot for slot in local - moving if classes[slot] == OTHER}
    assert len(others) <= int(0.1 * upto)


def test_padded_rows_and_beams_equal_what_they_are_alone(model: Any, tiny_tokenizer: Any) -> None:
    config = _config(tiny_tokenizer, recover=0.7)
    short, long = _ids(length=61, seed=3), _ids(length=80)
    ids = torch.cat((torch.nn.functional.pad(short, (19, 0), value=257), long))
    cache = create_tiered_cache(model, config)
    model.generate(ids, attention_mask=(ids != 257).long(), past_key_values=cache, max_new_tokens=1)
    cache.reorder_cache(torch.tensor([1, 0, 0]))
    assert cache.text is not None
    assert cache.text.ids.shape == (3, 80)
    for row, prompt in enumerate((long, short, short)):
        alone = create_tiered_cache(model, config)
        model.generate(prompt, past_key_values=alone, max_new_tokens=1)
        for layer in (0, 1):
            assert torch.equal(cache.tiered[layer].tokens.profiles[row], alone.tiered[layer].tokens.profiles[0])
            for head in (0, 1):
                assert _kept(cache, layer, 2 * row + head) == _kept(alone, layer, head)
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(do_sample=True, num_return_sequences=2)], ids=str)
def test_plain_generate_tells_the_ids(model: Any, tiny_tokenizer: Any, options: dict[str, Any]) -> None:
    cache = create_tiered_cache(model, _config(tiny_tokenizer, reassign_every=4, recover=0.7))
    torch.manual_seed(0)
    out = model.generate(_ids(), past_key_values=cache, max_new_tokens=20, **options)
    assert cache.text is not None
    rows = cache.text.ids
    assert rows.shape == (3 if "num_beams" in options else 2, PROMPT + 19)
    if "num_beams" not in options:
        assert torch.equal(rows, out[:, :-1].int())
    assert cache.memory_report()["tokens"]["EVICTED"] > 0


def test_crop_and_another_turn(model: Any, tiny_tokenizer: Any) -> None:
    ids = _ids(length=120)
    cache = create_tiered_cache(model, _config(tiny_tokenizer, recover=0.7))
    model(ids[:, :PROMPT], **forward_kwargs(cache, model))
    model(ids[:, :5], **forward_kwargs(cache, model))
    cache.crop(-5)
    model(ids[:, PROMPT:], **forward_kwargs(cache, model))
    assert cache.text is not None
    assert torch.equal(cache.text.ids, ids.int())
    cache.reset()
    model(ids[:, 50:70].expand(2, -1), **forward_kwargs(cache, model))
    assert torch.equal(cache.text.ids, ids[:, 50:70].expand(2, -1).int())


def test_caches_and_threads_do_not_mix_and_no_hook_is_left(tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> None:
    model = tiny_model()
    hooks = model._forward_pre_hooks
    caches = [create_tiered_cache(model, _config(tiny_tokenizer, recover=0.7)) for _ in range(2)]
    plain = create_tiered_cache(model)
    assert len(hooks) == 1
    texts = [_ids(length=100, seed=seed) for seed in range(2)]

    def feed(cache: Any, ids: Tensor) -> None:
        for piece in ids.split([60, *[1] * 40], dim=1):
            model(piece, **forward_kwargs(cache, model))
            model(piece, **forward_kwargs(DynamicCache(config=model.config), model))

    threads = [threading.Thread(target=feed, args=pair) for pair in zip(caches, texts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model(texts[0], **forward_kwargs(plain, model))
    for cache, ids in zip(caches, texts):
        assert cache.text is not None
        assert torch.equal(cache.text.ids, ids.int())
    assert plain.text is None
    copied = copy.deepcopy(caches[0])
    gone = weakref.ref(caches[0])
    del cache, threads
    caches.clear()
    gc.collect()
    assert gone() is None
    assert len(hooks) == 1  # the copy needs it
    model(texts[0][:, :3], **forward_kwargs(copied, model))
    assert copied.text is not None
    assert copied.text.ids.shape[1] == 103
    del copied
    gc.collect()
    assert len(hooks) == 0


def test_a_session_goes_on_with_the_same_logits(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The tokenizer is found beside the model, and again by the session."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    ids = _ids(length=130)
    cache = create_tiered_cache(model, FadeConfig(**SMALL, recover=0.7, reassign_every=4))
    model(ids[:, :100], **forward_kwargs(cache, model))
    cache.save_session(tmp_path / "session")
    loaded = load_session(model, tmp_path / "session")
    assert loaded.text is not None
    assert cache.text is not None
    assert torch.equal(loaded.text.ids, cache.text.ids)
    for step in range(100, 130):
        got, expected = (
            model(ids[:, step : step + 1], **forward_kwargs(each, model)).logits for each in (loaded, cache)
        )
        assert torch.equal(got, expected)
    assert all(torch.equal(a.tokens.profiles, b.tokens.profiles) for a, b in zip(loaded.tiered, cache.tiered))


def _predictor(model: Any, path: Path, budgets: HeadBudgets | None) -> Any:
    spec = FeatureSpec(window=16, block=4, horizon=32)
    facts: dict[str, Any] = dict(spec=spec, metrics={}, manifest={}, provenance=model_provenance(model))
    return load_bundle(Predictor(TokenMLP(), budgets=budgets, **facts).save(path / "bundle"))


def test_with_a_predictor_the_profile_raises_learned_budgets(model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """A head keeps its learned share or what its policy asks for, whichever is more, best forecast first."""
    some, nothing = [1.0, 0.1, 0.0], [0.0, 0.0, 0.0]
    budgets = HeadBudgets(torch.tensor([[some, nothing], [some, some]]), fractions=(0.0, 0.5, 1.0))
    predictor = _predictor(model, tmp_path, budgets)
    config = _config(tiny_tokenizer, predictor=predictor, int4_budget=0.3, recover=0.6, frequent_share=0.15)
    exact = config.with_options(recent_window=500)
    ids, body = _ids(length=100), list(range(2, 92))
    cache, whole = create_tiered_cache(model, config), create_tiered_cache(model, exact)
    for each in (cache, whole):
        model(ids, **forward_kwargs(each, model))
    classes, sizes = token_classes(tiny_tokenizer)[ids[0]].tolist(), Shares(0.6, 0.15, 0.3)
    raised = 0
    for layer in (0, 1):
        for row in (0, 1):
            forecast = whole.tiered[layer].tokens.full.attention_stats[0, row].tolist()
            policy = _cheapest(forecast, classes, body, sizes)
            assert int(cache.tiered[layer].tokens.profiles[0, row]) == policy
            asked = len(_members(policy, forecast, classes, body, sizes))
            learned = round(100 * budgets.allocate(0.3)[layer][row])
            raised += asked > learned
            count = min(max(asked, learned), len(body))
            best = sorted(body, key=lambda slot: (-forecast[slot], -slot))[:count]
            assert _kept(cache, layer, row) == set(best)
    assert raised in (1, 2, 3)
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)
    assert cache.memory_report()["tiers"]["predictor"] > 0


def test_a_memory_target_is_not_raised(model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    some = [1.0, 0.1, 0.0]
    budgets = HeadBudgets(torch.tensor([[some, some], [some, some]]), fractions=(0.0, 0.5, 1.0))
    predictor = _predictor(model, tmp_path, budgets)
    config = _config(tiny_tokenizer, predictor=predictor, memory=60_000, recover=0.99)
    kept = []
    for one in (config, config.with_options(eviction_policy="learned", tokenizer=None)):
        cache = create_tiered_cache(model, one)
        model(_ids(length=300), **forward_kwargs(cache, model))
        kept.append([len(_kept(cache, layer, row)) for layer in (0, 1) for row in (0, 1)])
    assert kept[0] == pytest.approx(kept[1], abs=2)  # the classes of tokens take some bytes too
    assert sum(kept[0]) < 4 * 290


def test_an_int4_budget_caps_every_head_and_special_tokens_go_last(model: Any, tiny_tokenizer: Any) -> None:
    cache = create_tiered_cache(model, _config(tiny_tokenizer, recover=1.0, int4_budget=20, low_budget=10))
    ids = _ids()
    model(ids, **forward_kwargs(cache, model))
    special = {slot for slot in range(2, PROMPT - 8) if int(ids[0, slot]) == 256}
    assert special
    for row in (0, 1):
        held = _kept(cache, 0, row)
        assert len(held) == 30
        assert special <= held
    assert cache.memory_report()["tokens"]["LOW"] == 40


def test_token_classes_of_the_real_tokenizer(real_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model_dir)
    classes = token_classes(tokenizer)
    assert classes.shape == (len(tokenizer),)
    assert classes.dtype == torch.int8
    ids = tokenizer("<|im_start|>user\nHello, world! x += 3 -- “so”…<|im_end|>")["input_ids"]
    found = {tokenizer.decode([one]).strip(): int(classes[one]) for one in ids}
    assert found["<|im_start|>"] == found["<|im_end|>"] == SPECIAL
    assert {found[mark] for mark in (",", "!", "--")} == {PUNCTUATION}
    assert {found[word] for word in ("user", "Hello", "world", "3", "")} == {OTHER}  # "" is the line break


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recover": 0.0}, "recover 0.0 is not a share"),
        ({"frequent_share": 1.5}, "frequent_share 1.5 is not a share"),
        ({"tau": 0.5, "int4_budget": 9}, "leave them at None"),
        ({"eviction_policy": "h2o", "tokenizer": "x"}, "reads no text"),
        ({"phase": "1a"}, "evicts nothing"),
        ({"predictor": "x"}, "raises learned budgets; set int4_budget"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FadeError, match=words):
        FadeConfig(**{**SMALL, **options})


def test_bad_calls_are_refused(model: Any, tiny_tokenizer: Any) -> None:
    with pytest.raises(FadeError, match="give FadeConfig\\(tokenizer"):
        create_tiered_cache(model, FadeConfig(**SMALL))
    with pytest.raises(FadeError, match="no tokenizer at nowhere"):
        create_tiered_cache(model, FadeConfig(**SMALL, tokenizer="nowhere"))
    assert model.config._attn_implementation != "fade"
    cache = create_tiered_cache(model, _config(tiny_tokenizer))
    with pytest.raises(FadeError, match="inputs_embeds"):
        model(inputs_embeds=torch.randn(1, 20, 64), **forward_kwargs(cache, model))
    for layer in cache.tiered:  # as if somebody called the layers without the model
        layer.update(torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16), kwargs={})
    with pytest.raises(FadeError, match="told the ids of 0 of 20 tokens"):
        cache.tiered[0].attend(torch.nn.Module(), AttentionCall(torch.randn(1, 4, 20, 16), None, 0.25))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_tells_its_ids(family: str, tiny_tokenizer: Any) -> None:
    """Whatever parts a model has, plain generate tells the cache each id once."""
    model, ids = FAMILIES[family](), _ids(2, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = create_tiered_cache(model, _config(tiny_tokenizer, recover=0.5, reassign_every=4))
        out = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert cache.text is not None
    assert torch.equal(cache.text.upto(cache.get_seq_length()), out[:, : cache.get_seq_length()].int())
    evicted = cache.memory_report()["tokens"]["EVICTED"]
    assert (evicted > 0) == bool(cache.tiered)
