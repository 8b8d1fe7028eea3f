"""Text sources -> documents: long enough, each of one source, no passage twice, split before anything is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain

from data.chat import Render, role_lines
from data.corpus import Text
from data.sources import open_source, passages
from predictor.errors import FadeError

PASSAGE = 60  # characters; a passage at least this long appears once in all documents

Sources = Sequence[str] | Mapping[str, float]  # taken in turn, or in proportion to weights


@dataclass(frozen=True)
class Document:
    """One text for the language model to read.

    Attributes:
        id: source and the hash of the text; the same text has the same id everywhere.
        source: the family it comes from.
        split: ``"train"`` or ``"validation"``.
        text: the text.
        origins: files, topics or records it was put together from; no train origin is a validation origin.
        chat: the text is made of chats in the model's template, or in lines of roles.
    """

    id: str
    source: str
    split: str
    text: str
    origins: tuple[str, ...]
    chat: bool = False


def load_documents(
    sources: Sources,
    *,
    train: int,
    validation: int,
    length: int,
    measure: Callable[[str], int] = len,
    seed: int = 0,
    held_out: Sources = (),
    render: Render = role_lines,
) -> list[Document]:
    """Put together documents of at least ``length`` from text sources.

    Args:
        sources: any of those below. A list gives documents in turn from each, and goes on with the others when one
            has no more. A mapping source -> weight gives each its quota of either split, within one document.

            - ``"builtin"``, or one of its families such as ``"builtin:topics"``;
            - a file of text or code; ``FILE.jsonl`` or ``FILE.parquet``, whose records have a ``text`` or are chats
              (``messages``); ``FILE.jsonl:FIELD+FIELD`` for other fields;
            - a folder of such files;
            - ``"hf:NAME"``, ``"hf:NAME:CONFIG"``, ``"hf:NAME:CONFIG:SPLIT"``, ``"hf:NAME:CONFIG:SPLIT:FIELD+FIELD"``:
              a dataset of the Hugging Face hub, or a dataset folder on disk.
        train: number of train documents. validation: number of validation documents.
        length: least length of a document, in units of ``measure``.
        measure: length of a text, such as the number of its tokens; characters by default.
        seed: order of the built-in corpus. The order of files is their names'.
        held_out: sources of the validation documents alone; those of ``sources`` are then all for training.
        render: writes a chat as text.

    Returns:
        Train documents, then validation documents. The same arguments over the same text give the same documents.

    Raises:
        FadeError: a source that is missing, empty or unreadable, too little text, a bad weight, or a text that
            training shares with a held-out source.

    Example:
        >>> documents = load_documents(["builtin"], train=4, validation=4, length=3000)
        >>> len({d.source for d in documents}), {len(d.text) >= 3000 for d in documents}
        (4, {True})
        >>> [d.id for d in documents] == [d.id for d in load_documents(["builtin"], train=4, validation=4, length=3000)]
        True
    """
    if not sources:
        raise FadeError('text names no source; give "builtin", a file, a folder or "hf:NAME"')
    read = _Read(length, measure, set(), {})
    mixed = _Mix(sources, read, seed, render)
    apart = _Mix(held_out, read, seed, render, held_out=True) if held_out else mixed
    documents: list[Document] = []
    # validation first: every source is in it, and it stays the same when more train documents are asked for
    for mix, split, wanted in ((apart, "validation", validation), (mixed, "train", train)):
        drawn = mix.draw(split, wanted)
        if len(drawn) < wanted:
            long = f" ({read.long} passages have more each: blank lines within them would help)" if read.long else ""
            raise FadeError(
                f"{mix.name} gives {len(drawn) + len(documents) * (mix is mixed)} documents of at least {length} "
                f"{_unit(measure)}{long} but {train} train and {validation} validation documents were asked for; "
                "add text, or ask for fewer or shorter documents"
            )
        documents = drawn + documents
    return documents


def corpus_hash(documents: Sequence[Document]) -> str:
    """SHA-256 over ids, splits and texts, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.id, document.split, document.text]).encode())
    return digest.hexdigest()


@dataclass
class _Read:
    """What all sources of one call share: lengths, passages that were taken, texts that are held out."""

    length: int
    measure: Callable[[str], int]
    passages: set[bytes]
    held_out: dict[bytes, str]  # hash of a text that validation alone may read -> its origin
    long: int = 0  # passages that alone are longer than a document has to be


class _Mix:
    """Several sources, each of one or more families; draws documents from them in turn or by weight."""

    def __init__(self, sources: Sources, read: _Read, seed: int, render: Render, held_out: bool = False):
        self.name = "validation_text" if held_out else "text"
        self.weighted = isinstance(sources, Mapping)
        weights = dict(sources) if isinstance(sources, Mapping) else dict.fromkeys(sources, 1)
        for source, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise FadeError(f"{self.name} {source} has weight {weight}; give a number above 0, or leave it out")
        self.weights = {source: Fraction(weight).limit_denominator(10**6) for source, weight in weights.items()}
        self.packers = {
            source: [_Packer(family, read, held_out) for family in open_source(source, seed, render)]
            for source in weights
        }

    def draw(self, split: str, wanted: int) -> list[Document]:
        """Draw documents, fewer than wanted when the text is used up, from origins that no other split has."""
        for packer in chain(*self.packers.values()):
            packer.leave_origin()
        drawn: list[Document] = []
        counts = dict.fromkeys(self.weights, 0)
        while len(drawn) < wanted and counts:
            source = next_source(counts, self.weights)
            document = self._next(source, split)
            if document is not None:
                drawn.append(document)
                counts[source] += 1
            elif self.weighted and len(self.weights) > 1:
                raise FadeError(
                    f"{self.name} {source} gives {counts[source]} {split} documents, its weight of "
                    f"{float(self.weights[source]):g} asks for more; add text to it, lower its weight, or ask for "
                    "fewer or shorter documents"
                )
            else:
                del counts[source]
        return drawn

    def _next(self, source: str, split: str) -> Document | None:
        packers = self.packers[source]
        while packers:
            packer = packers.pop(0)
            if document := packer.draw(split):
                packers.append(packer)
                return document
        return None


def next_source(counts: Mapping[str, int], weights: Mapping[str, Fraction]) -> str:
    """Choose the source of the next document, so that counts never leave the quotas of their weights by one or more.

    Of the sources that are not ahead of their quota, the one whose next document is due first.

    Source: Balinski and Young, "The Quota Method of Apportionment", American Mathematical Monthly 82 (1975).

    Example:
        >>> weights, counts = {"a": Fraction(3), "b": Fraction(1)}, {"a": 0, "b": 0}
        >>> order = []
        >>> for _ in range(8):
        ...     order.append(next_source(counts, weights))
        ...     counts[order[-1]] += 1
        >>> "".join(order)
        'aaabaaab'
    """
    per_weight = (1 + sum(counts.values())) / sum(weights[source] for source in counts)
    due = {source: count for source, count in counts.items() if count < weights[source] * per_weight}
    return min(due, key=lambda source: (due[source] + 1) / weights[source])


class _Packer:
    """Turns one family of texts into documents, passage by passage, dropping passages that were seen before."""

    def __init__(self, family: Iterator[Text], read: _Read, held_out: bool):
        self._read, self._held_out = read, held_out
        self._stream = self._fresh_passages(family)
        self._left: str | None = None  # origin whose remaining passages are passed over
        self._last: str | None = None  # origin of the newest passage that went into a document

    def leave_origin(self) -> None:
        """Take nothing more from the origin that the last document ended in."""
        self._left = self._last

    def draw(self, split: str) -> Document | None:
        """Make the next document, or None when the family has too little text left."""
        parts: list[str] = []
        origins: dict[str, None] = {}
        have, length, measure = 0, self._read.length, self._read.measure
        for (source, origin, _, whole), passage in self._stream:
            if origin == self._left:
                continue
            if parts and origin not in origins and not whole:
                parts.append("\n\n")
            parts.append(passage)
            origins[origin] = None
            self._last = origin
            size = measure(passage)
            self._read.long += size > length and not whole
            have += size
            if have >= length and measure("".join(parts)) >= length:
                text = "".join(parts)
                name = hashlib.sha256(text.encode()).hexdigest()[:12]
                return Document(f"{source}/{name}", source, split, text, tuple(origins), whole)
        return None

    def _fresh_passages(self, family: Iterator[Text]) -> Iterator[tuple[Text, str]]:
        for text in family:
            self._hold_out(text)
            for passage in [text.text] if text.whole else passages(text.text):
                key = _key(passage)
                if key in self._read.passages:
                    continue
                if key is not None:
                    self._read.passages.add(key)
                yield text, passage

    def _hold_out(self, text: Text) -> None:
        key = _key(text.text)
        if key is not None and self._held_out:
            self._read.held_out[key] = text.origin
        elif key in self._read.held_out:
            raise FadeError(
                f"text {text.origin} is also in validation_text ({self._read.held_out[key]}), which is held out from "
                "training; take it out of one of them"
            )


def _key(passage: str) -> bytes | None:
    """Hash of the words of a passage, or None when it is too short to be told from a heading."""
    words = " ".join(passage.split())
    return hashlib.blake2b(words.lower().encode(), digest_size=8).digest() if len(words) >= PASSAGE else None


def _unit(measure: Callable[[str], int]) -> str:
    return "characters" if measure is len else "tokens"
