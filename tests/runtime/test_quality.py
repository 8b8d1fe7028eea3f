"""The safe preset on the real model and real prose: how small, how close."""

from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs

PROMPT, STEPS = 2048, 128
PROSE = ("objects", "naming", "exceptions", "types")  # chapters of the language reference


@pytest.fixture(scope="module")
def ids(real_model_dir: Path) -> Tensor:
    text = "\n".join(topics.topics[name] for name in PROSE)
    ids = AutoTokenizer.from_pretrained(real_model_dir)(text, return_tensors="pt").input_ids
    assert ids.shape[1] >= PROMPT + STEPS
    return ids[:, : PROMPT + STEPS]


def _load(path: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().requires_grad_(False)


def _decode(model: Any, ids: Tensor, cache: Any, steps: int = STEPS) -> Tensor:
    """Log probabilities [T, V] of the steps after the prompt, teacher-forced, one token at a time."""
    call = forward_kwargs(cache, model)
    logits = [model(ids[:, :PROMPT], **call, logits_to_keep=1).logits[:, -1]]
    logits += [model(ids[:, at : at + 1], **call).logits[:, -1] for at in range(PROMPT, PROMPT + steps - 1)]
    return torch.cat(logits).log_softmax(-1)


@pytest.fixture(scope="module")
def model(real_model_dir: Path) -> Any:
    return _load(real_model_dir, torch.float32)


@pytest.fixture(scope="module")
def full(model: Any, ids: Tensor) -> Tensor:
    """Log probabilities [T, V] with the full cache."""
    return _decode(model, ids, DynamicCache(config=model.config))


@pytest.mark.slow
def test_safe_is_close_to_the_full_cache_in_float32(model: Any, ids: Tensor, full: Tensor) -> None:
    safe = _decode(model, ids, create_tiered_cache(model, FadeConfig.safe()))
    kl = (full.exp() * (full - safe)).sum(-1)
    assert float(kl.mean()) <= 0.006
    assert float((full.argmax(-1) == safe.argmax(-1)).float().mean()) >= 0.95
    assert float(kl.mean()) > 1e-6  # something was compressed


@pytest.mark.slow
def test_safe_is_three_times_smaller_in_bfloat16(real_model_dir: Path, ids: Tensor) -> None:
    model = _load(real_model_dir, torch.bfloat16)
    cache = create_tiered_cache(model, FadeConfig.safe())
    model(ids[:, :PROMPT], **forward_kwargs(cache, model), logits_to_keep=1)
    report = cache.memory_report()
    assert report["compression"] >= 3.0
    assert report["tokens"]["EVICTED"] == 0
    assert report["full_bytes"] == 2 * 30 * 3 * 64 * PROMPT * 2


LOW = FadeConfig(int4_budget=0, low_budget=None, page_tokens=64)  # every body token: 4-bit keys, 2-bit values


@pytest.mark.slow
def test_low_tier_is_four_times_smaller_and_close(model: Any, ids: Tensor, full: Tensor) -> None:
    cache = create_tiered_cache(model, LOW)
    for layer in cache.layers:  # what a 16-bit model would hold
        layer.update(*torch.randn(2, 1, 3, PROMPT, 64, dtype=torch.bfloat16), kwargs={})
        layer.compress()
    assert cache.memory_report()["compression"] >= 4.0
    low = _decode(model, ids, create_tiered_cache(model, LOW), steps=33)[1:]  # of what was read in the low tier
    exact = full[1:33]
    assert 1e-5 < float((exact.exp() * (exact - low)).sum(-1).mean()) <= 0.02
