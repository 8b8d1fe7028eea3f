"""After a rollback the tokens in doubt are decoded again under plain `generate`."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, TextStreamer

from fade_runtime import FadeConfig, FadeError, TieredCache, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from tests.families import FAMILIES
from tests.runtime.caches import random_ids

OPTIONS: dict[str, Any] = dict(
    n_sink=2, recent_window=32, int4_budget=10, reassign_every=16, guard="rollback", spill="host", monitor_every=8
)
AGAIN = dict(OPTIONS, on_rollback="redecode")


def generate(model: Any, ids: Tensor, cache: Any, new: int = 40, **options: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)


def late(model: Any, steps: int, **options: Any) -> TieredCache:
    """A cache whose guard finds all in order until some steps after the prompt, and all wrong from then on."""
    cache = create_tiered_cache(model, FadeConfig(**{**AGAIN, "kl_alarm": 0.1, **options}))
    for watch in cache.guard.watches:
        follow = watch.follow

        def seeing(layer: Any, look: Any, queries: int, follow: Any = follow) -> Any:
            wrong = float(layer.seen >= 200 + steps)
            return follow(layer, replace(look, kl=torch.full_like(look.kl, wrong)), queries)

        watch.follow = seeing  # type: ignore[method-assign]
    return cache


def at_most(watch: Any, good: int) -> None:
    """Let a watch find nothing in order after so many tokens."""
    follow = watch.follow

    def seeing(*given: Any) -> Any:
        done = follow(*given)
        watch.good = min(watch.good, good)
        return done

    watch.follow = seeing


def test_what_was_generated_in_doubt_is_generated_again(model: Any) -> None:
    """From the last good look on the text is that of a cache whose tokens were taken back to there by hand."""
    ids = random_ids(1, 200)
    cache = late(model, steps=13)
    out = generate(model, ids, cache)
    assert cache.monitor.report()["state"] == "full"
    assert out.shape == (1, 240)
    assert torch.equal(out[:, :200], ids)
    assert cache.get_seq_length() == 239

    other = late(model, steps=10_000)  # the same by hand: it was noticed after 216 tokens, and 208 were in order
    for layer in other.tiered:
        at_most(layer.hooks, 208)
    blind = generate(model, ids, other, new=17)
    assert torch.equal(blind[:, :209], out[:, :209])
    other.crop(208 - other.get_seq_length())
    for layer in other.tiered:
        layer.tokens.restore()
        layer.hooks.raised = [True] * len(layer.hooks.raised)
        layer.hooks.follow = lambda *_: (0, "look")  # and stays so
    assert torch.equal(generate(model, blind[:, :209], other, new=31), out)
    without = generate(model, ids, late(model, steps=13, on_rollback="continue"))
    assert not torch.equal(without, out)


def test_nothing_in_doubt_is_plain_generate(model: Any) -> None:
    ids = random_ids(1, 150)
    once = {"int4_budget": None, "reassign_every": 64}  # what is not yet found in order is compressed later
    config = FadeConfig(**{**AGAIN, **once})
    stock = generate(model, ids, create_tiered_cache(model, FadeConfig(**{**OPTIONS, **once})))
    assert torch.equal(generate(model, ids, create_tiered_cache(model, config)), stock)
    full = generate(model, ids[:, :20], DynamicCache(config=model.config))  # other caches do not notice
    assert torch.equal(generate(model, ids[:, :20], create_tiered_cache(model, FadeConfig.safe())), full)


def test_end_tokens_and_length_count_over_all_pieces(model: Any) -> None:
    ids = random_ids(1, 200)
    out = generate(model, ids, late(model, steps=13), new=17)
    assert out.shape[1] == 217
    blind = generate(model, ids, late(model, steps=10_000), new=17)[0, 200:].tolist()
    text = out[0, 200:].tolist()
    first = next(at for at in range(9, 17) if text[at] not in blind and text[at] not in text[:at]) + 200
    stop = int(out[0, first])  # what is in doubt does not end with it
    ended = generate(model, ids, late(model, steps=13), new=17, eos_token_id=stop)
    assert torch.equal(ended, out[:, : first + 1])


def test_a_second_turn_keeps_the_question(model: Any) -> None:
    ids = random_ids(1, 200)
    cache = late(model, steps=30)
    first = generate(model, ids, cache, new=10)
    asked = torch.cat((first, random_ids(1, 25, seed=3)), dim=1)
    out = generate(model, asked, cache, new=20)
    assert torch.equal(out[:, : asked.shape[1]], asked)
    assert out.shape[1] == asked.shape[1] + 20
    assert cache.get_seq_length() == out.shape[1] - 1
    assert cache.monitor.restored > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(guard="warn"), "needs what was evicted; set guard='rollback' and a spill store"),
        (dict(spill="none"), "needs what was evicted"),
        (dict(monitor_every=17), "drops up to 2 x monitor_every 17 tokens, .* lower monitor_every to 16 or less"),
    ],
    ids=["warn", "no spill", "window"],
)
def test_options_that_cannot_work_are_refused_at_creation(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FadeError, match=message):
        FadeConfig(**{**AGAIN, **options})


@pytest.mark.parametrize("family", ["mistral_sliding", "qwen3_next", "gemma3"])
def test_models_whose_layers_cannot_be_cropped_are_refused_at_creation(family: str) -> None:
    with pytest.raises(FadeError, match="'redecode' cannot take tokens out of the recurrent or sliding layers"):
        create_tiered_cache(FAMILIES[family](), FadeConfig(**AGAIN))


def test_calls_that_cannot_work_are_refused(model: Any, tiny_tokenizer: Any) -> None:
    cache = create_tiered_cache(model, FadeConfig(**AGAIN))
    for options, message in (
        (dict(num_beams=2), "num_beams above 1 does not go with"),
        (dict(streamer=TextStreamer(tiny_tokenizer)), "streamer does not go with on_rollback 'redecode'"),
    ):
        with pytest.raises(FadeError, match=message):
            generate(model, random_ids(1, 20), cache, **options)
    with pytest.raises(FadeError, match="one sequence of input_ids at a time"):
        generate(model, random_ids(1, 20).expand(2, -1), cache)


def test_a_copy_of_the_model_generates_by_itself(model: Any) -> None:
    cache = create_tiered_cache(model, FadeConfig(**AGAIN))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
    ids = random_ids(1, 20)
    ours, theirs = (generate(each, ids, DynamicCache(config=model.config), new=3) for each in (model, other))
    assert not torch.equal(ours, theirs)
    assert cache.get_seq_length() == 0


def test_the_model_is_not_kept_alive(tiny_model: Any) -> None:
    model = tiny_model("llama")
    cache = create_tiered_cache(model, FadeConfig(**AGAIN))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert cache.get_seq_length() == 0


def test_the_new_name_of_the_cache_is_heard_too(model: Any) -> None:
    ids = random_ids(1, 200)
    cache = late(model, steps=13)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(ids, max_new_tokens=40, do_sample=False, **forward_kwargs(cache, model))
    assert torch.equal(out, generate(model, ids, late(model, steps=13)))


def test_a_generate_that_was_looked_up_before_the_cache_was_made_says_that_it_does_not_decode_again(model: Any) -> None:
    plain = model.generate
    cache = late(model, steps=13)
    with pytest.warns(RuntimeWarning, match="in doubt and nothing decodes them again; make the cache first"):
        plain(random_ids(1, 200), max_new_tokens=40, do_sample=False, **forward_kwargs(cache, model))


def test_a_generate_that_was_there_before_is_called_and_comes_back(model: Any) -> None:
    calls: list[int] = []

    def own(*args: Any, **options: Any) -> Any:
        calls.append(len(args))
        return type(model).generate(model, *args, **options)

    model.generate = own
    ids = random_ids(1, 200)
    out = generate(model, ids, late(model, steps=13))
    assert len(calls) > 1  # in pieces
    assert model.generate is own
    del model.generate
    assert torch.equal(out, generate(model, ids, late(model, steps=13)))


def test_a_cache_that_goes_away_leaves_the_generate_of_another_alone(model: Any) -> None:
    ids = random_ids(1, 200)
    expected = generate(model, ids, late(model, steps=13))
    others = [create_tiered_cache(model, FadeConfig(**AGAIN))]

    def drop(*_: Any, **__: Any) -> Tensor:
        others.clear()
        return torch.zeros(1, dtype=torch.bool)

    assert torch.equal(generate(model, ids, late(model, steps=13), stopping_criteria=[drop]), expected)
    assert "generate" not in vars(model)
