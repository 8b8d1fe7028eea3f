"""A float32 model under `torch.autocast`: rotated keys come in float32, values in the lower precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.layer import AttentionCall
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_model
from tests.runtime.caches import random_ids

SAFE = FadeConfig(n_sink=2, recent_window=8, reassign_every=8)
LOSSY = SAFE.with_options(int4_budget=12, low_budget=10)
CONFIGS = {
    "off": FadeConfig(compression="off"),
    "safe": SAFE,
    "h2o": LOSSY,
    "streaming": LOSSY.with_options(positions="streaming"),
    "guard": LOSSY.with_options(guard="rollback", spill="host", monitor_every=4),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
both_halves = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)


def decode(model: Any, cache: Any, tokens: Tensor, prompt: int, half: torch.dtype | None) -> Tensor:
    """Logits [B, S, V] of a prompt and of single steps."""
    with torch.no_grad(), torch.autocast("cpu", dtype=half, enabled=half is not None):
        parts = tokens.split([prompt, *[1] * (tokens.shape[1] - prompt)], dim=1)
        return torch.cat([model(part, **forward_kwargs(cache, model)).logits for part in parts], dim=1)


@both_halves
def test_what_is_exact_is_exact_under_autocast(model: Any, half: torch.dtype) -> None:
    tokens = random_ids(2, 40)
    ours = decode(model, create_tiered_cache(model, CONFIGS["off"]), tokens, 36, half)
    assert torch.equal(ours, decode(model, DynamicCache(config=model.config), tokens, 36, half))


@every_config
@both_halves
def test_every_cache_runs_under_autocast_and_keeps_what_it_keeps_without(config: FadeConfig, half: torch.dtype) -> None:
    model, tokens = make_tiny_model(), random_ids(2, 70)
    caches = [create_tiered_cache(model, config) for _ in range(2)]
    logits = [decode(model, cache, tokens, 50, dtype).float() for cache, dtype in zip(caches, (half, None))]
    full, packed = caches[0].tiered[0].tokens.full, caches[0].tiered[0].tokens.packed
    assert full.key.dtype == full.value.dtype == half
    assert packed.key_reach.dtype == torch.float16
    assert full.attention_stats is None or full.attention_stats.dtype == torch.float32
    stock = decode(model, DynamicCache(config=model.config), tokens, 50, half).float()
    kl = [nn.functional.kl_div(each.log_softmax(-1), stock.softmax(-1), reduction="batchmean") for each in logits]
    assert float(kl[0]) < 2 * float(kl[1]) + 1e-3 * tokens.numel()  # no further from the full cache than without


def test_packing_is_done_without_autocast(model: Any) -> None:
    """What layer 0 stores is what it stores of the same keys and values, rounded by hand, outside of autocast."""
    tokens, stock, cache = random_ids(1, 60), DynamicCache(config=model.config), create_tiered_cache(model, SAFE)
    for each in (stock, cache):
        decode(model, each, tokens, 60, torch.bfloat16)
    by_hand = create_tiered_cache(model, SAFE).tiered[0]
    by_hand.update(stock.layers[0].keys.bfloat16(), stock.layers[0].values.bfloat16())
    call = AttentionCall(torch.zeros(1, 4, 60, 16, dtype=torch.bfloat16), None, 0.25)
    by_hand.attend(model.model.layers[0].self_attn, call)
    stored = cache.tiered[0].tensors()
    assert len(cache.tiered[0].tokens.packed) == 2 * 50
    assert stored.keys() == by_hand.tensors().keys()
    assert all(torch.equal(tensor, by_hand.tensors()[name]) for name, tensor in stored.items())


def test_beams_and_crops_under_autocast(model: Any) -> None:
    cache, more = create_tiered_cache(model, LOSSY), dict(num_beams=3, max_new_tokens=20, do_sample=False)
    cache.activate_past_recording()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.generate(random_ids(2, 40), **forward_kwargs(cache, model), **more)
        cache.crop(-1)
        cache.batch_select_indices(torch.tensor([3, 0]))
    assert out.shape[1] == 60
