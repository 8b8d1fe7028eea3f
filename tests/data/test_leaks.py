"""Text that was trained on is known by its content."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.leaks import SHARED, pack_keys, refuse_trained_on, unpack_keys
from data.packing import Document
from data.text import load_documents
from predictor.errors import FadeError


def paragraphs(name: str, count: int) -> list[str]:
    return [f"{name} paragraph {i}: " + " ".join(f"{name}{i * j}" for j in range(30)) for i in range(count)]


def document(folder: Path, name: str, text: list[str]) -> Document:
    """One document of all this text, from a file of this name."""
    folder.mkdir(parents=True, exist_ok=True)
    content = "\n\n".join(text)
    (folder / name).write_text(content)
    return load_documents([str(folder / name)], train=0, validation=1, length=len(content))[0]


def trained_on(one: Document) -> dict[str, object]:
    return {"passages": [pack_keys(one.keys)], "sources": f"{one.source} 1"}


def test_the_same_text_under_another_name_is_refused_and_other_text_of_the_same_name_is_not(tmp_path: Path) -> None:
    book = document(tmp_path, "book.txt", paragraphs("a", 20))
    trained = trained_on(book)
    other = document(tmp_path / "other", "book.txt", paragraphs("b", 20))
    refuse_trained_on([other], trained)
    copied = document(tmp_path, "copied.txt", [one.upper().replace(" ", "\n") for one in paragraphs("a", 20)])
    with pytest.raises(FadeError, match=r"copied.txt:0:0 was trained on: 20 of 20 passages of copied.txt/"):
        refuse_trained_on([other, copied], trained)


def test_a_licence_that_two_texts_share_is_no_leak(tmp_path: Path) -> None:
    book = document(tmp_path, "book.txt", paragraphs("a", 20))
    few, many = (paragraphs("a", n) + paragraphs("c", 20 - n) for n in (int(20 * SHARED), int(20 * SHARED) + 1))
    refuse_trained_on([document(tmp_path, "few.txt", few)], trained_on(book))
    with pytest.raises(FadeError, match="3 of 20 passages"):
        refuse_trained_on([document(tmp_path, "many.txt", many)], trained_on(book))


def test_a_manifest_of_an_earlier_release_knows_names_only(tmp_path: Path) -> None:
    book = document(tmp_path, "book.txt", paragraphs("a", 20))
    with pytest.raises(FadeError, match=r"text book.txt has the name of a source that was trained on"):
        refuse_trained_on([book], {"sources": "books 28, book.txt 3"})
    refuse_trained_on([book], {"sources": "books 28"})
    refuse_trained_on([book], {})


def test_keys_are_packed_and_unpacked(tmp_path: Path) -> None:
    keys = document(tmp_path, "book.txt", paragraphs("a", 7)).keys
    assert len(keys) == 7
    assert unpack_keys(pack_keys(keys)) == set(keys)
    assert unpack_keys("") == set()
