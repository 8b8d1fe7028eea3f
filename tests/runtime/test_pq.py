"""Product quantisation: codes, codebooks on disk, ragged tokens, and the PQ tier of a cache."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.vq import vq
from torch import Tensor

from fade_runtime.storage import codebook, pq
from fade_runtime.storage.codebook import CodebookSet, load_codebook
from fade_runtime.storage.pq import LayerCodebook, PQCodebook, PQTokens
from predictor.errors import FadeError
from predictor.provenance import model_provenance
from predictor.sealed import sealed


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_layer(dim: int = 16, sub_dim: int = 4, size: int = 32, seed: int = 0) -> LayerCodebook:
    """Codebooks that nobody trained: any centroids will do where only codes are moved about."""
    key, value = (normal(dim // sub_dim, size, sub_dim, seed=seed + part).half() for part in (0, 1))
    return LayerCodebook(PQCodebook(key), PQCodebook(value))


def random_set(model: Any, dim: int = 16) -> CodebookSet:
    count = model.config.num_hidden_layers
    layers = [random_layer(dim, seed=10 * index) for index in range(count)]
    return CodebookSet(layers, model_provenance(model), {"seed": 0})


# -- codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "sub_dim", "size"), [(64, 32, 256), (16, 4, 7), (80, 8, 64), (6, 6, 2)], ids=str)
@pytest.mark.parametrize("distance_bytes", [1, pq.DISTANCE_BYTES], ids=["one by one", "at once"])
def test_a_code_is_the_nearest_centroid(
    dim: int, sub_dim: int, size: int, distance_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pq, "DISTANCE_BYTES", distance_bytes)
    book = PQCodebook(normal(dim // sub_dim, size, sub_dim, seed=1).half())
    vectors = normal(3, 50, dim)
    codes = book.encode(vectors)
    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (3, 50, dim // sub_dim))
    for part, centroids in enumerate(book.centroids.double().numpy()):
        mine = vectors[..., part * sub_dim : (part + 1) * sub_dim].reshape(-1, sub_dim)
        nearest, _ = vq(mine.double().numpy(), centroids)
        np.testing.assert_array_equal(codes[..., part].flatten().numpy(), nearest)
        decoded = book.decode(codes)[..., part * sub_dim : (part + 1) * sub_dim]
        np.testing.assert_array_equal(decoded.reshape(-1, sub_dim).numpy(), centroids[nearest])


def test_centroids_are_their_own_code_in_any_dtype() -> None:
    book = PQCodebook(normal(2, 256, 8).half())
    every = book.centroids.transpose(0, 1).flatten(1)  # [256, 16]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        codes = book.encode(every.to(dtype))
        if dtype != torch.bfloat16:  # which rounds them
            assert torch.equal(book.decode(codes), every.float())
        assert torch.equal(codes, torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 2))


def test_more_centroids_and_smaller_parts_decode_closer() -> None:
    vectors, others = normal(600, 16), normal(200, 16, seed=1)

    def error(**sizes: int) -> float:
        book = PQCodebook.train(vectors, **sizes)
        return float((book.decode(book.encode(others)) - others).square().mean())

    by_count = [error(sub_dim=4, num_centroids=count) for count in (2, 8, 32, 128)]
    assert by_count == sorted(by_count, reverse=True)
    assert by_count[0] < 1  # less than that of the mean
    by_size = [error(sub_dim=size, num_centroids=32) for size in (16, 8, 4, 2, 1)]
    assert by_size == sorted(by_size, reverse=True)


def test_training_finds_clusters_and_is_repeatable() -> None:
    centres = torch.tensor([[-9.0, -9.0], [-9.0, 9.0], [9.0, -9.0], [9.0, 9.0]])
    vectors = (centres.repeat(50, 1) + 0.1 * normal(200, 2)).repeat(1, 2)
    book = PQCodebook.train(vectors, sub_dim=2, num_centroids=4, seed=3)
    for part in book.centroids.float():
        found = part[torch.cdist(centres, part).argmin(1)]
        torch.testing.assert_close(found, centres, atol=0.1, rtol=0)
    again, other = (PQCodebook.train(normal(300, 8), sub_dim=4, num_centroids=16, seed=seed) for seed in (0, 1))
    assert torch.equal(again.centroids, PQCodebook.train(normal(300, 8), sub_dim=4, num_centroids=16).centroids)
    assert not torch.equal(again.centroids, other.centroids)


@pytest.mark.parametrize(
    ("vectors", "sizes", "says"),
    [
        (normal(300, 48), {}, "sub_dim 32 does not divide head dim 48"),
        (normal(300, 64), {"sub_dim": 0}, "sub_dim 0"),
        (normal(300, 64), {"num_centroids": 257}, "num_centroids 257"),
        (normal(300, 64), {"num_centroids": 1}, "num_centroids 1"),
        (normal(255, 64), {}, "255 vectors are too few for num_centroids 256"),
        (normal(300, 64).index_fill(0, torch.tensor([7]), torch.nan), {}, "NaN"),
        (normal(300, 64) * 1e5, {}, "beyond float16"),
    ],
    ids=["indivisible", "zero", "many", "one", "few", "nan", "large"],
)
def test_training_refuses_by_name(vectors: Tensor, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(FadeError, match=says):
        PQCodebook.train(vectors, **sizes)


def test_vectors_of_another_head_dim_are_refused() -> None:
    with pytest.raises(FadeError, match="head dim 16, the model has 32; train one"):
        random_layer(16).encode(normal(5, 32), normal(5, 32))


# -- ragged tokens -----------------------------------------------------------------------------------------------


class Lists:
    """The same tokens as plain lists: for each row (slot, code bytes, stats)."""

    def __init__(self, tokens: PQTokens) -> None:
        self.rows: list[list[tuple[int, bytes, float]]] = [[] for _ in tokens.row_len]
        stats = tokens.attention_stats if tokens.attention_stats is not None else torch.zeros(len(tokens))
        facts = zip(tokens.token_row().tolist(), tokens.slots().tolist(), tokens.codes, stats.tolist())
        for row, slot, code, number in facts:
            self.rows[row].append((slot, bytes(code.tolist()), number))


@st.composite
def ragged(draw: st.DrawFn, rows: int, start: int = 0) -> PQTokens:
    lengths = draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows))
    book = random_layer()
    owner = torch.arange(rows).repeat_interleave(torch.tensor(lengths))
    count = len(owner)
    codes = torch.randint(32, (count, book.width), dtype=torch.uint8)
    return PQTokens.make(codes, owner, torch.arange(start, start + count), rows, book, torch.rand(count))


@given(st.data())
def test_ragged_operations_are_those_of_lists(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 5))
    tokens, others = data.draw(ragged(rows)), data.draw(ragged(rows, start=40_000))
    assert tokens.row_len.sum() == len(tokens) == len(tokens.token_row())
    before = Lists(tokens).rows

    mask = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))), dtype=torch.bool
    )
    flags = iter(mask.tolist())
    assert Lists(tokens.keep(mask)).rows == [[token for token in row if next(flags)] for row in before]

    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=6))
    selected = tokens.select_rows(torch.tensor(picked, dtype=torch.long))
    assert Lists(selected).rows == [before[row] for row in picked]

    joined = tokens.join(others)
    assert Lists(joined).rows == [mine + theirs for mine, theirs in zip(before, Lists(others).rows)]
    assert joined.row_len.dtype == torch.int32


def test_empty_tokens_take_part() -> None:
    rows = 3
    book = random_layer()
    none = PQTokens.empty(rows, book, torch.device("cpu"), keeps_stats=True)
    some = PQTokens.make(
        torch.ones(2, book.width, dtype=torch.uint8), torch.tensor([0, 2]), torch.tensor([5, 6]), rows, book,
        torch.ones(2),
    )  # fmt: skip
    assert Lists(none.join(some)).rows == Lists(some.join(none)).rows == Lists(some).rows
    assert len(none.keep(torch.zeros(0, dtype=torch.bool))) == len(none.select_rows(torch.tensor([2, 0]))) == 0
    assert none.key_decoder()(slice(0, 0)).shape == none.value_decoder()(slice(0, 0)).shape == (0, 16)
    assert "attention_stats" not in PQTokens.empty(rows, book, torch.device("cpu"), keeps_stats=False).tensors()


def test_tokens_decode_to_what_was_encoded_and_slots_are_small() -> None:
    book = random_layer()
    key, value = normal(6, 16), normal(6, 16, seed=1)
    codes = book.encode(key, value)
    for last, dtype in ((32_767, torch.int16), (32_768, torch.int32)):
        slots = torch.tensor([1, 2, 3, 4, 5, last])
        tokens = PQTokens.make(codes, torch.zeros(6, dtype=torch.long), slots, 1, book, None)
        assert tokens.slot.dtype == dtype
        assert torch.equal(tokens.slots(), slots)
    assert torch.equal(tokens.key_decoder()(slice(1, 4)), book.key.decode(book.key.encode(key[1:4])))
    assert torch.equal(tokens.value_decoder()(slice(1, 4)), book.value.decode(book.value.encode(value[1:4])))


# -- on disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tiny_model: Callable[..., Any], tmp_path: Path) -> Path:
    return random_set(tiny_model()).save(tmp_path / "book")


def test_saved_and_loaded_bit_for_bit(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    first, *rest = random_set(tiny_model()).layers
    made = CodebookSet([first, None, *rest], {"model_type": "x"}, {"seed": 0})
    path = made.save(tmp_path / "book")
    assert made.save(path) == path  # replaces its own
    loaded = load_codebook(path)
    assert (loaded.provenance, loaded.facts, loaded.name) == (made.provenance, made.facts, str(path))
    assert [layer is None for layer in loaded.layers] == [False, True, False]
    assert all(torch.equal(a, b) for a, b in zip(loaded.tensors(), made.tensors(), strict=True))
    assert sorted(file.name for file in path.iterdir()) == [codebook.FACTS, codebook.WEIGHTS]


@pytest.mark.parametrize("name", [codebook.FACTS, codebook.WEIGHTS])
def test_a_file_cut_at_any_byte_is_refused(stored: Path, name: str) -> None:
    file = stored / name
    whole = file.read_bytes()
    load_codebook(stored)
    for size in [*range(0, len(whole) - 2, max(1, len(whole) // 40)), len(whole) - 2]:
        file.write_bytes(whole[:size])
        with pytest.raises(FadeError, match="is damaged") as caught:
            load_codebook(stored)
        assert "\n" not in str(caught.value)


def test_damage_is_told(stored: Path, tmp_path: Path) -> None:
    file = stored / codebook.WEIGHTS
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FadeError, match="does not match its checksum"):
        load_codebook(stored)
    file.unlink()
    with pytest.raises(FadeError, match="cannot be read"):
        load_codebook(stored)
    with pytest.raises(FadeError, match="there is no codebook at .*train one"):
        load_codebook(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 3}, "has format 3, this release reads 1 to 2; upgrade"),
        ({"version": "1"}, "names no known format"),
        ({"shapes": {}}, "does not hold the shapes"),
        ({"layers": "two"}, "is not what was written"),
        ({"layers": 10**12}, "is not what was written"),
        ({"provenance": None}, "is not what was written"),
    ],
    ids=["newer", "odd", "shapes", "layers", "many layers", "provenance"],
)
def test_facts_that_cannot_be(stored: Path, change: dict[str, Any], says: str) -> None:
    file = stored / codebook.FACTS
    file.write_text(sealed({**json.loads(file.read_text()), **change}))
    with pytest.raises(FadeError, match=says):
        load_codebook(stored)


@pytest.mark.parametrize("name", [codebook.FACTS, codebook.WEIGHTS])
def test_no_bit_changes_unseen(stored: Path, name: str) -> None:
    whole, drawn = (stored / name).read_bytes(), random.Random(0)
    for _ in range(200):
        content = bytearray(whole)
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        (stored / name).write_bytes(content)
        with pytest.raises(FadeError, match="is damaged|has format"):
            load_codebook(stored)


def test_a_codebook_without_a_checksum_is_read_with_a_warning(stored: Path) -> None:
    before = load_codebook(stored).tensors()
    facts = {**json.loads((stored / codebook.FACTS).read_text()), "version": 1}
    del facts["sha256"]
    (stored / codebook.FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    with pytest.warns(UserWarning, match="has format 1, without a checksum over codebook.json"):
        again = load_codebook(stored).tensors()
    assert all(torch.equal(a, b) for a, b in zip(again, before, strict=True))


def test_something_else_is_never_overwritten(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(FadeError, match="is there already and is not a codebook"):
        random_set(tiny_model()).save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]


# -- which model -------------------------------------------------------------------------------------------------


def test_another_model_is_refused(tiny_model: Callable[..., Any]) -> None:
    book = random_set(tiny_model())
    book.check(tiny_model())
    other = tiny_model(seed=1)
    with pytest.raises(FadeError, match="made for another model: weights"):
        book.check(other)
    with pytest.warns(UserWarning, match="allowed by strict=False"):
        book.check(other, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_refused_even_when_not_strict(tiny_model: Callable[..., Any], strict: bool) -> None:
    with pytest.raises(FadeError, match="is for head dim 32, the model has 16; train one for this model"):
        random_set(tiny_model(), dim=32).check(tiny_model(), strict)
    with pytest.raises(FadeError, match="covers 2 of 2 layers, the model's cache can tier 3 of 3"):
        random_set(tiny_model()).check(tiny_model(num_hidden_layers=3), strict)
