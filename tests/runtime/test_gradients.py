"""Training over a cache: gradients are those of transformers' own cache that holds the same keys and values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, FadeError, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_model
from tests.families import FAMILIES
from tests.runtime.caches import random_ids

SAFE = FadeConfig(n_sink=2, recent_window=8, reassign_every=8)
CONFIGS = {
    "off": FadeConfig(compression="off"),
    "4 bits": SAFE,
    "statistics": SAFE.with_options(int4_budget=1.0, low_budget=None, guard="warn", spill="host", monitor_every=4),
    "streaming": SAFE.with_options(positions="streaming"),
}


def forward(model: Any, cache: Any, tokens: Tensor, **more: Any) -> Any:
    return model(tokens, **forward_kwargs(cache, model), **more)


def after(model: Any, cache: Any, prefix: Tensor) -> Any:
    with torch.no_grad():
        forward(model, cache, prefix)
    return cache


def same_tokens(model: Any, cache: Any) -> DynamicCache:
    """transformers' own cache, with the keys and values that a tiered one holds."""
    stock = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "materialise"):
            stock.update(*layer.materialise(), index)
        else:
            stock.layers[index] = copy.deepcopy(layer)
    return stock


def gradients(model: Any, cache: Any, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    forward(model, cache, tokens, labels=tokens).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("family", "trained"), [("llama", ""), ("llama", "k_proj"), ("gemma2", ""), ("gpt2", ""), ("gpt_oss", "")]
)
def test_gradients_are_those_of_the_same_tokens_in_transformers_own_cache(
    config: FadeConfig, family: str, trained: str
) -> None:
    model, prefix, tokens = FAMILIES[family](), random_ids(2, 60), random_ids(2, 12, seed=1)
    if config.positions == "streaming" and family == "gpt2":
        pytest.skip("no rotary positions")
    caches = [after(model, create_tiered_cache(model, config), prefix) for _ in range(2)]
    stock = same_tokens(model, caches[0])
    names = [name for name, _ in model.named_parameters() if trained in name]
    for name in names:
        model.get_parameter(name).requires_grad_(True)
    ours, theirs = (gradients(model, cache, tokens) for cache in (caches[0], stock))
    assert ours.keys() == theirs.keys() <= set(names)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)
    after(model, caches[1], tokens)  # gradients change nothing of what is stored
    for with_gradients, without in zip(*(cache.tiered for cache in caches)):
        for name, tensor in without.tensors().items():
            assert not with_gradients.tensors()[name].requires_grad
            torch.testing.assert_close(with_gradients.tensors()[name], tensor, atol=1e-5, rtol=1e-4)


def test_gradients_through_several_turns_are_refused_unless_the_turn_was_taken_back(model: Any) -> None:
    prefix, tokens = random_ids(1, 60), random_ids(1, 6, seed=1)
    cache = after(model, create_tiered_cache(model, SAFE.with_options(eviction_policy="position")), prefix)
    model.requires_grad_(True)
    loss = forward(model, cache, tokens, labels=tokens).loss
    loss.backward()
    again = forward(model, cache, tokens, labels=tokens).loss  # no gradients, no objection
    with pytest.raises(FadeError, match="gradients do not reach the tokens of earlier calls, .* torch.no_grad"):
        again.backward()
    cache.reset()
    after(model, cache, prefix[:, :6])
    before = forward(model, cache, tokens, labels=tokens).loss
    cache.crop(-6)
    gradients(model, cache, tokens)
    assert before.requires_grad


def test_under_another_attention_that_reads_all_tokens_gradients_are_the_same(model: Any) -> None:
    prefix, tokens = random_ids(1, 60), random_ids(1, 6, seed=1)
    cache = after(model, create_tiered_cache(model, SAFE), prefix)
    stock = same_tokens(model, cache)
    model.requires_grad_(True).set_attn_implementation("eager")
    ours, theirs = gradients(model, cache, tokens), gradients(model, stock, tokens)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("no_grad", [True, False])
def test_dropout_is_that_of_transformers_own_cache_or_refused(no_grad: bool) -> None:
    model, tokens = make_tiny_model(attention_dropout=0.5).train().requires_grad_(True), random_ids(1, 20)
    outs = []
    with torch.set_grad_enabled(not no_grad):
        for seed in (0, 1):
            for cache in (create_tiered_cache(model, CONFIGS["off"]), DynamicCache(config=model.config)):
                torch.manual_seed(seed)
                logits = forward(model, cache, tokens).logits
                outs.append(logits)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[2], outs[3])
    assert not torch.equal(outs[0], outs[2])
    cache = after(model.eval(), create_tiered_cache(model, SAFE), tokens)
    model.train()
    with pytest.raises(FadeError, match="attention dropout is not applied to packed tokens"):
        forward(model, cache, tokens[:, :3])
