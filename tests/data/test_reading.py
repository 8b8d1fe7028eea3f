"""Files of text as different systems write them give the same text; what is no text is refused by file and place."""

from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import reading
from data.reading import json_lines, proper, read_text
from data.records import file_texts
from data.sources import MAX_PASSAGE, passages
from data.text import load_documents
from predictor.errors import FadeError
from tests.data.texts import CHAT, sentences

TEXT = "One caf\xe9.\n\nTwo: \U0001f600 and \u4e2d\u6587.\n\n" + "\n\n".join(sentences("r", 600))
ENCODINGS = {
    "utf-8": b"",
    "utf-8 with a mark": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
ENDS = {"unix": "\n", "windows": "\r\n", "old mac": "\r"}


def encoded(text: str, name: str, end: str = "\n") -> bytes:
    return ENCODINGS[name] + text.replace("\n", end).encode(name.partition(" ")[0])


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_and_line_end_gives_the_same_documents(name: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(encoded(TEXT, name, end))
    record = json.dumps({"text": TEXT.replace("\n", end)}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(encoded(f"{record}\n", name, end))
    (tmp_path / "plain.txt").write_bytes(TEXT.encode())
    expected = load_documents([str(tmp_path / "plain.txt")], train=2, validation=1, length=500)
    assert expected[2].text.startswith("One caf\xe9.\n\nTwo")
    for file in ("a.txt", "a.jsonl"):
        assert [part.text for part in file_texts(tmp_path / file)] == [TEXT]
        documents = load_documents([str(tmp_path / file)], train=2, validation=1, length=500)
        assert [one.text for one in documents] == [one.text for one in expected]


@given(
    text=st.text(st.characters(exclude_characters="\0\r\ufeff", exclude_categories=["Cs"]), max_size=40),
    name=st.sampled_from(list(ENCODINGS)),
    end=st.sampled_from(list(ENDS.values())),
    chunk=st.integers(4, 11),
)
def test_chunks_cut_no_character_and_no_line_end(
    text: str, name: str, end: str, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(encoded(text, name, end))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK", chunk)
        assert read_text(path) == text
        rows = [{"t": line} for line in text.split("\n")]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_bytes(encoded(lines, name, end))
        assert [row for _, row in json_lines(path)] == rows


@pytest.mark.parametrize("place", [0, 5, reading.CHUNK - 1, reading.CHUNK, reading.CHUNK + 7])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_a_byte_that_is_none_of_the_encoding_is_named(place: int, mark: bytes, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(mark + b"a" * place + "\xe9 and more".encode("latin-1"))
    with pytest.raises(FadeError, match=rf"latin.txt is not UTF-8: byte 0xe9 at {len(mark) + place}; save it as"):
        read_text(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"text\0text", "is not text but binary"),
        ("text".encode("utf-16-le"), "is not text but binary .*UTF-16 without a byte order mark"),
        (codecs.BOM_UTF16_LE + b"\0\xd8a\0", "is not UTF-16-LE: byte 0x00 at 2"),  # half of a pair
        (codecs.BOM_UTF16_LE + b"a", "is not UTF-16-LE: byte 0x61 at 2"),  # cut off
        ("\xe9".encode()[:1], "is not UTF-8: byte 0xc3 at 0"),
        (gzip.compress(b"text", mtime=0), r"is compressed \(gzip\); unpack it"),
        (b"PK\3\4 and so on", r"is compressed \(zip\)"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_no_text_is_refused(data: bytes, words: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FadeError, match=f"{name} {words}"):
        list(file_texts(tmp_path / name))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (r'{"text": "a\ud800b"}', r"line 2 has half of a surrogate pair \('\\ud800'\) at character 1"),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', "line 2: a message of user has half of a"),
        (r'{"messages": [{"role": "us\ud800er", "content": "a"}]}', "line 2 has half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": 7}]}', "line 2: a message of user has int for content"),
        ('{"text": ' + "9" * 5000 + "}", "line 2 is not JSON"),
        ('{"text": ' + "[" * 99_999, "line 2 is not JSON"),
        ('"text"', "line 2 is no object but str"),
        ('{"text": 7}', "line 2 has no text field 'text'"),
    ],
)
def test_a_record_that_is_no_text_is_named_by_its_line(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(FadeError, match=rf"rows.jsonl {words}") as caught:
        list(file_texts(path))
    assert "\n" not in str(caught.value)


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"text": "\ud83d\ude00 \u2028 stays"}')
    assert [part.text for part in file_texts(path)] == ["\U0001f600 \u2028 stays"]
    path.write_text('{"text": "\u2028 \x85 stays"}', encoding="utf-8")  # separators that are no ends of lines
    assert [part.text for part in file_texts(path)] == ["\u2028 \x85 stays"]


def test_null_is_passed_over_in_every_kind_of_record(tmp_path: Path) -> None:
    folder, other = tmp_path / "rows", [{"role": "user", "content": None}, *CHAT]
    folder.mkdir()
    records: list[dict[str, Any]] = [
        {"text": "a", "more": "b", "messages": CHAT},
        {"text": None, "more": "c", "messages": other},
        {"text": "d", "more": None, "messages": None},
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet")
    for path in (tmp_path / "rows.jsonl", folder / "train.jsonl"):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for path in (tmp_path / "rows.jsonl", tmp_path / "rows.parquet"):
        assert [part.text for part in file_texts(path)] == ["a", "d"]
        assert [part.text for part in file_texts(path, ["text", "more"])] == ["a\nb"]
        assert len(list(file_texts(path, ["messages"]))) == 2
    (document,) = load_documents([f"hf:{folder}"], train=1, validation=0, length=2)
    assert document.text == "a\n\nd"
    (tmp_path / "rows.jsonl").write_text('{"text": null}\n')
    with pytest.raises(FadeError, match="rows.jsonl is empty"):
        load_documents([str(tmp_path / "rows.jsonl")], train=1, validation=0, length=4)


def test_parquet_text_is_read_as_that_of_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["\ufeffone\r\ntwo"]}), path)
    assert [part.text for part in file_texts(path)] == ["one\ntwo"]
    pq.write_table(pa.table({"text": pa.array([b"caf\xe9"]).cast(pa.string(), safe=False)}), path)
    with pytest.raises(FadeError, match=r"rows.parquet has text that is not UTF-8"):
        list(file_texts(path))


@pytest.mark.parametrize("end", ["\n", " ", "", "\u3002"], ids=["lines", "sentences", "one word", "no spaces"])
def test_a_text_without_blank_lines_gives_documents_for_both_splits(end: str, tmp_path: Path) -> None:
    mark = "." if end in ("\n", " ") else ""
    text = end.join(f"{one}{mark}".replace(" ", " " if mark else "") for one in sentences("s", 700))
    (tmp_path / "a.txt").write_text(f"A title.\n\n{text}", encoding="utf-8")
    documents = load_documents([str(tmp_path / "a.txt")], train=3, validation=2, length=2000)
    assert all(2000 <= len(one.text) < 2000 + MAX_PASSAGE for one in documents)
    train, validation = ({origin for one in part for origin in one.origins} for part in (documents[:3], documents[3:]))
    assert not train & validation


@given(st.text(alphabet="ab. \n\u3002", max_size=60), st.integers(1, 500))
def test_long_passages_are_cut_and_joined_are_the_text(text: str, times: int) -> None:
    long = text * times
    cut = passages(long)
    assert "".join(cut) == long
    assert all(len(one.rstrip()) <= MAX_PASSAGE for one in cut)


def test_a_long_passage_is_cut_at_the_best_place_there_is() -> None:
    line, sentence = "A line of this text.\n", "And a sentence. "
    short, blank = line * 100, f"{line}\n"
    assert passages(short + blank) == [short + blank]
    assert passages(blank + line * 900) == [blank, *[line] * 900]
    assert passages(sentence * 900) == [sentence] * 900
    assert passages("word " * 3000) == ["word " * (MAX_PASSAGE // 5), "word " * (3000 - MAX_PASSAGE // 5)]
    assert passages("x" * 9000) == ["x" * MAX_PASSAGE, "x" * (9000 - MAX_PASSAGE)]


def test_too_little_text_of_long_passages_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(sentences("s", 50)))  # one passage of fewer than MAX_PASSAGE characters
    with pytest.raises(FadeError, match=r"gives 1 documents .*\(1 passages have more each: blank lines within them"):
        load_documents([str(tmp_path / "a.txt")], train=1, validation=1, length=500)


@pytest.mark.parametrize("data", [b"", codecs.BOM_UTF8, codecs.BOM_UTF16_LE, b"\r\n \r\n"])
def test_an_empty_file_is_named_alone_and_passed_over_in_a_folder(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(FadeError, match="a.txt is empty"):
        load_documents([str(tmp_path / "a.txt")], train=1, validation=0, length=4)
    (tmp_path / "b.txt").write_text("Some text.")
    (document,) = load_documents([str(tmp_path)], train=1, validation=0, length=4)
    assert document.text == "Some text."


@given(text=st.text(st.sampled_from("a\r\n\ufeff\xe9"), max_size=9))
def test_proper_text_is_what_a_file_of_it_gives(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    assert proper(text, "it") == read_text(path)
