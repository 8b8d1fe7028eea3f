"""What the attention function does with the arguments of a call."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from fade_runtime import FadeConfig, FadeError, create_tiered_cache
from fade_runtime import transformers_api as hf
from tests.families import FAMILIES


class Recorder:
    """A layer that notes what it is asked."""

    kv_sharers = 0

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        **more: Any,
    ) -> Tensor:
        self.asked.append((scaling, more))
        return query.transpose(1, 2)


def _brute_force(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of Gemma 2 and of gpt-oss, one query at a time: [B, Q, Hq, D]."""
    batch, heads, steps, _ = query.shape
    out = torch.zeros(batch, steps, heads, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // key.shape[1])
            for q in range(steps):
                scores = (key[b, kv].double() @ query[b, h, q].double() * scaling)[visible[b, q]]
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                sink = -torch.inf if sinks is None else float(sinks[h])
                shares = torch.cat((scores, torch.tensor([sink]))).softmax(0)[:-1]
                out[b, q, h] = shares @ value[b, kv][visible[b, q]].double()
    return out


@pytest.mark.parametrize("at_once", [1, 300, 1 << 24])
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "per head"])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(1.5, False), (1.5, True), (None, True)])
def test_dense_attention_equals_brute_force(
    kind: str, at_once: int, softcap: float | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "SCORES_AT_ONCE", at_once)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 11, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    sinks = 2 * torch.randn(4) if with_sinks else None
    visible = torch.ones(11, 11, dtype=torch.bool).tril().repeat(2, 1, 1)
    if kind != "none":
        visible[1, 4:, :3] = False  # padding
    mask = {
        "none": None,
        "bool": visible[:, None],
        "additive": torch.zeros(2, 1, 11, 11).masked_fill(~visible[:, None], torch.finfo(torch.float32).min),
        "per head": visible[:, None].expand(-1, 4, -1, -1),
    }[kind]
    out = hf.dense_attention(_grouped(), query, key, value, mask, 0.7, softcap, sinks=sinks)
    expected = _brute_force(query, key, value, visible, 0.7, softcap, sinks)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def _grouped() -> nn.Module:
    """An attention module of which transformers' SDPA knows that two query heads share a kv head."""
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_lose_nothing_in_half_precision(dtype: torch.dtype, steps: int) -> None:
    """Of a sink of 7.3 over a scaling of .3 bfloat16 keeps two digits: scores would be off by .03."""
    torch.manual_seed(0)
    query, key, value = (each.to(dtype) for each in (torch.randn(1, 4, steps, 8), *torch.randn(2, 1, 2, 9, 8)))
    sinks = torch.tensor([7.3, -torch.inf, 0.1, -40.0])
    visible = torch.ones(1, 9, 9).tril().bool()[:, -steps:]
    out = hf.dense_attention(_grouped(), query, key, value, None, 0.3, sinks=sinks)
    expected = _brute_force(query, key, value, visible, 0.3, None, sinks)
    assert float((out.double() - expected).norm() / expected.norm()) < torch.finfo(dtype).eps
    assert float((out.double() - expected)[:, :, 0].norm() / expected[:, :, 0].norm()) < torch.finfo(dtype).eps


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 2**16))
def test_dense_attention_beside_sinks_of_minus_infinity_is_plain(steps: int, older: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 4, steps, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, steps + older, 8, generator=generator)
    mask = torch.ones(steps, steps + older, dtype=torch.bool).tril(older)[None, None] if older and steps > 1 else None
    ours, plain = (
        hf.dense_attention(_grouped(), query, key, value, mask, 0.3, sinks=sinks)
        for sinks in (torch.full((4,), -torch.inf), None)
    )
    torch.testing.assert_close(ours, plain, atol=2e-6, rtol=1e-5)


def test_softcap_and_positions_reach_the_layer() -> None:
    layer, query = Recorder(), torch.randn(1, 2, 3, 4)
    positions = torch.arange(3)[None]
    more = {hf.HANDLE: layer, "position_ids": positions, "use_cache": True}
    hf.fade_attention(nn.Module(), query, query, query, None, scaling=0.5, softcap=50.0, **more)
    assert layer.asked == [(0.5, {"softcap": 50.0, "position_ids": positions, "dropout": 0.0, "sinks": None})]


@pytest.mark.parametrize("name", ["position_bias", "anything_new"])
def test_unknown_arguments_are_refused_by_name_unless_none(name: str) -> None:
    layer, query = Recorder(), torch.randn(1, 2, 3, 4)
    hf.fade_attention(nn.Module(), query, query, query, None, **{hf.HANDLE: layer, name: None})
    with pytest.raises(FadeError, match=f"'{name}' of Module is not supported"):
        hf.fade_attention(nn.Module(), query, query, query, None, **{hf.HANDLE: layer, name: torch.ones(1)})
    assert len(layer.asked) == 1


def test_attention_sinks_are_not_swallowed_without_a_tiered_layer() -> None:
    query = torch.randn(1, 2, 3, 4)
    sinks = torch.randn(2)
    out, _ = hf.fade_attention(nn.Module(), query, query, query, None, scaling=0.7, s_aux=sinks)
    expected = _brute_force(query, query, query, torch.ones(1, 3, 3).tril().bool(), 0.7, None, sinks)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def test_handed_key_is_the_same_memory_and_stands_in_for_sdpa() -> None:
    layer, key = Recorder(), torch.randn(1, 2, 3, 4)
    call: dict[str, Any] = {}
    assert hf.hand_over(layer, key, call) is key
    assert call == {hf.HANDLE: layer}
    handed = hf.hand_over(layer, key, None)
    assert handed.data_ptr() == key.data_ptr()
    query = torch.randn(1, 2, 3, 4)
    out = nn.functional.scaled_dot_product_attention(query, handed, key, is_causal=True)
    assert torch.equal(out, query)
    assert layer.asked == [(0.5, {"dropout": 0.0})]
    assert torch.equal(handed + 1, key + 1)


@pytest.mark.parametrize("keep", [1, 3])
def test_sharing_layers_whose_queries_are_cut_still_see_the_prompt(keep: int) -> None:
    """Gemma 4 sends only the newest ``logits_to_keep`` queries of a prompt through the layers that share keys."""
    model = FAMILIES["gemma4_shared"]()
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits[:, -keep:]
    cache = create_tiered_cache(model, FadeConfig(n_sink=2, recent_window=8))
    ours = model(ids, logits_to_keep=keep, **hf.forward_kwargs(cache, model)).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    assert cache.memory_report()["tokens"]["HIGH"] > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma4_shared"])
def test_static_cache_is_served_as_before(family: str) -> None:
    model = FAMILIES[family]()
    ids = torch.randint(3, 250, (2, 30), generator=torch.Generator().manual_seed(0))
    tiered = create_tiered_cache(model)
    results = []
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
        parts = (ids[:, :28], ids[:, 28:29], ids[:, 29:])
        results.append(torch.cat([model(part, **hf.forward_kwargs(cache, model)).logits for part in parts], 1))
    torch.testing.assert_close(*results, atol=1e-4, rtol=0)
    assert tiered.get_seq_length() == 0


def test_dropout_may_come_by_place_as_kvpress_passes_it() -> None:
    """Its wrapper, put around every attention function once it is imported, calls it so."""
    torch.manual_seed(0)
    query = torch.randn(1, 2, 5, 8)
    by_name, _ = hf.fade_attention(nn.Module(), query, query, query, None, dropout=0.0, scaling=0.25)
    by_place, _ = hf.fade_attention(nn.Module(), query, query, query, None, 0.0, scaling=0.25)
    torch.testing.assert_close(by_place, by_name)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_cache_names_itself_as_its_model_does(tiny_model: Any) -> None:
    model = tiny_model("llama")
    ids = torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(0))
    stock = model.generate(ids, max_new_tokens=6, do_sample=False)
    cache = create_tiered_cache(model, FadeConfig(recent_window=64))  # all of it exact
    assert torch.equal(model.generate(ids, **cache.kwargs, max_new_tokens=6, do_sample=False), stock)
    assert cache.get_seq_length() == 45
    after = create_tiered_cache(model, FadeConfig(recent_window=64))
    torch.testing.assert_close(model(ids, **after.kwargs).logits, model(ids).logits, atol=1e-5, rtol=0)
    assert after.get_seq_length() == 40
    del model
    with pytest.raises(FadeError, match="this cache's model is gone"):
        _ = cache.kwargs
