"""Next-token distributions against a pass of the whole text in full precision."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from transformers import DynamicCache

from fade_runtime import FadeConfig, FadeError, create_tiered_cache
from fade_runtime.cache.shadow import next_token_kl
from fade_runtime.cache.telemetry import ListExporter, attach_telemetry
from fade_runtime.events import ShadowEvent
from fade_runtime.transformers_api import forward_kwargs
from predictor.twin import dense_twin
from tests.families import FAMILIES, TIERED
from tests.runtime.caches import random_ids

OPTIONS: dict[str, Any] = dict(
    n_sink=2, recent_window=16, int4_budget=20, reassign_every=16, guard="warn", spill="host", kl_alarm=1e9
)


def test_divergence_is_scipys() -> None:
    full, ours = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    p, q = (each.double().softmax(-1).numpy() for each in (full, ours))
    np.testing.assert_allclose(next_token_kl(full, ours), rel_entr(p, q).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("pad", [0, 7])
def test_it_is_the_divergence_from_the_full_cache(model: Any, pad: int) -> None:
    twin, ids = dense_twin(model), random_ids(2, 300)
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    cache = create_tiered_cache(model, FadeConfig(**OPTIONS, shadow_every=8))
    events = attach_telemetry(cache, ListExporter()).exporter.events
    full, expected = DynamicCache(config=model.config), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for seen in [280, *range(281, 300)]:
            new = ids[:, seen - 1 : seen] if seen > 280 else ids[:, :280]
            positions = (mask[:, :seen].cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            given = dict(attention_mask=mask[:, :seen], position_ids=positions)
            ours = model(new, **forward_kwargs(cache, model), **given).logits[:, -1]
            theirs = twin(new, past_key_values=full, **given).logits[:, -1]
            expected[seen] = float(next_token_kl(theirs, ours).max())
    found = {event.seen: event.kl for event in events if isinstance(event, ShadowEvent)}
    assert list(found) == [288, 296]
    for seen, kl in found.items():
        assert kl == pytest.approx(expected[seen], rel=1e-3, abs=1e-6)
        assert kl > 1e-4
    assert cache.monitor.report()["shadow"]["kl"] == found[296]


@pytest.mark.parametrize("family", TIERED)
def test_in_every_family_nothing_compressed_has_no_divergence(family: str) -> None:
    model, ids = FAMILIES[family](), random_ids(2, 42)
    cache = create_tiered_cache(model, FadeConfig(recent_window=100, guard="warn", spill="host", shadow_every=1))
    model(ids[:, :40], **forward_kwargs(cache, model))
    for at in (40, 41):
        model(ids[:, at : at + 1], **forward_kwargs(cache, model))
    shadow = cache.monitor.report()["shadow"]
    assert shadow["seen"] == 42
    assert abs(shadow["kl"]) < 1e-5
    assert shadow["top1"] == 1


def test_plain_generate_is_shadowed_and_the_hook_goes_with_the_cache(model: Any) -> None:
    cache = create_tiered_cache(model, FadeConfig(**OPTIONS, shadow_every=4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(random_ids(1, 200), past_key_values=cache, max_new_tokens=10, do_sample=False)
        other = create_tiered_cache(model, FadeConfig(**OPTIONS))
        plain = model.generate(random_ids(1, 200), past_key_values=other, max_new_tokens=10, do_sample=False)
    assert torch.equal(plain, out)
    assert cache.monitor.report()["shadow"]["seen"] == 208
    hooks = len(model._forward_hooks)
    del cache
    gc.collect()
    assert len(model._forward_hooks) == hooks - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(OPTIONS, shadow_every=0), "shadow_every 0 is neither None nor a whole number of at least 1"),
        (dict(shadow_every=8), "shadow_every is the guard's; set guard="),
    ],
    ids=["zero", "no guard"],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FadeError, match=message):
        FadeConfig(**options)
