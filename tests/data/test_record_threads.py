"""A model is left alone while it is recorded: what runs on it at the same time gives what it gives alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from data.record import AttentionRecorder, record_forward, recorded_attention, recording_twin
from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from predictor.features import FeatureSpec
from tests.data.drawn import tokens_of

SPEC = FeatureSpec(window=8)
EVICTING = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, low_budget=10, reassign_every=8)
CACHES: dict[str, tuple[str, FadeConfig | None]] = {
    "sdpa": ("sdpa", None),
    "eager": ("eager", None),
    "tiered": ("sdpa", EVICTING),
}


def assert_same_rows(rows: list[Any], expected: list[Any]) -> None:
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected):
        assert set(row) == set(other)
        for name, value in other.items():
            np.testing.assert_array_equal(row[name], value)


def generated(model: Any, config: FadeConfig | None) -> torch.Tensor:
    """Logits of a prompt and of 24 steps after it, over a cache of its own."""
    cache = DynamicCache(config=model.config) if config is None else create_tiered_cache(model, config)
    pieces = tokens_of(84, seed=5)[None].split([60, *[1] * 24], dim=1)
    return torch.cat([model(one, **forward_kwargs(cache, model)).logits[0, -1:] for one in pieces])


def attention_of(model: Any) -> set[str]:
    """Names of the attention implementations that the modules of a model call."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return {config._attn_implementation for config in configs}


class Held:
    """A recording in a thread of its own that stands still in its first layer until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any, text: torch.Tensor, prompt: int) -> None:
        self.there, self.goes, self.rows = threading.Event(), threading.Event(), None
        observe = AttentionRecorder.observe

        def held(recorder: AttentionRecorder, layer: int, *args: Any) -> None:
            if threading.current_thread() is self.thread and layer == 0:
                self.there.set()
                assert self.goes.wait(60)
            observe(recorder, layer, *args)

        def work() -> None:
            self.rows = record_forward(model, text, prompt, SPEC)

        monkeypatch.setattr(AttentionRecorder, "observe", held)
        self.thread = threading.Thread(target=work)
        self.thread.start()
        assert self.there.wait(60)

    def goes_on(self) -> list[Any]:
        """Its rows, once it has ended."""
        self.goes.set()
        self.thread.join()
        assert self.rows is not None
        return self.rows


@pytest.mark.parametrize("name", CACHES)
def test_a_model_that_is_recorded_generates_as_it_does_alone(
    name: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementation, config = CACHES[name]
    model.set_attn_implementation(implementation)
    text = tokens_of(120)
    rows, before = record_forward(model, text, 100, SPEC), attention_of(model)
    alone = generated(model, config)
    recording = Held(monkeypatch, model, text, 100)
    assert torch.equal(generated(model, config), alone)
    assert_same_rows(recording.goes_on(), rows)
    assert attention_of(model) == before or config is not None


def test_two_recordings_of_one_model_at_a_time_are_those_of_each_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, before = [tokens_of(120), tokens_of(97, seed=1)], attention_of(model)
    alone = [record_forward(model, text, 80, SPEC) for text in texts]
    for which in (model, recording_twin(model)):
        first, second = (Held(monkeypatch, which, text, 80) for text in texts)
        assert_same_rows(first.goes_on(), alone[0])  # the other one has only begun
        assert_same_rows(second.goes_on(), alone[1])
        assert attention_of(model) == before


def test_a_forward_inside_a_recording_sees_the_model_as_it_is(model: Any) -> None:
    seen: list[set[str]] = []
    handle = model.model.layers[1].register_forward_pre_hook(lambda *call: seen.append(attention_of(model)))
    record_forward(model, tokens_of(40), 30, SPEC)
    handle.remove()
    assert seen == [{"sdpa"}]
    assert attention_of(recording_twin(model)) == {"fade_record"}


def test_a_recording_twin_follows_the_weights_of_its_model(model: Any) -> None:
    tokens, twin = tokens_of(60), recording_twin(model)
    assert all(one is other for one, other in zip(model.parameters(), twin.parameters()))
    model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    assert_same_rows(record_forward(twin, tokens, 50, SPEC), record_forward(model, tokens, 50, SPEC))


def test_without_a_recorder_the_attention_is_that_of_sdpa(model: Any) -> None:
    tokens, twin = tokens_of(77)[None], recording_twin(model)
    assert torch.equal(twin(tokens).logits, model(tokens).logits)
    assert recorded_attention.__module__ == "data.record"
