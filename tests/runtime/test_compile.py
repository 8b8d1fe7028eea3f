"""`torch.compile` around a model with a tiered cache: the graph breaks at each layer, the result is the eager one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_model
from tests.runtime.caches import random_ids

LOSSY = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, low_budget=10, reassign_every=8)
CONFIGS = {
    "off": FadeConfig(compression="off"),
    "h2o": LOSSY,
    "shadow": LOSSY.with_options(guard="rollback", spill="host", monitor_every=4, shadow_every=4),
}


def forward(model: Any, backend: str) -> Any:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def in_place(model: Any, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def wrapped(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend)


WAYS: dict[str, Callable[[Any, str], Any]] = {"forward": forward, "in place": in_place, "wrapped": wrapped}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled yet; a frame is compiled three times (prompt, step, what changed), not eight, then eager."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=3):
        yield
    torch._dynamo.reset()


def decode(model: Any, config: FadeConfig) -> tuple[Tensor, Any]:
    """Logits of a prompt of 60 and of 16 steps; the cache."""
    cache, tokens = create_tiered_cache(model, config), random_ids(1, 76)
    with torch.no_grad():
        parts = tokens.split([60, *[1] * 16], dim=1)
        return torch.cat([model(part, **forward_kwargs(cache, model)).logits for part in parts], dim=1), cache


def make_model(**options: Any) -> Any:
    return make_tiny_model(num_hidden_layers=1, **options)  # each layer is traced by itself


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name", "attention"),
    [*((way, name, "sdpa") for way in WAYS for name in CONFIGS), ("forward", "h2o", "eager")],
)
def test_a_compiled_model_gives_what_the_eager_one_gives(way: str, name: str, attention: str) -> None:
    config = CONFIGS[name]
    expected, stock = decode(make_model(attn_implementation=attention), config)
    logits, cache = decode(WAYS[way](make_model(attn_implementation=attention), "eager"), config)
    assert torch.equal(logits, expected)
    assert cache.memory_report() == stock.memory_report()
    if config.shadow_every is not None:
        assert cache.monitor.report()["shadow"] == stock.monitor.report()["shadow"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["forward", pytest.param("in place", marks=pytest.mark.slow)])
def test_generate_of_a_compiled_model(way: str) -> None:
    outs = []
    for model in (make_model(), WAYS[way](make_model(), "eager")):
        cache = create_tiered_cache(model, LOSSY)
        outs.append(
            model.generate(random_ids(1, 60), max_new_tokens=24, do_sample=False, **forward_kwargs(cache, model))
        )
    assert torch.equal(*outs)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_inductor_decodes_as_the_eager_model_does(config: FadeConfig) -> None:
    expected, _ = decode(make_model(), config)
    logits, _ = decode(wrapped(make_model(), "inductor"), config)
    torch.testing.assert_close(logits.softmax(-1), expected.softmax(-1), atol=1e-3, rtol=0)
