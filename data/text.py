"""Text sources -> documents: long enough, each of one source, no passage twice, split before anything is run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.corpus import Text, builtin_families, builtin_readmes
from predictor.errors import FadeError

SUFFIXES = (".txt", ".md", ".jsonl")
PASSAGE = 60  # characters; a passage at least this long appears once in all documents
SECTION = 24_000  # characters; a longer file counts as several origins, so that one book fills both splits
_BLANK_LINES = re.compile(r"(\n(?:[ \t]*\n)+)")


@dataclass(frozen=True)
class Document:
    """One text for the language model to read.

    Attributes:
        id: source and the hash of the text; the same text has the same id everywhere.
        source: the family it comes from.
        split: ``"train"`` or ``"validation"``.
        text: the text.
        origins: files, topics or records it was put together from; no train origin is a validation origin.
    """

    id: str
    source: str
    split: str
    text: str
    origins: tuple[str, ...]


def load_documents(
    sources: Sequence[str],
    *,
    train: int,
    validation: int,
    length: int,
    measure: Callable[[str], int] = len,
    seed: int = 0,
) -> list[Document]:
    """Put together documents of at least ``length`` from text sources, in turn from each source.

    Args:
        sources: ``"builtin"``, ``"builtin:readmes"`` (to test on), a .txt, .md or .jsonl file (one object with a ``text`` field a line), a folder of
            such files, or ``"hf:NAME"``, ``"hf:NAME:CONFIG"``, ``"hf:NAME:CONFIG:SPLIT"`` for a dataset of the
            Hugging Face hub (or a dataset folder on disk).
        train: number of train documents. validation: number of validation documents.
        length: least length of a document, in units of ``measure``.
        measure: length of a text, such as the number of its tokens; characters when not given.
        seed: order of the built-in corpus. The order of files is their names'.

    Returns:
        Train documents, then validation documents. The same arguments over the same text give the same documents.

    Raises:
        FadeError: a source that is missing, empty or unreadable, or too little text.

    Example:
        >>> documents = load_documents(["builtin"], train=4, validation=4, length=3000)
        >>> len({d.source for d in documents}), {len(d.text) >= 3000 for d in documents}
        (4, {True})
        >>> [d.id for d in documents] == [d.id for d in load_documents(["builtin"], train=4, validation=4, length=3000)]
        True
    """
    if not sources:
        raise FadeError('text names no source; give "builtin", a file, a folder or "hf:NAME"')
    seen: set[bytes] = set()
    open_packers = [
        _Packer(family, seen, length, measure) for source in sources for family in open_source(source, seed)
    ]
    documents: dict[str, list[Document]] = {"train": [], "validation": []}
    # validation first: every source is in it, and it stays the same when more train documents are asked for
    for split, wanted in (("validation", validation), ("train", train)):
        for packer in open_packers:
            packer.leave_origin()
        while len(documents[split]) < wanted:
            if not open_packers:
                raise FadeError(
                    f"text gives {sum(map(len, documents.values()))} documents of at least {length} "
                    f"{_unit(measure)} but {train} train and {validation} validation documents were asked for; "
                    "add text, or ask for fewer or shorter documents"
                )
            packer = open_packers.pop(0)
            if document := packer.draw(split):
                documents[split].append(document)
                open_packers.append(packer)
    return documents["train"] + documents["validation"]


def corpus_hash(documents: Sequence[Document]) -> str:
    """SHA-256 over ids, splits and texts, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.id, document.split, document.text]).encode())
    return digest.hexdigest()


def open_source(source: str, seed: int = 0) -> list[Iterator[Text]]:
    """Open one text source as one or more families of texts (see :func:`load_documents`).

    Raises:
        FadeError: the source does not exist or holds no text.
    """
    if source == "builtin":
        return builtin_families(seed)
    if source == "builtin:readmes":
        return [builtin_readmes(seed)]
    if source.startswith("hf:"):
        return [_dataset(source)]
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise FadeError(f"text source {source} is a folder without .txt, .md or .jsonl files; add some")
        return [_files(source, files)]
    if not path.is_file():
        raise FadeError(f'text source {source} does not exist; give "builtin", a file, a folder or "hf:NAME"')
    if path.suffix not in SUFFIXES:
        raise FadeError(f"text source {source} is not a .txt, .md or .jsonl file; convert it to one of them")
    return [_files(source, [path])]


def passages(text: str) -> list[str]:
    r"""Cut a text at its blank lines; the pieces joined give the text back.

    Example:
        >>> passages("one\n\n  two\n \n\nthree")
        ['one\n\n', '  two\n \n\n', 'three']
    """
    pieces = _BLANK_LINES.split(text) + [""]
    return [p for p in map("".join, zip(pieces[::2], pieces[1::2])) if p]


class _Packer:
    """Turns one family of texts into documents, passage by passage, dropping passages that were seen before."""

    def __init__(self, family: Iterator[Text], seen: set[bytes], length: int, measure: Callable[[str], int]):
        self._stream = self._fresh_passages(family, seen)
        self._length, self._measure = length, measure
        self._left: str | None = None  # origin whose remaining passages are passed over
        self._last: str | None = None  # origin of the newest passage that went into a document

    def leave_origin(self) -> None:
        """Take nothing more from the origin that the last document ended in."""
        self._left = self._last

    def draw(self, split: str) -> Document | None:
        """Make the next document, or None when the family has too little text left."""
        parts: list[str] = []
        origins: dict[str, None] = {}
        have = 0
        for source, origin, passage in self._stream:
            if origin == self._left:
                continue
            if parts and origin not in origins:
                parts.append("\n\n")
            parts.append(passage)
            origins[origin] = None
            self._last = origin
            have += self._measure(passage)
            if have >= self._length and self._measure("".join(parts)) >= self._length:
                text = "".join(parts)
                name = hashlib.sha256(text.encode()).hexdigest()[:12]
                return Document(f"{source}/{name}", source, split, text, tuple(origins))
        return None

    @staticmethod
    def _fresh_passages(family: Iterator[Text], seen: set[bytes]) -> Iterator[tuple[str, str, str]]:
        for source, origin, text in family:
            for passage in passages(text):
                words = " ".join(passage.split())
                if len(words) >= PASSAGE:
                    key = hashlib.blake2b(words.lower().encode(), digest_size=8).digest()
                    if key in seen:
                        continue
                    seen.add(key)
                yield source, origin, passage


def _unit(measure: Callable[[str], int]) -> str:
    return "characters" if measure is len else "tokens"


def _files(source: str, files: list[Path]) -> Iterator[Text]:
    name, empty = Path(source).name, True
    for file in files:
        for record, text in enumerate(_records(file)):
            for section, part in enumerate(_sections(text)):
                empty = False
                yield Text(name, f"{file}:{record}:{section}", part)
    if empty:
        raise FadeError(f"text source {source} is empty; give a file or folder with text in it")


def _records(file: Path) -> Iterator[str]:
    try:
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8")
            return
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _field(line, f"{file} line {number}")
    except UnicodeDecodeError as error:
        raise FadeError(f"text source {file} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise FadeError(f"text source {file} cannot be read: {error.strerror}; check the file") from error


def _field(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise FadeError(
            f"text source {where} is not JSON; give one object with a text field a line"
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise FadeError(f"text source {where} has no text field; give one object with a text field a line")
    return record["text"]


def _sections(text: str) -> Iterator[str]:
    parts: list[str] = []
    size = 0
    for passage in passages(text):
        parts.append(passage)
        size += len(passage)
        if size >= SECTION:
            yield "".join(parts)
            parts, size = [], 0
    if "".join(parts).strip():
        yield "".join(parts)


def _dataset(source: str) -> Iterator[Text]:
    """Stream a dataset by name; only a source that starts with ``hf:`` ever reaches the network."""
    name, config, split = (source.removeprefix("hf:").split(":") + ["", ""])[:3]
    from datasets import load_dataset

    try:
        records = load_dataset(name, config or None, split=split or "train", streaming=True)
        columns = records.column_names or list(next(iter(records), {}))
    except Exception as error:  # datasets raises many kinds, most of them with a page of text
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FadeError(
            f"text source {source} cannot be loaded: {reason}; check name, config and split (hf:NAME:CONFIG:SPLIT)"
        ) from error
    if "text" not in columns:
        raise FadeError(f"text source {source} has no text column but {columns}; choose a dataset with one")
    empty = True
    for number, record in enumerate(records):
        for section, part in enumerate(_sections(record["text"] or "")):
            empty = False
            yield Text(name, f"{source}#{number}:{section}", part)
    if empty:
        raise FadeError(f"text source {source} is empty; choose another dataset or split")
