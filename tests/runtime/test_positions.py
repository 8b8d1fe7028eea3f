"""Streaming positions: what is kept is read as if it stood side by side."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.layer.positions import contiguous
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import slow
from tests.runtime.caches import random_ids, reachable_bytes

SCHEMES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def _feed(model: Any, ids: Tensor, cache: Any, prompt: int, **options: Any) -> Tensor:
    """Logits [B, 1 + steps, V] of the prompt's last token and of what follows, one token at a time."""
    out = [model(ids[:, :prompt], **forward_kwargs(cache, model), **options).logits[:, -1:]]
    out += [model(ids[:, i : i + 1], **forward_kwargs(cache, model)).logits for i in range(prompt, ids.shape[1])]
    return torch.cat(out, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_to_compress_equals_stock(tiny_model: Callable[..., Any], scheme: str) -> None:
    model = tiny_model(rope_parameters={"rope_theta": 10_000.0, **SCHEMES[scheme]})
    ids = random_ids(2, 50)
    expected = _feed(model, ids, DynamicCache(config=model.config), 40)
    got = _feed(model, ids, create_tiered_cache(model, FadeConfig(positions="streaming", recent_window=500)), 40)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pad", [0, 13])
@pytest.mark.parametrize(("budget", "tolerance"), [(0, 1e-4), (20, 0.02)])
def test_evicted_text_is_as_if_it_had_never_been_there(
    tiny_model: Callable[..., Any], budget: int, tolerance: float, pad: int
) -> None:
    """In one layer keys depend on nothing but their token, so a stock forward over the kept tokens is the truth."""
    model = tiny_model(num_hidden_layers=1)
    config = FadeConfig(
        positions="streaming", n_sink=3, recent_window=16, int4_budget=budget, eviction_policy="position",
        middle_k_bits=8, middle_v_bits=8, low_v_bits=4, reassign_every=1,
    )  # fmt: skip
    ids = random_ids(1, 120)
    given = torch.nn.functional.pad(ids, (pad, 0), value=257)
    cache = create_tiered_cache(model, config)
    mask, positions = (given != 257).long(), (torch.arange(pad + 100) - pad).clamp(min=0)[None]
    kwargs = forward_kwargs(cache, model)
    model(given[:, : pad + 100], attention_mask=mask[:, : pad + 100], position_ids=positions, **kwargs)
    for step in range(100, 120):
        now = pad + step + 1
        logits = model(
            given[:, now - 1 : now], attention_mask=mask[:, :now], position_ids=torch.tensor([[step]]), **kwargs
        ).logits[0, -1]
        # what the step saw: the sinks, the body, the window of the step before, and its own token
        kept = [0, 1, 2, *range(step - 16 - budget, step + 1)]
        alone = model(ids[:, kept]).logits[0, -1]
        assert float((logits - alone).norm() / alone.norm()) < tolerance, step


def test_original_positions_are_another_thing(tiny_model: Callable[..., Any]) -> None:
    """Guards the test above: positions of the text give other logits."""
    model = tiny_model(num_hidden_layers=1)
    ids = random_ids(1, 101)
    options = {"n_sink": 3, "recent_window": 16, "int4_budget": 0, "eviction_policy": "position"}
    cache = create_tiered_cache(model, FadeConfig(**options))
    logits = _feed(model, ids, cache, 100)[0, -1]
    alone = model(ids[:, [0, 1, 2, *range(84, 101)]]).logits[0, -1]
    assert float((logits - alone).norm() / alone.norm()) > 0.05


@pytest.mark.parametrize("scheme", ["default", *slow(*(name for name in SCHEMES if name != "default"))])
def test_generation_runs_past_the_trained_context(tiny_model: Callable[..., Any], scheme: str) -> None:
    rope = {"rope_theta": 10_000.0, **SCHEMES[scheme]}
    model = tiny_model(num_hidden_layers=1, max_position_embeddings=64, rope_parameters=rope)
    config = FadeConfig(positions="streaming", recent_window=16, int4_budget=16, low_budget=8, reassign_every=16)
    cache = create_tiered_cache(model, config)
    model(random_ids(1, 60), **forward_kwargs(cache, model))
    sizes = []
    for step in range(4 * 64):
        logits = model(random_ids(1, 1, step), **forward_kwargs(cache, model)).logits
        assert bool(logits.isfinite().all())
        sizes.append(cache.memory_report()["resident_bytes"])
    assert cache.get_seq_length() == 60 + 256
    assert max(sizes[128:]) <= 1.2 * max(sizes[:128])  # pages thin out to a few tokens each
    at, body = contiguous(cache.tiered[0].tokens)
    assert int(at.max()) < 64  # positions stay inside what the model was trained for
    assert all(int(where.max()) < 64 for where in body if len(where))
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)


@pytest.mark.parametrize("policy", ["h2o", "ema"])
def test_left_padded_row_equals_its_unbatched_run(tiny_model: Callable[..., Any], policy: str) -> None:
    model = tiny_model()
    config = FadeConfig(
        positions="streaming", n_sink=2, recent_window=8, int4_budget=12, low_budget=6, eviction_policy=policy,
        reassign_every=1,
    )  # fmt: skip
    short, long = random_ids(1, 33, 1), random_ids(1, 60, 2)
    ids = torch.cat((torch.nn.functional.pad(short, (27, 0), value=257), long))
    options = {"max_new_tokens": 12, "do_sample": False}
    both = model.generate(
        ids, attention_mask=(ids != 257).long(), past_key_values=create_tiered_cache(model, config), **options
    )
    for row, prompt in enumerate((short, long)):
        alone = model.generate(prompt, past_key_values=create_tiered_cache(model, config), **options)
        assert torch.equal(both[row, 60:], alone[0, prompt.shape[1] :])


def test_foreign_attention_reads_streaming_keys_at_their_places(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    config = FadeConfig(positions="streaming", n_sink=2, recent_window=8)
    ids = random_ids(2, 80)
    expected = _feed(model, ids, create_tiered_cache(model, config), 70)
    cache = create_tiered_cache(model, config)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(_feed(model, ids, cache, 70), expected, atol=1e-3, rtol=1e-3)
