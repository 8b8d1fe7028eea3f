"""Recorded rows against stock transformers with eager attention and plain loops."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from data.record import AttentionRecorder, record_forward, recorded_attention, recording_twin
from predictor.cache_layers import learnable_layers
from predictor.errors import FadeError
from predictor.features import FEATURES, FeatureSpec, expected_attention
from predictor.rope import find_rotary
from tests.data.drawn import tokens_of
from tests.families import FAMILIES


def eager_rows(model: Any, tokens: torch.Tensor, heads: int) -> dict[int, np.ndarray]:
    """Layer -> [H, S + T, S + T] float64 attention of stock transformers, averaged over each kv head's queries.

    Layers without attention are left out.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    maps: dict[int, np.ndarray] = {}
    hooks = [
        module.register_forward_hook(
            lambda module, args, out: maps.update(
                {module.layer_idx: out[1][0].double().unflatten(0, (heads, -1)).mean(1).numpy()}
            )
        )
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "scaling")
    ]
    with torch.no_grad():
        model(tokens[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation(before)
    return maps


def close(got: Any, expected: Any, relative: float = 2e-3, absolute: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=relative, atol=absolute)


def assert_rows_show(rows: list[Any], expected: dict[int, np.ndarray], prompt: int, spec: FeatureSpec) -> None:
    """Hold every array but the expected attention to the attention of :func:`eager_rows`."""
    window, block = spec.window, spec.block
    for row in rows:
        full = expected[row["layer"]][row["head"]]
        history = np.array(full[prompt - window : prompt, :prompt])
        future = np.array(full[prompt:, :])
        for name, attention in (("history", history), ("future", future)):
            cuts = range(0, attention.shape[1], block)
            close(row[f"{name}_mean"], np.stack([attention[:, at : at + block].mean(1) for at in cuts], axis=1))
            close(row[f"{name}_max"], np.stack([attention[:, at : at + block].max(1) for at in cuts], axis=1))
        close(np.exp(row["target_sum"].astype(float)), future[:, :prompt].mean(0), relative=1e-2)
        close(np.exp(row["target_max"].astype(float)), future[:, :prompt].max(0), relative=1e-2)
        received = [sum(full[i, j] for i in range(j, prompt)) / (prompt - j) for j in range(prompt)]
        close(np.exp(row["h2o"].astype(float)), received, relative=1e-2)
        features = dict(zip(FEATURES, row["tokens"].astype(float).T))
        close(np.exp(features["log_mean"]), history.mean(0), relative=1e-2)
        close(np.exp(features["log_max"]), history.max(0), relative=1e-2)
        weights = np.array([0.95 ** (window - 1 - i) for i in range(window)])
        close(np.exp(features["log_ema"]), weights @ history / weights.sum(), relative=1e-2)
        close(features["age"], [math.log((prompt - j) / 1024) for j in range(prompt)])


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("prompt", [41, 97])
def test_recorded_keys_are_those_before_the_rotation(kind: str, prompt: int, tiny_model: Callable[..., Any]) -> None:
    """Against what the projections of the model give out."""
    model, tokens, given = tiny_model(kind), tokens_of(prompt + 5), {}
    for layer, block in enumerate(model.model.layers):
        for name in ("k_proj", "v_proj"):
            keep = lambda module, args, out, place=(layer, name[0]): given.update({place: out[0, :prompt]})
            getattr(block.self_attn, name).register_forward_hook(keep)
    rows = record_forward(model, tokens, prompt, FeatureSpec(window=8, hidden=True))
    for row in rows:
        for name in ("key", "value"):
            heads = given[row["layer"], name[0]].view(prompt, 2, 16)
            close(row[name], heads[:, row["head"]], relative=2e-3, absolute=1e-3)
    assert "key" not in record_forward(model, tokens, prompt, FeatureSpec(window=8))[0]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gpt_oss"])
@pytest.mark.parametrize(("prompt", "steps", "window", "block"), [(37, 5, 8, 16), (111, 29, 17, 7), (64, 16, 63, 16)])
def test_rows_are_what_stock_eager_attention_shows(
    kind: str, prompt: int, steps: int, window: int, block: int, tiny_model: Callable[..., Any]
) -> None:
    heads = 2
    if kind == "gpt2":  # learned positions, no grouped heads
        config = transformers.GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
    elif kind == "gpt_oss":  # learned sinks: no row sums to 1
        model = FAMILIES[kind](num_hidden_layers=2, layer_types=["full_attention"] * 2)
    else:
        model = tiny_model(kind)
    spec = FeatureSpec(window=window, block=block, horizon=steps)
    tokens = tokens_of(prompt + steps)
    expected = eager_rows(model, tokens, heads)
    rows = record_forward(model, tokens, prompt, spec)
    assert [(row["layer"], row["head"]) for row in rows] == [
        (layer, head) for layer in range(2) for head in range(heads)
    ]
    assert_rows_show(rows, expected, prompt, spec)


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("gemma3", [0, 2]), ("gemma3n", [0, 2]), ("gemma4", [1, 3]), ("gemma4_shared", [0, 2]), ("cohere2", [0, 2]),
        ("qwen3_next", [0, 2]), ("qwen3_5", [0, 2]), ("lfm2", [0, 2]), ("gpt_oss", [0, 2]),
    ],
)  # fmt: skip
def test_only_layers_that_keep_all_their_tokens_are_recorded(family: str, layers: list[int]) -> None:
    """Prompts are longer than the windows: what the others hide or share comes through the model's own run."""
    model, prompt, spec = FAMILIES[family](), 111, FeatureSpec(window=17, block=7, horizon=29)
    tokens = tokens_of(prompt + 29)
    expected = eager_rows(model, tokens, 2)
    rows = record_forward(model, tokens, prompt, spec)
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in layers for head in range(2)]
    assert_rows_show(rows, expected, prompt, spec)


def test_nothing_after_the_prompt_enters_what_a_predictor_sees(model: Any) -> None:
    spec = FeatureSpec(window=16, horizon=20)
    first, second = tokens_of(83), tokens_of(83)
    second[63:] = (second[63:] + 91) % 256
    differs = 0
    for one, other in zip(record_forward(model, first, 63, spec), record_forward(model, second, 63, spec)):
        for name in ("tokens", "history_mean", "history_max", "h2o"):
            assert one[name].tobytes() == other[name].tobytes(), name
        differs += one["future_mean"].tobytes() != other["future_mean"].tobytes()
    assert differs == 4


def test_the_forward_pass_is_sdpa_bit_for_bit_and_its_setting_comes_back(model: Any) -> None:
    tokens, seen = tokens_of(77), []
    handle = model.base_model.register_forward_hook(lambda *call: seen.append(call[-1].last_hidden_state))
    assert model.config._attn_implementation == "sdpa"
    with torch.inference_mode():
        model(tokens[None])
    record_forward(model, tokens, 60, FeatureSpec(window=8))
    handle.remove()
    assert torch.equal(*seen)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with pytest.raises(IndexError):
        record_forward(model, tokens + 10_000, 60, FeatureSpec(window=8))
    assert model.config._attn_implementation == "eager"


def test_models_that_run_at_the_same_time_do_not_mix(tiny_model: Callable[..., Any]) -> None:
    models = [tiny_model("llama", seed=1), tiny_model("qwen2", seed=2, num_hidden_layers=3)]
    spec, tokens = FeatureSpec(window=8), tokens_of(120)
    alone = [record_forward(one, tokens, 100, spec) for one in models]
    found: dict[int, list[Any]] = {0: [], 1: []}

    def work(which: int) -> None:
        for _ in range(4):
            found[which].append(record_forward(models[which], tokens, 100, spec))

    threads = [threading.Thread(target=work, args=(which,)) for which in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, runs in found.items():
        assert len(runs) == 4
        for rows in runs:
            assert len(rows) == len(alone[which])
            for row, expected in zip(rows, alone[which]):
                np.testing.assert_array_equal(row["tokens"], expected["tokens"])


def test_without_h2o_there_is_no_such_column_and_the_rest_is_the_same(model: Any) -> None:
    spec, tokens = FeatureSpec(window=8), tokens_of(60)
    for row, bare in zip(record_forward(model, tokens, 50, spec), record_forward(model, tokens, 50, spec, h2o=False)):
        assert set(row) - set(bare) == {"h2o"}
        assert all(np.array_equal(row[name], value) for name, value in bare.items())


def test_a_model_of_windows_alone_is_told_that_it_can_only_be_stored() -> None:
    model = FAMILIES["mistral_sliding"]()
    for count in (20, 61):  # within the window of 24, and beyond
        with pytest.raises(FadeError, match=r"no layer of mistral keeps all its tokens.*sliding=\"packed\""):
            record_forward(model, tokens_of(count), count - 5, FeatureSpec(window=8))


def test_full_layers_of_other_heads_are_refused_by_number() -> None:
    config = FAMILIES["llama"]().config
    config.per_layer_config = {1: {"num_key_value_heads": 4}}
    with pytest.raises(FadeError, match="layer 0 of llama has 2 kv heads and layer 1 has 4"):
        learnable_layers(config)


def test_a_mask_that_is_not_causal_is_refused(model: Any) -> None:
    query, mask = torch.randn(1, 4, 9, 16), torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    mask[..., 5, 2] = False
    recorder = AttentionRecorder(5, FeatureSpec(window=8), [1], lambda layer: None)
    with pytest.raises(FadeError, match="mask of layer 1 is not the plain causal one"):
        recorded_attention(model.model.layers[1].self_attn, query, query, query, mask, fade_recorder=recorder)


@pytest.mark.parametrize(("count", "prompt", "words"), [(20, 8, "window 8"), (40, 40, "nothing after a prompt of 40")])
def test_documents_that_are_too_short_are_refused(count: int, prompt: int, words: str, model: Any) -> None:
    with pytest.raises(FadeError, match=words):
        record_forward(model, tokens_of(count), prompt, FeatureSpec(window=8))


@pytest.mark.parametrize("length", [1, 2, 50])
def test_a_recorded_model_with_learned_sinks_computes_what_eager_attention_does(length: int) -> None:
    model, tokens = FAMILIES["gpt_oss"](), tokens_of(length)[None]
    with torch.no_grad():
        expected, ours = model(tokens).logits, recording_twin(model)(tokens).logits
    torch.testing.assert_close(ours, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ["softcap", "position_bias"])
def test_what_changes_scores_is_refused_by_name(name: str, model: Any) -> None:
    query, key = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16)
    everything = AttentionRecorder(5, FeatureSpec(), [0, 1], lambda layer: None)
    module = model.model.layers[1].self_attn
    with pytest.raises(FadeError, match=f"layer 1 passes {name}"):
        recorded_attention(module, query, key, key, None, 0.25, fade_recorder=everything, **{name: torch.ones(4)})


def test_latent_attention_is_refused(model: Any) -> None:
    query, key, value = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 12)
    everything = AttentionRecorder(5, FeatureSpec(), [0, 1], lambda layer: None)
    module = model.model.layers[0].self_attn
    with pytest.raises(FadeError, match="latent attention"):
        recorded_attention(module, query, key, value, None, 0.25, fade_recorder=everything)


def test_each_layer_is_recorded_with_its_own_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 turns sliding and full layers by different angles, Cohere 2 the sliding ones only."""
    spec, slots = FeatureSpec(window=8, horizon=16), torch.arange(20 + 16)
    for family in ("gemma3", "cohere2"):
        model, seen = FAMILIES[family](), []
        observe = AttentionRecorder.observe

        def spy(self: Any, *args: Any, of: Any = seen, to: Any = observe) -> None:
            of.append(args)
            to(self, *args)

        monkeypatch.setattr(AttentionRecorder, "observe", spy)
        rows = record_forward(model, tokens_of(23), 20, spec)
        monkeypatch.undo()
        assert len(seen) == 2
        rotary = find_rotary(model)
        assert rotary is not None
        for layer, query, key, _, scaling, _ in seen:
            past = query[:, :20], key[:, :20], scaling
            tables = (rotary.table(slots, at) for at in (layer, (layer + 1) % 4))
            own, other = (expected_attention(*past, table, 16) for table in tables)
            got = np.stack([row["tokens"][:, 1] for row in rows if row["layer"] == layer])
            close(got, own, absolute=2e-3)
            assert not np.allclose(got, other, atol=2e-2)
