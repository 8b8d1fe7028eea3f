"""A whole cache whose attention and packing run in Triton, interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.cache.telemetry import attention_path
from fade_runtime.kernels import dispatch
from fade_runtime.kernels.dispatch import forget
from fade_runtime.kernels.triton import attention as triton
from fade_runtime.kernels.triton import pack_kernel as triton_pack
from fade_runtime.layer import movement
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_model
from tests.families import FAMILIES
from tests.runtime.caches import reachable_bytes

CONFIGS = {
    "low tier": dict(int4_budget=0.4, eviction_policy="h2o", low_budget=0.3),
    "streaming": dict(int4_budget=0.6, eviction_policy="h2o", positions="streaming"),
}


def _llama() -> Any:
    return make_tiny_model(num_hidden_layers=1)


def _gpt_oss() -> Any:
    """Learned sinks, a full layer and one with a window."""
    return FAMILIES["gpt_oss"](num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])


CASES = [("low tier", _llama), ("streaming", _llama), ("low tier", _gpt_oss)]


def _logits(model: Any, config: FadeConfig) -> tuple[torch.Tensor, Any]:
    cache = create_tiered_cache(model, config)
    torch.manual_seed(1)
    ids = torch.randint(0, 250, (2, 70))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0  # padding
    model(ids[:, :60], attention_mask=mask[:, :60], **forward_kwargs(cache, model))
    more = [(60, 61), (61, 69), (69, 70)]  # one token, a further prompt, one token
    outs = [model(ids[:, a:b], attention_mask=mask[:, :b], **forward_kwargs(cache, model)).logits for a, b in more]
    return torch.cat(outs, dim=1), cache


@pytest.mark.parametrize(("name", "make"), CASES)
def test_a_cache_in_triton_answers_as_one_in_plain_torch(
    name: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FadeConfig(n_sink=2, recent_window=8, reassign_every=4, **CONFIGS[name])
    kernel = dispatch.Kernel("triton", triton.attend, triton_pack.quantise)
    monkeypatch.setattr(dispatch, "_kernel_of", lambda device: kernel)
    monkeypatch.setattr(movement, "pick_quantiser", lambda device: kernel.quantise)  # that of a CPU is plain torch
    ours, cache = _logits(make(), config)
    assert attention_path(cache.tiered[0]) == "triton"
    assert len(cache.tiered[0].store.packed.derived) > 0
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)
    monkeypatch.undo()
    monkeypatch.setenv("FADE_KERNEL", "reference")
    forget()
    theirs, _ = _logits(make(), config)
    forget()
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
