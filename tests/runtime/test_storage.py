"""The storage format: codes, groups, pages, ragged rows."""

import math

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from fade_runtime.kernels.reference import dequantise, packed_scores, packed_values
from fade_runtime.storage import quant
from fade_runtime.storage.packed import Bits, PackedTokens, pack_tokens
from fade_runtime.storage.tiers import Tier

DIMS = [16, 64, 80, 96, 128]


@pytest.mark.parametrize("bits", [2, 4, 8])
@given(data=st.data())
def test_pack_is_lossless_and_dense(bits: int, data: st.DataObject) -> None:
    tokens, dim = data.draw(st.integers(0, 9)), 8 * data.draw(st.integers(1, 5))
    codes = torch.randint(0, 1 << bits, (tokens, dim), dtype=torch.uint8)
    packed = quant.pack(codes, bits)
    assert packed.shape == (tokens, dim * bits // 8)
    assert torch.equal(quant.unpack(packed, bits), codes)


@pytest.mark.parametrize("dim", DIMS)
def test_hadamard_is_the_textbook_matrix_in_blocks(dim: int) -> None:
    power = math.gcd(dim, 1 << 20)
    block = torch.tensor(scipy.linalg.hadamard(power), dtype=torch.float32) / power**0.5
    x = torch.randn(3, dim)
    expected = (x.view(3, -1, power) @ block).view(3, dim)
    torch.testing.assert_close(quant.hadamard(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", DIMS)
@given(data=st.data())
def test_reconstruction_is_within_half_a_step(dim: int, data: st.DataObject) -> None:
    """Keys by channel and page, values by token and group, against brute-force ranges."""
    lengths = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=4))
    torch.manual_seed(sum(lengths))
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    total = len(rows)
    key, value = torch.randn(total, dim) * 3 + 1, torch.randn(total, dim) * 0.1
    packed = pack_tokens(key, value, rows, torch.arange(total), None)
    back_key, back_value = dequantise(packed, torch.float32)
    error_key, error_value = quant.hadamard(back_key - key).abs(), quant.hadamard(back_value - value).abs()
    rotated_key, rotated_value = quant.hadamard(key), quant.hadamard(value)
    start = 0
    for length in lengths:
        for first in range(start, start + length, 64):
            page = slice(first, min(first + 64, start + length))
            step = (rotated_key[page].amax(0) - rotated_key[page].amin(0)) / 15
            assert bool((error_key[page] <= 0.5 * step + 6e-3).all())
        start += length
    group = dim // quant.value_groups(dim)
    split = rotated_value.view(total, dim // group, group)
    step = ((split.amax(-1) - split.amin(-1)) / 15).repeat_interleave(group, -1) if total else rotated_value
    assert bool((error_value <= 0.5 * step + 1e-3).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
@given(seed=st.integers(0, 10_000), pages=st.integers(0, 3), size=st.sampled_from([1e-4, 1.0, 300.0]))
def test_levels_of_a_page_reach_its_extremes_and_little_further(bits: int, seed: int, pages: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(pages, 16, generator=generator) * size
    high = low + torch.rand(pages, 16, generator=generator) * size
    stored = quant.page_affine(low, high, bits)
    assert [t.dtype for t in stored] == [torch.uint8, torch.uint8, torch.float16]
    scale, zero = quant.page_params(*stored)
    top, least, spread = quant.read_reach(stored[2])
    relative = torch.where(quant.is_wide(stored[2][:, :1]), 2**-7, 2**-10)  # of bfloat16, of float16
    rounding = relative * (top * quant.LEVELS[bits] + least.abs() + spread) + 2**-20
    first, last = (zero + scale * level for level in ((7.5, 247.5) if bits == 8 else (0, quant.LEVELS[bits])))
    unit = spread / 255 + top * quant.LEVELS[bits] / 255  # of a zero, and of what a scale reaches
    for inside in (first <= low + rounding, last >= high - rounding):
        assert bool(inside.all())
    for little in (first >= low - unit - rounding, last <= high + unit + rounding):
        assert bool(little.all())


LAYOUTS = [Bits(), Bits(4, 4, 2, 2), Bits(8, 8, 4, 2), Bits(4, 2, 4, 2), Bits(8, 4, 8, 4)]


@pytest.mark.parametrize("bits", LAYOUTS, ids=str)
@given(data=st.data())
def test_demotion_by_code_is_what_few_bits_give_at_once(bits: Bits, data: st.DataObject) -> None:
    """Nothing is quantised twice: the low tier equals the nearest middles, computed from the original."""
    lengths = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=3))
    torch.manual_seed(sum(lengths))
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    key, value = torch.randn(2, len(rows), 16)
    low = torch.rand(len(rows)) < 0.5
    plain = pack_tokens(key, value, rows, torch.arange(len(rows)), None, bits=bits)
    packed = plain.retier(torch.where(low, int(Tier.LOW), int(Tier.HIGH)))
    at_once = pack_tokens(key, value, rows, torch.arange(len(rows)), None, low=low, bits=bits)
    assert all(torch.equal(a, b) for a, b in zip(packed.tensors().values(), at_once.tensors().values()))
    place = packed.slots()  # tokens now stand by page, high before low
    assert torch.equal(packed.low(), low[place])
    page = plain.token_page()
    for name, x, few in (("key", key, bits.low_key), ("value", value, bits.low_value)):
        back = dequantise(packed, torch.float32)[name == "value"]
        scale, zero = plain.key_params(page) if name == "key" else (plain.value_scale.float(), plain.value_zero.float())
        step = scale * 2 ** (getattr(bits, name) - few)
        least = zero + (step - scale) / 2  # the middle of the levels that share the lowest one
        nearest = ((quant.hadamard(x) - least) / step.clamp(min=1e-9)).round().clamp(0, 2**few - 1) * step + least
        error = (quant.hadamard(back) - nearest[place]).abs()[packed.low()]
        off = error > 1e-4  # a tie between two levels may fall either way
        assert not bool(off.any()) or bool(((error - step[place][packed.low()]).abs() < 1e-3)[off].all())
    high = dequantise(packed, torch.float32)[0][~packed.low()]
    assert torch.equal(high, dequantise(plain, torch.float32)[0][place][~packed.low()])


@given(lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3), page=st.sampled_from([8, 16, 32]))
def test_smaller_pages_have_finer_scales(lengths: list[int], page: int) -> None:
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    torch.manual_seed(sum(lengths))
    key, value = torch.randn(2, len(rows), 16)
    large, small = (pack_tokens(key, value, rows, torch.arange(len(rows)), None, page_tokens=n) for n in (64, page))
    expected = [min(page, row - first) for row in lengths for first in range(0, row, page)]
    assert small.page_len.tolist() == expected
    assert torch.equal(small.token_row(), rows)
    of_small, of_large = (packed.key_params(packed.token_page())[0] for packed in (small, large))
    reach = small.key_reach[small.token_page()].float()
    rounding = (reach[:, :1] + reach[:, 2:] / 15) / 255  # a scale goes up by less, and so does what its zero went down
    assert bool((of_small <= of_large + rounding + 1e-6).all())
    for mine, theirs in ((small.value_codes, large.value_codes), (small.slots(), large.slots())):
        assert torch.equal(mine, theirs)


def test_low_tokens_survive_every_move() -> None:
    packed = _ragged([130, 0, 70])
    tiers = torch.where(torch.rand(200) < 0.4, int(Tier.LOW), int(Tier.HIGH))
    mixed = packed.retier(tiers)
    key = dequantise(mixed, torch.float32)[0]
    where = {(row, slot): i for i, (row, slot) in enumerate(zip(mixed.token_row().tolist(), mixed.slots().tolist()))}
    for moved, rows in (
        (mixed.keep(torch.rand(200) < 0.6), [0, 1, 2]),
        (mixed.select_rows(torch.tensor([2, 0])), [2, 0]),
    ):
        moved_key = dequantise(moved, torch.float32)[0]
        for i, (row, slot) in enumerate(zip(moved.token_row().tolist(), moved.slots().tolist())):
            assert torch.equal(moved_key[i], key[where[rows[row], slot]])
    joined = mixed.join(_ragged([3, 3, 3]).retier(torch.full((9,), int(Tier.LOW))))
    assert int(joined.low().sum()) == int(mixed.low().sum()) + 9
    assert torch.equal(dequantise(joined, torch.float32)[0][:130], key[:130])
    assert len(mixed.low_key_codes) + len(mixed.key_codes) == 200


def test_equal_tokens_survive_exactly() -> None:
    rows = torch.zeros(5, dtype=torch.long)
    packed = pack_tokens(torch.full((5, 16), 2.0), torch.zeros(5, 16), rows, torch.arange(5), None)
    key, value = dequantise(packed, torch.float32)
    torch.testing.assert_close(key, torch.full((5, 16), 2.0), atol=1e-3, rtol=0)
    assert bool((value == 0).all())


def _ragged(lengths: list[int], dim: int = 32) -> PackedTokens:
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    slots = torch.cat([torch.arange(n) * 3 + 4 for n in lengths] or [rows])
    torch.manual_seed(1)
    return pack_tokens(torch.randn(len(rows), dim), torch.randn(len(rows), dim), rows, slots, torch.rand(len(rows)))


@pytest.mark.parametrize("lengths", [[130, 0, 17, 64], [1], [64, 128], [200, 63, 5, 111, 0]], ids=str)
@pytest.mark.parametrize("queries", [1, 6])
def test_packed_attention_equals_dequantised(lengths: list[int], queries: int) -> None:
    packed = _ragged(lengths)
    packed = packed.keep(torch.rand(len(packed)) < 0.8)  # pages with gaps
    key, value = dequantise(packed, torch.float32)
    row = packed.token_row()
    query, probs = torch.randn(len(lengths), queries, 32), torch.rand(len(packed), queries)
    expected = torch.stack([query[r] @ k for r, k in zip(row.tolist(), key)]) if len(packed) else probs
    torch.testing.assert_close(packed_scores(quant.hadamard(query), packed), expected, atol=1e-4, rtol=1e-4)
    sums = torch.zeros(len(lengths), queries, 32)
    for token, r in enumerate(row.tolist()):
        sums[r] += probs[token][:, None] * value[token]
    out = quant.hadamard(packed_values(probs, packed, len(lengths)))
    torch.testing.assert_close(out, sums, atol=1e-4, rtol=1e-4)


def test_keep_moves_codes_and_frees_empty_pages() -> None:
    packed = _ragged([130, 0, 70])
    kept = torch.zeros(200, dtype=torch.bool)
    kept[[3, 5, 129, 140]] = True  # the second page of row 0 and the second page of row 2 end up empty
    small = packed.keep(kept)
    assert small.page_len.tolist() == [2, 1, 1]
    assert small.token_row().tolist() == [0, 0, 0, 2]
    assert torch.equal(small.slots(), packed.slots()[kept])
    assert small.attention_stats is not None
    assert packed.attention_stats is not None
    assert torch.equal(small.attention_stats, packed.attention_stats[kept])
    for ours, theirs in zip(dequantise(small, torch.float32), dequantise(packed, torch.float32)):
        assert torch.equal(ours, theirs[kept])  # not quantised again
    bytes_held = sum(t.untyped_storage().nbytes() for t in small.tensors().values())
    assert bytes_held < 5 * 80 + 3 * (4 * 32 + 12)


def test_select_rows_and_join_keep_the_order_within_rows() -> None:
    packed = _ragged([5, 0, 70])
    picked = packed.select_rows(torch.tensor([2, 0, 2, 1]))
    assert picked.token_row().tolist() == [0] * 70 + [1] * 5 + [2] * 70
    assert torch.equal(picked.slots()[:70], picked.slots()[75:])
    key = dequantise(packed, torch.float32)[0]
    assert torch.equal(dequantise(picked, torch.float32)[0][70:75], key[:5])
    rows = torch.tensor([0, 1, 1, 2])
    new = pack_tokens(torch.randn(4, 32), torch.randn(4, 32), rows, torch.tensor([900, 901, 902, 900]), torch.rand(4))
    joined = packed.join(new)
    assert joined.token_row().tolist() == [0] * 6 + [1] * 2 + [2] * 71
    assert bool((joined.slots().diff()[joined.token_row().diff() == 0] > 0).all())
    assert torch.equal(dequantise(joined, torch.float32)[0][5], dequantise(new, torch.float32)[0][0])


@pytest.mark.parametrize(("gap", "dtype"), [(1, torch.uint8), (9, torch.int16), (40_000, torch.int32)])
def test_slots_use_the_smallest_type_that_holds_them(gap: int, dtype: torch.dtype) -> None:
    slots = torch.arange(50) * gap + 7
    packed = pack_tokens(torch.randn(50, 16), torch.randn(50, 16), torch.zeros(50, dtype=torch.long), slots, None)
    assert packed.offset.dtype == dtype
    assert torch.equal(packed.slots(), slots)


def test_the_rotation_that_inference_made_serves_training_too() -> None:
    quant._hadamard_matrix.cache_clear()
    with torch.inference_mode():
        quant.hadamard(torch.randn(2, 48))
    x = torch.randn(2, 48, requires_grad=True)
    quant.hadamard(x).sum().backward()
    assert x.grad is not None
