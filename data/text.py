"""Text sources -> documents: long enough, each of one source, no passage twice, split before anything is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import chain

from data.chat import Render, role_lines
from data.generated import GENERATED, kind_of
from data.packing import Document, Generator, Packer, Reading
from data.sources import open_source
from predictor.errors import FadeError

Sources = Sequence[str] | Mapping[str, float]  # taken in turn, or in proportion to weights


class TooLittleText(FadeError):
    """The sources do not hold as many documents as were asked for."""


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
            has no more. A mapping source -> weight gives each its quota of either split, within one document. The texts
            of a source (files, records, modules) take turns too, as long as there is enough text for that.

            - ``"builtin"``, or one of its families such as ``"builtin:topics"``;
            - a file of text or code; ``FILE.jsonl`` or ``FILE.parquet``, whose records have a ``text`` or are chats
              (``messages``); ``FILE.jsonl:FIELD+FIELD`` for other fields;
            - a folder of such files;
            - ``"hf:NAME"``, ``"hf:NAME:CONFIG"``, ``"hf:NAME:CONFIG:SPLIT"``, ``"hf:NAME:CONFIG:SPLIT:FIELD+FIELD"``:
              a dataset of the Hugging Face hub, or a dataset folder on disk;
            - ``"generated:KIND"``: text whose end asks for what came before (:mod:`data.generated`); its validation
              documents have templates that training never sees.
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
    wanted = {"validation": validation, "train": train}

    def draw(turns: bool) -> list[Document]:
        read = Reading(length, measure, turns)
        mixed = _Mix(sources, read, seed, render)
        apart = _Mix(held_out, read, seed, render, held_out=True) if held_out else mixed
        documents: list[Document] = []
        # validation first: every source is in it, and it stays the same when some more train documents are asked for
        for mix, split in ((apart, "validation"), (mixed, "train")):
            drawn = mix.draw(split, wanted[split])
            if len(drawn) < wanted[split]:
                long = f" ({read.long} passages have more each: blank lines within them would help)" * bool(read.long)
                raise TooLittleText(
                    f"{mix.name} gives {len(drawn) + len(documents) * (mix is mixed)} documents of at least {length} "
                    f"{_unit(measure)}{long} but {train} train and {validation} validation documents were asked for; "
                    "add text, or ask for fewer or shorter documents"
                )
            documents = drawn + documents
        return documents

    try:
        return draw(turns=True)
    except TooLittleText:
        return draw(turns=False)  # what turns leave of a text that validation has begun is lost to training


def corpus_hash(documents: Sequence[Document]) -> str:
    """SHA-256 over ids, splits and texts, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.id, document.split, document.text]).encode())
    return digest.hexdigest()


class _Mix:
    """Several sources, each of one or more families; draws documents from them in turn or by weight."""

    def __init__(self, sources: Sources, read: Reading, seed: int, render: Render, held_out: bool = False):
        self.name = "validation_text" if held_out else "text"
        self.weighted = isinstance(sources, Mapping)
        weights = dict(sources) if isinstance(sources, Mapping) else dict.fromkeys(sources, 1)
        for source, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise FadeError(f"{self.name} {source} has weight {weight}; give a number above 0, or leave it out")
        self.weights = {source: Fraction(weight).limit_denominator(10**6) for source, weight in weights.items()}

        def packers(source: str) -> list[Packer | Generator]:
            if source.startswith(GENERATED):
                return [Generator(kind_of(source), read, seed)]
            return [Packer(family, read, held_out) for family in open_source(source, seed, render)]

        self.packers = {source: packers(source) for source in weights}

    def draw(self, split: str, wanted: int) -> list[Document]:
        """Draw documents, fewer than wanted when the text is used up, from origins that no other split has."""
        for packer in chain(*self.packers.values()):
            packer.leave_origins()
        drawn: list[Document] = []
        counts = dict.fromkeys(self.weights, 0)
        while len(drawn) < wanted and counts:
            source = next_source(counts, self.weights)
            document = self._next(source, split)
            if document is not None:
                drawn.append(document)
                counts[source] += 1
            elif self.weighted and len(self.weights) > 1:
                raise TooLittleText(
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


def _unit(measure: Callable[[str], int]) -> str:
    return "characters" if measure is len else "tokens"
