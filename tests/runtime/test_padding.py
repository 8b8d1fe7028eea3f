"""A row of a batch ends as it would alone, wherever padding stands; position ids are those that came."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, TieredCache, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_model, slow
from tests.runtime.caches import save_bundle
from tests.runtime.kinds import KINDS, TIGHT, config_of, tokens

PAD = 257


TURNS = [(61, 20), (3, 40), (17, 1)]  # tokens of both rows in each turn


def padded(rows: list[Tensor], side: str, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, n] with padding on a side, around the middle, or anywhere."""
    width = max(map(len, rows)) + (4 if side == "anywhere" else 0)
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for row, given in enumerate(rows):
        free = width - len(given)
        at = {
            "left": range(free, width),
            "right": range(len(given)),
            "inside": [*range(len(given) // 2), *range(free + len(given) // 2, width)],
            "anywhere": sorted(rng.sample(range(width), len(given))),
        }[side]
        ids[row, list(at)], mask[row, list(at)] = given, 1
    return ids, mask


class Play:
    """A batch that is fed turn by turn."""

    def __init__(self, model: Any, config: FadeConfig, rows: int) -> None:
        self.model, self.cache = model, create_tiered_cache(model, config)
        self.mask = torch.zeros(rows, 0, dtype=torch.long)

    def feed(self, ids: Tensor, mask: Tensor) -> list[Tensor]:
        """Logits of each row's tokens."""
        self.mask = torch.cat((self.mask, mask), 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = dict(attention_mask=self.mask, position_ids=positions)
        logits = self.model(ids, **given, **forward_kwargs(self.cache, self.model)).logits
        return [each[real.bool()] for each, real in zip(logits, mask)]


def stored(cache: TieredCache, layer: int, row: int, head: int) -> dict[str, list[int]]:
    """Slots of a row and kv head by tier."""
    store = cache.tiered[layer].tokens
    full = store.full.slots[row]
    found = {"FULL": full[full >= 0].sort().values.tolist()}
    for at, body in enumerate(store.body()):
        own = body.token_row() == row * store.heads + head
        low = own & (body.tiers() > 1)
        found |= {f"{at}": body.slots()[own].sort().values.tolist(), f"{at} low": body.slots()[low].tolist()}
    return found


def assert_rows_are_as_alone(
    model: Any, config: FadeConfig, turns: list[tuple[int, ...]], side: str, steps: int, seed: int = 0
) -> None:
    rng, rows = random.Random(seed), len(turns[0])
    both, alone = Play(model, config, rows), [Play(model, config, 1) for _ in range(rows)]
    for turn, lengths in enumerate(turns):
        given = [tokens(length, 100 * turn + row + seed) for row, length in enumerate(lengths)]
        batches = [(padded(given, side, rng), given)]
        batches += [
            ((torch.stack(step), torch.ones(rows, 1, dtype=torch.long)), step)
            for step in ([tokens(1, 7 * at + row + turn) for row in range(rows)] for at in range(steps))
        ]
        for (ids, mask), each in batches:
            got = both.feed(ids, mask)
            for row, own in enumerate(each):
                if not len(own):
                    continue
                (expected,) = alone[row].feed(own[None], torch.ones(1, len(own), dtype=torch.long))
                # sums over padded and unpadded rows round differently, and a key or value beside the middle between
                # two codes then takes the other: 1/15 of a channel's range in one of hundreds of numbers
                torch.testing.assert_close(got[row], expected, atol=0.05, rtol=1e-3)
    both.cache.count_held()  # a call that is short for one row may be long for another
    for row, one in enumerate(alone):
        if not one.cache.get_seq_length():
            continue
        one.cache.count_held()
        for layer in range(len(one.cache.tiered)):
            for head in range(2):
                assert stored(both.cache, layer, row, head) == stored(one.cache, layer, 0, head), (row, layer, head)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", *slow("right", "inside", "anywhere")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_row_ends_as_alone_over_several_turns(kind: str, side: str, tmp_path: Path) -> None:
    """Also short rows beside long ones: they leave their windows at other steps."""
    model = make_tiny_model()
    assert_rows_are_as_alone(model, config_of(kind, model, tmp_path), TURNS, side, steps=15)


def test_a_row_may_begin_later_and_rest_between(tmp_path: Path) -> None:
    model = make_tiny_model()
    for kind in ("h2o", "ema", "learned"):
        config = config_of(kind, model, tmp_path / kind)
        assert_rows_are_as_alone(model, config, [(50, 0), (4, 45), (0, 9), (30, 30)], "right", steps=0)


def test_padding_is_neither_counted_nor_stored(tiny_model: Any) -> None:
    model = tiny_model()
    for side in ("left", "right", "anywhere"):
        play = Play(model, FadeConfig(**TIGHT), 2)
        play.feed(*padded([tokens(80, 0), tokens(30, 1)], side, random.Random(0)))
        report = play.cache.memory_report()
        assert sum(report["tokens"].values()) == (80 + 30) * 2 * 2  # heads and layers
        assert report["tokens"]["FULL"] == (12 + 12) * 2 * 2


def test_one_mask_for_all_rows_and_additive_masks(tiny_model: Any) -> None:
    """Masks of four dims, written out by the caller."""
    model = tiny_model()
    ids, mask = padded([tokens(40, 0), tokens(25, 1)], "left", random.Random(0))
    at = torch.arange(40)
    seen = (at <= at[:, None])[None, None] & mask[:, None, None].bool()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    outs = []
    for written in (mask, torch.where(seen, 0.0, torch.finfo(torch.float32).min)):
        cache = create_tiered_cache(model, FadeConfig(**TIGHT))
        outs.append(model(ids, attention_mask=written, position_ids=positions, **forward_kwargs(cache, model)).logits)
        assert cache.tiered[0].tokens.sequences.counts == [40, 25]
    real = mask.bool()
    torch.testing.assert_close(outs[0][real], outs[1][real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["streaming", "pq"])
@pytest.mark.parametrize("ids", ["from 100", "with a gap", "backwards", "each its own"])
def test_keys_stored_plain_are_read_at_the_ids_that_came(kind: str, ids: str, tmp_path: Path) -> None:
    """Nothing is compressed, so the logits are stock's."""
    model = make_tiny_model()
    config = config_of(kind, model, tmp_path).with_options(recent_window=512)
    at = {
        "from 100": torch.arange(100, 140).expand(2, -1),
        "with a gap": torch.tensor([*range(20), *range(60, 80)]).expand(2, -1),
        "backwards": torch.arange(40, 0, -1).expand(2, -1),
        "each its own": torch.randint(0, 4000, (2, 40), generator=torch.Generator().manual_seed(2)),
    }[ids]
    text = torch.stack([tokens(40, 0), tokens(40, 1)])
    got = []
    for cache in (create_tiered_cache(model, config), DynamicCache(config=model.config)):
        kwargs = forward_kwargs(cache, model)
        calls = (0, 30), (30, 39), (39, 40)
        parts = [model(text[:, a:b], position_ids=at[:, a:b], **kwargs).logits for a, b in calls]
        got.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(*got, atol=2e-3, rtol=1e-3)  # keys turned back and forth in float32


@pytest.mark.slow
def test_random_caches_and_batches_end_as_their_rows_alone(tmp_path: Path) -> None:
    """Five hundred of them."""
    model = make_tiny_model(num_hidden_layers=1)
    bundle = str(save_bundle(tmp_path, model))
    for seed in range(500):
        rng = random.Random(seed)
        kind = rng.choice([name for name in KINDS if name not in ("pq", "fastgen")])
        options = dict(KINDS[kind], n_sink=rng.randint(0, 5), recent_window=rng.randint(1, 24))
        options |= dict(reassign_every=rng.randint(1, 20), page_tokens=rng.choice([8, 16, 32]))
        if "int4_budget" in options:
            options |= dict(int4_budget=rng.choice([0, 9, 0.3]), low_budget=rng.choice([0, 7, 0.2]))
        if kind == "learned":
            options["predictor"] = bundle
        rows = rng.randint(1, 3)
        least = 2 if kind == "chunked" else 1  # a single token ends a prompt in chunks
        turns = [tuple(rng.randint(least, 50) for _ in range(rows)) for _ in range(rng.randint(1, 3))]
        side = rng.choice(["left", "right", "inside", "anywhere"])
        try:
            config = FadeConfig(**options)
        except ValueError:
            continue
        assert_rows_are_as_alone(model, config, turns, side, rng.randint(0, 9), seed)
