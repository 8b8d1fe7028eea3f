"""Evicted tokens that are looked at as much as kept ones come back while decoding."""

from __future__ import annotations

import random
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fade_runtime import FadeConfig, FadeError, TieredCache, create_tiered_cache
from fade_runtime.guard.prefetch import fetch, needed
from fade_runtime.storage.spillfiles import SpillFolder
from fade_runtime.transformers_api import forward_kwargs
from tests.runtime.caches import random_ids

OPTIONS: dict[str, Any] = dict(
    n_sink=2, recent_window=16, int4_budget=30, reassign_every=16, eviction_policy="ema", guard="warn", spill="host",
    monitor_every=8, kl_alarm=1e9,
)  # fmt: skip


def decode(model: Any, cache: TieredCache, ids: Tensor, first: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for at in [slice(0, first), *(slice(i, i + 1) for i in range(first, ids.shape[1]))]:
            model(ids[:, at], **forward_kwargs(cache, model))


@pytest.mark.parametrize(("length", "block", "most"), [(5, 16, 9), (48, 16, 20), (111, 7, 15), (64, 4, 0)])
def test_needed_against_a_loop(length: int, block: int, most: int) -> None:
    generator = torch.Generator().manual_seed(length)
    attention = torch.rand(3, length, generator=generator, dtype=torch.float64) ** 4
    gone = torch.rand(3, length, generator=generator) < 0.6
    kept = ~gone & (torch.rand(3, length, generator=generator) < 0.8)
    got = needed(attention, gone, kept, most, block)
    for row in range(3):
        usual = float(attention[row, kept[row]].sum()) / max(int(kept[row].sum()), 1)
        blocks = []
        for at in range(0, length, block):
            mine = [s for s in range(at, min(at + block, length)) if gone[row, s]]
            mean = sum(float(attention[row, s]) for s in mine) / max(len(mine), 1)
            if mine and mean >= usual:
                blocks.append((mean, mine))
        chosen: list[int] = []
        for _, mine in sorted(blocks, reverse=True):
            if len(chosen) + len(mine) > most:
                break
            chosen += mine
        assert got[row].nonzero().flatten().tolist() == sorted(chosen)


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("policy", ["ema", "h2o", "position"])
def test_tokens_come_back_and_the_budget_holds(model: Any, policy: str, where: str, tmp_path: Path) -> None:
    spill = dict(spill="disk", spill_dir=tmp_path) if where == "disk" else {}
    cache = create_tiered_cache(model, FadeConfig(**{**OPTIONS, **spill, "eviction_policy": policy}, prefetch=True))
    decode(model, cache, random_ids(2, 260), 200)
    report = cache.monitor.report()
    assert report["fetched"] > 0
    tokens = cache.memory_report()["tokens"]
    assert tokens["EVICTED"] == report["spilled"]["tokens"]
    rows = 2 * 2 * len(cache.tiered)
    assert tokens["HIGH"] <= rows * (30 + 3 * 16)  # what came back waits for the next reassignment


def test_what_comes_back_is_what_left_with_its_attention_as_statistic(model: Any) -> None:
    cache = create_tiered_cache(model, FadeConfig(**OPTIONS))
    decode(model, cache, random_ids(2, 220), 200)
    layer = cache.tiered[0]
    before = layer.materialise()
    attention = torch.rand(4, layer.seen, generator=torch.Generator().manual_seed(1))
    gone = torch.zeros(4, layer.seen, dtype=torch.bool)
    for tokens in layer.tokens.whole().back:
        gone[tokens.token_row(), tokens.slots()] = True
    chosen = gone.clone()
    count = fetch(layer, [attention], gone)
    for tokens in layer.tokens.whole().back:
        chosen[tokens.token_row(), tokens.slots()] = False
    assert count == int(chosen.sum()) > 0
    for ours, theirs in zip(layer.materialise(), before):
        assert torch.equal(ours, theirs)
    packed = layer.tokens.packed
    row, slot = packed.token_row(), packed.slots()
    back = chosen[row, slot]
    score = layer.policy.score(packed.attention_stats, slot, layer.seen, layer.prompt)
    torch.testing.assert_close(score[back], attention[row, slot][back])


def fetching(model: Any, rows: list[int] | None = None, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    """Logits [B, n, V] of decode steps between which the batch is reordered, in the first order; the guard's report."""
    ids = random_ids(2, 260)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        cache = create_tiered_cache(model, FadeConfig(**{**OPTIONS, **options}, prefetch=True))
        order = torch.arange(2)
        model(ids[:, :200], **forward_kwargs(cache, model))
        steps = []
        for at in range(200, 260):
            if rows is not None:
                cache.reorder_cache(torch.tensor(rows))
                order = order[rows]
            logits = model(ids[order, at : at + 1], **forward_kwargs(cache, model)).logits
            steps.append(logits[order.argsort()])
    return torch.cat(steps, 1), cache.monitor.report()


@pytest.mark.slow
def test_logits_do_not_depend_on_how_fast_the_disk_is(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, report = fetching(model)  # from host memory
    assert report["fetched"] > 0
    quick, _ = fetching(model, spill="disk", spill_dir=tmp_path)
    drawn, read = random.Random(0), SpillFolder.read

    def slow(*given: Any) -> bytes:
        time.sleep(drawn.choice([0, 0.001, 0.02]))
        return read(*given)

    monkeypatch.setattr(SpillFolder, "read", slow)
    got, after = fetching(model, spill="disk", spill_dir=tmp_path)
    assert torch.equal(quick, expected)
    assert torch.equal(got, expected)
    assert after["fetched"] == report["fetched"]


def test_what_comes_back_is_that_row_s_after_a_reorder(model: Any) -> None:
    expected, report = fetching(model)
    got, after = fetching(model, rows=[1, 0])
    assert after["fetched"] == report["fetched"] > 0
    bound = 2e-5 * float(expected.abs().max())  # rows are added up in another order
    torch.testing.assert_close(got, expected, atol=bound, rtol=1e-4)


def test_it_needs_a_spill_store() -> None:
    with pytest.raises(FadeError, match="prefetch brings spilled tokens back; set guard and spill="):
        FadeConfig(prefetch=True)
