"""Documents: the same each time, no passage twice, splits apart, and a sentence for every bad source."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.corpus import docstrings
from data.packing import PASSAGE, Document
from data.sources import passages
from data.text import corpus_hash, load_documents
from predictor.errors import FadeError


def long_passages(text: str) -> list[str]:
    """Passages as a reader would find them: runs of lines between blank lines, white space squeezed."""
    found, lines = [], []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            found.append(" ".join(" ".join(lines).split()).lower())
            lines = []
    return [one for one in found if len(one) >= PASSAGE]


def origins(documents: list[Document], split: str) -> set[str]:
    return {origin for one in documents if one.split == split for origin in one.origins}


@pytest.fixture(scope="module")
def builtin() -> list[Document]:
    return load_documents(["builtin"], train=12, validation=8, length=5000, seed=3)


def test_builtin_documents_are_long_enough_and_from_every_family(builtin: list[Document]) -> None:
    assert all(len(one.text) >= 5000 for one in builtin)
    assert Counter((one.split, one.source) for one in builtin) == {
        (split, source): count
        for split, count in (("train", 3), ("validation", 2))
        for source in ("topics", "stdlib-docs", "stdlib-source", "package-docs")
    }
    assert len({one.id for one in builtin}) == len(builtin)


def test_front_pages_are_read_by_their_name_only(builtin: list[Document]) -> None:
    (one,) = load_documents(["builtin:readmes"], train=0, validation=1, length=5000)
    assert one.source == "readmes"
    assert all(origin.startswith("readmes/") for origin in one.origins)
    assert "readmes" not in {document.source for document in builtin}


def test_no_passage_stands_in_two_documents(builtin: list[Document]) -> None:
    counts = Counter(passage for one in builtin for passage in set(long_passages(one.text)))
    assert len(counts) > 300
    assert [passage for passage, count in counts.items() if count > 1] == []


def test_splits_share_no_origin(builtin: list[Document]) -> None:
    assert origins(builtin, "train")
    assert not origins(builtin, "train") & origins(builtin, "validation")


def test_the_seed_decides_and_validation_outlives_a_change_of_train(builtin: list[Document]) -> None:
    again = load_documents(["builtin"], train=12, validation=8, length=5000, seed=3)
    assert again == builtin
    assert corpus_hash(again) == corpus_hash(builtin)
    fewer = load_documents(["builtin"], train=2, validation=8, length=5000, seed=3)
    assert fewer[2:] == builtin[12:]
    assert corpus_hash(fewer) != corpus_hash(builtin)
    other = load_documents(["builtin"], train=12, validation=8, length=5000, seed=4)
    assert not {one.id for one in other} & {one.id for one in builtin}


def test_a_passage_that_comes_again_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "The quick brown fox jumps over the lazy dog, again and again and again.\n\nshort\n"
    )
    (tmp_path / "b.txt").write_text(
        "The quick  brown fox jumps over\nthe lazy DOG, again and again and again.\n\nshort\n"
    )
    (tmp_path / "c.md").write_text("Here is something that was nowhere else before, and it is long enough to count.\n")
    (document,) = load_documents([str(tmp_path)], train=1, validation=0, length=150)
    assert document.text.lower().count("quick") == 1
    assert document.text.count("short") == 2  # too short to be told from a heading
    assert "nowhere else" in document.text


def test_one_long_file_fills_both_splits_with_different_text(tmp_path: Path) -> None:
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefgh", k=6)) for _ in range(500)]
    text = "\n\n".join(" ".join(drawn.choices(words, k=60)) for _ in range(300))
    (tmp_path / "book.txt").write_text(text)
    documents = load_documents([str(tmp_path / "book.txt")], train=5, validation=3, length=9000)
    counts = Counter(passage for one in documents for passage in set(long_passages(one.text)))
    assert max(counts.values()) == 1
    assert not origins(documents, "train") & origins(documents, "validation")
    assert {one.source for one in documents} == {"book.txt"}


def test_jsonl_records_and_a_dataset_folder_give_their_text(tmp_path: Path) -> None:
    records = [" ".join(f"record{i} word{j}" for j in range(30)) for i in range(8)]
    file = tmp_path / "rows" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"text": record, "label": 1}) + "\n" for record in records) + "\n")
    for source in (str(file), f"hf:{file.parent}"):
        documents = load_documents([source], train=2, validation=2, length=500)
        assert all("record" in one.text for one in documents)
        assert len(documents) == 4
        assert not origins(documents, "train") & origins(documents, "validation")


def test_sources_take_turns(tmp_path: Path) -> None:
    for name in ("a", "b"):
        text = "\n\n".join(f"{name} paragraph {i} " + "with its own words " * 5 for i in range(40))
        (tmp_path / f"{name}.txt").write_text(text)
    documents = load_documents([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], train=4, validation=0, length=300)
    assert [one.source for one in documents] == ["a.txt", "b.txt", "a.txt", "b.txt"]


def test_length_is_measured_as_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"{i} " * 20 for i in range(50)))
    documents = load_documents([str(tmp_path)], train=3, validation=0, length=77, measure=lambda t: len(t.split()))
    assert all(len(one.text.split()) >= 77 for one in documents)


@given(st.text(alphabet="ab \n\t", max_size=60))
def test_passages_joined_are_the_text(text: str) -> None:
    cut = passages(text)
    assert "".join(cut) == text
    assert all(not re.search(r"\n[ \t]*\n[ \t]*[ab]", one.lstrip("\n \t")) for one in cut)


def test_docstrings_are_those_that_python_sees() -> None:
    import argparse
    import inspect

    found = dict(docstrings("argparse", inspect.getsource(argparse)))
    assert found["argparse"] == inspect.getdoc(argparse)
    assert found["argparse.ArgumentParser"] == inspect.getdoc(argparse.ArgumentParser)
    assert all(len(text) >= 400 for text in found.values())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (None, None, "does not exist"),
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n\n \n", "is empty"),
        ("a.pdf", b"%PDF\0", "not text but binary"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
        ("bad.jsonl", b'{"text": "x"}\n{"text"\n', "line 2 is not JSON"),
        ("other.jsonl", b'{"body": "x"}\n', "line 1 has no text field"),
        ("short.txt", b"Too little text.", "gives 0 documents of at least 100 characters"),
    ],
)
def test_bad_sources_are_named(name: str | None, content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / (name or "nothing.txt")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FadeError, match=words) as caught:
        load_documents([str(path)], train=1, validation=1, length=100)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)  # what is wrong; what to do
    assert "gives" in words or str(path) in str(caught.value)


def test_an_empty_folder_and_a_missing_dataset_are_named(tmp_path: Path) -> None:
    with pytest.raises(FadeError, match="folder without"):
        load_documents([str(tmp_path)], train=1, validation=1, length=100)
    with pytest.raises(FadeError, match=r"hf:.*nothing cannot be loaded: .*; check name"):
        load_documents([f"hf:{tmp_path / 'nothing'}"], train=1, validation=1, length=100)
    with pytest.raises(FadeError, match="names no source"):
        load_documents([], train=1, validation=1, length=100)


def text_of(name: str, count: int) -> str:
    return "\n\n".join(f"{name} paragraph {i} " + f"with its own words {name}{i} " * 4 for i in range(count))


@pytest.mark.parametrize("kind", ["folder", "records"])
def test_the_texts_of_a_source_take_turns(kind: str, tmp_path: Path) -> None:
    """One document of each of seven long texts, validation's first, before a second one of any."""
    names = [f"text{n}" for n in range(7)]
    if kind == "folder":
        for name in names:
            (tmp_path / f"{name}.txt").write_text(text_of(name, 30))
        place = tmp_path
    else:
        place = tmp_path / "all.jsonl"
        place.write_text("".join(json.dumps({"text": text_of(name, 30)}) + "\n" for name in names))
    documents = load_documents([str(place)], train=5, validation=2, length=500)
    begun = [one.text.split()[0] for one in documents]
    assert begun == [*names[2:], *names[:2]]
    more = load_documents([str(place)], train=12, validation=2, length=500)
    assert more[12:] == documents[5:]
    assert [one.text.split()[0] for one in more[:12]] == [*names[2:], *names[2:], *names[2:4]]
    assert more[5].text.split()[2] != "0"  # where the first one of this text ended
    counts = Counter(passage for one in more for passage in set(long_passages(one.text)))
    assert max(counts.values()) == 1


def test_texts_that_are_too_short_for_turns_are_used_up_one_by_one(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"{name}.txt").write_text(text_of(name, 30))
    turns = load_documents([str(tmp_path)], train=3, validation=3, length=1000)
    assert [one.text[0] for one in turns] == ["d", "d", "d", "a", "b", "c"]
    documents = load_documents(
        [str(tmp_path)], train=7, validation=3, length=1000
    )  # turns would leave d alone to train
    assert [one.text[0] for one in documents[7:]] == ["a", "a", "a"]
    assert not origins(documents, "train") & origins(documents, "validation")


def test_texts_shorter_than_a_document_are_joined(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(text_of(name, 3))
    documents = load_documents([str(tmp_path)], train=2, validation=0, length=450)
    assert [len(one.origins) for one in documents] == [2, 2]
    assert [one.text[0] for one in documents] == ["a", "c"]
