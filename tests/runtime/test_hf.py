"""What the attention function does with the arguments of a call."""

from typing import Any

import pytest
import torch
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


def _brute_force(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float, softcap: float) -> Tensor:
    """Gemma 2's attention, one query at a time: [B, Q, Hq, D]."""
    batch, heads, steps, _ = query.shape
    out = torch.zeros(batch, steps, heads, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // key.shape[1])
            for q in range(steps):
                scores = softcap * torch.tanh(key[b, kv].double() @ query[b, h, q].double() * scaling / softcap)
                shares = scores[visible[b, q]].softmax(0)
                out[b, q, h] = shares @ value[b, kv][visible[b, q]].double()
    return out


@pytest.mark.parametrize("at_once", [1, 300, 1 << 24])
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "per head"])
def test_softcapped_attention_equals_brute_force(kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "SCORES_AT_ONCE", at_once)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 11, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    visible = torch.ones(11, 11, dtype=torch.bool).tril().repeat(2, 1, 1)
    if kind != "none":
        visible[1, 4:, :3] = False  # padding
    mask = {
        "none": None,
        "bool": visible[:, None],
        "additive": torch.zeros(2, 1, 11, 11).masked_fill(~visible[:, None], torch.finfo(torch.float32).min),
        "per head": visible[:, None].expand(-1, 4, -1, -1),
    }[kind]
    out = hf.dense_attention(nn.Module(), query, key, value, mask, 0.7, softcap=1.5)
    expected = _brute_force(query, key, value, visible, 0.7, 1.5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def test_softcap_and_positions_reach_the_layer() -> None:
    layer, query = Recorder(), torch.randn(1, 2, 3, 4)
    positions = torch.arange(3)[None]
    more = {hf.HANDLE: layer, "position_ids": positions, "use_cache": True}
    hf.fade_attention(nn.Module(), query, query, query, None, scaling=0.5, softcap=50.0, **more)
    assert layer.asked == [(0.5, {"softcap": 50.0, "position_ids": positions, "dropout": 0.0})]


@pytest.mark.parametrize("name", ["s_aux", "position_bias", "anything_new"])
def test_unknown_arguments_are_refused_by_name_unless_none(name: str) -> None:
    layer, query = Recorder(), torch.randn(1, 2, 3, 4)
    hf.fade_attention(nn.Module(), query, query, query, None, **{hf.HANDLE: layer, name: None})
    with pytest.raises(FadeError, match=f"'{name}' of Module is not supported"):
        hf.fade_attention(nn.Module(), query, query, query, None, **{hf.HANDLE: layer, name: torch.ones(1)})
    assert len(layer.asked) == 1


def test_attention_sinks_are_not_swallowed_without_a_tiered_layer() -> None:
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(FadeError, match="'s_aux'"):
        hf.fade_attention(nn.Module(), query, query, query, None, s_aux=torch.ones(2))


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
