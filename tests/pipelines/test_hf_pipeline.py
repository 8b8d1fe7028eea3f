"""The pipeline "fade-text-generation" beside transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines.integrations.hf_pipeline import TASK, register_pipeline
from predictor.errors import FadeError

CHAT = [{"role": "system", "content": "be brief " * 10}, {"role": "user", "content": "who is there? " * 20}]
TEXTS = ["once upon a time " * 20, "there was " * 15, "a"]
GREEDY = dict(do_sample=False, max_new_tokens=10)
EVICTING = {"int4_budget": 0.2, "eviction_policy": "position"}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_pipeline()
    register_pipeline()  # says nothing
    yield
    PIPELINE_REGISTRY.supported_tasks.pop(TASK)


def make(path: Path, task: str = TASK, **options: Any) -> Any:
    made = pipeline(task, model=str(path), dtype="float32", device="cpu", **options)
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.mark.parametrize(
    ("given", "batch"),
    [(TEXTS[0], 1), (TEXTS, 1), (TEXTS, 2), (CHAT, 1), ([CHAT, CHAT[1:]], 2)],
    ids=["text", "texts", "batch", "chat", "chats"],
)
def test_with_nothing_compressed_it_answers_as_text_generation_does(
    given: Any, batch: int, tiny_model_dir: Path
) -> None:
    stock = make(tiny_model_dir, "text-generation")
    ours = make(tiny_model_dir, fade_config=FadeConfig(compression="off"))
    for options in (
        GREEDY,
        {**GREEDY, "return_full_text": False},
        {**GREEDY, "return_tensors": True},
        {**GREEDY, "num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 3},
    ):
        torch.manual_seed(0)
        expected = stock(given, batch_size=batch, **options)
        torch.manual_seed(0)
        assert ours(given, batch_size=batch, **options) == expected


def test_generation_goes_over_the_tiers_of_its_config(tiny_model_dir: Path) -> None:
    ours = make(tiny_model_dir, fade_config=EVICTING, return_full_text=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    for config in (FadeConfig(**EVICTING), FadeConfig.safe(int4_budget=0.1)):  # as made, as called
        inputs = tokenizer(TEXTS[0], return_tensors="pt")
        cache = create_tiered_cache(model, config)
        tokens = model.generate(**inputs, **forward_kwargs(cache, model), **GREEDY)[0]
        (record,) = ours(TEXTS[0], fade_config=config, return_memory=True, **GREEDY)
        assert record["generated_text"] == tokenizer.decode(
            tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        report = cache.memory_report()
        assert record["memory"] == {name: report[name] for name in ("resident_bytes", "full_bytes", "compression")}
        assert record["memory"]["compression"] > 2
    assert ours(TEXTS[0], **GREEDY) == ours(TEXTS[0], fade_config=FadeConfig(**EVICTING), **GREEDY)


def test_memory_is_that_of_a_batch_and_only_on_request(tiny_model_dir: Path) -> None:
    ours = make(tiny_model_dir, fade_config="safe")
    assert "memory" not in ours(TEXTS[0], **GREEDY)[0]
    alone = [ours(text, return_memory=True, **GREEDY)[0]["memory"]["full_bytes"] for text in TEXTS[:2]]
    together = ours(TEXTS[:2], return_memory=True, batch_size=2, num_return_sequences=1, **GREEDY)
    assert {row[0]["memory"]["full_bytes"] for row in together} == {2 * max(alone)}
    tensors = ours(TEXTS[0], return_memory=True, return_tensors=True, **GREEDY)[0]
    assert tensors["memory"]["full_bytes"] == alone[0]


def test_a_predictor_alone_means_balanced(tiny_model_dir: Path, bundles: dict[str, Path]) -> None:
    ours = make(tiny_model_dir, predictor=bundles["mlp"])
    (record,) = ours(TEXTS[0], return_memory=True, **GREEDY)
    (safe,) = ours(TEXTS[0], fade_config="safe", return_memory=True, **GREEDY)
    assert record["memory"]["resident_bytes"] != safe["memory"]["resident_bytes"]


def test_bad_input_is_named(tiny_model_dir: Path) -> None:
    with pytest.raises(FadeError, match="config 'brave' is neither safe"):
        make(tiny_model_dir, fade_config="brave")
    ours = make(tiny_model_dir)
    with pytest.raises(FadeError, match="unknown option budget"):
        ours(TEXTS[0], fade_config={"budget": 1})
    cache = create_tiered_cache(ours.model)
    with pytest.raises(FadeError, match="past_key_values is given, but fade-text-generation makes a cache"):
        ours(TEXTS[0], past_key_values=cache)
