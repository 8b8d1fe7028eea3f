"""The Triton kernels that pack and unpack, interpreted on a CPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

from fade_runtime.kernels import reference
from fade_runtime.kernels.triton import codes as triton_codes
from fade_runtime.kernels.triton import pack_kernel as triton_pack
from fade_runtime.storage import packed as plain
from fade_runtime.storage import quant
from fade_runtime.storage.packed import Bits, PackedTokens, pack_tokens


def test_constants_and_fields_are_those_of_the_format() -> None:
    assert triton_codes.PackedTensors._fields == (*PackedTokens.READ[:-1], "limits")  # rows come from the splits
    assert PackedTokens.READ[-1] == "page_row"
    assert quant.PARAMS == torch.float16
    for name in ("PAGE", "MARK", "RIM", "COARSE", "PARAM_MAX", "PARAM_ERROR"):
        assert getattr(triton_codes, name).value == getattr(quant, name)


SHAPES = [(64, [70, 0, 3]), (96, [1]), (128, [64, 63]), (256, [17]), (80, [65]), (16, [200])]


@pytest.mark.parametrize("bits", [(4, 4, 4, 2), (8, 2, 4, 2), (2, 8, 2, 4)], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e5, 1e30])
def test_numbers_that_float16_cannot_describe_are_packed_as_in_plain_torch(size: float, bits: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    rows = torch.arange(2).repeat_interleave(torch.tensor([70, 30]))
    key, value = torch.randn(2, 100, 64)
    key *= size
    value[::2] *= size
    stored = pack_tokens(key, value, rows, torch.arange(100), None, bits=Bits(*bits))
    ours = triton_pack.quantise(key, value, stored.page_len, Bits(*bits))
    theirs = plain.quantise(key, value, stored.page_len, Bits(*bits))
    for wide in (ours[3][:, :1], ours[5]):
        assert bool(quant.is_wide(wide).any())
    assert torch.equal(quant.is_wide(ours[5]), quant.is_wide(theirs[5]))
    read = [
        (quant.page_params(*each[1:4]), quant.params(*each[5:7]), (each[0].float(), each[4].float()))
        for each in (ours, theirs)
    ]
    (keys, values, codes), (other_keys, other_values, other_codes) = read
    for mine, other in zip((*keys, *values), (*other_keys, *other_values), strict=True):
        most = other.abs().amax(-1, keepdim=True)  # sums in another order may round the other way
        assert bool(((mine - other).abs() <= 0.02 * most).all())
    for mine, other in zip(codes, other_codes, strict=True):
        assert float((mine != other).float().mean()) < 0.01


@pytest.mark.parametrize("bits", [(4, 4, 4, 2), (8, 2, 4, 2), (2, 8, 2, 4)], ids=str)
@pytest.mark.parametrize(("dim", "lengths"), SHAPES, ids=str)
def test_packs_and_unpacks_as_plain_torch(dim: int, lengths: list[int], bits: tuple[int, ...]) -> None:
    dtype = torch.float16 if dim in (64, 128) else torch.float32
    generator = torch.Generator().manual_seed(dim)
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    slots = torch.cat([torch.arange(n) for n in lengths])
    key, value = (torch.randn(2, len(rows), dim, generator=generator) * 3).to(dtype)
    value[0] = 0  # a group of equal values
    low = torch.rand(len(rows), generator=generator) < 0.4
    stored = pack_tokens(key, value, rows, slots, None, low=low, bits=Bits(*bits))
    ours = triton_pack.quantise(key, value, stored.page_len, Bits(*bits))
    theirs = plain.quantise(key, value, stored.page_len, Bits(*bits))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert mine.shape == other.shape
    few = 2e-3  # sums in another order may round the other way
    for mine, other in zip((ours[3], *ours[5:]), (theirs[3], *theirs[5:]), strict=True):  # reach; scale, zero
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=1e-5)
    for mine, other in zip(ours[1:3], theirs[1:3], strict=True):  # bytes of scales and of zeros
        off = (mine.int() - other.int()).abs()
        assert int(off.max()) <= 1
        assert float(off.float().mean()) < 10 * few
    assert float((ours[4] != theirs[4]).float().mean()) < few
    if 1 not in stored.page_len.tolist():  # the codes of a lonely key are of rounding errors
        assert float((ours[0] != theirs[0]).float().mean()) < few
    for mine, other in zip(triton_pack.dequantise(stored, dtype), reference.dequantise(stored, dtype), strict=True):
        assert mine.dtype == dtype
        off = float((mine.float() - other.float()).norm() / other.float().norm().clamp(min=1e-9))
        assert off < (1e-3 if dtype == torch.float16 else 1e-5)


def test_nothing_is_packed_and_unpacked() -> None:
    none, no_rows = torch.zeros(0, 64), torch.zeros(0, dtype=torch.long)
    stored = pack_tokens(none, none, no_rows, no_rows, None)
    assert [len(t) for t in triton_pack.quantise(none, none, stored.page_len, Bits())] == [0] * 7
    assert [t.shape for t in triton_pack.dequantise(stored, torch.float16)] == [(0, 64), (0, 64)]
