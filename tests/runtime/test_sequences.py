"""Which columns are tokens, at which ids they came: held against a loop over rows."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fade_runtime import FadeConfig, FadeError, TieredCache, create_tiered_cache
from fade_runtime.layer.sequences import Sequences, Shared
from fade_runtime.transformers_api import forward_kwargs

CPU = torch.device("cpu")


def mask_of(real: Tensor, new: int) -> Tensor:
    """[B, 1, new, S] what queries of the newest columns may look at."""
    columns = real.shape[1]
    causal = torch.ones(new, columns, dtype=torch.bool).tril(columns - new)
    return (causal & real[:, None])[:, None]


@st.composite
def batches(draw: Any) -> list[list[list[bool]]]:
    """Calls of a batch: for each its rows, for each of these which columns are tokens."""
    rows = draw(st.integers(1, 3))
    width = st.integers(1, 5)
    return [
        [draw(st.lists(st.booleans(), min_size=new, max_size=new)) for _ in range(rows)]
        for new in draw(st.lists(width, min_size=1, max_size=4))
    ]


@given(batches(), st.integers(0, 100))
def test_slots_columns_and_ids_are_those_of_each_row_alone(calls: list[list[list[bool]]], seed: int) -> None:
    rows, generator = len(calls[0]), torch.Generator().manual_seed(seed)
    sequences, real = Sequences(0, rows, CPU), torch.zeros(rows, 0, dtype=torch.bool)
    ids = torch.zeros(rows, 0, dtype=torch.long)
    for call in calls:
        fresh = torch.tensor(call)
        new = fresh.shape[1]
        real = torch.cat((real, fresh), 1)
        at = torch.randint(1000, (rows, new), generator=generator)
        ids = torch.cat((ids, at), 1)
        sequences = sequences.extended(new, mask_of(real, new), at, keep_positions=True)
        newest = sequences.newest_slots()
        for row in range(rows):
            columns = real[row].nonzero()[:, 0].tolist()
            assert sequences.counts[row] == int(sequences.lengths[row]) == len(columns)
            assert sequences.gained[row] == sum(call[row])
            assert sequences.begins[row] == (0 < sum(call[row]) == len(columns))
            slots = [columns.index(c) if c in columns else -1 for c in range(real.shape[1] - new, real.shape[1])]
            assert newest[row].tolist() == slots
            assert torch.arange(real.shape[1])[sequences.tokens_of(row)].tolist() == columns
            assert sequences.by_slot(ids)[row, : len(columns)].tolist() == ids[row, columns].tolist()
            known, index = sequences.distinct
            assert known[index[row, : len(columns)]].tolist() == ids[row, columns].tolist()
            alone = sequences.row(row)
            assert (alone.real, alone.seen, alone.new) == (None, len(columns), sum(call[row]))
        assert sequences.plain


@given(batches(), st.integers(0, 12))
def test_a_crop_is_as_if_the_columns_had_never_come(calls: list[list[list[bool]]], count: int) -> None:
    rows = len(calls[0])
    real = torch.cat([torch.tensor(call) for call in calls], 1)
    count = min(count, real.shape[1] - 1)
    at = torch.arange(real.shape[1]).expand(rows, -1) * 3
    whole = Sequences(0, rows, CPU).extended(real.shape[1], mask_of(real, real.shape[1]), at, keep_positions=True)
    left = real[:, : real.shape[1] - count]
    other = Sequences(0, rows, CPU)
    other = other.extended(left.shape[1], mask_of(left, left.shape[1]), at[:, : left.shape[1]], keep_positions=True)
    cropped = whole.cropped(count)
    assert (cropped.counts, cropped.seen) == (other.counts, other.seen)
    assert (cropped.real is None) == (other.real is None)
    assert torch.equal(cropped.positions, other.positions)  # type: ignore[arg-type]


@pytest.mark.parametrize("pad", [0, 3])
def test_only_causality_and_padding_make_a_plain_mask(pad: int) -> None:
    at = torch.arange(9)
    plain = ((at <= at[:, None]) & (at >= pad))[None, None].expand(2, 1, 9, 9).clone()
    assert Sequences(0, 2, CPU).extended(9, plain).plain
    seen = plain.clone()
    seen[:, :, :pad, :] = False
    seen[:, :, 1:pad, 0] = True  # what padding sees is of no interest
    assert Sequences(0, 2, CPU).extended(9, seen).plain
    for row, query, slot in ((1, 8, pad), (0, 7, 8)):  # a window, and a look ahead
        other = plain.clone()
        other[row, 0, query, slot] ^= True
        assert not Sequences(0, 2, CPU).extended(9, other).plain
    assert not Sequences(0, 2, CPU).extended(9, torch.where(plain, 0.0, -torch.inf)).plain
    assert not Sequences(0, 2, CPU).extended(9, plain.expand(2, 4, 9, 9)).plain
    additive = Sequences(0, 2, CPU).extended(9, torch.where(plain, 0.0, torch.finfo(torch.float32).min))
    assert additive.counts == [9 - pad, 9 - pad]


def test_what_was_padding_stays_padding_and_masks_are_over_everything() -> None:
    real = torch.tensor([[True, True], [False, True]])
    sequences = Sequences(0, 2, CPU).extended(2, mask_of(real, 2))
    shown = torch.ones(2, 1, 1, 3, dtype=torch.bool)
    with pytest.raises(FadeError, match="shows column 0 of row 1, which was padding when it came"):
        sequences.extended(1, shown)
    with pytest.raises(FadeError, match="is over 1 queries and 2 columns, and the cache holds 2 with 1 new"):
        sequences.extended(1, shown[..., :2])


def test_ids_of_images_are_refused() -> None:
    ids = torch.arange(4).expand(3, 1, 4).clone()
    assert Sequences(0, 1, CPU).extended(4, None, ids, keep_positions=True).positions is not None
    ids[1] += 1
    with pytest.raises(FadeError, match="position ids differ between their axes, as those of images do"):
        Sequences(0, 1, CPU).extended(4, None, ids, keep_positions=True)


def test_layers_share_a_step_and_copies_do_not() -> None:
    shared, start = Shared(), Sequences(0, 1, CPU)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril()
    before = shared.step(start, 2, lambda: start.extended(2, mask), mask)
    assert shared.step(Sequences(0, 1, CPU), 2, lambda: start.extended(2, mask), mask) is before
    mask = torch.ones(1, 1, 2, 4, dtype=torch.bool).tril(2)
    step = functools.partial(before.extended, 2, mask)
    first = shared.step(before, 2, step, mask)
    assert shared.step(before, 2, step, mask) is first
    assert shared.step(before, 2, step, mask.clone()) is not first
    again = shared.step(before, 2, step, mask)
    assert copy.deepcopy(shared).step(before, 2, step, mask) is not again
    assert shared.step(start.extended(2), 2, step, mask) is not again


@pytest.mark.parametrize("options", [{}, {"positions": "streaming"}], ids=str)
def test_all_layers_of_a_cache_hold_the_same_rows(tiny_model: Any, options: dict[str, Any]) -> None:
    """In calls with and without padding, after a reorder and in a copy."""
    model = tiny_model(num_hidden_layers=3)
    cache = create_tiered_cache(model, FadeConfig(n_sink=2, recent_window=8, int4_budget=10, **options))
    ids, mask = torch.randint(3, 250, (2, 50)), torch.ones(2, 50, dtype=torch.long)
    mask[1, 30:] = 0

    def one(of: TieredCache) -> bool:
        return len({id(layer.tokens.sequences) for layer in of.tiered}) == 1

    for at in (slice(0, 40), slice(40, 41), slice(41, 45)):
        given = dict(attention_mask=mask[:, : at.stop], position_ids=torch.arange(50)[None, at].expand(2, -1))
        model(ids[:, at], **given, **forward_kwargs(cache, model))
        assert one(cache)
    assert one(copy.deepcopy(cache))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert one(cache)
    assert cache.tiered[0].tokens.sequences.counts == [30, 45]
