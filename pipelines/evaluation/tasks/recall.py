"""Text that can only be read on by looking back: a record, then parts of it once more."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from data.lm import encode
from pipelines.evaluation.tasks.retrieval import Lookup, draw_keys, draw_record, draw_value, key_value, lines
from pipelines.evaluation.tasks.task import PromptBuilder
from predictor.errors import FadeError

AGAIN = "\nSome of this again, in another order.\n\n"
HIDDEN = 8  # sentences in the text about other things

Parts = tuple[str, list[str], list[str], str]  # opening, all passages in order, those to come again, closing


def recalled(name: str, builder: PromptBuilder, steps: int) -> Iterator[list[int]]:
    """Token ids of ``builder.length`` tokens of a record and ``steps`` of passages of it, in another order.

    Args:
        name: "lines", "key-value" or "needles" (sentences in a text about other things, ``builder.source``).
        builder: tokenizer, number, length of the record, seed.
        steps: tokens after it.

    Raises:
        FadeError: no such text, or one that is too short to have so many tokens of it again.
    """
    if name not in KINDS:
        raise FadeError(f"text generated:{name} is not known; choose from {', '.join(KINDS)}")
    rng = random.Random(f"{name} {builder.seed}")
    for opening, passages, repeated, closing in KINDS[name](builder, rng):
        body, after = [*encode(builder.tokenizer, ""), *builder.ids(opening)], builder.ids(closing + AGAIN)
        room, whole = builder.length - len(after), set()
        if len(body) > room:
            raise FadeError(f"length {builder.length} is too short for generated:{name}; lengthen it")
        for passage in passages:
            ids = builder.ids(passage)
            if len(body) + len(ids) <= room:
                whole.add(passage)
            body += ids[: room - len(body)]
        again = [passage for passage in repeated if passage in whole]
        rng.shuffle(again)
        tail = [token for passage in again for token in builder.ids(passage)]
        if len(body) < room or len(tail) < steps:
            raise FadeError(
                f"text generated:{name} has too little for {builder.length} and {steps} tokens; change them"
            )
        yield [*body, *after, *tail[:steps]]


def _rows(lookup: Lookup) -> Callable[[PromptBuilder, random.Random], Iterator[Parts]]:
    def parts(builder: PromptBuilder, rng: random.Random) -> Iterator[Parts]:
        for _ in range(builder.n):
            rows = [lookup.row.format(key=key, value=value) for key, value in draw_record(rng)]
            yield lookup.head, rows, rows, lookup.tail

    return parts


def _needles(builder: PromptBuilder, rng: random.Random) -> Iterator[Parts]:
    runs = builder.filler(builder.length)
    for _ in range(builder.n):
        hidden = [f"The special number of the {key} is {draw_value(rng)}.\n\n" for key in draw_keys(rng)[:HIDDEN]]
        passages = next(runs)
        for place, sentence in enumerate(hidden):
            passages.insert(round((place + rng.random()) / HIDDEN * 0.8 * len(passages)), sentence)
        yield "", passages, hidden, ""


KINDS: dict[str, Callable[[PromptBuilder, random.Random], Iterator[Parts]]] = {
    "lines": _rows(lines),
    "key-value": _rows(key_value),
    "needles": _needles,
}
