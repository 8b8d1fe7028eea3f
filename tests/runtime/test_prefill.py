"""A prompt in chunks equals a prompt in one call."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import slow
from tests.runtime.caches import reachable_bytes, save_bundle


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"positions": "streaming"}], ids=str)
@pytest.mark.parametrize("policy", ["position", "h2o", "ema", "learned"])
@pytest.mark.parametrize("chunk", [7, *slow(40)])
def test_chunked_prefill_equals_one_prefill(
    model: Any, policy: str, chunk: int, options: dict[str, Any], tmp_path: Path
) -> None:
    predictor = save_bundle(tmp_path, model) if policy == "learned" else None
    config = FadeConfig(
        n_sink=2, recent_window=8, int4_budget=12, low_budget=10, eviction_policy=policy, predictor=predictor,
        reassign_every=8, chunked_prefill=True, **options,
    )  # fmt: skip
    ids = torch.randint(3, 250, (2, 130), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    ids[1, :20], mask[1, :20] = 257, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits, caches = [], []
    for size in (100, chunk):
        cache = create_tiered_cache(model, config)
        starts = [*range(0, 100, size), *range(100, 130)]
        out = []
        for at, stop in zip(starts, [*starts[1:], 130]):
            stop = min(stop, 100) if at < 100 else stop
            part = model(
                ids[:, at:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, at:stop],
                **forward_kwargs(cache, model),
            )
            if at >= 100:
                out.append(part.logits)
            if at == 0:
                assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)  # held queries are counted
        logits.append(torch.cat(out, 1))
        caches.append(cache)
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)
    for one, many in zip(*(cache.tiered for cache in caches)):
        assert torch.equal(one.tokens.packed.slots(), many.tokens.packed.slots())
        assert torch.equal(one.tokens.packed.low(), many.tokens.packed.low())
        assert many.tokens.evicted > 0
    report = caches[1].memory_report()
    assert report["resident_bytes"] == reachable_bytes(caches[1])


def test_held_chunks_can_be_taken_back(model: Any) -> None:
    config = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, chunked_prefill=True)
    ids = torch.randint(3, 250, (1, 60), generator=torch.Generator().manual_seed(4))
    outs = []
    for parts in ([ids[:, :50]], [ids[:, :30], ids[:, 30:55], None, ids[:, 45:50]]):
        cache = create_tiered_cache(model, config)
        for part in parts:
            if part is None:
                cache.crop(-10)
            else:
                model(part, **forward_kwargs(cache, model))
        outs.append(model(ids[:, 50:51], **forward_kwargs(cache, model)).logits)
        assert cache.memory_report()["tokens"]["EVICTED"] > 0
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)


def test_generate_in_chunks_compresses(model: Any) -> None:
    config = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, chunked_prefill=True)
    ids = torch.randint(3, 250, (1, 90), generator=torch.Generator().manual_seed(4))
    outs = [
        model.generate(
            ids, past_key_values=create_tiered_cache(model, config), max_new_tokens=10, do_sample=False, **chunks
        )
        for chunks in ({}, {"prefill_chunk_size": 32})
    ]
    assert torch.equal(*outs)
