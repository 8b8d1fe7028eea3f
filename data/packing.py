"""Texts of one family -> documents: passage by passage, none of them twice, the texts in turn."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from data.corpus import Text
from data.encoding import encode
from data.generated import GENERATED, Generated
from data.sources import passages
from predictor.errors import FadeError

PASSAGE = 60  # characters; a passage at least this long appears once in all documents
KEY_BYTES = 8


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
        keys: hashes of its passages, by which text is known again wherever it comes from.
        generated: what makes it at any length, whose end asks for what came before; None: it was found.
    """

    id: str
    source: str
    split: str
    text: str
    origins: tuple[str, ...]
    chat: bool = False
    keys: tuple[bytes, ...] = ()
    generated: Generated | None = None

    def ids(self, tokenizer: Any, prompt: int, steps: int) -> list[int]:
        """The first ``prompt + steps`` token ids, fewer where the text is shorter.

        Of generated text the first ``prompt`` end with a question, and ``steps`` answer it.
        """
        if self.generated is not None:
            return self.generated.ids(tokenizer, prompt, steps)
        return encode(tokenizer, self.text)[: prompt + steps]


@dataclass
class Reading:
    """What all sources of one call share.

    Attributes:
        length, measure: least length of a document, and what measures it. turns: the texts of a family take turns.
        passages: keys of those that are in a document. held_out: key of a text that validation alone may read ->
            its origin. long: passages that alone are longer than a document has to be.
    """

    length: int
    measure: Callable[[str], int]
    turns: bool = True
    passages: set[bytes] = field(default_factory=set)
    held_out: dict[bytes, str] = field(default_factory=dict)
    long: int = 0


class Packer:
    """Turns one family of texts into documents, passage by passage, dropping passages that were seen before.

    Args:
        family: texts, those of one record or file one after the other.
        reading: shared with all others. held_out: validation alone may read this family.
    """

    def __init__(self, family: Iterator[Text], reading: Reading, held_out: bool):
        self._reading, self._held_out = reading, held_out
        self._records = groupby(family, key=lambda text: text.record)
        self._now: Iterator[tuple[Text, str]] = iter(())
        self._rests: deque[list[tuple[Text, str]]] = deque()  # of records that had their turn
        self._used: set[str] = set()  # origins that are in a document
        self._left: set[str] = set()  # origins whose remaining passages are passed over

    def leave_origins(self) -> None:
        """Take nothing more from the origins that documents have been made of."""
        self._left = set(self._used)

    def draw(self, split: str) -> Document | None:
        """Make the next document, or None when the family has too little text left."""
        parts: list[str] = []
        origins: dict[str, None] = {}
        keys: list[bytes] = []
        have, length, measure = 0, self._reading.length, self._reading.measure
        for text, passage, key in self._fresh():
            if parts and text.origin not in origins and not text.whole:
                parts.append("\n\n")
            parts.append(passage)
            origins[text.origin] = None
            keys += [] if key is None else [key]
            size = measure(passage)
            self._reading.long += size > length and not text.whole
            have += size
            if have >= length and measure("".join(parts)) >= length:
                self._used.update(origins)
                if self._reading.turns and (rest := list(self._now)):
                    self._rests.append(rest)
                content = "".join(parts)
                name = f"{text.source}/{hashlib.sha256(content.encode()).hexdigest()[:12]}"
                return Document(name, text.source, split, content, tuple(origins), text.whole, tuple(keys))
        return None

    def _fresh(self) -> Iterator[tuple[Text, str, bytes | None]]:
        """Passages that are in no document yet, each with its key."""
        while True:
            for text, passage in self._now:
                key = passage_key(passage)
                if text.origin in self._left or key in self._reading.passages:
                    continue
                if key is not None:
                    self._reading.passages.add(key)
                yield text, passage, key
            if record := next(self._records, None):
                self._now = self._passages(record[1])
            elif self._rests:
                self._now = iter(self._rests.popleft())
            else:
                return

    def _passages(self, record: Iterator[Text]) -> Iterator[tuple[Text, str]]:
        for text in record:
            self._hold_out(text)
            for passage in [text.text] if text.whole else passages(text.text):
                yield text, passage

    def _hold_out(self, text: Text) -> None:
        key = passage_key(text.text)
        if key is not None and self._held_out:
            self._reading.held_out[key] = text.origin
        elif key in self._reading.held_out:
            raise FadeError(
                f"text {text.origin} is also in validation_text ({self._reading.held_out[key]}), which is held out "
                "from training; take it out of one of them"
            )


class Generator:
    """Gives documents of generated text: validation has templates that training never sees.

    Args:
        kind: a key of :data:`data.generated.KINDS`. reading: length and measure. seed: of all documents.
    """

    def __init__(self, kind: str, reading: Reading, seed: int):
        self._kind, self._reading, self._seed = kind, reading, seed
        self._drawn = 0

    def leave_origins(self) -> None:
        """Nothing: no two documents have an origin in common."""

    def draw(self, split: str) -> Document:
        """Make the next document, of which there is always one."""
        self._drawn += 1
        generated = Generated(self._kind, f"{self._seed} {self._drawn}", held_out=split == "validation")
        parts = generated.parts(self._reading.length, self._reading.measure)
        content = "".join(parts)
        source = f"{GENERATED}{self._kind}"
        name = f"{source}/{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        keys = tuple(key for part in parts if (key := passage_key(part)) is not None)
        origin = f"{source}/{split}/{self._drawn}"
        return Document(name, source, split, content, (origin,), keys=keys, generated=generated)


def passage_key(passage: str) -> bytes | None:
    """Hash of the words of a passage, or None when it is too short to be told from a heading."""
    words = " ".join(passage.split())
    return hashlib.blake2b(words.lower().encode(), digest_size=KEY_BYTES).digest() if len(words) >= PASSAGE else None
