"""The product-quantised tier inside a cache, against stock transformers over decoded keys and values."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

from fade_runtime import FadeConfig, FadeError, create_tiered_cache
from fade_runtime.storage.codebook import CodebookSet
from fade_runtime.storage.pq import LayerCodebook, PQCodebook
from predictor.provenance import model_provenance
from tests.conftest import make_tiny_model
from tests.runtime.caches import forward, random_ids, reachable_bytes

SINK, WINDOW = 2, 8


def _turned(model: Any, key: Tensor, sign: int) -> Tensor:
    """Keys [B, H, S, D] rotated to positions 0, 1, ..., or back by sign -1, the way Llama's own file does."""
    cos, sin = model.model.rotary_emb(key, torch.arange(key.shape[2])[None])
    return key * cos[:, None] + sign * rotate_half(key) * sin[:, None]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_model()


@pytest.fixture(scope="module")
def book(model: Any) -> CodebookSet:
    """Codebooks of keys and values of one text, coarse enough that a wrong code is seen."""
    stock = DynamicCache(config=model.config)
    forward(model, random_ids(1, 400, seed=9), stock)
    layers = []
    for layer in stock.layers:
        plain = _turned(model, layer.keys, -1)
        key, value = (PQCodebook.train(x.flatten(0, 2), sub_dim=4, num_centroids=64) for x in (plain, layer.values))
        layers.append(LayerCodebook(key, value))
    return CodebookSet(layers, model_provenance(model))


def _config(book: CodebookSet | str, **options: Any) -> FadeConfig:
    settings = {
        "n_sink": SINK,
        "recent_window": WINDOW,
        "int4_budget": 20,
        "low_budget": 30,
        "reassign_every": 8,
    }
    return FadeConfig(**{**settings, "low_tier": "pq", "codebook": book, **options})


def test_with_everything_in_pq_attention_is_dense_attention_over_decoded_keys(model: Any, book: CodebookSet) -> None:
    ids, length = random_ids(1, 100), 90
    cache = create_tiered_cache(model, _config(book, int4_budget=0, low_budget=None))
    forward(model, ids[:, :length], cache)
    ours = forward(model, ids[:, length : length + 1], cache)
    assert cache.memory_report()["tokens"]["PQ"] == 2 * 2 * (length - SINK - WINDOW)

    stock = DynamicCache(config=model.config)
    forward(model, ids[:, :length], stock)
    exact = forward(model, ids[:, length : length + 1], stock)
    stock.crop(-1)
    body = slice(SINK, length - WINDOW)
    for layer, codes in zip(stock.layers, book.layers):
        assert codes is not None
        plain = _turned(model, layer.keys, -1)
        plain[:, :, body] = codes.key.decode(codes.key.encode(plain[:, :, body]))
        layer.keys = _turned(model, plain, 1)
        layer.values[:, :, body] = codes.value.decode(codes.value.encode(layer.values[:, :, body]))
    expected = forward(model, ids[:, length : length + 1], stock)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert float((ours - exact).abs().max()) > 0.01  # what is coded is not the same


def test_with_a_centroid_for_each_token_nothing_is_lost(model: Any) -> None:
    """So HIGH and PQ are read at the right places side by side: the mix is nearer to stock than the high tier alone."""
    ids, length = random_ids(1, 100), 90
    stock = DynamicCache(config=model.config)
    forward(model, ids[:, :length], stock)
    layers = [
        LayerCodebook(PQCodebook(_turned(model, layer.keys, -1)[0].half().flatten(0, 1)[None]),
                      PQCodebook(layer.values[0].half().flatten(0, 1)[None]))
        for layer in stock.layers
    ]  # fmt: skip
    exact = CodebookSet(layers, model_provenance(model))
    step = ids[:, length : length + 1]
    expected = forward(model, step, stock)
    errors = {}
    for name, config in (
        ("pq", _config(exact, int4_budget=0, low_budget=None)),
        ("both", _config(exact, int4_budget=20, low_budget=None)),
        ("int4", FadeConfig(n_sink=SINK, recent_window=WINDOW)),
    ):
        cache = create_tiered_cache(model, config.with_options(page_tokens=64))
        forward(model, ids[:, :length], cache)
        errors[name] = float((forward(model, step, cache) - expected).norm() / expected.norm())
    assert errors["pq"] < 2e-3
    assert errors["pq"] < errors["both"] < 0.9 * errors["int4"]


@pytest.mark.parametrize("policy", ["position", "h2o", "ema"])
def test_policies_fill_the_pq_tier(model: Any, book: CodebookSet, policy: str) -> None:
    cache = create_tiered_cache(model, _config(book, eviction_policy=policy))
    ids = random_ids(1, 160)
    forward(model, ids[:, :120], cache)
    rows = 2 * 2  # layers x kv heads
    expected = {"FULL": SINK + WINDOW, "HIGH": 20, "LOW": 0, "PQ": 30, "EVICTED": 120 - SINK - WINDOW - 50}
    assert cache.memory_report()["tokens"] == {tier: rows * count for tier, count in expected.items()}
    for at in range(120, 160):  # tokens of the high tier are demoted by the code that they carry
        assert bool(forward(model, ids[:, at : at + 1], cache).isfinite().all())
    report = cache.memory_report()
    assert (report["tokens"]["HIGH"], report["tokens"]["PQ"]) == (rows * 20, rows * 30)
    assert report["tiers"]["codebook"] == sum(tensor.nbytes for tensor in book.tensors())
    width = 8  # bytes: 4 parts of keys, 4 of values; carried by tokens of both tiers
    assert report["tiers"]["PQ"] == rows * (20 + 30) * width


@pytest.mark.parametrize("positions", ["original", "streaming"])
def test_report_equals_reachable_bytes(model: Any, book: CodebookSet, positions: str) -> None:
    cache, ids = create_tiered_cache(model, _config(book, positions=positions)), random_ids(2, 160)
    codebook = sum(tensor.nbytes for tensor in book.tensors())
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache) == codebook
    for part in (ids[:, :120], *ids[:, 120:].split(1, dim=1)):
        forward(model, part, cache)
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache) > codebook
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache)
    cache.reset()
    assert cache.memory_report()["resident_bytes"] == reachable_bytes(cache) == codebook


def test_a_demoted_token_has_the_code_of_its_exact_key(model: Any, book: CodebookSet) -> None:
    """A token that passes through the high tier decodes to the same as one that goes to PQ at once."""
    ids = random_ids(1, 120)
    slow = create_tiered_cache(model, _config(book, int4_budget=40, low_budget=200, eviction_policy="position"))
    forward(model, ids[:, :80], slow)
    first = slow.layers[0].store.packed.slots()
    for at in range(80, 120):
        forward(model, ids[:, at : at + 1], slow)
    demoted = slow.layers[0].store.pq
    assert set(demoted.slots().tolist()) & set(first.tolist())

    stock = DynamicCache(config=model.config)
    forward(model, ids, stock)
    plain, codes = _turned(model, stock.layers[0].keys, -1)[0], book.layers[0]
    assert codes is not None
    true = plain[demoted.token_row(), demoted.slots()]  # the first layer's keys do not depend on the cache
    assert float((codes.key.encode(true) == demoted.codes[:, :4]).float().mean()) > 0.99  # but for ties


@pytest.mark.parametrize("lengths", [(61, 40), (61, 5)], ids=str)
def test_left_padded_row_equals_its_unbatched_run(model: Any, book: CodebookSet, lengths: tuple[int, int]) -> None:
    config = _config(book, int4_budget=6, low_budget=20, reassign_every=1)
    prompts = [random_ids(1, n, i) for i, n in enumerate(lengths)]
    width = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0), value=257) for p in prompts])
    options = {
        "max_new_tokens": 16,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        both = model.generate(
            ids,
            past_key_values=create_tiered_cache(model, config),
            attention_mask=(ids != 257).long(),
            **options,
        )
        for row, prompt in enumerate(prompts):
            cache = create_tiered_cache(model, config)
            alone = model.generate(prompt, past_key_values=cache, **options)
            assert cache.memory_report()["tokens"]["PQ"] > 0 or prompt.shape[1] < 10
            for ours, theirs in zip(both.logits, alone.logits):
                torch.testing.assert_close(ours[row], theirs[0], atol=1e-3, rtol=1e-3)


def test_reordering_moves_whole_rows(model: Any, book: CodebookSet) -> None:
    ids, order = random_ids(3, 90), torch.tensor([2, 0, 0])
    cache, swapped = (create_tiered_cache(model, _config(book)) for _ in range(2))
    forward(model, ids, cache)
    forward(model, ids[order], swapped)
    cache.reorder_cache(order)
    step = torch.tensor([[5], [6], [7]])
    ours, expected = forward(model, step, cache), forward(model, step, swapped)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_streaming_positions_read_the_pq_tier(model: Any, book: CodebookSet) -> None:
    """Nothing was evicted yet: contiguous positions are those of the text."""
    ids = random_ids(1, 90)
    logits = []
    for positions in ("original", "streaming"):
        cache = create_tiered_cache(model, _config(book, low_budget=200, positions=positions))
        forward(model, ids, cache)
        logits.append(forward(model, torch.tensor([[5]]), cache))
        assert cache.memory_report()["tokens"]["PQ"] > 0
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)


def test_beam_search_runs(model: Any, book: CodebookSet) -> None:
    cache = create_tiered_cache(model, _config(book))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        out = model.generate(random_ids(2, 90), past_key_values=cache, num_beams=3, max_new_tokens=12, do_sample=False)
    assert out.shape == (2, 102)
    assert cache.memory_report()["tokens"]["PQ"] == 2 * 2 * 2 * 3 * 30


def test_a_directory_will_do_and_the_wrong_one_is_refused(model: Any, book: CodebookSet, tmp_path: Path) -> None:
    path = str(book.save(tmp_path / "book"))
    cache = create_tiered_cache(model, _config(path))
    forward(model, random_ids(1, 90), cache)
    assert cache.memory_report()["tokens"]["PQ"] > 0
    with pytest.raises(FadeError, match="is for head dim 16, the model has 32; train one for this model"):
        create_tiered_cache(make_tiny_model(head_dim=32), _config(path))
    with pytest.raises(FadeError, match="there is no codebook at"):
        create_tiered_cache(model, _config(str(tmp_path / "nowhere")))
