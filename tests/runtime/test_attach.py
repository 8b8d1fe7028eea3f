"""What caches change about a model: once for all of them, and only while there are any."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, FadeError, create_tiered_cache
from fade_runtime.cache import attach
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_model
from tests.runtime.caches import random_ids

LOSSY = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, reassign_every=8)
GUARDED = dict(n_sink=2, recent_window=16, int4_budget=20, reassign_every=8, spill="host", monitor_every=8)
SHADOWED = FadeConfig(**GUARDED, guard="warn", shadow_every=4)
AGAIN = FadeConfig(**GUARDED, guard="rollback", on_rollback="redecode")


def stock(model: Any, tokens: Tensor) -> Tensor:
    """Logits of a prompt and a step over transformers' own cache."""
    cache = DynamicCache(config=model.config.get_text_config())
    parts = tokens[:, :-1], tokens[:, -1:]
    return torch.cat([model(part, **forward_kwargs(cache, model)).logits for part in parts], dim=1)


def changes(model: Any) -> dict[str, Any]:
    """All that caches may change."""
    return {
        "attention": [config._attn_implementation for config in attach._configs(model)],
        "kinds": [type(config._attn_implementation) for config in attach._configs(model)],
        "hooks": (len(model._forward_hooks), len(model._forward_pre_hooks), len(model._forward_hooks_with_kwargs)),
        "own": sorted(vars(model)),
    }


def make_nested() -> Any:
    """A model of images and text whose vision part has another attention than its text part."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=make_tiny_model().config, image_token_index=259)
    )
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    return model.eval().requires_grad_(False)


MODELS: dict[str, Callable[[], Any]] = {
    "sdpa": make_tiny_model,
    "eager": lambda: make_tiny_model(attn_implementation="eager"),
    "nested": make_nested,
}
every_model = pytest.mark.parametrize("kind", MODELS)


@every_model
@pytest.mark.parametrize("config", [LOSSY, SHADOWED, AGAIN], ids=["plain", "shadow", "redecode"])
def test_the_model_is_as_before_when_its_last_cache_is_gone(kind: str, config: FadeConfig) -> None:
    model = MODELS[kind]()
    before = changes(model)
    first, second = (create_tiered_cache(model, config) for _ in range(2))
    third = copy.deepcopy(first)
    while_there = changes(model)
    assert set(while_there["attention"]) == {"fade"}
    del first
    assert changes(model) == while_there
    second.detach()
    assert changes(model) == while_there
    del third
    assert changes(model) == before
    second.attach()
    assert changes(model) == while_there
    del second
    gc.collect()
    assert changes(model) == before


def test_with_leaves_the_model_at_the_end_also_after_an_error(model: Any) -> None:
    before = changes(model)
    cache = create_tiered_cache(model, LOSSY)
    with pytest.raises(KeyError), cache:
        _ = model.generate(random_ids(1, 40), max_new_tokens=4, **forward_kwargs(cache, model)), {}["no such key"]
    assert changes(model) == before
    with pytest.raises(FadeError, match=r"'sdpa' cannot skip evicted tokens; call cache.attach\(\)"):
        model(random_ids(1, 1), **forward_kwargs(copy.deepcopy(cache), model))
    cache.attach()
    model(random_ids(1, 1), **forward_kwargs(cache, model))
    assert cache.get_seq_length() == 44


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_an_attention_that_the_user_sets_meanwhile_stays(model: Any, own: str) -> None:
    cache = create_tiered_cache(model, LOSSY)
    model.set_attn_implementation(own)
    later = create_tiered_cache(model, LOSSY)
    assert model.config._attn_implementation == "fade"
    del cache
    assert model.config._attn_implementation == "fade"
    del later
    assert model.config._attn_implementation == own
    cache = create_tiered_cache(model, LOSSY)
    model.set_attn_implementation(own)
    del cache
    assert model.config._attn_implementation == own


@every_model
def test_calls_with_other_caches_are_served_by_the_models_own_attention(kind: str) -> None:
    model, tokens = MODELS[kind](), random_ids(1, 30)
    mask = torch.ones_like(tokens)
    mask[:, :4] = 0
    before = stock(model, tokens), model(tokens, attention_mask=mask).logits
    maps = model(tokens, output_attentions=True).attentions
    with create_tiered_cache(model, LOSSY):
        assert torch.equal(stock(model, tokens), before[0])
        assert torch.equal(model(tokens, attention_mask=mask).logits, before[1])
        now = model(tokens, output_attentions=True).attentions
    assert len(now or ()) == len(maps or ()) == (2 if kind == "eager" else 0)
    assert all(map(torch.equal, now or (), maps or ()))


@every_model
@pytest.mark.parametrize("goes", [True, False], ids=["goes", "comes"])
def test_a_call_during_which_the_model_changes_gives_what_it_gives_alone(kind: str, goes: bool) -> None:
    """As when another thread's cache comes or goes between two layers: masks of one attention meet the other's."""
    model, tokens = MODELS[kind](), random_ids(1, 30)
    expected, caches = model(tokens).logits, [create_tiered_cache(model, LOSSY)] if goes else []

    def change(*_: Any) -> None:
        caches.clear() if goes else caches.append(create_tiered_cache(model, LOSSY))

    model.get_decoder().layers[0].mlp.register_forward_hook(change)
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=0)
    assert bool(caches) != goes


@pytest.mark.parametrize("config", [LOSSY, AGAIN], ids=["plain", "redecode"])
def test_copies_and_pickles_of_a_model_hold_nothing_of_its_caches(config: FadeConfig) -> None:
    model, tokens = MODELS["eager"](), random_ids(1, 20)
    expected = model.generate(tokens, max_new_tokens=3)
    with create_tiered_cache(model, config):
        stored = pickle.dumps(model)
        others = copy.deepcopy(model), pickle.loads(stored)
    assert b"fade" not in stored
    for other in others:
        assert changes(other)["attention"] == ["eager"]
        assert changes(other)["kinds"] == [str]
        assert torch.equal(other.generate(tokens, max_new_tokens=3), expected)


def test_hooks_are_shared_and_may_go_in_the_middle_of_a_call(model: Any) -> None:
    """torch copies the hooks before it calls them, and looks in the model how to call each."""
    caches: dict[str, Any] = {}
    dropped: list[str] = []

    def drop(*_: Any) -> None:
        if dropped:
            caches.pop(dropped.pop())

    model.register_forward_pre_hook(drop)  # before ours
    model.register_forward_hook(drop)
    caches |= {name: create_tiered_cache(model, SHADOWED) for name in ("mine", "other", "third")}
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 2
    mine = caches["mine"]
    dropped += ["third", "other"]
    model(random_ids(1, 40), **forward_kwargs(mine, model))
    assert mine.text is not None
    assert torch.equal(mine.text.ids, random_ids(1, 40).int())
    assert len(model._forward_pre_hooks) == 2
    del mine
    dropped += ["mine"]  # the last one goes in somebody else's call
    assert torch.equal(
        model(random_ids(1, 40)).logits, make_tiny_model(model.config.model_type)(random_ids(1, 40)).logits
    )
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


def test_a_cache_that_dies_while_the_model_is_being_changed_is_no_deadlock(model: Any) -> None:
    """The garbage collector may run anywhere, also in the thread that changes something."""
    cache = create_tiered_cache(model, LOSSY)
    with attach.changing():
        del cache
        assert model.config._attn_implementation == "fade"
    assert model.config._attn_implementation == "sdpa"


def test_caches_of_many_threads_come_and_go(model: Any) -> None:
    tokens, before = random_ids(1, 24), changes(model)
    expected, wrong, last = model(tokens).logits, [], threading.Barrier(4)

    def work(config: FadeConfig | None) -> None:
        try:
            for _ in range(15):
                cache = None if config is None else create_tiered_cache(model, config)
                ours = model(tokens, **({} if cache is None else forward_kwargs(cache, model))).logits
                torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
                del cache
            last.wait()
        except BaseException as error:
            wrong.append(error)
            last.abort()

    threads = [threading.Thread(target=work, args=(config,)) for config in (None, LOSSY, SHADOWED, AGAIN)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert changes(model) == before
