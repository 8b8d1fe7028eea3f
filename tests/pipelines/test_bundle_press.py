"""The press of a bundle: the tokens that it keeps are those that the runtime keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, pipeline

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines.evaluation.peer import MissingPeer
from pipelines.evaluation.peers import under_older_names
from pipelines.integrations import bundle_press
from pipelines.integrations.bundle_press import BundlePress
from predictor.budgets import HeadBudgets
from predictor.bundle import Predictor
from predictor.cache_layers import evictable_layers
from predictor.errors import FadeError
from predictor.features import FeatureSpec
from predictor.nets import TokenMLP
from predictor.provenance import model_provenance
from tests.families import FAMILIES

needs_kvpress = pytest.mark.skipif(
    bundle_press._missing is not None, reason=f"kvpress cannot be imported: {bundle_press._missing}"
)
LENGTH = 500


LOST = [[[3.0, 1, 0], [1, 0.1, 0]], [[0.5, 0.4, 0], [2, 0.2, 0]]]  # kv heads want very different budgets


def made_for(model: Any, tokenizer: Any, lost: Any = LOST) -> Predictor:
    """The closed form, and budgets by these losses."""
    layers = tuple(evictable_layers(model.config))
    table = HeadBudgets(torch.tensor(lost), fractions=(0.0, 0.4, 1.0), layers=layers)
    return Predictor(TokenMLP(), FeatureSpec(horizon=40), model_provenance(model, tokenizer), budgets=table)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def pressed(model: Any, press: Any, tokens: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), press(model):
        model(tokens, **forward_kwargs(cache, model))
    return cache


def dropped(model: Any) -> set[tuple[int, int, int]]:
    """Layer, kv head and slot of each token that kvpress masks."""
    modules = [layer.self_attn for layer in model.model.layers]
    return {
        (module.layer_idx, head, slot)
        for module in modules
        if getattr(module, "masked_key_indices", None) is not None
        for _, head, slot in torch.stack(module.masked_key_indices).T.tolist()
    }


def kept_by_runtime(model: Any, config: FadeConfig, tokens: Tensor) -> set[tuple[int, int, int]]:
    cache = create_tiered_cache(model, config)
    with torch.inference_mode():
        model(tokens, **forward_kwargs(cache, model))
    kept = set()
    for layer in cache.tiered:
        exact = [*range(config.n_sink), *range(LENGTH - config.recent_window, LENGTH)]
        kept |= {(layer.index, head, slot) for head in range(2) for slot in exact}
        packed = layer.tokens.packed
        kept |= {(layer.index, *each) for each in zip(packed.token_row().tolist(), packed.slots().tolist())}
    return kept


@needs_kvpress
@pytest.mark.parametrize("ratio", [0.3, 0.7])
def test_the_press_drops_what_the_runtime_evicts(ratio: float, model: Any, tiny_tokenizer: Any, tokens: Tensor) -> None:
    predictor = made_for(model, tiny_tokenizer)
    pressed(model, BundlePress(predictor, ratio), tokens)
    found = dropped(model)
    counts = torch.zeros(2, 2)
    for layer, head, _ in found:
        counts[layer, head] += 1
    assert len(counts.unique()) > 1  # heads differ
    assert float(counts.mean()) >= ratio * LENGTH - 1  # more, where a head's budget is more than its body
    assert ratio == 0.3 or float(counts.mean()) == pytest.approx(ratio * LENGTH, abs=1)
    budget = int((1 - ratio) * LENGTH) - 68
    config = FadeConfig(int4_budget=budget, eviction_policy="learned", predictor=predictor)
    every = {(layer, head, slot) for layer in range(2) for head in range(2) for slot in range(LENGTH)}
    assert every - found == kept_by_runtime(model, config, tokens)


@needs_kvpress
def test_windows_stay_as_they_are(tiny_tokenizer: Any, tokens: Tensor) -> None:
    """Gemma 3: what the two full layers drop is what the runtime evicts there, by their own rotation and budgets."""
    model = FAMILIES["gemma3"](sliding_window=83, layer_types=["sliding_attention", "full_attention"] * 2)
    predictor = made_for(model, tiny_tokenizer)
    cache = pressed(model, BundlePress(predictor, 0.7), tokens)
    found, config = dropped(model), FadeConfig(int4_budget=82, eviction_policy="learned", predictor=predictor)
    every = {(layer, head, slot) for layer in (1, 3) for head in range(2) for slot in range(LENGTH)}
    assert every - found == kept_by_runtime(model, config, tokens)
    assert [layer.keys.shape[2] for layer in cache.layers] == [82, LENGTH] * 2
    with (
        pytest.raises(FadeError, match="no layer of mistral keeps all its tokens"),
        BundlePress(predictor, 0.5)(FAMILIES["mistral_sliding"]()),
    ):
        pass


@needs_kvpress
def test_equal_budgets_free_memory(tiny_model: Callable[..., Any], tiny_tokenizer: Any, tokens: Tensor) -> None:
    model = tiny_model()
    predictor = made_for(model, tiny_tokenizer)
    full = pressed(model, BundlePress(predictor), tokens)
    assert [layer.keys.shape[2] for layer in full.layers] == [LENGTH] * 2
    cache = pressed(model, BundlePress(predictor, 0.6, head_budgets=False), tokens)
    config = FadeConfig(int4_budget=132, eviction_policy="learned", predictor=predictor, head_budgets=False)
    kept = kept_by_runtime(model, config, tokens)
    for index, (mine, whole) in enumerate(zip(cache.layers, full.layers)):
        for head in range(2):
            slots = sorted(slot for layer, which, slot in kept if (layer, which) == (index, head))
            assert len(slots) == 200
            assert torch.equal(mine.keys[0, head], whole.keys[0, head, slots])
            assert torch.equal(mine.values[0, head], whole.values[0, head, slots])


@needs_kvpress
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("lost", [LOST, [LOST[0], [[0, 0, 0]] * 2]], ids=["ragged", "a layer alike"])
def test_decoding_sees_what_the_runtime_sees(
    queries: int, lost: Any, tiny_model: Callable[..., Any], tiny_tokenizer: Any, tokens: Tensor
) -> None:
    """8-bit storage of the same tokens gives the same logits, and they are not the full cache's."""
    predictor = made_for(tiny_model(), tiny_tokenizer, lost)
    bits = dict(middle_k_bits=8, middle_v_bits=8)
    config = FadeConfig(int4_budget=32, eviction_policy="learned", predictor=predictor, **bits)
    logits = {}
    for name in ("full", "press", "tiered"):
        model = tiny_model()
        where = {"position_ids": torch.arange(LENGTH, LENGTH + queries)[None]}
        if name == "tiered":
            cache: Any = create_tiered_cache(model, config)
            model(tokens, **forward_kwargs(cache, model))
        else:
            cache = pressed(model, BundlePress(predictor, 0.8 if name == "press" else 0), tokens)
        with torch.inference_mode():
            logits[name] = model(tokens[:, :queries], **where, **forward_kwargs(cache, model)).logits[0]
    off = {name: float((each - logits["press"]).norm() / logits["press"].norm()) for name, each in logits.items()}
    assert off["tiered"] < 0.15 < 0.8 < off["full"]


@needs_kvpress
def test_kvpress_runs_it_as_its_own(tiny_model_dir: Path, bundles: dict[str, Path]) -> None:
    press = BundlePress(bundles["mlp"], 0.4)
    assert "compression_ratio=0.4" in repr(press)
    asked = pipeline("kv-press-text-generation", model=str(tiny_model_dir), device="cpu", dtype="float32")
    asked.tokenizer.bos_token = "<|end|>"  # kvpress wants one
    context, questions = "who was where when? " * 20, ["who?", "where?"]
    presses = {"none": None, "all": BundlePress(bundles["mlp"]), "bundle": press}
    answers = {}
    for name, one in presses.items():
        answers[name] = asked(context, questions=questions, press=one, max_new_tokens=8)["answers"]
        assert len(answers[name]) == 2
    assert answers["all"] == answers["none"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    inputs = tokenizer("<|end|>" + context + questions[0] + "\n", return_tensors="pt")
    said = asked.model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answers["none"][0] == tokenizer.decode(said, skip_special_tokens=True)
    assert answers["bundle"] != answers["none"]


@needs_kvpress
def test_other_presses_take_its_scores(model: Any, tiny_tokenizer: Any, tokens: Tensor) -> None:
    from kvpress import AdaKVPress

    class Ada(AdaKVPress):  # on any transformers
        def forward_hook(self, module: Any, given: Any, kwargs: dict[str, Any], output: Any) -> Any:
            return super().forward_hook(module, given, under_older_names(module, kwargs), output)

    pressed(model, Ada(BundlePress(made_for(model, tiny_tokenizer), 0.7)), tokens)
    found = dropped(model)
    assert len(found) == 2 * 2 * int(0.7 * LENGTH)
    assert {slot for *_, slot in found} <= set(range(4, LENGTH - 64))  # sinks and window have the highest


@needs_kvpress
def test_bad_input_is_named(
    tiny_model: Callable[..., Any], tiny_tokenizer: Any, tokens: Tensor, bundles: dict[str, Path]
) -> None:
    model = tiny_model()
    predictor = made_for(model, tiny_tokenizer)
    with pytest.raises(FadeError, match="compression_ratio 1.0 is not a share"):
        BundlePress(predictor, 1.0)
    with pytest.raises(FadeError, match="there is no bundle at nobody"):
        BundlePress("nobody", 0.5)
    with pytest.raises(FadeError, match="was made for another model"), BundlePress("smollm2-135m-instruct", 0.5)(model):
        pass
    with pytest.warns(UserWarning, match="leaves fewer than sinks and window, which stay: 68"):
        cache = pressed(model, BundlePress(predictor, 0.9, head_budgets=False), tokens)
    assert cache.layers[0].keys.shape[2] == 68
    with create_tiered_cache(model), pytest.raises(FadeError, match="under attention 'fade'; call model.set_attn_impl"):
        pressed(model, BundlePress(predictor, 0.5), tokens)


def test_without_kvpress_it_says_what_to_install(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_press, "_missing", ImportError("No module named 'kvpress'"))
    with pytest.raises(MissingPeer, match="kvpress cannot be imported .*pip install"):
        BundlePress(bundles["mlp"], 0.5)
