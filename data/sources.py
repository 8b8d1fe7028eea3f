"""A text source by its name -> families of texts: the built-in corpus, files, folders, datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.chat import Render, role_lines
from data.corpus import Text, builtin_families
from data.records import columns_of, file_texts, record_text, split_fields, text_files
from predictor.errors import FadeError, first_line

SECTION_LENGTH = 24_000  # characters; a longer file counts as several origins, so that one book fills both splits
MAX_PASSAGE = (
    8_000  # characters; a longer passage is cut further, so that a text without blank lines gives documents too
)
_ENDS = (  # what ends a passage: blank lines; where that leaves it too long line ends, then sentences, then words
    re.compile(r"(\n(?:[ \t]*\n)+)"),
    re.compile(r"(\n)"),
    re.compile(r"((?<=[.!?])\s+|(?<=[。！？])(?!\s))"),
)
_WORDS = re.compile(rf"(?s).{{1,{MAX_PASSAGE}}}(?:\s+|$)|.{{1,{MAX_PASSAGE}}}")


def open_source(source: str, seed: int = 0, render: Render = role_lines) -> list[Iterator[Text]]:
    """Open one text source as one or more families of texts (see :func:`data.text.load_documents`).

    Raises:
        FadeError: the source does not exist or holds no text.
    """
    if source.partition(":")[0] == "builtin":
        return builtin_families(seed, source.partition(":")[2])
    if source.startswith("hf:"):
        return [_dataset(source, render)]
    name, fields = split_fields(source)
    path = Path(name)
    if path.is_dir():
        return [_files(source, text_files(path), (), render)]
    if not path.is_file():
        raise FadeError(f'text source {source} does not exist; give "builtin", a file, a folder or "hf:NAME"')
    return [_files(name, [path], fields, render)]


def passages(text: str) -> list[str]:
    r"""Cut a text at its blank lines; the pieces joined give the text back.

    A piece longer than :data:`MAX_PASSAGE` is cut at its line ends, a longer line at its sentences, a longer sentence
    between words.

    Example:
        >>> passages("one\n\n  two\n \n\nthree")
        ['one\n\n', '  two\n \n\n', 'three']
        >>> len(passages("A line of this text.\n" * 1000)), len(passages("And a sentence. " * 1000))
        (1000, 1000)
    """
    return list(_cut(text, _ENDS))


def _cut(text: str, ends: Sequence[re.Pattern[str]]) -> Iterator[str]:
    end, *finer = ends
    pieces = end.split(text) + [""]
    for piece in map("".join, zip(pieces[::2], pieces[1::2])):
        if len(piece) > MAX_PASSAGE and finer:
            yield from _cut(piece, finer)
        elif len(piece) > MAX_PASSAGE:
            yield from _WORDS.findall(piece)
        elif piece:
            yield piece


def _files(source: str, files: list[Path], fields: Sequence[str], render: Render) -> Iterator[Text]:
    name, empty = Path(source).name, True
    for file in files:
        for record, (text, whole) in enumerate(file_texts(file, fields, render)):
            for section, part in enumerate(_sections(text, whole)):
                empty = False
                yield Text(name, f"{file}:{record}:{section}", part, whole)
    if empty:
        raise FadeError(f"text source {source} is empty; give a file or folder with text in it")


def _sections(text: str, whole: bool = False) -> Iterator[str]:
    parts: list[str] = []
    size = 0
    for passage in [text] if whole else passages(text):
        parts.append(passage)
        size += len(passage)
        if size >= SECTION_LENGTH:
            yield "".join(parts)
            parts, size = [], 0
    if "".join(parts).strip():
        yield "".join(parts)


def _dataset(source: str, render: Render) -> Iterator[Text]:
    """Stream a dataset by name; only a source that starts with ``hf:`` ever reaches the network."""
    name, config, split, named = (source.removeprefix("hf:").split(":") + ["", "", ""])[:4]
    from datasets import load_dataset  # heavy, and only sources of this kind need it

    try:
        records = load_dataset(name, config or None, split=split or "train", streaming=True)
        columns = records.column_names or list(next(iter(records), {}))
    except Exception as error:  # datasets raises many kinds, most of them with a page of text
        reason = first_line(error)
        raise FadeError(
            f"text source {source} cannot be loaded: {reason}; check name, config and split (hf:NAME:CONFIG:SPLIT)"
        ) from error
    fields = columns_of(named.split("+") if named else (), columns, source)
    empty = True
    for number, record in enumerate(records):
        if found := record_text(record, fields, render, f"text source {source} record {number}"):
            for section, part in enumerate(_sections(*found)):
                empty = False
                yield Text(name, f"{source}#{number}:{section}", part, found.whole)
    if empty:
        raise FadeError(f"text source {source} is empty; choose another dataset or split")
