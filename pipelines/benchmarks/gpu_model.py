"""Whole decode steps of a Llama with random weights, on a GPU that needs no network."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines.benchmarks.caches import cache_bytes
from pipelines.benchmarks.timing import quantiles

SIZES = {
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64),
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128),
}
VOCABULARY = 128256
METHODS = ("full", "safe", "balanced")  # caches of the model


@functools.lru_cache(maxsize=1)
def random_llama(size: str, device: torch.device) -> Any:
    """A Llama of one of :data:`SIZES` with random weights, in bfloat16."""
    heads: Any = dict(num_attention_heads=32, num_key_value_heads=8, **SIZES[size])
    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2**18, **heads)
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def decode_row(lm: Any, *, method: str, context: int, steps: int) -> dict[str, Any]:
    """Decode with one cache: time of a step, tokens per second, peak of the GPU's memory from the prompt on."""
    config, device = lm.config, lm.device
    cache: Any = DynamicCache(config=config)
    if method != "full":
        cache = create_tiered_cache(lm, getattr(FadeConfig, method)())
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    spread = quantiles(_step_times(lm, cache, context, steps + 2)[2:])  # the first compile
    return {
        "bench": "decode", "dim": config.head_dim, "layers": config.num_hidden_layers, "batch": 1,
        "group": config.num_attention_heads // config.num_key_value_heads, "length": context, "method": method,
        "unit": "ms", **spread, "bytes": cache_bytes(cache), "tokens_per_second": 1e3 / spread["p50"],
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }  # fmt: skip


def _step_times(lm: Any, cache: Any, context: int, steps: int) -> list[float]:
    """Milliseconds of each decode step after a random prompt."""
    device = lm.device
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    ids = torch.randint(lm.config.vocab_size, (1, context + steps), device=device)
    times = []
    with torch.inference_mode():
        lm(ids[:, :context], logits_to_keep=1, **forward_kwargs(cache, lm))
        for at in range(context, context + steps):
            wait()
            started = time.perf_counter()
            lm(ids[:, at : at + 1], **forward_kwargs(cache, lm))
            wait()
            times.append(1e3 * (time.perf_counter() - started))
    return times
