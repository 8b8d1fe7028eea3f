"""The compiled CPU kernel against the plain torch reference."""

import copy
import functools
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fade_runtime.kernels import reference
from fade_runtime.kernels.cpu import attention as cpu
from fade_runtime.kernels.reference import Part
from fade_runtime.storage.packed import Bits, PackedTokens, pack_tokens
from predictor.rope import Table
from tests import rounding
from tests.runtime.compiled import compiled, mixed  # noqa: F401  a fixture

DEFAULT = Bits()


def _ragged(lengths: list[int], dim: int, bits: Bits = DEFAULT) -> PackedTokens:
    torch.manual_seed(2)
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    slots = torch.cat([torch.arange(n) for n in lengths])
    return pack_tokens(torch.randn(len(rows), dim), torch.randn(len(rows), dim) * 5, rows, slots, None, bits=bits)


def _hiding(*shape: int) -> Tensor:
    return torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, -torch.inf)


def _flat(result: tuple[Tensor, Tensor | None, list[Tensor]]) -> list[Tensor]:
    """The tensors of a result: output, then statistics if there are any."""
    return [t for t in (*result[:2], *result[2]) if t is not None]


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [(4, 4, 4, 2), (4, 2, 4, 2), (8, 8, 4, 4), (4, 4, 2, 2)], ids=str)
def test_compiled_kernel_equals_the_reference(
    dim: int, bits: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = cpu.attend, reference.attend
    monkeypatch.setattr(reference, "attend", None)  # the kernel must do it all itself
    lengths = ([1], [17, 63], [64, 0, 200], [129, 1, 0, 65], [70], [3, 130])
    for queries, counts in zip((1, 2, 3, 4, 7, 8), lengths, strict=True):
        packed = _ragged(counts, dim, Bits(*bits))
        query = torch.randn(len(counts), queries, dim) * dim**-0.5 * 4
        weights = torch.rand(queries)
        for tokens, full, masked in (
            (packed, 68, False),
            (mixed(packed), 1, False),
            (mixed(packed), 129, True),
        ):
            key, value = torch.randn(2, len(counts), full, dim)
            bias = _hiding(len(counts), queries, full) if masked else None
            since = torch.randint(150, (len(counts), queries), dtype=torch.int32) if full != 68 else None
            part = Part(tokens, bias=_hiding(len(tokens), queries) if masked else None, since=since)
            sinks = 2 * torch.randn(len(counts), queries) if full != 68 else None
            call = rounding.Call(query, key, value, [part], weights, bias, 3.0 if masked else None, sinks)
            exact = rounding.attention(*call)
            for kernel in both:
                exact.check(_flat(kernel(*call)))
        older = torch.rand(len(counts), full), torch.rand(len(tokens))
        for kernel in both:
            into = [state.clone() for state in older]
            out, mass, masses = kernel(*call, into=into, decay=0.5)
            assert [each.data_ptr() for each in (mass, *masses)] == [each.data_ptr() for each in into]
            exact.after(older, 0.5).check([out, *into])
        alone, mass, masses = cpu.attend(query, key, value, [part], None, bias, 3.0, sinks)
        assert (mass, masses) == (None, [])
        assert torch.equal(alone, cpu.attend(*call)[0])


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("bits", [DEFAULT, Bits(8, 8, 4, 2)], ids=str)
@pytest.mark.parametrize("page_tokens", [32, 64])
def test_rows_longer_than_what_is_taken_at_once(dim: int, bits: Bits, page_tokens: int) -> None:
    """Splits of a row, and values weighed in runs of tokens, whose ends are no multiples of anything."""
    lengths = torch.tensor([1101, 38, 703])
    rows, slots = torch.arange(3).repeat_interleave(lengths), torch.cat([torch.arange(n) for n in lengths])
    body = torch.randn(2, len(rows), dim)
    packed = pack_tokens(*body, rows, slots, None, bits=bits, page_tokens=page_tokens)
    query, weights = torch.randn(3, 5, dim) * dim**-0.5 * 4, torch.rand(5)
    key, value = torch.randn(2, 3, 1030, dim)
    for tokens in (packed, mixed(packed)):
        call = rounding.Call(query, key, value, [Part(tokens)], weights)
        exact = rounding.attention(*call)
        for kernel in (cpu.attend, reference.attend):
            exact.check(_flat(kernel(*call)))


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_many_queries_over_several_splits() -> None:
    """A second prompt over a long body: splits of 1,024 tokens are merged, pages straddle rows."""
    packed = mixed(_ragged([2500, 700], 64))
    query, (key, value) = torch.randn(2, 42, 64), torch.randn(2, 2, 1500, 64)
    call = rounding.Call(query, key, value, [Part(packed)], torch.rand(42))
    exact = rounding.attention(*call)
    for kernel in (cpu.attend, reference.attend):
        exact.check(_flat(kernel(*call)))


# Tokens of each row, part by part.
PARTS = {
    2: ([70, 0, 200], [129, 1, 0]),
    5: ([1100, 17, 0], [0, 0, 0], [3, 64, 0], [0, 0, 900], [65, 1, 130]),
    16: tuple([16 * (n % 5), 0, 90 - 6 * n] for n in range(16)),
}


def _parts(counts: int, dim: int, queries: int, bits: Bits, masked: bool) -> list[Part]:
    """Ragged parts, every other one with both tiers; hidden tokens in some."""
    torch.manual_seed(4)
    parts = []
    for index, lengths in enumerate(PARTS[counts]):
        tokens = _ragged(lengths, dim, bits)
        tokens = mixed(tokens) if index % 2 and len(tokens) else tokens
        parts.append(Part(tokens, bias=_hiding(len(tokens), queries) if masked and index % 3 == 0 else None))
    return parts


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("counts", PARTS, ids="{}-parts".format)
@pytest.mark.parametrize("dim", [48, 64, 128])
@pytest.mark.parametrize("bits", [DEFAULT, Bits(8, 4, 4, 2)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_several_parts_under_one_softmax(
    counts: int, dim: int, bits: Bits, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = cpu.attend, reference.attend
    monkeypatch.setattr(reference, "attend", None)
    queries, full = 5, 70
    parts = _parts(counts, dim, queries, bits, masked)
    query, weights = torch.randn(3, queries, dim) * dim**-0.5 * 4, torch.rand(queries)
    key, value = torch.randn(2, 3, full, dim)
    bias = _hiding(3, queries, full) if masked else None
    call = rounding.Call(query, key, value, parts, weights, bias, 3.0 if masked else None)
    results = [kernel(*call) for kernel in both]
    exact = rounding.attention(*call)
    for result in results:
        exact.check(_flat(result))
    assert [len(mass) for mass in results[0][2]] == [len(part.tokens) for part in parts]
    total = float(results[0][1].sum() + sum(mass.sum() for mass in results[0][2]))  # type: ignore[union-attr]
    assert total == pytest.approx(3 * float(weights.sum()), rel=rounding.of_sum(sum(map(len, results[0][2])) + full))
    monkeypatch.setattr(cpu, "PARALLEL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for alone, shared in zip(_flat(results[0]), _flat(cpu.attend(*call)), strict=True):
        assert torch.equal(alone, shared)


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("counts", PARTS, ids="{}-parts".format)
def test_parts_give_what_their_join_gives(counts: int) -> None:
    parts = _parts(counts, 64, 3, DEFAULT, masked=False)
    query, (key, value) = torch.randn(3, 3, 64) / 2, torch.randn(2, 3, 9, 64)
    weights = torch.rand(3)
    tokens = [part.tokens for part in parts if isinstance(part.tokens, PackedTokens)]
    joined = functools.reduce(PackedTokens.join, tokens)
    out, mass, masses = cpu.attend(query, key, value, parts, weights)
    expected, full_mass, (joined_mass,) = cpu.attend(query, key, value, [Part(joined)], weights)
    order = torch.cat([each.token_row() for each in tokens]).argsort(stable=True)
    exact = rounding.attention(query, key, value, [Part(joined)], weights)
    for results in ((out, mass, torch.cat(masses)[order]), (expected, full_mass, joined_mass)):
        exact.check(results)


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_parts_of_different_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    both = cpu.attend, reference.attend
    monkeypatch.setattr(reference, "attend", None)
    parts = [Part(mixed(_ragged([70, 9], 64, bits))) for bits in (DEFAULT, Bits(8, 8, 4, 4), Bits(2, 2, 2, 2))]
    call = rounding.Call(torch.randn(2, 3, 64) / 2, *torch.randn(2, 2, 5, 64), parts, torch.rand(3))
    exact = rounding.attention(*call)
    for kernel in both:
        exact.check(_flat(kernel(*call)))


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_a_part_to_be_rotated_sends_all_to_the_reference() -> None:
    packed, angles = _ragged([70, 9], 64), torch.rand(90, 64)
    rotated = Part(packed, table=Table(angles.cos(), angles.sin()), positions=packed.slots())
    call = rounding.Call(torch.randn(2, 3, 64), *torch.randn(2, 2, 5, 64), [Part(packed), rotated], torch.rand(3))
    for ours, theirs in zip(*(_flat(kernel(*call)) for kernel in (cpu.attend, reference.attend)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("statistics", [False, True])
def test_threads_change_nothing(statistics: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither threads inside a call nor calls of several threads at once."""
    packed = [mixed(_ragged([2200, 30, 1100], 64)), mixed(_ragged([900, 4000, 1], 64))]
    query, (key, value) = torch.randn(3, 3, 64), torch.randn(2, 3, 90, 64)
    weights = torch.rand(3) if statistics else None
    run = lambda tokens: _flat(cpu.attend(query, key, value, [Part(tokens)], weights))
    monkeypatch.setattr(cpu, "PARALLEL", 0)
    results = {}
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results[threads] = [run(tokens) for tokens in packed]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(run, packed * 8))
        for got, expected in zip([*results[threads], *together], results[1] * 9, strict=True):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_keys_may_lie_in_a_longer_buffer() -> None:
    packed, query = _ragged([70, 9], 64), torch.randn(2, 3, 64)
    key, value = torch.full((2, 2, 40, 64), torch.nan)
    key[:, :30], value[:, :30] = torch.randn(2, 2, 30, 64)
    call = rounding.Call(query, key[:, :30], value[:, :30], [Part(packed)])
    rounding.attention(*call).check(_flat(cpu.attend(*call)))


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_extreme_scores_neither_overflow_nor_vanish() -> None:
    packed = _ragged([130, 70], 64)
    query, (key, value) = torch.randn(2, 3, 64) * 300, torch.randn(2, 2, 5, 64)
    call = rounding.Call(query, key, value, [Part(packed)], torch.ones(3))
    exact = rounding.attention(*call)
    for kernel in (cpu.attend, reference.attend):
        results = _flat(kernel(*call))
        assert all(bool(each.isfinite().all()) for each in results)
        exact.check(results)


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries_keep_their_type(dtype: torch.dtype) -> None:
    packed = _ragged([90, 5], 64)
    query, (key, value) = torch.randn(2, 3, 64), torch.randn(2, 2, 7, 64)
    out, _, _ = cpu.attend(query.to(dtype), key.to(dtype), value.to(dtype), [Part(packed)])
    assert out.dtype == dtype
    rounded = [each.to(dtype) for each in (query, key, value)]
    exact = rounding.attention(*rounded, [Part(packed)])
    once = torch.finfo(dtype).eps / 2 * float(out.float().norm())  # the result is rounded once
    assert float((out - exact.results[0]).norm()) <= once + exact.errors[0]


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kernel", [cpu.attend, reference.attend], ids=["compiled", "reference"])
def test_hidden_tokens_carry_nothing(kernel: Callable[..., Any]) -> None:
    packed = _ragged([40, 8], 32)
    query, (key, value) = torch.randn(2, 2, 32), torch.randn(2, 2, 6, 32)
    hidden, body_hidden = torch.zeros(2, 2, 6), torch.zeros(48, 2)
    hidden[:, :, 4:] = -torch.inf
    body_hidden[10:] = -torch.inf  # the whole second row
    out, mass, (body_mass,) = kernel(query, key, value, [Part(packed, bias=body_hidden)], torch.ones(2), hidden)
    seen = rounding.Call(query, key[:, :4], value[:, :4], [Part(packed.keep(torch.arange(48) < 10))], torch.ones(2))
    expected, full_mass, (seen_mass,) = reference.attend(*seen)
    exact = rounding.attention(*seen)
    for results in ((out, mass[:, :4], body_mass[:10]), (expected, full_mass, seen_mass)):
        exact.check(results)
    assert bool((body_mass[10:] == 0).all())
    all_hidden = Part(packed, bias=torch.full_like(body_hidden, -torch.inf))
    for sinks in (None, torch.full((2, 2), -torch.inf), torch.zeros(2, 2)):
        nothing, _, _ = kernel(query, key, value, [all_hidden], None, torch.full_like(hidden, -torch.inf), None, sinks)
        assert bool((nothing == 0).all())  # a padding query


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kernel", [cpu.attend, reference.attend], ids=["compiled", "reference"])
@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3), queries=st.integers(1, 5), full=st.integers(0, 70))
def test_sinks_of_minus_infinity_are_none(
    kernel: Callable[..., Any], lengths: list[int], queries: int, full: int
) -> None:
    packed, rows = _ragged(lengths, 32), len(lengths)
    call = rounding.Call(
        torch.randn(rows, queries, 32), *torch.randn(2, rows, full, 32), [Part(packed)], torch.rand(queries)
    )
    plain = _flat(kernel(*call))
    for sinks in (-torch.inf, -1e38):
        alike = _flat(kernel(*call._replace(sinks=torch.full((rows, queries), sinks))))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(alike, plain, strict=True))


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kernel", [cpu.attend, reference.attend], ids=["compiled", "reference"])
def test_a_sink_takes_its_share_of_every_token(kernel: Callable[..., Any]) -> None:
    """By the logarithm of the sum of exponentials, which is all that a sink has to know of the tokens."""
    packed = _ragged([70, 0, 130], 48)
    query, (key, value) = torch.randn(3, 4, 48), torch.randn(2, 3, 9, 48)
    call, sinks = rounding.Call(query, key, value, [Part(packed)], torch.ones(4)), 4 * torch.randn(3, 4)
    plain_key, _ = reference.dequantise(packed, torch.float32)
    for row in range(3):
        keys = torch.cat((key[row], plain_key[packed.token_row() == row]))
        share = ((query[row] @ keys.T).logsumexp(-1) - sinks[row]).sigmoid()[:, None]
        ours, plain = (kernel(*call._replace(sinks=each))[0][row] for each in (sinks, None))
        torch.testing.assert_close(ours, plain * share, atol=1e-5, rtol=1e-4)


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_default_dtype_changes_nothing() -> None:
    packed = _ragged([90, 5], 64)
    call = rounding.Call(torch.randn(2, 3, 64), *torch.randn(2, 2, 7, 64), [Part(packed)], torch.rand(3))
    expected = _flat(cpu.attend(*call))
    torch.set_default_dtype(torch.float16)
    try:
        results = _flat(cpu.attend(*call))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_what_is_known_of_tokens_goes_with_them() -> None:
    packed, query, (key, value) = _ragged([90, 5], 64), torch.randn(2, 3, 64), torch.randn(2, 2, 7, 64)
    first = cpu.attend(query, key, value, [Part(packed)])[0]
    known = packed.derived[cpu.DESCRIBED]
    assert torch.equal(cpu.attend(query, key, value, [Part(packed)])[0], first)
    assert packed.derived[cpu.DESCRIBED] is known
    for copied in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert copied.derived == {}  # it has tensors of its own
        copied.key_codes.zero_()
        assert not torch.equal(cpu.attend(query, key, value, [Part(copied)])[0], first)
    assert all(getattr(packed, name) is tensor for name, tensor in zip(PackedTokens.READ, known.tensors, strict=True))


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_copies_that_c_needs_do_not_outlive_the_call() -> None:
    packed = _ragged([90, 5], 64)
    strided = replace(packed, key_codes=packed.key_codes.T.contiguous().T)
    query, (key, value) = torch.randn(2, 3, 64), torch.randn(2, 2, 7, 64)
    ours, plain = (cpu.attend(query, key, value, [Part(each)])[0] for each in (strided, packed))
    assert torch.equal(ours, plain)
    assert strided.derived == {}


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_process_keeps_denormal_numbers() -> None:
    """Loading a library built with -ffast-math would flush them to zero, everywhere."""
    cpu.self_test()
    tiny = torch.tensor(1e-40)
    assert float(tiny * 0.5) > 0


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_values_of_another_width_than_keys_go_to_the_reference() -> None:
    torch.manual_seed(3)
    rows = torch.zeros(70, dtype=torch.long)
    packed = pack_tokens(torch.randn(70, 64), torch.randn(70, 32), rows, torch.arange(70), None)
    call = rounding.Call(
        torch.randn(1, 3, 64), torch.randn(1, 5, 64), torch.randn(1, 5, 32), [Part(packed)], torch.ones(3)
    )
    ours, theirs = cpu.attend(*call), reference.attend(*call)
    assert ours[0].shape == (1, 3, 32)
    assert torch.equal(ours[0], theirs[0])
