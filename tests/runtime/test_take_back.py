"""Tokens that are taken back leave nothing behind, and a call that did not end is taken back or named."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fade_runtime import FadeConfig, FadeError, TieredCache, create_tiered_cache
from fade_runtime.layer import AttentionCall
from tests.conftest import make_tiny_model, slow
from tests.families import FAMILIES
from tests.runtime.kinds import GUARDED, KINDS, TIGHT, config_of, step, tokens

from .compare import differences

# of the last call; and times
CALL = frozenset({"running", "shared", "new", "plain", "ms", "spill"})


def assert_same(model: Any, one: TieredCache, other: TieredCache) -> None:
    """They hold the same to the last bit, and go on alike."""
    assert differences(vars(one)["layers"], vars(other)["layers"], but=CALL) == []
    for each in ("guard", "memory"):
        assert differences(getattr(one, each), getattr(other, each), but=CALL | {"spill", "cache", "watches"}) == []
    for at in range(25):
        logits = [step(model, each, tokens(1, 900 + at)) for each in (one, other)]
        assert torch.equal(*logits)


def give(model: Any, cache: TieredCache, first: int, count: int, seed: int = 0) -> None:
    """Keys, values and queries by position alone: what a model computes also rounds by how many come together."""
    made = [torch.Generator().manual_seed(10_000 * seed + at) for at in range(first, first + count)]
    for index, layer in enumerate(cache.tiered):
        key, value, query = (
            torch.stack([torch.randn(heads, 16, generator=each) for each in made], dim=1)[None] for heads in (2, 2, 4)
        )
        if index == 0:
            cache.note_ids(torch.tensor([[1 + each.initial_seed() % 200 for each in made]]))
        call: dict[str, Any] = {}
        key, value = cache.update(key, value, index, kwargs=call)
        at = torch.arange(first, first + count)[None]
        layer.attend(model.model.layers[index].self_attn, AttentionCall(query, None, 0.25), at)


@pytest.mark.parametrize("kind", [*KINDS, "guard"])
@pytest.mark.parametrize("drafts", [2, *slow(5)])
def test_rejected_drafts_leave_nothing(kind: str, drafts: int, tmp_path: Path) -> None:
    """Also when the first call brings the prompt and drafts, as in transformers' assisted decoding."""
    model = make_tiny_model()
    config = FadeConfig(**GUARDED) if kind == "guard" else config_of(kind, model, tmp_path)
    drafted, plain = create_tiered_cache(model, config), create_tiered_cache(model, config)
    for cache in (drafted, plain):
        cache.activate_past_recording()
    seen = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at, good in enumerate([70, *(1 + at % 3 for at in range(12))]):
            give(model, plain, seen, good)
            give(model, drafted, seen, good + drafts - at % 2)  # the tokens that follow are others in the end
            plain.crop(0)
            drafted.crop(at % 2 - drafts)
            seen += good
    assert differences(drafted.layers, plain.layers, but=CALL) == []
    assert drafted.tiered[0].tokens.compressed
    assert_same(model, drafted, plain)


@pytest.mark.parametrize("kind", [*KINDS, "guard"])
def test_a_question_that_is_taken_back_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """Without recording: its tokens come in one call, and are not counted before the next."""
    model = make_tiny_model()
    config = FadeConfig(**GUARDED) if kind == "guard" else config_of(kind, model, tmp_path)
    asked, plain = create_tiered_cache(model, config), create_tiered_cache(model, config)
    for cache in (asked, plain):
        step(model, cache, tokens(70, 0))
        step(model, cache, tokens(1, 1))
    if kind == "chunked":
        step(model, plain, tokens(1, 2))
        step(model, asked, tokens(1, 2))
    step(model, asked, tokens(5, 3))
    asked.crop(-3)
    asked.crop(-2)
    assert_same(model, asked, plain)


def test_what_has_been_counted_is_not_taken_back(tiny_model: Any) -> None:
    model = tiny_model()
    cache = create_tiered_cache(model, FadeConfig(**TIGHT))
    step(model, cache, tokens(70, 0))
    before = copy.deepcopy(cache)
    with pytest.raises(FadeError, match="cannot take back 1 tokens: only the newest 0 have not entered statistics"):
        cache.crop(-1)
    assert_same(model, cache, before)
    recorded = create_tiered_cache(model, FadeConfig(**TIGHT))
    recorded.activate_past_recording()
    for at in range(30):
        step(model, recorded, tokens(1, at))
    recorded.crop(-9)
    assert recorded.get_seq_length() == 21


def test_a_first_call_that_is_taken_back_whole_may_be_followed_by_a_longer_one(tiny_model: Any) -> None:
    model = tiny_model()
    cache, plain = (create_tiered_cache(model, FadeConfig(**TIGHT)) for _ in range(2))
    cache.activate_past_recording()
    step(model, cache, tokens(5, 0))
    cache.crop(-5)
    for each in (cache, plain):
        each.activate_past_recording()
        assert torch.equal(step(model, each, tokens(60, 1)), step(model, create_tiered_cache(model), tokens(60, 1)))
        each.crop(0)
    assert cache.tiered[0].tokens.sequences.counts == [60]
    assert_same(model, cache, plain)


def test_recording_does_not_grow_without_bound(tiny_model: Any) -> None:
    """As many tokens as the window has can be taken back; what is older is counted."""
    model = tiny_model()
    cache = create_tiered_cache(model, FadeConfig(**TIGHT))
    cache.activate_past_recording()
    step(model, cache, tokens(50, 0))
    for at in range(60):
        step(model, cache, tokens(1, at))
    layer = cache.tiered[0]
    assert layer.seen - layer.final == TIGHT["recent_window"]
    assert len(layer.tokens.full) <= TIGHT["n_sink"] + 2 * TIGHT["recent_window"] + TIGHT["reassign_every"]


def test_assisted_decoding_gives_what_plain_decoding_gives_where_nothing_is_compressed(tiny_model: Any) -> None:
    model = tiny_model()
    options = dict(max_new_tokens=30, do_sample=False)
    ids = tokens(15, 0).repeat(3)[None]
    config = FadeConfig(n_sink=2, recent_window=200, int4_budget=10)
    plain = model.generate(ids, past_key_values=create_tiered_cache(model, config), **options)
    cache = create_tiered_cache(model, config)
    assert torch.equal(model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, **options), plain)


def test_what_came_in_inference_mode_is_counted_outside_of_it(tiny_model: Any) -> None:
    model = tiny_model()
    caches = [create_tiered_cache(model, FadeConfig(**TIGHT)) for _ in range(2)]
    with torch.inference_mode():
        for cache in caches:
            step(model, cache, tokens(60, 0))
            step(model, cache, tokens(4, 1))
        caches[0].count_held()
    caches[1].count_held()
    with torch.inference_mode():
        assert_same(model, *caches)


class Boom(RuntimeError):
    """What a test raises in the middle of a call."""


def assert_taken_back_or_named(model: Any, cache: TieredCache, clean: TieredCache, ids: Tensor, again: Tensor) -> bool:
    """After a failed call the same call gives what it should, or a refusal by name; a reset cache is a new one."""
    assert cache.get_seq_length() == clean.get_seq_length()
    got: Tensor | None = None
    refusals: list[str] = []
    try:
        got = torch.cat([step(model, cache, ids), step(model, cache, tokens(1, 77))], 1)
    except FadeError as error:
        refusals.append(str(error))
    assert all("did not end" in refusal for refusal in refusals)
    if got is not None:
        assert torch.equal(got, torch.cat([step(model, clean, ids), step(model, clean, tokens(1, 77))], 1))
        assert differences(cache.layers, clean.layers, but=CALL) == []  # statistics too, which decide later
    cache.reset()
    fresh = create_tiered_cache(model, cache.config)
    assert torch.equal(step(model, cache, again), step(model, fresh, again))
    assert differences(cache.layers, fresh.layers, but=CALL) == []
    return got is None


@pytest.mark.parametrize("kind", [*KINDS, "guard"])
@pytest.mark.parametrize("error", [Boom, *slow(KeyboardInterrupt)])
@pytest.mark.parametrize("where", ["o_proj", *slow("q_proj")])
def test_a_call_that_fails_in_a_layer_is_taken_back_or_named(
    kind: str, error: type[BaseException], where: str, tmp_path: Path
) -> None:
    model = make_tiny_model(num_hidden_layers=3)
    config = FadeConfig(**GUARDED) if kind == "guard" else config_of(kind, model, tmp_path) if kind != "pq" else None
    if config is None:  # its codebook is of two layers
        return
    for before, size in ((0, 80), (80, 1), (80, 3), (80, 30)):
        cache, clean = create_tiered_cache(model, config), create_tiered_cache(model, config)
        for each in (cache, clean):
            if before:
                step(model, each, tokens(before, 0))
                step(model, each, tokens(1, 1))

        def fail(*given: Any) -> None:
            raise error()

        hook = getattr(model.model.layers[1].self_attn, where).register_forward_pre_hook(fail)
        with pytest.raises(error):
            step(model, cache, tokens(size, 2))
        hook.remove()
        named = assert_taken_back_or_named(model, cache, clean, tokens(size, 2), tokens(80, 0))
        assert not (named and (before == 0 or (kind == "int4" and size < 6))), "nothing of these is final"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h2o", *slow("int4", "learned", "guard", "streaming", "recorded")])
def test_an_interrupt_at_any_line_is_taken_back_or_named(kind: str, tmp_path: Path) -> None:
    model = make_tiny_model()
    options = {"guard": GUARDED, "recorded": TIGHT}
    config = FadeConfig(**options[kind]) if kind in options else config_of(kind, model, tmp_path)
    rng, outcomes = random.Random(0), set()
    for size in (1, 4, 20):
        lines = 0

        def count(frame: Any, event: str, argument: Any) -> Any:
            nonlocal lines
            if "fade_runtime" not in frame.f_code.co_filename:
                return None
            if event == "line":
                lines -= 1
                if lines == 0:
                    raise KeyboardInterrupt
            return count

        def ready() -> TieredCache:
            cache = create_tiered_cache(model, config)
            if kind == "recorded":
                cache.activate_past_recording()
            step(model, cache, tokens(60, 0))
            step(model, cache, tokens(3, 1))  # held until the next call
            return cache

        cache, lines = ready(), 1 << 40
        sys.settrace(count)
        step(model, cache, tokens(size, 2))
        sys.settrace(None)
        for at in sorted(rng.sample(range(1, (1 << 40) - lines), 12)):
            cache, clean = ready(), ready()
            lines = at
            sys.settrace(count)
            try:
                step(model, cache, tokens(size, 2))
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            if cache.get_seq_length() > clean.get_seq_length():
                continue  # the last layer had done all, and only then it was interrupted
            outcomes.add(assert_taken_back_or_named(model, cache, clean, tokens(size, 2), tokens(80, 0)))
    assert False in outcomes


def test_layers_of_transformers_are_taken_back_too_or_named() -> None:
    model = FAMILIES["gemma3"]()
    config = FadeConfig(n_sink=2, recent_window=8, int4_budget=20, sliding="exact")
    for before in (0, 40):
        cache, clean = create_tiered_cache(model, config), create_tiered_cache(model, config)
        for each in (cache, clean):
            if before:
                step(model, each, tokens(before, 0))

        def fail(*given: Any) -> None:
            raise Boom

        hook = model.model.layers[-1].mlp.register_forward_pre_hook(fail)
        if not any(type(layer).__name__ == "TieredLayer" for layer in cache.layers[-1:]):
            hook.remove()
            hook = model.model.layers[-2].mlp.register_forward_pre_hook(fail)
        with pytest.raises(Boom):
            step(model, cache, tokens(30, 2))
        hook.remove()
        assert_taken_back_or_named(model, cache, clean, tokens(30, 2), tokens(50, 0))


def test_another_model_no_tokens_and_other_layers_are_refused(tiny_model: Any) -> None:
    model = tiny_model()
    cache, clean = create_tiered_cache(model, FadeConfig(**TIGHT)), create_tiered_cache(model, FadeConfig(**TIGHT))
    for each in (cache, clean):
        step(model, each, tokens(60, 0))
    deeper, other = tiny_model(num_hidden_layers=3), tiny_model()
    with pytest.raises(FadeError, match="this model's attention does not go over this cache"):
        step(other, cache, tokens(1, 1))
    own = create_tiered_cache(deeper)  # its attention goes over such caches as long as it has one
    assert own.get_seq_length() == 0
    with pytest.raises(FadeError, match="the model has a layer 2, this cache 2 layers"):
        step(deeper, cache, tokens(3, 1))
    with pytest.raises(FadeError, match="layer 0 holds 2 kv heads of dim 16, the model now gives 4 of 16"):
        step(tiny_model(num_key_value_heads=4), cache, tokens(3, 1))
    with pytest.raises(FadeError, match="layer 0 was given no tokens"):
        cache.update(torch.zeros(1, 2, 0, 16), torch.zeros(1, 2, 0, 16), 0)
    assert_same(model, cache, clean)
