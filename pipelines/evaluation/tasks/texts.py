"""Text as it is: how well it is predicted from a context that was compressed, and whether it can be copied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from data.encoding import encode
from data.text import load_documents
from pipelines.evaluation.tasks.task import Example, Output, PromptBuilder, Turn
from predictor.errors import FadeError

ANSWER = 64  # tokens of text that follow the context
LEAD = 16  # tokens of the repetition that belong to the prompt of a copy


def continuation(builder: PromptBuilder) -> Iterator[Example]:
    """Documents of a text source: the context, and the tokens that follow it."""
    for ids in _documents(builder):
        yield _example(builder, ids[: builder.length], ids[builder.length :], {})


def copy(builder: PromptBuilder) -> Iterator[Example]:
    """A text that comes back to a part of itself, at evenly spread depths, and must be continued from there."""
    for index, ids in enumerate(_documents(builder)):
        text = builder.length - LEAD
        start = round((text - 2 * ANSWER) * index / builder.n)
        lead, answer = ids[start : start + LEAD], ids[start + LEAD : start + LEAD + ANSWER]
        yield _example(builder, [*ids[:text], *lead], answer, {"depth": round(start / builder.length, 3)})


def perplexity(output: Output, example: Example) -> float:
    """The exponential of the mean negative log-likelihood of the text that follows, read through the cache.

    Example:
        >>> round(perplexity(Output([], [math.log(0.5), math.log(0.125)], []), Example([], ())), 3)
        4.0
    """
    return math.exp(-sum(output.logprobs) / len(output.logprobs))


def copied(output: Output, example: Example) -> float:
    """Fraction of the reference that comes before the first mistake; 1: all of it.

    Example:
        >>> copied(Output(["so it is"], [], []), Example([], (), {"values": ["so it was"]}))
        0.6666666666666666
    """
    answer, reference = output.texts[-1], example.facts["values"][0]
    right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(answer, reference))
    return len(list(right)) / len(reference)


def _documents(builder: PromptBuilder) -> Iterator[list[int]]:
    length = builder.length + ANSWER
    if builder.length < LEAD + 3 * ANSWER:
        raise FadeError(f"length {builder.length} is too short; {LEAD + 3 * ANSWER} tokens are the least")
    found = load_documents(
        [builder.source],
        train=0,
        validation=builder.n,
        length=length,
        measure=lambda text: len(encode(builder.tokenizer, text)),
        seed=builder.seed,
    )
    for document in found:
        yield encode(builder.tokenizer, document.text)[:length]


def _example(builder: PromptBuilder, prompt: list[int], answer: list[int], facts: dict[str, Any]) -> Example:
    """The last token of the prompt stands for its question."""
    return Example(prompt[:-1], (Turn(prompt[-1:], answer),), {"values": [builder.tokenizer.decode(answer)], **facts})
