"""Fault injection on a real language model: what fails without the guard is right with it."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.corpus import builtin_families
from fade_runtime import FadeConfig, TieredCache, create_tiered_cache
from fade_runtime.policies.base import Prompt
from fade_runtime.policies.learned import Learned
from fade_runtime.transformers_api import forward_kwargs

pytestmark = pytest.mark.slow

SHIPPED = "smollm2-135m-instruct"
GUARD: dict[str, Any] = dict(guard="rollback", spill="host", monitor_every=16)
NEEDLE = "The secret code of the castle is 7491."
QUESTION = "What is the secret code of the castle?"


class Shuffled(Learned):
    """A predictor whose scores are those of other tokens."""

    def start(self, prompt: Prompt) -> Tensor:
        state = super().start(prompt)
        return state[:, torch.randperm(state.shape[1], generator=torch.Generator().manual_seed(0))]


class Constant(Learned):
    """A predictor that says the same of every token."""

    def start(self, prompt: Prompt) -> Tensor:
        return torch.full_like(super().start(prompt), 1e-3)


@pytest.fixture(scope="module")
def lm(real_model_dir: Path) -> Any:
    from data.lm import load_lm

    return load_lm(str(real_model_dir), "float32")


def make_cache(model: Any, config: FadeConfig, policy: type[Learned] | None = None) -> TieredCache:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        cache = create_tiered_cache(model, config)
    if policy is not None:
        assert cache.policy.predictor is not None
        cache.policy = policy(cache.policy.predictor)
        for layer in cache.tiered:
            layer.setup = replace(layer.setup, policy=cache.policy)
    return cache


def filler() -> list[str]:
    """Words of an English text that knows no castle."""
    topics = builtin_families(seed=0)[0]
    return " ".join(text.text for text in itertools.islice(topics, 20)).split()


def answer(lm: Any, cache: TieredCache) -> str:
    """Tell a fact in the midst of a long text, then ask for it in a second turn."""
    model, tokenizer = lm
    words = filler()
    told = " ".join(words[:175]) + f"\n{NEEDLE}\n" + " ".join(words[175:350]) + "\nSay ok."
    chat = [{"role": "user", "content": told}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    asked = f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    options: dict[str, Any] = dict(past_key_values=cache, do_sample=False, pad_token_id=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = model.generate(ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=8, **options)
        second = torch.cat((first, tokenizer(asked, return_tensors="pt")["input_ids"]), dim=1)
        out = model.generate(second, attention_mask=torch.ones_like(second), max_new_tokens=16, **options)
    return tokenizer.decode(out[0, second.shape[1] :], skip_special_tokens=True)


FAULTS: dict[str, tuple[dict[str, Any], type[Learned] | None]] = {
    "h2o": (dict(int4_budget=0.1, eviction_policy="h2o"), None),
    "position": (dict(int4_budget=0.1, eviction_policy="position"), None),
    "shuffled": (dict(int4_budget=0.1, eviction_policy="learned", predictor=SHIPPED, head_budgets=False), Shuffled),
    "constant": (dict(int4_budget=0.1, eviction_policy="learned", predictor=SHIPPED, head_budgets=False), Constant),
}


@pytest.fixture(scope="module")
def right(lm: Any) -> str:
    """What is answered when nothing is compressed."""
    return answer(lm, make_cache(lm[0], FadeConfig(compression="off")))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_question_about_evicted_text_is_answered_after_rollback(fault: str, lm: Any, right: str) -> None:
    options, policy = FAULTS[fault]
    assert "7491" in right
    assert "7491" not in answer(lm, make_cache(lm[0], FadeConfig(**options), policy))
    cache = make_cache(lm[0], FadeConfig(**options, **GUARD), policy)
    assert answer(lm, cache).rstrip(".") == right.rstrip(".")
    assert cache.monitor.report()["state"] in ("raised", "full")


def test_text_that_turns_back_to_what_was_evicted_is_noticed_in_time(lm: Any) -> None:
    """The text goes on with a passage of its beginning, which nothing in the prompt announced."""
    model, tokenizer = lm
    ids = tokenizer(" ".join(filler()), return_tensors="pt")["input_ids"][:, :1000]
    passage = ids[:, 200 : 200 + 3 * GUARD["monitor_every"]]
    options = dict(int4_budget=0.1, eviction_policy="ema")
    caches = {
        "full": make_cache(model, FadeConfig(compression="off")),
        "guard": make_cache(model, FadeConfig(**options, **GUARD)),
        "none": make_cache(model, FadeConfig(**options)),
    }
    kl: dict[str, list[float]] = {"guard": [], "none": []}
    fired = None
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for cache in caches.values():
            model(ids, **forward_kwargs(cache, model))
        before = caches["guard"].monitor.restored
        for step in range(passage.shape[1]):
            token = passage[:, step : step + 1]
            logits = {
                name: model(token, **forward_kwargs(cache, model)).logits[0, -1].log_softmax(-1)
                for name, cache in caches.items()
            }
            for name, each in kl.items():
                each.append(float((logits["full"].exp() * (logits["full"] - logits[name])).sum()))
            if fired is None and caches["guard"].monitor.restored > before:
                fired = step + 1
    assert fired is not None
    assert fired <= 2 * GUARD["monitor_every"]
    tail = slice(2 * GUARD["monitor_every"], None)
    assert sum(kl["guard"][tail]) < 0.2 * sum(kl["none"][tail])


def test_a_good_predictor_is_left_alone(lm: Any) -> None:
    """On ordinary text the shipped predictor's forecast holds: few heads are raised, most stays evicted."""
    model, tokenizer = lm
    ids = tokenizer(" ".join(filler()), return_tensors="pt")["input_ids"][:, :1064]
    cache = make_cache(model, FadeConfig.balanced(predictor=SHIPPED, **GUARD))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        model(ids[:, :1000], **forward_kwargs(cache, model))
        for at in range(1000, 1064):
            model(ids[:, at : at + 1], **forward_kwargs(cache, model))
    report = cache.monitor.report()
    assert report["probes"] > 120
    assert report["raised"] <= 0.15 * report["heads"]
