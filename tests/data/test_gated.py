"""A model read on through gates, against stock transformers: whole texts, masks, numeric differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from data.gated import GatedModel, attend_through
from predictor.errors import FadeError
from predictor.features import FeatureSpec
from tests.families import FAMILIES

SPEC = FeatureSpec(window=8, block=4, horizon=32)
LEARNABLE = ("llama", "qwen3", "phi", "gemma3", "gpt_oss", "qwen3_next", "lfm2", "gpt2", "gemma4")


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", LEARNABLE)
def test_open_gates_and_none_read_on_as_stock_transformers_read_the_whole(family):
    model = FAMILIES[family]()
    ids, length = tokens(61), 50
    with torch.no_grad():
        whole = model(ids[None], use_cache=False).logits[0, length:]
    gated = GatedModel(model, SPEC)
    prompt = gated.read(ids[:length])
    layers, heads = prompt.shape
    assert layers == len(gated.layers)
    assert prompt.features.tokens.shape[:2] == (layers * heads, length)
    assert prompt.features.heads.tolist() == [[layer, head] for layer in gated.layers for head in range(heads)]
    following = ids[length:]
    for gates in (None, torch.zeros(layers, heads, length), None):  # a call changes nothing for the next
        got = gated.logits(prompt, following, gates)
        torch.testing.assert_close(got, whole, rtol=2e-3, atol=2e-3)


def test_gates_are_added_to_the_scores_of_eager_attention():
    """Stock eager attention takes an additive mask of all query heads, the same in all layers."""
    model = FAMILIES["llama"]()
    ids, length, steps = tokens(47), 40, 7
    bias = torch.randn(2, length).exp().neg()
    bias[0, 5], bias[1, 17:30] = -torch.inf, -torch.inf
    gated = GatedModel(model, SPEC)
    got = gated.logits(gated.read(ids[:length]), ids[length:], bias.expand(2, 2, length))
    model.set_attn_implementation("eager")
    mask = torch.zeros(1, 4, length + steps, length + steps)
    mask.masked_fill_(torch.ones(length + steps, length + steps).triu(1).bool(), torch.finfo().min)
    mask[:, :, length:, :length] += bias.clamp(min=torch.finfo().min).repeat_interleave(2, 0)[None, :, None]
    with torch.no_grad():
        expected = model(ids[None], attention_mask=mask, use_cache=False).logits[0, length:]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_the_gradient_of_gates_is_that_of_numeric_differences():
    model = FAMILIES["qwen3"]().double()
    gated = GatedModel(model, SPEC)
    ids = tokens(31)
    prompt = gated.read(ids[:26])
    following, shape = ids[26:], (*prompt.shape, 26)
    weights = torch.randn(260, dtype=torch.float64)
    gates = torch.randn(shape, dtype=torch.float64).exp().neg().requires_grad_(True)
    value = lambda each: (gated.logits(prompt, following, each) @ weights).sum()
    value(gates).backward()
    for place in (0, 40, gates.numel() - 1):
        moved = torch.zeros(gates.numel(), dtype=torch.float64).index_fill(0, torch.tensor(place), 1e-2).view(shape)
        with torch.no_grad():
            numeric = (value(gates + moved) - value(gates - moved)) / 2e-2
        assert gates.grad.flatten()[place].item() == pytest.approx(numeric.item(), rel=0.02, abs=1e-2)


def test_nothing_but_the_gates_has_a_gradient_and_the_model_is_left_alone():
    model = FAMILIES["qwen2"]().requires_grad_(True)
    before = {name: each.clone() for name, each in model.named_parameters()}
    implementation = model.config._attn_implementation
    gated = GatedModel(model, SPEC)
    prompt = gated.read(tokens(30))
    gates = torch.zeros(2, 2, 30, requires_grad=True)
    gated.logits(prompt, tokens(5, 1), gates).sum().backward()
    assert gates.grad.abs().sum() > 0
    assert not any(layer.keys.requires_grad for layer in prompt.cache.layers)
    assert prompt.cache.get_seq_length() == 30
    assert all(each.grad is None and torch.equal(each, before[name]) for name, each in model.named_parameters())
    assert model.config._attn_implementation == implementation


def saved_bytes(length: int) -> int:
    """Bytes that one differentiated call keeps for its backward pass, weights and cached tokens apart."""
    model = FAMILIES["llama"]()
    gated = GatedModel(model, SPEC)
    prompt = gated.read(tokens(length))
    gates, sizes = torch.zeros(2, 2, length, requires_grad=True), {}
    known = {each.data_ptr() for each in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gated.logits(prompt, tokens(6, 1), gates)
    return sum(sizes.values())


def test_gradient_memory_grows_with_the_continuation_and_not_with_the_square_of_the_prompt():
    short, middle, long = (saved_bytes(length) for length in (200, 400, 600))
    assert long - middle < 1.3 * (middle - short)


def test_bfloat16_agrees_with_float32():
    model = FAMILIES["llama"]()
    ids = tokens(60)
    got = []
    for dtype in (torch.float32, torch.bfloat16):
        gated = GatedModel(model.to(dtype), SPEC)
        prompt = gated.read(ids[:50])
        assert prompt.features.tokens.dtype == torch.float32
        gates = torch.full((2, 2, 50), -0.5, requires_grad=True)
        logits = gated.logits(prompt, ids[50:], gates)
        logits.float().square().mean().backward()
        got.append((logits.float().log_softmax(-1), gates.grad))
    (one, slope), (two, other) = got
    assert (one - two).abs().mean() < 0.15
    assert torch.cosine_similarity(slope.flatten(), other.flatten(), dim=0) > 0.9


def test_attention_through_gates_is_the_formula():
    query, key, value = torch.randn(6, 3, 8), torch.randn(2, 12, 8), torch.randn(2, 12, 8)
    gates, sinks = torch.randn(2, 9), torch.randn(6)
    got = attend_through(gates, query, key, value, 0.4, sinks)
    for head in range(6):
        for step in range(3):
            weight = (query[head, step] @ key[head // 3].T * 0.4).exp()[: 10 + step]
            weight[:9] *= gates[head // 3].exp()
            expected = weight / (weight.sum() + sinks[head].exp()) @ value[head // 3, : 10 + step]
            torch.testing.assert_close(got[head, step], expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_learned_is_refused():
    with pytest.raises(FadeError, match="no longer than window 8"):
        GatedModel(FAMILIES["llama"](), SPEC).read(tokens(8))
    with pytest.raises(FadeError, match="nothing to learn"):
        GatedModel(FAMILIES["mistral_sliding"](), SPEC)
    with pytest.raises(FadeError, match="softcap"):
        GatedModel(FAMILIES["gemma2"](), SPEC).read(tokens(30))
