"""A smaller model's help: its attention by the stock implementation, the fusion by loops, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from fade_runtime import FadeConfig, FadeError, create_tiered_cache, load_session
from fade_runtime.cache.assistant import Assistant, first_layers, fuse
from fade_runtime.transformers_api import forward_kwargs
from tests.runtime.caches import reachable

PROMPT, TAIL = 90, 40
SMALL: dict[str, Any] = dict(n_sink=2, recent_window=8, int4_budget=20, assist_tail=TAIL)


def _ids(batch: int = 1, length: int = PROMPT) -> Tensor:
    return torch.randint(3, 250, (batch, length), generator=torch.Generator().manual_seed(5))


def _heard(model: Any, ids: Tensor, decay: float = 0.95, window: int = 64) -> Tensor:
    """[n] moving average of the last queries' attention by the eager implementation, over heads and layers."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True, **forward_kwargs(DynamicCache(config=model.config), model))
    rows = torch.stack([each[0].mean(0) for each in out.attentions]).mean(0)[-window:]
    weights = decay ** torch.arange(len(rows) - 1, -1, -1.0)
    return (rows * (weights / weights.sum())[:, None]).sum(0)


@given(st.integers(1, 30), st.integers(0, 30), st.floats(0, 1), st.integers(0, 999))
def test_fusion_is_a_loop_and_keeps_every_sum(known: int, before: int, weight: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    score, heard = torch.rand(3, before + known, generator=random), torch.rand(known, generator=random)
    got = fuse(score, heard, weight)
    for head in range(3):
        mass = sum(score[head, before:].tolist())
        for slot in range(before + known):
            here = float(score[head, slot])
            if slot >= before:
                here = weight * here + (1 - weight) * float(heard[slot - before]) / sum(heard.tolist()) * mass
            assert float(got[head, slot]) == pytest.approx(here, abs=1e-5)
    assert torch.allclose(got.sum(1), score.sum(1), atol=1e-4)
    assert torch.equal(fuse(score, heard, 1.0), score)


@pytest.mark.parametrize("length", [20, TAIL, PROMPT])
def test_importance_is_what_the_smaller_model_attends_to(model: Any, length: int) -> None:
    small = first_layers(model, 1)
    ids = _ids(length=length)
    expected = _heard(small, ids[:, -TAIL:])
    got = Assistant(small, weight=0.7, tail=TAIL, make_cache=create_tiered_cache).importance(ids[0])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert float(got.sum()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("policy", ["h2o", "ema", "fastgen"])
@pytest.mark.parametrize("weight", [0.6, 0.8])
def test_scores_at_the_end_of_a_prompt_are_fused(model: Any, tiny_tokenizer: Any, policy: str, weight: float) -> None:
    """Each layer's scores with help are those without, mixed with the same importance; a batch row by row."""
    options = dict(SMALL, recent_window=500, eviction_policy=policy)
    if policy == "fastgen":
        options["tokenizer"] = tiny_tokenizer
    ids, slots = _ids(batch=2), torch.arange(PROMPT)
    plain = create_tiered_cache(model, FadeConfig(**options))
    helped = create_tiered_cache(model, FadeConfig(**options, assistant=1, assist_weight=weight))
    for cache in (plain, helped):
        model(ids, **forward_kwargs(cache, model))
    small = first_layers(model, 1)
    for layer, other in zip(plain.tiered, helped.tiered):
        for row in range(2):
            before, after = (
                one.policy.score(one.tokens.full.attention_stats[row], slots, PROMPT, PROMPT) for one in (layer, other)
            )
            expected = fuse(before, _heard(small, ids[row : row + 1, -TAIL:]), weight)
            torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-3)
            assert not torch.allclose(after, before, atol=1e-4)


def test_padded_rows_and_chunks_are_helped_as_they_are_alone(model: Any) -> None:
    config = FadeConfig(**SMALL, assistant=1)
    short, long = _ids(length=53), _ids(length=80)
    ids = torch.cat((torch.nn.functional.pad(short, (27, 0), value=257), long))
    both = create_tiered_cache(model, config)
    model.generate(ids, attention_mask=(ids != 257).long(), max_new_tokens=2, past_key_values=both)
    for row, prompt in enumerate((short, long)):
        alone, pieces = (
            create_tiered_cache(model, config),
            create_tiered_cache(model, config.with_options(chunked_prefill=True)),
        )
        model.generate(prompt, max_new_tokens=2, past_key_values=alone)
        for piece in prompt.split(30, dim=1):
            model(piece, **forward_kwargs(pieces, model))
        model(prompt[:, :1], **forward_kwargs(pieces, model))
        for layer, one, other in zip(both.tiered, alone.tiered, pieces.tiered):
            packed = layer.tokens.packed
            mine = packed.slots()[packed.token_row() // 2 == row]
            assert torch.equal(mine, one.tokens.packed.slots())
            assert torch.equal(other.tokens.packed.slots(), one.tokens.packed.slots())


def test_no_copy_of_the_smaller_model_and_no_trace_of_the_prompt(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(num_hidden_layers=3)
    cache = create_tiered_cache(model, FadeConfig(**SMALL, assistant=2))
    assert cache.text is not None
    ids = _ids()
    model(ids, **forward_kwargs(cache, model))
    model(ids[:, :1], **forward_kwargs(cache, model))
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    report = cache.memory_report()
    own = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in reachable(cache)
        if tensor.data_ptr() not in weights
    }
    rotary = sum(buffer.untyped_storage().nbytes() for buffer in model.buffers())
    assert report["tiers"]["text"] == 4 * (PROMPT + 1)
    assert report["resident_bytes"] <= sum(own.values()) <= report["resident_bytes"] + rotary
    assert len(model.model.layers) == 3
    assert model.config.num_hidden_layers == 3


def test_a_directory_a_model_and_a_session(tiny_model_dir: Path, tmp_path: Path) -> None:
    model, other = (AutoModelForCausalLM.from_pretrained(tiny_model_dir) for _ in range(2))
    ids = _ids(length=100)
    caches = [
        create_tiered_cache(model, FadeConfig(**SMALL, assistant=given)) for given in (other, tiny_model_dir, None)
    ]
    for cache in caches:
        model(ids, **forward_kwargs(cache, model))
    kept = [cache.tiered[1].tokens.packed.slots().tolist() for cache in caches]
    assert kept[0] == kept[1] != kept[2]
    caches[1].save_session(tmp_path / "session")
    loaded = load_session(model, tmp_path / "session", assistant=tiny_model_dir)
    assert loaded.text is not None
    assert torch.equal(loaded.text.ids, ids.int())
    got, expected = (model(ids[:, :1], **forward_kwargs(each, model)).logits for each in (loaded, caches[1]))
    assert torch.equal(got, expected)


def test_another_tokenizer_is_refused(tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.save_pretrained(tmp_path / "other")
    tiny_tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tiny_tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(FadeError, match="has another tokenizer than"):
        create_tiered_cache(model, FadeConfig(**SMALL, assistant=tmp_path / "other"))
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    with pytest.raises(FadeError, match="has another tokenizer than"):
        create_tiered_cache(model, FadeConfig(**SMALL, assistant=small))
    assert model.config._attn_implementation != "fade"
    create_tiered_cache(model, FadeConfig(**SMALL, assistant=small, tokenizer=tiny_tokenizer))  # told it is the same


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"assist_weight": 0.5}, "assist_weight 0.5 is not from 0.6 to 0.8"),
        ({"assist_tail": 0}, "assist_tail 0"),
        ({"assistant": 1, "int4_budget": None}, "assistant has a part in scores, and none decides"),
        ({"assistant": 1, "eviction_policy": "position"}, "assistant has a part in scores"),
        ({"assistant": True}, "assistant True is neither"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FadeError, match=words):
        FadeConfig(**{**SMALL, **options})


def test_bad_assistants_are_refused(model: Any, tiny_model_dir: Path) -> None:
    for count in (0, 2):
        with pytest.raises(FadeError, match=f"assistant {count} is not a number of layers from 1 to 1"):
            create_tiered_cache(model, FadeConfig(**SMALL, assistant=count))
    with pytest.raises(FadeError, match="there is no tokenizer at nowhere"):
        create_tiered_cache(model, FadeConfig(**SMALL, assistant="nowhere"))
    with pytest.raises(FadeError, match="has no list of layers"):
        first_layers(torch.nn.Linear(2, 2), 1)
    cache = create_tiered_cache(model, FadeConfig(**SMALL, assistant=1))
    with pytest.raises(FadeError, match="inputs_embeds"):
        model(inputs_embeds=torch.randn(1, 20, 64), **forward_kwargs(cache, model))
