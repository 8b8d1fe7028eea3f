"""Small caches of every kind, each of which evicts and demotes within a short text."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fade_runtime import FadeConfig
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_tokenizer
from tests.runtime.caches import make_codebook, save_bundle

TIGHT: dict[str, Any] = dict(n_sink=2, recent_window=10, int4_budget=14, low_budget=8, reassign_every=6, page_tokens=9)
KINDS: dict[str, dict[str, Any]] = {
    "int4": dict(n_sink=2, recent_window=10, reassign_every=6),
    "position": dict(TIGHT, eviction_policy="position"),
    "h2o": TIGHT,
    "ema": dict(TIGHT, eviction_policy="ema"),
    "adaptive": dict(TIGHT, eviction_policy="adaptive"),
    "learned": dict(TIGHT, eviction_policy="learned"),
    "fastgen": dict(TIGHT, eviction_policy="fastgen", recover=0.7),
    "streaming": dict(TIGHT, positions="streaming"),
    "pq": dict(TIGHT, low_tier="pq"),
    "global": dict(TIGHT, eviction_policy="learned", allocation="global"),
    "chunked": dict(TIGHT, chunked_prefill=True),
}
GUARDED: dict[str, Any] = dict(TIGHT, guard="rollback", spill="host", monitor_every=5, kl_alarm=0.02, kl_target=0.01)


def config_of(kind: str, model: Any, folder: Path) -> FadeConfig:
    options = dict(KINDS[kind])
    if kind == "learned":
        options["predictor"] = str(save_bundle(folder, model))
    if kind == "global":
        heads = model.config.num_hidden_layers, model.config.num_key_value_heads
        offsets = torch.randn(heads, generator=torch.Generator().manual_seed(0))
        options["predictor"] = str(save_bundle(folder, model, offsets=offsets))
    if kind == "fastgen":
        options["tokenizer"] = make_tiny_tokenizer()
    if kind == "pq":
        options["codebook"] = make_codebook(model)
    return FadeConfig(**options)


def tokens(length: int, seed: int) -> Tensor:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed))


def step(model: Any, cache: Any, ids: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(ids.view(1, -1), **forward_kwargs(cache, model)).logits
