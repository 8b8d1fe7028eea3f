"""Other projects' caches: how they are named, counted and run. The real ones where they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines.evaluation.measure import compare
from pipelines.evaluation.peer import MissingPeer, PeerError
from pipelines.evaluation.peers import Kvpress, make_peer
from pipelines.evaluation.reachable import reachable, resident_bytes
from pipelines.evaluation.runs import Method, read_prompt, start
from pipelines.reporting.rows import FULL
from predictor.errors import FadeError
from tests.pipelines.peers import Plain

CONTEXT, STEPS = 301, 33  # hqq packs an even number of groups; there are two heads
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "quanto 4": ("quanto", {}),
    "quanto 2": ("quanto", {"nbits": 2}),
    "hqq 4": ("hqq", {}),
    "snapkv": ("kvpress", {"press": "SnapKVPress", "compression_ratio": 0.5}),
    "expected attention": ("kvpress", {"press": "ExpectedAttentionPress", "compression_ratio": 0.5}),
    "fade-kv": ("fade-kv", {"int4_budget": 100}),
}
PACKAGES = {"quanto": "optimum", "hqq": "hqq", "kvpress": "kvpress", "fade-kv": "fade"}


@dataclass(frozen=True)
class Forgetful(Plain):
    """Forgets all but the last tokens of the prompt, and goes on at their places."""

    kept: int = 50
    keeps_positions: ClassVar[bool] = True

    def read(self, model: Any, tokens: Tensor, cache: Any) -> Tensor:
        logits = super().read(model, tokens, cache)
        for layer in cache.layers:
            layer.keys, layer.values = (each[:, :, -self.kept :].clone() for each in (layer.keys, layer.values))
        return logits


@dataclass(frozen=True)
class Broken(Plain):
    def read(self, model: Any, tokens: Tensor, cache: Any) -> Tensor:
        raise AssertionError("too short")


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(256, (1, CONTEXT + STEPS), generator=torch.Generator().manual_seed(1))


def test_a_peer_that_does_nothing_is_the_full_cache(model: Any, tokens: Tensor) -> None:
    for timed in (False, True):
        full, plain = compare(model, [Method(FULL, None), Method("plain", Plain())], tokens, STEPS, timed=timed)
        assert plain.kl == pytest.approx([0.0] * STEPS, abs=1e-9)
        assert (plain.resident_bytes, plain.full_bytes) == (full.resident_bytes, full.full_bytes)


def test_what_is_forgotten_is_not_seen_and_places_are_kept(tiny_model: Callable[..., Any], tokens: Tensor) -> None:
    _, measured = compare(
        tiny_model(num_hidden_layers=1),
        [Method(FULL, None), Method("half", Forgetful())],
        tokens,
        STEPS,
        timed=False,
    )
    model = tiny_model(num_hidden_layers=1)  # one layer: what is kept knows nothing of what is not
    full = model(tokens).logits[0, CONTEXT:]
    first = CONTEXT - Forgetful.kept
    alone = model(tokens[:, first:], position_ids=torch.arange(first, tokens.shape[1])[None]).logits[0, -STEPS:]
    p, q = full.double().log_softmax(-1), alone.double().log_softmax(-1)
    assert measured.kl == pytest.approx((p.exp() * (p - q)).sum(-1).tolist(), rel=1e-3, abs=1e-6)
    assert measured.full_bytes / measured.resident_bytes == pytest.approx(tokens.shape[1] / (Forgetful.kept + STEPS))


def test_a_peer_that_only_stores_is_filled_while_ours_read(model: Any, tokens: Tensor) -> None:
    read, heard = [], []

    @dataclass(frozen=True)
    class Storing(Plain):
        stores: ClassVar[bool] = True

        def read(self, *args: Any) -> Tensor:
            read.append(args)
            return super().read(*args)

        @contextmanager
        def listen(self, model: Any, cache: Any) -> Iterator[None]:
            yield
            heard.append(cache.get_seq_length())

    methods = [Method(FULL, None), Method("storing", Storing()), Method("safe", FadeConfig.safe())]
    full, storing, _ = compare(model, methods, tokens, STEPS, timed=False)
    assert (read, heard) == ([], [CONTEXT])
    assert storing.kl == pytest.approx([0.0] * STEPS, abs=1e-9)
    assert storing.resident_bytes == full.resident_bytes


def test_a_peer_that_fails_while_ours_read_is_named(model: Any, tokens: Tensor) -> None:
    @dataclass(frozen=True)
    class Refusing(Plain):
        stores: ClassVar[bool] = True

        def cache(self, model: Any) -> Any:
            made = super().cache(model)
            made.layers[1].update = lambda *args: 1 / 0
            return made

    peer = Refusing()
    methods = [Method(FULL, None), Method("refusing", peer), Method("safe", FadeConfig.safe())]
    with pytest.raises(PeerError, match="transformers failed on 301 tokens: ZeroDivisionError") as caught:
        compare(model, methods, tokens, STEPS, timed=False)
    assert caught.value.peer is peer


def test_a_peer_that_fails_is_named(model: Any, tokens: Tensor) -> None:
    with pytest.raises(PeerError, match="transformers failed on 301 tokens: AssertionError: too short") as caught:
        compare(model, [Method(FULL, None), Method("broken", Broken())], tokens, STEPS)
    assert caught.value.peer == Broken()


def test_bytes_are_those_of_all_tensors_within_reach(tiny_model: Callable[..., Any], tokens: Tensor) -> None:
    model = tiny_model()
    cache = DynamicCache(config=model.config)
    model(tokens, **forward_kwargs(cache, model))
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert resident_bytes(cache, torch.float32) == stored // 2
    cache.extra = {
        "codes": torch.zeros(7, dtype=torch.uint8),
        "again": [cache.layers[0].keys, cache.layers[0].keys[:, :1]],
    }
    assert resident_bytes(cache, torch.float32) == stored // 2 + 7
    cache.model = model  # its weights are nobody's cache
    assert resident_bytes(cache, torch.float32) == stored // 2 + 7


def test_the_walk_finds_what_our_own_report_counts(tiny_model: Callable[..., Any], tokens: Tensor) -> None:
    model = tiny_model()
    cache = create_tiered_cache(model, FadeConfig(int4_budget=0.25, eviction_policy="position"))
    model(tokens, **forward_kwargs(cache, model))
    counted = cache.memory_report()["resident_bytes"]
    walked = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in reachable(cache.layers)}.values()
    )
    assert walked == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_what_to_install(name: str) -> None:
    if importlib.util.find_spec(PACKAGES[name]):
        pytest.skip("it is installed")
    with pytest.raises(MissingPeer, match=r"cannot be imported .*pip install \S*(quanto|hqq|kvpress|fade-kv)"):
        make_peer(name, {})


def test_unknown_peers_and_options_are_named() -> None:
    for name, options, words in [
        ("gguf", {}, "peer 'gguf' is not known; choose from quanto, hqq, kvpress, fade-kv"),
        (
            "quanto",
            {"bits": 4},
            "peer 'quanto' has no option 'bits' but axis_key, axis_value, nbits, q_group_size",
        ),
    ]:
        with pytest.raises(FadeError) as caught:
            make_peer(name, options)
        assert words in str(caught.value)


@pytest.mark.parametrize("name", REAL)
def test_real_peers_run_and_lose_something(name: str, tiny_model: Callable[..., Any], tokens: Tensor) -> None:
    peer, options = REAL[name]
    pytest.importorskip(PACKAGES[peer])
    model = tiny_model(hidden_size=256, head_dim=64)  # groups of 64
    methods = [Method(FULL, None), Method("safe", FadeConfig.safe()), Method(name, make_peer(peer, options))]
    _, safe, measured = compare(model, methods, tokens, STEPS, timed=False)
    assert len(measured.kl) == STEPS
    assert sum(measured.kl) > sum(safe.kl)
    assert measured.full_bytes == safe.full_bytes
    if peer != "fade-kv":  # which keeps codes and what they stand for
        assert measured.resident_bytes < measured.full_bytes


def test_a_press_that_only_masks_is_refused_and_leaves_no_mask(tiny_model: Callable[..., Any], tokens: Tensor) -> None:
    kvpress = pytest.importorskip("kvpress")
    model = tiny_model()

    @dataclass(frozen=True)
    class Ada(Kvpress):
        def make_press(self) -> Any:
            return kvpress.AdaKVPress(kvpress.SnapKVPress(0.5))

    with pytest.raises(PeerError, match="AdaKVPress masks what it drops and frees nothing"):
        compare(model, [Method(FULL, None), Method("ada", Ada())], tokens, STEPS)
    (run,) = start([Method("ada", Ada())], model, model)
    with pytest.raises(PeerError, match="AdaKVPress masks"):
        run.feed(tokens)
    assert all(layer.self_attn.masked_key_indices is None for layer in model.model.layers)


@pytest.mark.parametrize("name", REAL)
def test_a_real_peer_loses_the_same_whoever_reads_the_prompt(
    name: str, tiny_model: Callable[..., Any], tokens: Tensor
) -> None:
    peer, options = REAL[name]
    pytest.importorskip(PACKAGES[peer])
    full, theirs = Method(FULL, None), Method(name, make_peer(peer, options))
    methods = [full, theirs, Method("safe", FadeConfig.safe())], [full, theirs]
    together, alone = (
        compare(tiny_model(hidden_size=256, head_dim=64), each, tokens, STEPS, timed=False)[1] for each in methods
    )
    assert alone.kl == pytest.approx(together.kl, rel=0.02, abs=1e-6)
    assert alone.resident_bytes == together.resident_bytes


@pytest.mark.parametrize("name", REAL)
def test_a_copy_of_a_real_peers_cache_goes_its_own_way(
    name: str, tiny_model: Callable[..., Any], tokens: Tensor
) -> None:
    peer, options = REAL[name]
    pytest.importorskip(PACKAGES[peer])
    model = tiny_model(hidden_size=256, head_dim=64)
    (run,) = start([Method(name, make_peer(peer, options))], model, model)
    head, tail = tokens.split([CONTEXT - 1, STEPS + 1], dim=1)
    with torch.inference_mode():
        read_prompt([run], head)
        aside = run.copied()
        first = aside.follow(tail)
        assert aside.half_precision_bytes()[1] > run.half_precision_bytes()[1]
        torch.testing.assert_close(run.follow(tail), first)
