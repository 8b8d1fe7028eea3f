"""One budget for all layers and heads: it goes to the best tokens of a sequence, and is as large as by heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fade_runtime import FadeConfig, FadeError, TieredCache, create_tiered_cache
from fade_runtime.layer import CompressedLayer, allocation
from fade_runtime.policies import Policy, Prompt
from fade_runtime.policies.comparison import comparable, comparison
from predictor.budgets import HeadBudgets
from tests.conftest import make_tiny_model
from tests.runtime.caches import forward, forward_quietly, random_ids, reachable_bytes, save_bundle

TIGHT: dict[str, Any] = dict(n_sink=3, recent_window=9, int4_budget=0.3, reassign_every=7, allocation="global")
LAYERS, HEADS = 3, 2


class Known(Policy):
    """Importance that is given beforehand, and stays."""

    decay = 1.0

    def __init__(self, importance: Tensor) -> None:
        self.importance = importance

    def start(self, prompt: Prompt) -> Tensor:
        return self.importance[:, : prompt.key.shape[1]].clone()

    def weights(self, steps: int, device: torch.device) -> None:
        return None

    def score(self, attention_stats: Tensor, slots: Tensor, seen: Any, prompt: Any) -> Tensor:
        return attention_stats


def kept(cache: TieredCache, layer: int, row: int, head: int) -> set[int]:
    store = cache.tiered[layer].tokens
    own = store.packed.token_row() == row * store.heads + head
    return set(store.packed.slots()[own].tolist())


def by_row(cache: TieredCache) -> dict[tuple[int, int, int], set[int]]:
    batch = cache.tiered[0].tokens.batch
    return {(i, r, h): kept(cache, i, r, h) for i in range(LAYERS) for r in range(batch) for h in range(HEADS)}


def best(tokens: list[tuple[float, int, int, int]], count: int) -> list[tuple[float, int, int, int]]:
    return sorted(tokens, reverse=True)[:count]


@pytest.mark.parametrize("margin", [0.05, 5.0])
def test_a_prompt_keeps_the_best_tokens_of_all_layers(margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule in plain Python: a layer knows those before it; with a large margin, the best of all."""
    monkeypatch.setattr(allocation, "MARGIN", margin)
    model, lengths = make_tiny_model(num_hidden_layers=LAYERS, num_key_value_heads=HEADS), (97, 58)
    cache = create_tiered_cache(model, FadeConfig(**TIGHT))
    scores = torch.rand(LAYERS, HEADS, 97, generator=torch.Generator().manual_seed(1))
    scores[0] *= 1.5  # more than its part, which shows when later layers have been read
    for layer in cache.tiered:
        layer.setup = replace(layer.setup, policy=Known(scores[layer.index]))
    ids, mask = random_ids(2, 97), torch.ones(2, 97, dtype=torch.long)
    mask[1, :39] = 0
    forward(model, ids, cache, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    for row, length in enumerate(lengths):
        budget, standing = int(0.3 * length) * HEADS, list[tuple[float, int, int, int]]()
        for index in range(LAYERS):
            mine = [(float(scores[index, h, s]), s, index, h) for h in range(HEADS) for s in range(3, length - 9)]
            chosen = set(best(standing + mine, int((1 + margin) * budget * (index + 1))))
            standing += [each for each in mine if each in chosen]
        wanted = best(standing, budget * LAYERS)
        heads = [(i, h) for i in range(LAYERS) for h in range(HEADS)]
        every = [(float(scores[i, h, s]), s, i, h) for i, h in heads for s in range(3, length - 9)]
        assert (wanted == best(every, budget * LAYERS)) == (margin > 1)
        for index, head in heads:
            assert kept(cache, index, row, head) == {s for _, s, i, h in wanted if (i, h) == (index, head)}


def test_no_layer_waits_for_another() -> None:
    """While a prompt is read, an earlier layer holds its part and a twentieth more, packed, before the next begins."""
    model, found = make_tiny_model(num_hidden_layers=LAYERS, num_key_value_heads=HEADS), {}
    cache = create_tiered_cache(model, FadeConfig(**TIGHT))

    def look(layer: CompressedLayer, ms: float) -> None:
        assert len(layer.tokens.full) == 12
        found.setdefault(layer.index, []).append(len(layer.tokens.packed))

    for layer in cache.tiered:
        layer.observer = look
    forward(model, random_ids(1, 211), cache)
    budget = int(0.3 * 211) * HEADS
    assert found[0][0] == int(1.05 * budget)
    assert sum(each[-1] for each in found.values()) == LAYERS * budget
    assert all(len(each) == 2 for each in found.values())


@pytest.mark.parametrize("size", [dict(int4_budget=0.3), dict(int4_budget=30), dict(int4_budget=0.2, low_budget=0.15)])
def test_it_holds_as_much_as_by_heads(size: dict[str, Any]) -> None:
    """At the end of prompts of two lengths, and while decoding."""
    model = make_tiny_model(num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    caches = [
        create_tiered_cache(model, FadeConfig(**{**TIGHT, **size, "allocation": way})) for way in ("heads", "global")
    ]
    ids, mask = random_ids(2, 97), torch.ones(2, 97, dtype=torch.long)
    mask[1, :39] = 0
    differs = False
    for at in range(60):
        for cache in caches:
            given = ids if at == 0 else random_ids(2, 1, seed=at)
            forward(
                model,
                given,
                cache,
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -given.shape[1] :],
            )
        mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
        counts = [cache.memory_report()["tokens"] for cache in caches]
        for tier in ("FULL", "HIGH", "LOW"):
            assert counts[1][tier] == pytest.approx(counts[0][tier], rel=0.01, abs=4)
        by_heads, anywhere = map(by_row, caches)
        for row in range(2):
            totals = [sum(len(found) for (_, r, _), found in each.items() if r == row) for each in (by_heads, anywhere)]
            assert totals[1] == pytest.approx(totals[0], rel=0.01, abs=2)
        differs |= {key: len(found) for key, found in anywhere.items()} != {key: len(f) for key, f in by_heads.items()}
    assert differs


def test_tokens_compete_again_while_decoding_and_none_comes_back() -> None:
    model = make_tiny_model(num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    cache = create_tiered_cache(model, FadeConfig(**{**TIGHT, "int4_budget": 20}))
    forward(model, random_ids(1, 97), cache)
    moved, before = False, by_row(cache)
    for at in range(40):
        forward(model, random_ids(1, 1, seed=at), cache)
        after = by_row(cache)
        newest = 97 + at - 9 - 7
        for key in after:
            assert {slot for slot in after[key] if slot < newest - 7} <= before[key]
        sizes = [len(after[key]) - len(before[key]) for key in after]
        moved |= min(sizes) < 0 < max(sizes)
        assert sum(map(len, after.values())) == 20 * HEADS * LAYERS
        before = after
    assert moved
    assert reachable_bytes(cache) == cache.memory_report()["resident_bytes"]


def test_head_offsets_say_which_head_gets_more(tmp_path: Path) -> None:
    model = make_tiny_model(num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    offsets = torch.zeros(LAYERS, HEADS)
    offsets[0, 1], offsets[2, 0] = 40.0, -40.0
    budgets = HeadBudgets(torch.tensor([1.0, 0.0]).expand(LAYERS, HEADS, 2), fractions=(0.0, 1.0))
    bundle = save_bundle(tmp_path, model, budgets=budgets, offsets=offsets)
    cache = create_tiered_cache(model, FadeConfig(**TIGHT, eviction_policy="learned", predictor=bundle))
    forward(model, random_ids(1, 97), cache)
    for at in range(20):
        assert len(kept(cache, 0, 0, 1)) == 97 + at - at % 7 - 12
        assert not kept(cache, 2, 0, 0)
        assert len(kept(cache, 1, 0, 0)) > 0
        forward(model, random_ids(1, 1, seed=at), cache)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 80), st.integers(0, 1000))
def test_comparable_scores_keep_the_order_and_meet_the_importance(length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    importance = torch.randn(2, length, generator=generator) * 5
    stats = torch.rand(2, length, generator=generator).sort().values.gather(1, importance.argsort().argsort())
    got = torch.stack([comparable(s, p.expand(length, -1, -1)) for s, p in zip(stats, comparison(stats, importance))])
    assert torch.equal(got.argsort(stable=True), importance.argsort(stable=True))
    ends = importance.amin(1), importance.amax(1)
    torch.testing.assert_close((got.amin(1), got.amax(1)), ends)
    spread = (ends[1] - ends[0]).max()
    assert bool(((got - importance).abs() < spread).all())
    doubled = comparable(2 * stats[0], comparison(stats, importance)[0].expand(length, -1, -1))
    assert bool((doubled > got[0] - 1e-4).all())


def test_a_guarded_cache_that_decodes_again_keeps_its_budget_elsewhere() -> None:
    model = make_tiny_model(num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    options = dict(TIGHT, recent_window=16, guard="rollback", spill="host", monitor_every=8, on_rollback="redecode")
    cache = create_tiered_cache(model, FadeConfig(**options))
    model.generate(random_ids(1, 97), **cache.kwargs, max_new_tokens=40, eos_token_id=None, do_sample=False)
    assert cache.monitor.probes > 0
    assert reachable_bytes(cache) == cache.memory_report()["resident_bytes"]
    forward_quietly(model, random_ids(1, 1), cache)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            dict(eviction_policy="position"),
            "compares scores of all heads, and eviction_policy 'position'",
        ),
        (dict(eviction_policy="fastgen"), "eviction_policy 'fastgen' decides in each by itself"),
        (dict(eviction_policy="adaptive"), "tau and low_tau"),
        (dict(tau=0.9), "tau and low_tau"),
        (dict(allocation="layers"), "allocation 'layers' is not one of heads, global"),
    ],
)
def test_what_cannot_compete_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FadeError, match=words):
        FadeConfig(**{**TIGHT, **options})


def test_a_predictor_needs_offsets_of_the_model_s_heads(tmp_path: Path) -> None:
    model = make_tiny_model(num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    without = save_bundle(tmp_path / "without", model)
    with pytest.raises(FadeError, match="has none; use one that was trained with them"):
        create_tiered_cache(model, FadeConfig(**TIGHT, eviction_policy="learned", predictor=without))
    other = save_bundle(tmp_path / "other", model, offsets=torch.zeros(LAYERS - 1, HEADS))
    with pytest.raises(FadeError, match=r"head offsets for layers 0 to 1 \(2 kv heads\), and its model can evict"):
        create_tiered_cache(model, FadeConfig(**TIGHT, eviction_policy="learned", predictor=other))
