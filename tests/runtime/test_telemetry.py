"""Events and snapshots are what really happened; without a listener nothing is measured."""

import copy
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fade_runtime import (
    FadeConfig,
    FadeError,
    JsonlExporter,
    ListExporter,
    TieredCache,
    attach_telemetry,
    create_tiered_cache,
    detach_telemetry,
)
from fade_runtime.cache import telemetry
from fade_runtime.kernels.dispatch import forget, kernel_name
from fade_runtime.layer.layer import TieredLayer
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_model
from tests.runtime.caches import make_codebook
from tests.runtime.sessions import TIGHT, filled

BATCH, HEADS, LAYERS = 2, 2, 2


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_model()


def feed(model: Any, cache: TieredCache, tokens: int, prompt: int = 60) -> None:
    ids = torch.randint(3, 250, (BATCH, prompt + tokens), generator=torch.Generator().manual_seed(2))
    model(ids[:, :prompt], **forward_kwargs(cache, model))
    for at in range(prompt, prompt + tokens):
        model(ids[:, at : at + 1], **forward_kwargs(cache, model))


def membership(layer: TieredLayer) -> list[dict[int, int]]:
    """Slot -> tier of each row, found one token at a time."""
    rows: list[dict[int, int]] = [{} for _ in range(BATCH * HEADS)]
    for tokens in layer.tokens.body():
        tiers, slots = tokens.tiers().tolist(), tokens.slots().tolist()
        for row, slot, tier in zip(tokens.token_row().tolist(), slots, tiers):
            rows[row][slot] = tier
    for row, found in enumerate(rows):
        found |= {slot: 0 for slot in layer.tokens.full.slots[row // HEADS].tolist() if slot >= 0}
    return rows


class Watcher(ListExporter):
    """Notes by itself what a layer holds when an event comes."""

    def __init__(self, cache: TieredCache) -> None:
        super().__init__()
        self.cache = cache
        self.rows: list[list[dict[int, int]]] = []
        self.reports: list[dict[str, Any]] = []
        self.stored: list[int] = []
        self.columns: list[int] = []  # bytes of what all layers share: position ids, for product quantisation

    def export(self, event: Any) -> None:
        super().export(event)
        layer = self.cache.tiered[event.layer]
        self.rows.append(membership(layer))
        self.reports.append(self.cache.memory_report())
        self.stored.append(sum(t.nbytes for t in layer.tensors().values()))
        self.columns.append(sum(t.nbytes for t in layer.tokens.sequences.tensors().values()))


@pytest.mark.parametrize("low_tier", ["int2", "pq"])
def test_events_are_what_happened(model: Any, low_tier: str) -> None:
    codebook = make_codebook(model) if low_tier == "pq" else None
    cache = create_tiered_cache(model, FadeConfig(**TIGHT, low_tier=low_tier, codebook=codebook))
    watcher = Watcher(cache)
    began = time.time()
    counters = attach_telemetry(cache, watcher)
    feed(model, cache, 20)
    name, number = {"int2": ("LOW", 2), "pq": ("PQ", 3)}[low_tier]
    assert [(e.layer, e.seen) for e in watcher.events] == [(i, n) for n in (60, 68, 76) for i in range(LAYERS)]
    before = {i: [dict.fromkeys(range(60), 0)] * (BATCH * HEADS) for i in range(LAYERS)}
    for event, rows, stored in zip(watcher.events, watcher.rows, watcher.stored):
        old, before[event.layer] = before[event.layer], rows
        for tier, expected in ((0, "FULL"), (1, "HIGH"), (number, name)):
            assert event.tokens[expected] == sum(list(row.values()).count(tier) for row in rows)
        assert event.tokens["EVICTED"] == BATCH * HEADS * event.seen - sum(map(len, rows))
        # tokens that were in full precision until now were in the window at the last event, or came since
        came = range(60) if event.seen == 60 else range(event.seen - 8, event.seen)
        was = [{**dict.fromkeys(came, 0), **row} for row in old]
        fell = [(s, t, row.get(s, 4)) for row, then in zip(rows, was) for s, t in then.items()]
        assert event.demoted == sum(t < number and now == number for _, t, now in fell) > 0
        assert event.evicted == sum(now == 4 for _, _, now in fell) > 0
        assert event.resident_bytes == stored
        assert event.full_bytes == 2 * BATCH * HEADS * 16 * 4 * event.seen
        assert (event.policy, event.path) == ("h2o", kernel_name(torch.device("cpu")))
        assert began <= event.time <= time.time()
        assert 0 < event.ms < 1e3 * (time.time() - began)
    assert counters.reassignments == len(watcher.events) == 6
    assert counters.evicted == sum(e.evicted for e in watcher.events) == cache.memory_report()["tokens"]["EVICTED"]
    assert counters.demoted == sum(e.demoted for e in watcher.events)
    assert counters.ms == pytest.approx(sum(e.ms for e in watcher.events))
    last = watcher.events[-LAYERS:]
    others = cache.memory_report()["tiers"]["codebook"] + watcher.columns[-1]
    assert watcher.reports[-1]["resident_bytes"] == sum(e.resident_bytes for e in last) + others
    assert watcher.reports[-1]["full_bytes"] == sum(e.full_bytes for e in last)


def test_scores_are_described(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics against numpy's, over the scores that the policy gave."""
    import numpy as np

    given: list[Tensor] = []
    cache = create_tiered_cache(model, FadeConfig(**TIGHT))
    score = cache.policy.score
    monkeypatch.setattr(cache.policy, "score", lambda *args: given.append(score(*args)) or given[-1])
    exporter = ListExporter()
    attach_telemetry(cache, exporter)
    feed(model, cache, 20)
    for event, scores in zip(exporter.events, given, strict=True):
        values = scores.numpy().astype(np.float64)
        found = {"min": values.min(), "mean": values.mean(), "max": values.max()}
        for share in (5, 25, 50, 75, 95):
            found[f"q{share:02d}"] = np.sort(values)[int(share / 100 * (len(values) - 1) + 0.5)]
        assert event.scores == pytest.approx({"count": len(values), **found})


def test_no_score_no_statistics(model: Any) -> None:
    exporter = ListExporter()
    cache = create_tiered_cache(model, FadeConfig(n_sink=2, recent_window=8))
    attach_telemetry(cache, exporter)
    feed(model, cache, 0)
    assert [(e.scores, e.demoted, e.evicted) for e in exporter.events] == [({}, 0, 0)] * LAYERS
    assert telemetry.score_statistics(torch.tensor([1.0, float("inf")]))["max"] is None
    assert telemetry.score_statistics(torch.tensor([])) == {"count": 0}


def test_detached_nothing_is_measured(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = create_tiered_cache(model, FadeConfig(**TIGHT))
    assert all(layer.observer is None for layer in cache.tiered)
    exporter = ListExporter()
    counters = attach_telemetry(cache, exporter)
    detach_telemetry(cache)
    monkeypatch.setattr(telemetry, "describe_reassignment", lambda *args: pytest.fail("was measured"))
    feed(model, cache, 20)
    assert cache.tiered[0].tokens.evicted > 0
    assert (exporter.events, counters.reassignments, counters.ms) == ([], 0, 0.0)
    assert all(layer.observer is layer.last_plan is None for layer in cache.tiered)


def test_attached_the_cache_does_the_same_and_holds_no_more(model: Any) -> None:
    caches = [create_tiered_cache(model, FadeConfig(**TIGHT)) for _ in range(2)]
    attach_telemetry(caches[0], ListExporter())
    for cache in caches:
        feed(model, cache, 20)
    states = [cache.cache_state_dict() for cache in caches]
    assert states[0].pop("facts") == states[1].pop("facts")
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0].keys() | states[1].keys())
    assert caches[0].tiered[0].last_plan is None


def test_lines_are_json_and_are_appended(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "events.jsonl"
    for _ in range(2):
        cache = create_tiered_cache(model, FadeConfig(**TIGHT))
        counters = attach_telemetry(cache, JsonlExporter(path))
        feed(model, cache, 8)
        lines = [json.loads(line) for line in path.read_text().splitlines()]  # complete at any time
        assert lines[-1]["seen"] == 68
        assert lines[-1]["tokens"] == cache.tiered[-1].tokens.counts()
    assert len(lines) == 2 * counters.reassignments == 8
    assert set(lines[0]) == {
        "event", "time", "layer", "seen", "policy", "path", "tokens", "demoted", "evicted", "scores",
        "resident_bytes", "full_bytes", "ms",
    }  # fmt: skip


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "events.jsonl"):
        with pytest.raises(FadeError, match=r"telemetry file .* cannot be written \(.*\); name another path"):
            JsonlExporter(path)


def test_a_file_that_is_lost_does_not_harm_the_cache(model: Any, tmp_path: Path) -> None:
    cache = create_tiered_cache(model, FadeConfig(**TIGHT))
    exporter = JsonlExporter(tmp_path / "events.jsonl")
    counters = attach_telemetry(cache, exporter)
    exporter.path.unlink()
    exporter.path.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        feed(model, cache, 10)
    assert [str(w.message) for w in caught if "telemetry" in str(w.message)] == [
        f"telemetry is lost from here on: [Errno 21] Is a directory: '{exporter.path}'"
    ]
    assert counters.lost == counters.reassignments == 4
    assert cache.get_seq_length() == 70


def test_the_path_that_runs_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = create_tiered_cache(model, FadeConfig(**TIGHT))
    feed(model, cache, 0, prompt=5)
    layer = cache.tiered[0]
    assert telemetry.attention_path(layer) == "dense"
    feed(model, cache, 0)
    monkeypatch.setenv("FADE_KERNEL", "reference")
    forget()
    assert telemetry.attention_path(layer) == "reference"
    forget()
    other = make_tiny_model()
    cache = create_tiered_cache(other, FadeConfig.safe())
    other.set_attn_implementation("eager")
    exporter = ListExporter()
    attach_telemetry(cache, exporter)
    feed(other, cache, 0, prompt=100)
    assert {event.path for event in exporter.events} == {"materialised for eager"}


def test_copies_and_sessions_keep_telling(model: Any) -> None:
    cache = create_tiered_cache(model, FadeConfig(**TIGHT))
    exporter = ListExporter()
    attach_telemetry(cache, exporter)
    feed(model, cache, 0)
    copied = copy.deepcopy(cache)
    copied.load_cache_state_dict(cache.cache_state_dict())
    feed(model, copied, 0, prompt=16)
    assert [event.seen for event in exporter.events] == [60, 60, 76, 76]


@pytest.mark.parametrize("slots", [False, True])
def test_snapshot_is_what_the_cache_holds(model: Any, slots: bool, tmp_path: Path) -> None:
    cache = create_tiered_cache(model, FadeConfig(**TIGHT))
    feed(model, cache, 13)
    report = cache.memory_report()
    path = cache.dump_debug(tmp_path / "debug.json", slots=slots)
    found = json.loads(path.read_text())
    assert found["memory"] == report == cache.memory_report()
    assert found["options"]["int4_budget"] == 20
    assert found["policy"] == "h2o"
    for layer, told in zip(cache.tiered, found["layers"], strict=True):
        assert (told["kind"], told["seen"], told["prompt"]) == ("TieredLayer", 73, 60)
        assert told["path"] in ("cpu", "reference")
        for row, (expected, shown) in enumerate(zip(membership(layer), told["rows"], strict=True)):
            assert (shown["batch"], shown["head"]) == divmod(row, HEADS)
            kept = {
                name: sorted(s for s, t in expected.items() if t == tier)
                for tier, name in enumerate(("FULL", "HIGH", "LOW", "PQ"))
            }
            assert shown["tokens"] == {**{n: len(s) for n, s in kept.items()}, "EVICTED": 73 - len(expected)}
            assert shown.get("slots") == (kept if slots else None)


def test_snapshot_of_an_empty_cache_and_of_no_place(model: Any, tmp_path: Path) -> None:
    cache = create_tiered_cache(model, FadeConfig.safe())
    found = json.loads(cache.dump_debug(tmp_path / "debug.json").read_text())
    assert [(layer["seen"], layer["path"], layer["rows"]) for layer in found["layers"]] == [(0, "dense", [])] * 2
    with pytest.raises(FadeError, match=r"cannot be written \(.*\); name another path"):
        cache.dump_debug(tmp_path / "debug.json" / "sub.json")


def test_padding_is_in_no_tier_of_a_snapshot(model: Any, tmp_path: Path) -> None:
    found = json.loads(filled(model).dump_debug(tmp_path / "debug.json").read_text())
    for layer in found["layers"]:
        assert [sum(row["tokens"].values()) for row in layer["rows"]] == [60, 60, 40, 40, 0, 0]
