"""Text as it is: how well it is predicted from a context that was compressed, and whether it can be copied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from data.lm import encode
from data.text import load_documents
from pipelines.evaluation.tasks.task import Example, Output, Turn, Wish
from predictor.errors import FadeError

ANSWER = 64  # tokens of text that follow the context
LEAD = 16  # tokens of the repetition that belong to the prompt of a copy


def continuation(wish: Wish) -> Iterator[Example]:
    """Documents of a text source: the context, and the tokens that follow it."""
    for ids in _documents(wish):
        yield _example(wish, ids[: wish.length], ids[wish.length :], {})


def copy(wish: Wish) -> Iterator[Example]:
    """A text that comes back to a part of itself, at evenly spread depths, and must be continued from there."""
    for index, ids in enumerate(_documents(wish)):
        text = wish.length - LEAD
        start = round((text - 2 * ANSWER) * index / wish.n)
        lead, answer = ids[start : start + LEAD], ids[start + LEAD : start + LEAD + ANSWER]
        yield _example(wish, [*ids[:text], *lead], answer, {"depth": round(start / wish.length, 3)})


def perplexity(output: Output, example: Example) -> float:
    """The exponential of the mean negative log-likelihood of the text that follows, read through the cache.

    Example:
        >>> round(perplexity(Output([], [math.log(0.5), math.log(0.125)], []), Example([], ())), 3)
        4.0
    """
    return math.exp(-sum(output.logprobs) / len(output.logprobs))


def copied(output: Output, example: Example) -> float:
    """Share of the wanted text that comes before the first mistake; 1: all of it.

    Example:
        >>> copied(Output(["so it is"], [], []), Example([], (), {"values": ["so it was"]}))
        0.6666666666666666
    """
    said, wanted = output.texts[-1], example.facts["values"][0]
    right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said, wanted))
    return len(list(right)) / len(wanted)


def _documents(wish: Wish) -> Iterator[list[int]]:
    length = wish.length + ANSWER
    if wish.length < LEAD + 3 * ANSWER:
        raise FadeError(f"length {wish.length} is too short; {LEAD + 3 * ANSWER} tokens are the least")
    found = load_documents(
        [wish.source],
        train=0,
        validation=wish.n,
        length=length,
        measure=lambda text: len(encode(wish.tokenizer, text)),
        seed=wish.seed,
    )
    for document in found:
        yield encode(wish.tokenizer, document.text)[:length]


def _example(wish: Wish, prompt: list[int], answer: list[int], facts: dict[str, Any]) -> Example:
    """The last token of the prompt stands for its question."""
    return Example(prompt[:-1], (Turn(prompt[-1:], answer),), {"values": [wish.tokenizer.decode(answer)], **facts})
