"""Text that can only be read on by looking back: a record, then parts of it once more."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from data.lm import encode
from pipelines.evaluation.tasks.retrieval import Lookup, draw_keys, draw_record, draw_value, key_value, lines
from pipelines.evaluation.tasks.task import Wish
from predictor.errors import FadeError

AGAIN = "\nSome of this again, in another order.\n\n"
HIDDEN = 8  # sentences in the text about other things

Parts = tuple[str, list[str], list[str], str]  # opening, all pieces in order, those to come again, closing


def recalled(name: str, wish: Wish, steps: int) -> Iterator[list[int]]:
    """Token ids of ``wish.length`` tokens of a record and ``steps`` of pieces of it, in another order.

    Args:
        name: "lines", "key-value" or "needles" (sentences in a text about other things, ``wish.source``).
        wish: tokenizer, number, length of the record, seed.
        steps: tokens after it.

    Raises:
        FadeError: no such text, or one that is too short to have so many tokens of it again.
    """
    if name not in KINDS:
        raise FadeError(f"text generated:{name} is not known; choose from {', '.join(KINDS)}")
    drawn = random.Random(f"{name} {wish.seed}")
    for opening, pieces, wanted, closing in KINDS[name](wish, drawn):
        body, after = [*encode(wish.tokenizer, ""), *wish.ids(opening)], wish.ids(closing + AGAIN)
        room, whole = wish.length - len(after), set()
        if len(body) > room:
            raise FadeError(f"length {wish.length} is too short for generated:{name}; lengthen it")
        for piece in pieces:
            ids = wish.ids(piece)
            if len(body) + len(ids) <= room:
                whole.add(piece)
            body += ids[: room - len(body)]
        again = [piece for piece in wanted if piece in whole]
        drawn.shuffle(again)
        tail = [token for piece in again for token in wish.ids(piece)]
        if len(body) < room or len(tail) < steps:
            raise FadeError(f"text generated:{name} has too little for {wish.length} and {steps} tokens; change them")
        yield [*body, *after, *tail[:steps]]


def _rows(lookup: Lookup) -> Callable[[Wish, random.Random], Iterator[Parts]]:
    def made(wish: Wish, drawn: random.Random) -> Iterator[Parts]:
        for _ in range(wish.n):
            rows = [lookup.row.format(key=key, value=value) for key, value in draw_record(drawn)]
            yield lookup.head, rows, rows, lookup.tail

    return made


def _needles(wish: Wish, drawn: random.Random) -> Iterator[Parts]:
    runs = wish.filler(wish.length)
    for _ in range(wish.n):
        hidden = [f"The special number of the {key} is {draw_value(drawn)}.\n\n" for key in draw_keys(drawn)[:HIDDEN]]
        pieces = next(runs)
        for place, sentence in enumerate(hidden):
            pieces.insert(round((place + drawn.random()) / HIDDEN * 0.8 * len(pieces)), sentence)
        yield "", pieces, hidden, ""


KINDS: dict[str, Callable[[Wish, random.Random], Iterator[Parts]]] = {
    "lines": _rows(lines),
    "key-value": _rows(key_value),
    "needles": _needles,
}
