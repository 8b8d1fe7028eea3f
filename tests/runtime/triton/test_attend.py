"""The Triton kernel of attention, interpreted on a CPU, against the plain torch reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fade_runtime.kernels import reference
from fade_runtime.kernels.reference import Part
from fade_runtime.kernels.triton import attention as triton
from fade_runtime.kernels.triton import launch_table as launches
from fade_runtime.kernels.triton import self_test as triton_check
from fade_runtime.kernels.triton.launch_table import Launch
from fade_runtime.storage.packed import Bits, PackedTokens, pack_tokens
from fade_runtime.storage.tiers import Tier
from predictor.errors import FadeError
from predictor.rope import Table
from tests.rounding import Call

DIMS = (64, 96, 128, 256)
LENGTHS = ([1], [17, 63], [64, 0, 200], [63, 1], [200], [0, 64, 17], [130, 65], [17])  # tokens of each row
BITS = ((4, 4, 4, 2), (4, 2, 4, 2), (8, 8, 4, 4), (4, 4, 2, 2))
PAGES = (64, 32, 9)  # most tokens of a page
SMALL = Launch(2, 1, 2, 2)  # two pages a split, so that rows are split


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel is to write is full of NaN before, and it must compute everything itself."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(99)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


def _packed(
    lengths: list[int], dim: int, bits: tuple[int, ...], mixed: bool, seed: int = 0, page: int = 64
) -> PackedTokens:
    """Ragged rows; mixed: of both tiers, in pages with gaps."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    slots = torch.cat([torch.arange(n) for n in lengths])
    key, value = torch.randn(2, len(rows), dim, generator=generator)
    packed = pack_tokens(key, value * 5, rows, slots, None, bits=Bits(*bits), page_tokens=page)
    if not mixed:
        return packed
    kinds = torch.tensor([Tier.HIGH, Tier.LOW, Tier.LOW, Tier.EVICTED])
    tiers = kinds[torch.randint(4, (len(packed),), generator=generator)]
    tiers[0] = Tier.LOW
    return packed.retier(tiers)


def _hiding(*shape: int) -> Tensor:
    return torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, -torch.inf)


def _call(packed: PackedTokens, rows: int, queries: int, full: int, masked: bool, **part: Any) -> Call:
    """Arguments of a kernel, with statistics; masked: with biases, a cap and sinks."""
    torch.manual_seed(queries)
    dim = packed.key_scale.shape[1]
    query, (key, value) = torch.randn(rows, queries, dim) * dim**-0.5 * 4, torch.randn(2, rows, full, dim)
    bias = _hiding(rows, queries, full) if masked else None
    since = torch.randint(150, (rows, queries), dtype=torch.int32) if masked else None
    stored = Part(packed, bias=_hiding(len(packed), queries) if masked else None, since=since, **part)
    cap, sinks = (3.0, 2 * torch.randn(rows, queries)) if masked else (None, None)
    return Call(query, key, value, [stored], torch.rand(queries), bias, cap, sinks)


def _half(call: Call) -> Call:
    """The same of a model in half precision."""
    return call._replace(query=call.query.half(), key=call.key.half(), value=call.value.half())


def _flat(result: tuple[Tensor, Tensor | None, list[Tensor]]) -> list[Tensor]:
    return [t for t in (*result[:2], *result[2]) if t is not None]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative root mean square error."""
    return float((ours.float() - theirs).norm() / theirs.norm().clamp(min=1e-30))


def _agree(kernel: Callable[..., Any], call: Call, most: float = 1e-5) -> None:
    expected, got = _flat(reference.attend(*call)), _flat(kernel(*call))
    for ours, theirs in zip(got, expected, strict=True):
        assert _difference(ours, theirs) < most


def _alone(*arguments: Any, launch: Launch = SMALL) -> Any:
    """The fused kernel itself, so that nothing is left to the reference; arguments of a :class:`Call`."""
    call = Call(*arguments)
    return triton.fused(*call, [launch] * len(call.parts))


@pytest.mark.parametrize("queries", range(1, 9), ids="group {}".format)
@pytest.mark.parametrize("dim", DIMS, ids="dim {}".format)
def test_equals_the_reference(dim: int, queries: int) -> None:
    lengths = LENGTHS[queries - 1]
    turn = queries + DIMS.index(dim)
    packed = _packed(lengths, dim, BITS[turn % 4], mixed=turn % 3 > 0, page=PAGES[queries % 3])
    full = (1, 64, 130, 17, 63, 1, 68, 5)[queries - 1]
    _agree(_alone, _call(packed, len(lengths), queries, full, masked=turn % 2 == 0))


@pytest.mark.parametrize("bits", [(8, 4, 4, 2), (8, 8, 8, 8), (2, 2, 2, 2), (4, 4, 4, 4), (8, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["high", "both", "low"])
def test_all_bits_and_tiers(bits: tuple[int, ...], kind: str) -> None:
    packed = _packed([70, 5], 80, bits, mixed=kind == "both")
    if kind == "low":
        packed = packed.retier(torch.full((75,), int(Tier.LOW)))
    _agree(_alone, _call(packed, 2, 3, 7, masked=False))


def test_without_statistics_the_output_is_the_same() -> None:
    call = _call(_packed([70], 64, BITS[0], True), 1, 3, 5, masked=True)
    plain = triton.attend(*call._replace(weights=None))
    assert plain[1:] == (None, [])
    assert torch.equal(plain[0], triton.attend(*call)[0])


def test_statistics_are_added_to_older_ones() -> None:
    packed = _packed([70, 5], 64, BITS[0], mixed=True)
    call = _call(packed, 2, 3, 7, masked=True)
    _, fresh, (fresh_packed,) = _alone(*call)
    older = torch.rand(2, 7), torch.rand(len(packed))
    states = [state.clone() for state in older]
    triton.attend(*call, into=states, decay=0.5)
    for state, old, new in zip(states, older, (fresh, fresh_packed)):
        torch.testing.assert_close(state, 0.5 * old + new)


@pytest.mark.parametrize("counts", [[0], [0, 0]], ids=str)
def test_rows_without_stored_tokens(counts: list[int]) -> None:
    _agree(triton.attend, _call(_packed(counts, 64, BITS[0], False), len(counts), 2, 3, masked=False))


def test_no_full_precision_tokens() -> None:
    _agree(_alone, _call(_packed([70, 5], 64, BITS[0], True), 2, 2, 0, masked=False))


def test_many_queries_and_splits() -> None:
    """Two blocks of queries; rows of several splits."""
    _agree(_alone, _call(_packed([200, 3], 16, BITS[0], True), 2, 20, 130, masked=True))


@pytest.mark.parametrize("span", [1, 3, 16])
def test_splits_cover_all_pages_once(span: int) -> None:
    packed = _packed([640, 0, 1, 64, 65], 16, BITS[0], True)
    splits, starts = triton.make_splits(packed, 6, span)
    row, first, pages, token, low = splits[:, splits[2] > 0].tolist()
    seen = [page for at, count in zip(first, pages) for page in range(at, at + count)]
    assert seen == list(range(len(packed.page_len)))
    assert [packed.page_row[at] for at in first] == row
    assert token == [int(packed.page_len[:at].sum()) for at in first]
    assert low == [int(packed.page_low[:at].sum()) for at in first]
    assert starts.tolist() == [sum(each < r for each in row) for r in range(7)]
    assert triton.make_splits(packed, 6, span)[0] is splits


@pytest.mark.parametrize("masked", [False, True])
def test_several_parts_share_one_softmax(masked: bool) -> None:
    """Of other bits, tiers and lengths; the second has no token in the last row, the third none at all."""
    lengths = [[70, 5], [130, 0], [0, 0], [3, 64]]
    parts = [_packed(each, 64, bits, mixed, seed=3) for each, bits, mixed in zip(lengths, BITS, (1, 0, 0, 1))]
    call = _call(parts[0], 2, 3, 70, masked)
    others = [Part(each, bias=_hiding(len(each), 3) if masked else None) for each in parts[1:]]
    _agree(_alone, call._replace(parts=[*call.parts, *others]))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("dim", "width"), [(64, 64), (64, 32), (96, 48), (128, 128)], ids=str)
def test_keys_rotated_when_they_are_read(dim: int, width: int, interleaved: bool) -> None:
    packed = _packed([70, 20], dim, BITS[0], True, page=32 if interleaved else 64)
    angles = torch.rand(200, width // 2, generator=torch.Generator().manual_seed(1)) * 6
    both = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    positions = torch.arange(len(packed)) * 2 % 200
    table = Table(both.cos() * 1.1, both.sin() * 1.1, interleaved)
    _agree(_alone, _call(packed, 2, 3, 7, True, table=table, positions=positions))


@pytest.mark.parametrize("dim", DIMS, ids="dim {}".format)
def test_half_precision(dim: int) -> None:
    packed = _packed([200, 17], dim, BITS[0], True)
    call = _call(packed, 2, 4, 20, masked=True)
    expected = _flat(reference.attend(*call))
    got = _flat(_alone(*_half(call)))
    assert got[0].dtype == torch.float16
    assert all(_difference(ours, theirs) < 2e-3 for ours, theirs in zip(got, expected, strict=True))


def test_small_values_under_flat_attention_do_not_vanish_in_half_precision() -> None:
    """Probability times scale is 1e-8 here, which float16 cannot hold."""
    rows = torch.zeros(1000, dtype=torch.long)
    key, value = torch.zeros(1000, 64), torch.rand(1000, 64, generator=torch.Generator().manual_seed(0)) * 1e-2
    packed = pack_tokens(key, value, rows, torch.arange(1000), None)
    query, full = torch.ones(1, 1, 64) / 8, torch.full((1, 1, 64), 11 / 8)  # exp(11): what the whole body weighs
    call = Call(query, full, torch.zeros(1, 1, 64), [Part(packed)])
    assert _difference(_alone(*_half(call))[0], reference.attend(*call)[0]) < 5e-3


def test_extreme_scores_neither_overflow_nor_vanish() -> None:
    packed = _packed([130, 70], 64, BITS[0], True)
    call = _call(packed, 2, 3, 5, masked=False)
    _agree(_alone, call._replace(query=call.query * 2000), 1e-3)
    huge = pack_tokens(torch.randn(64, 64) * 1e4, torch.randn(64, 64), torch.zeros(64).long(), torch.arange(64), None)
    large = _half(Call(torch.randn(1, 2, 64) * 100, call.key[:1], call.value[:1], [Part(huge)]))
    assert bool(_alone(*large)[0].isfinite().all())


def test_hidden_tokens_carry_nothing() -> None:
    packed = _packed([40, 8], 64, BITS[0], False)
    nothing = Part(packed, bias=torch.full((48, 2), -torch.inf))
    call = _call(packed, 2, 2, 6, masked=False)._replace(parts=[nothing])
    for sinks in (None, torch.full((2, 2), -torch.inf), torch.zeros(2, 2)):
        out, mass, (body,) = _alone(*call._replace(bias=torch.full((2, 2, 6), -torch.inf), sinks=sinks))
        assert not any(bool(t.any()) for t in (out, mass, body))  # a padding query
    out, mass, (body,) = _alone(*call)
    expected, full_mass, _ = reference.attend(*call._replace(parts=[]))
    assert _difference(out, expected) < 1e-5
    assert _difference(mass, full_mass) < 1e-5
    assert not bool(body.any())


def test_sinks_of_minus_infinity_are_none() -> None:
    call = _call(_packed([70, 0, 9], 64, BITS[0], True), 3, 4, 30, masked=True)
    alike = _alone(*call._replace(sinks=torch.full((3, 4), -torch.inf)))
    plain = _alone(*call._replace(sinks=None))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(_flat(alike), _flat(plain), strict=True))


def test_keys_may_lie_in_a_longer_buffer() -> None:
    packed = _packed([70, 9], 64, BITS[0], False)
    call = _call(packed, 2, 3, 30, masked=False)
    longer = torch.full((2, 2, 40, 64), torch.nan)
    longer[:, :, :30] = torch.stack((call.key, call.value))
    _agree(_alone, call._replace(key=longer[0, :, :30], value=longer[1, :, :30]))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [[70, 70], [70, 0, 9]], ids=str)
def test_a_dequantised_layer_gives_the_same(lengths: list[int], masked: bool) -> None:
    packed = _packed(lengths, 64, BITS[0], masked)
    query, key, value, (part,), _, bias, _, sinks = _call(packed, len(lengths), 20, 7, masked)
    expected = reference.attend(query, key, value, [part], None, bias, None, sinks)[0]
    assert _difference(triton.dense(query, key, value, part, bias, sinks), expected) < 1e-5
    hidden = Part(packed, bias=torch.full((len(packed), 20), -torch.inf))
    nothing = triton.dense(query, key, value, hidden, torch.full((len(lengths), 20, 7), -torch.inf), sinks)
    assert not bool(nothing.any())


def test_many_queries_take_the_dequantised_layer_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, parts, weights, *_ = _call(_packed([70], 64, BITS[0], False), 1, 6, 5, masked=False)
    taken = []
    for name in ("dense", "fused"):
        real = getattr(triton, name)
        spy = lambda *args, name=name, real=real: (taken.append(name), real(*args))[1]
        monkeypatch.setattr(triton, name, spy)
    for least, queries in ((75, 6), (76, 6), (75, 7)):
        launch = Launch(2, 1, 2, 2, ((least, queries),))
        monkeypatch.setattr(launches, "choose", lambda *_, launch=launch: launch)
        triton.attend(query, key, value, parts)
    assert taken == ["dense", "fused", "fused"]
    launch = Launch(2, 1, 2, 2, ((0, 1),))
    monkeypatch.setattr(launches, "choose", lambda *_: launch)
    triton.attend(query, key, value, parts, weights)  # statistics need scores
    triton.attend(query, key, value, parts, None, None, 2.0)
    assert taken[3:] == ["fused", "fused"]


def test_what_it_cannot_do_goes_to_the_reference() -> None:
    packed = _packed([70], 64, BITS[0], False)
    query, key, value, _, weights, *_ = _call(packed, 1, 3, 5, masked=False)
    narrow = pack_tokens(torch.randn(70, 64), torch.randn(70, 32), torch.zeros(70).long(), torch.arange(70), None)
    for values, parts in ((value, []), (value[..., :32], [Part(narrow)])):
        ours = triton.attend(query, key, values, parts, weights)
        theirs = reference.attend(query, key, values, parts, weights)
        assert all(torch.equal(mine, other) for mine, other in zip(_flat(ours), _flat(theirs), strict=True))


def test_a_kernel_that_disagrees_fails_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    triton_check.self_test(here)
    real = triton.attend
    monkeypatch.setattr(triton, "attend", lambda *args: (real(*args)[0] * 1.02, *real(*args)[1:]))
    with pytest.raises(FadeError, match=r"disagree with the reference in their attention, by 2\.0%"):
        triton_check.self_test(here)
    monkeypatch.setattr(triton, "attend", lambda *args: 1 / 0)
    with pytest.raises(FadeError, match="do not run on cpu: ZeroDivisionError"):
        triton_check.self_test(here)
