"""Generated text to measure on: what its end asks for can only be known by looking back."""

from __future__ import annotations

import random
from collections.abc import Iterator

from data.encoding import encode
from data.generated import GENERATED, KINDS, kind_of
from pipelines.evaluation.tasks.task import PromptBuilder
from predictor.errors import FadeError


def recalled(name: str, builder: PromptBuilder, steps: int) -> Iterator[list[int]]:
    """Token ids of texts of ``builder.length`` tokens whose end asks for earlier facts, and ``steps`` that answer.

    Args:
        name: a kind of :mod:`data.generated`, whose held-out template is used.
        builder: tokenizer, number, length before the answer, seed, text about other things.
        steps: tokens after it.

    Raises:
        FadeError: no such text, or one that is too short to have so many tokens of it again.
    """
    kind_of(GENERATED + name)
    rng, runs = random.Random(f"{name} {builder.seed}"), builder.filler(builder.length)
    for _ in range(builder.n):
        recall = KINDS[name](True, rng, lambda: next(runs))
        try:
            yield recall.ids(builder.ids, encode(builder.tokenizer, ""), builder.length, steps, rng)
        except FadeError as error:
            raise FadeError(f"text {GENERATED}{name}: {error}") from error
