"""Keys and values of any size: packed within what their bits allow, read alike by all kernels, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.cache.factory import load_session
from fade_runtime.kernels import reference
from fade_runtime.kernels.dispatch import pick_kernel
from fade_runtime.kernels.reference import Part, dequantise
from fade_runtime.storage import quant
from fade_runtime.storage.packed import Bits, PackedTokens, pack_tokens
from fade_runtime.transformers_api import forward_kwargs
from predictor.errors import FadeError
from tests import rounding
from tests.conftest import make_tiny_model

CPU = torch.device("cpu")
LAYOUTS = [Bits(), Bits(8, 8, 4, 2), Bits(2, 2, 2, 2)]
LEAST, MOST = -100, 110  # exponents of two: below, steps leave float32; above, numbers are refused
EXPONENTS = st.integers(LEAST, MOST - 4)  # normal numbers may be sixteen times as large


def _packed(key: Tensor, value: Tensor, lengths: tuple[int, ...], bits: Bits) -> PackedTokens:
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return pack_tokens(key, value, rows, torch.arange(len(rows)), None, bits=bits)


def _sizes(data: st.DataObject, *shape: int) -> Tensor:
    """Powers of two: one for all, or one for each of a shape."""
    if data.draw(st.booleans()):
        return torch.full(shape, 2.0 ** data.draw(EXPONENTS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    return 2.0 ** torch.randint(LEAST, MOST - 4, shape, generator=generator).double().float()


@pytest.mark.parametrize("bits", LAYOUTS, ids=str)
@pytest.mark.parametrize("dim", [16, 80, 128])
@hypothesis.given(data=st.data())
def test_what_is_read_is_near_what_was_stored(dim: int, bits: Bits, data: st.DataObject) -> None:
    """Within half a step of the range of a page (a group), which twice its largest number bounds.

    Rounding of parameters adds as much at most where they are float16, 2^-7 of the largest number where bfloat16, and
    with the rim of 8 bits, and scales and zeros in 255 parts, a tenth.
    """
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    key, value = (torch.randn(80, dim) * _sizes(data, 80, 1) + _sizes(data, 1, dim) for _ in range(2))
    packed = _packed(key, value, (70, 1, 9), bits)
    key, value = quant.hadamard(key), quant.hadamard(value)
    page, groups = packed.token_page(), quant.value_groups(dim)
    scale, zero = packed.key_params(page)
    off = (quant.unpack(packed.key_codes, bits.key) * scale + zero - key).abs()
    largest = torch.stack([key[page == i].abs().amax() for i in range(len(packed.page_len))])[page, None]
    assert bool((off <= (2.1 / quant.LEVELS[bits.key] + 2**-7) * largest.clamp(min=2.0**LEAST)).all())
    scale, zero = (each[..., None] for each in packed.value_params(slice(None)))
    value = value.unflatten(1, (groups, -1))
    off = (quant.unpack(packed.value_codes, bits.value).unflatten(1, (groups, -1)) * scale + zero - value).abs()
    largest = value.abs().amax(-1, keepdim=True)
    assert bool((off <= (2.1 / quant.LEVELS[bits.value] + 2**-7) * largest.clamp(min=2.0**LEAST)).all())


@pytest.mark.parametrize("constant", [1e-9, 1e5, 1e30])
def test_numbers_that_are_all_the_same_have_no_scale(constant: float) -> None:
    """A scale of nothing still says that what stands beside it is wide."""
    same = torch.zeros(9, 16)
    same[:, 0] = 4 * constant  # rotated: constant in all channels
    packed = _packed(same, same, (9,), Bits())
    assert packed.wide
    for back in dequantise(packed, torch.float32):
        assert float((back - same).abs().amax()) <= 2**-6 * 4 * constant


@pytest.mark.parametrize("bits", LAYOUTS, ids=str)
@hypothesis.given(exponent=st.one_of(st.integers(LEAST, -30), st.integers(20, MOST - 4)))
def test_large_and_small_numbers_have_the_codes_of_ordinary_ones(exponent: int, bits: Bits) -> None:
    """A power of two changes no code where parameters are bfloat16; what is lost is a tenth more than in float16."""
    torch.manual_seed(1)
    original = torch.randn(2, 80, 64)
    key, value = original
    plain, other, larger = (_packed(key * 2.0**by, value * 2.0**by, (70, 10), bits) for by in (0, exponent, 40))
    assert [each.wide for each in (plain, other, larger)] == [False, True, True]
    for name, tensor in other.tensors().items():
        if tensor.dtype == torch.uint8:
            assert torch.equal(tensor, getattr(larger, name))
    for ours, theirs, more, true in zip(
        *(dequantise(each, torch.float64) for each in (other, plain, larger)), original
    ):
        assert torch.equal(ours * 2.0 ** (40 - exponent), more)
        assert float((ours * 2.0**-exponent - true).norm()) < 1.1 * float((theirs - true).norm())


@hypothesis.given(seed=st.integers(0, 1000), size=st.sampled_from([2e-2, 1.0, 50.0]))
def test_ordinary_numbers_are_stored_in_float16(seed: int, size: float) -> None:
    """By a formula of its own: what releases before bfloat16 wrote, bit by bit."""
    torch.manual_seed(seed)
    x = torch.randn(40, 64) * size
    for bits in (2, 4, 8):
        rim = (x.amax(1) - x.amin(1)) / 32 * (bits == 8)
        low, high = x.amin(1) - rim, x.amax(1) + rim
        codes, scale, zero = quant.quantise_values(x, bits)
        by = ((high - low.half().float()) / (2**bits - 1)).half()
        assert torch.equal(zero[:, 0].view(torch.int16), low.half().view(torch.int16))
        assert torch.equal(scale[:, 0].view(torch.int16), by.view(torch.int16))
        expected = ((x - zero.float()) / by.float()[:, None]).round().clamp(0, 2**bits - 1)
        assert torch.equal(quant.unpack(codes, bits), expected.to(torch.uint8))


@pytest.mark.kernels
@pytest.mark.parametrize("bits", LAYOUTS, ids=str)
@hypothesis.given(data=st.data())
def test_kernels_agree_at_any_size(bits: Bits, data: st.DataObject) -> None:
    """Keys that a query is as small as, and a body whose sizes differ from page to page and from token to token."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    size = 2.0 ** data.draw(EXPONENTS)
    key, value = torch.randn(200, 64) * size, torch.randn(200, 64) * _sizes(data, 200, 1)
    key[100:] *= 2.0 ** -data.draw(st.integers(0, 20))
    packed = _packed(key, value, (130, 70), bits)
    packed = packed.retier(torch.randint(2, 4, (200,)))
    query, full_key, full_value = torch.randn(2, 3, 64) / 2 / size, torch.randn(2, 5, 64) * size, torch.randn(2, 5, 64)
    call = rounding.Call(query, full_key, full_value, [Part(packed)], torch.rand(3))
    exact = rounding.attention(*call)
    for kernel in (pick_kernel(CPU), reference.attend):
        out, mass, masses = kernel(*call)
        assert mass is not None
        exact.check([out, mass, *masses])


@pytest.mark.kernels
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 3e4), (torch.bfloat16, 1e30), (torch.bfloat16, 1e-30)])
def test_half_precision_models_with_keys_of_any_size(compiled: bool, dtype: torch.dtype, size: float) -> None:
    kernel = pick_kernel(CPU) if compiled else reference.attend
    torch.manual_seed(0)
    key, value = (torch.randn(2, 80, 64).clamp(-2, 2) * size).to(dtype)
    packed = _packed(key, value, (70, 10), Bits())
    assert packed.wide
    query, full = (torch.randn(2, 3, 64) / size / 4).to(dtype), (torch.randn(2, 2, 5, 64) / 4 * size).to(dtype)
    call = rounding.Call(query, full[0], full[1], [Part(packed)])
    exact, out = rounding.attention(*call), kernel(*call)[0]
    assert out.dtype == dtype
    once = torch.finfo(dtype).eps / 2 * float(exact.results[0].norm())
    tiny = torch.finfo(dtype).tiny * out.numel() ** 0.5
    assert float((out.double() - exact.results[0]).norm()) <= once + exact.errors[0] + tiny


# -- models ------------------------------------------------------------------------------------------------------------


def _resized(dtype: torch.dtype, keys: float, values: float) -> Any:
    """A tiny model whose keys and values are so many times as large, and whose logits are the same."""
    model = make_tiny_model()
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj.weight /= keys
        attention.k_proj.weight *= keys
        attention.v_proj.weight *= values
        attention.o_proj.weight /= values
    return model.to(dtype)


def _logits(model: Any, cache: Any) -> Tensor:
    """Of the second half of a text, whose first half is packed."""
    torch.manual_seed(3)
    ids = torch.randint(0, 250, (1, 200))
    model(ids[:, :150], **forward_kwargs(cache, model))
    return model(ids[:, 150:], **forward_kwargs(cache, model)).logits.float()


SIZES = [
    (torch.float32, 2.0**17, 2.0**-17),
    (torch.float32, 2.0**-23, 2.0**17),
    (torch.float32, 2.0**80, 2.0**-60),
    (torch.float32, 2.0**-60, 2.0**80),
    (torch.bfloat16, 2.0**60, 2.0**-60),
    (torch.bfloat16, 2.0**-23, 2.0**17),
    (torch.float16, 2.0**11, 2.0**-7),
    (torch.float16, 2.0**-7, 2.0**11),
]


@pytest.mark.parametrize(("dtype", "keys", "values"), SIZES, ids=str)
def test_a_model_with_large_or_small_keys_loses_what_it_loses_with_ordinary_ones(
    dtype: torch.dtype, keys: float, values: float
) -> None:
    config = FadeConfig.safe()
    with torch.inference_mode():
        losses = []
        for by_key, by_value in ((1.0, 1.0), (keys, values)):
            model = _resized(dtype, by_key, by_value)
            full = _logits(model, DynamicCache(config=model.config)).log_softmax(-1)
            ours = _logits(model, create_tiered_cache(model, config)).log_softmax(-1)
            losses.append(float((full.exp() * (full - ours)).sum(-1).mean()))
    assert 0 <= losses[1] < 1.5 * losses[0] + 1e-3


@pytest.mark.parametrize("keys", [2.0**17, 2.0**-23, 1.0])
def test_sessions_keep_numbers_of_any_size(keys: float, tmp_path: Path) -> None:
    model = _resized(torch.float32, keys, 1.0)
    cache = create_tiered_cache(model, FadeConfig.safe())
    with torch.inference_mode():
        _logits(model, cache)
        path = cache.save_session(tmp_path / "session")
        loaded = load_session(model, path)
        assert loaded.tiered[0].store.packed.wide == (keys != 1.0)
        assert torch.equal(_logits(model, loaded), _logits(model, cache))


def test_a_key_that_cannot_be_packed_is_refused_by_layer_and_size() -> None:
    model = _resized(torch.float32, 2.0**122, 1.0)
    said = r"layer 0 was given keys of up to \de\+3\d, and no more than 1e\+33 can be packed"
    with torch.inference_mode(), pytest.raises(FadeError, match=said):
        _logits(model, create_tiered_cache(model, FadeConfig.safe()))


@pytest.mark.slow
def test_a_real_model_has_nothing_that_float16_cannot_describe(real_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_model_dir).eval()
    cache = create_tiered_cache(model, FadeConfig(middle_k_bits=8, middle_v_bits=8, low_k_bits=4, low_v_bits=2))
    torch.manual_seed(0)
    with torch.inference_mode():
        model(torch.randint(0, 40_000, (1, 700)), **forward_kwargs(cache, model))
    assert not any(layer.store.packed.wide for layer in cache.tiered)
