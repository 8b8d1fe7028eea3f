"""Something is hidden in a long context, and the question is for it: needle, lines, topics, key-value, many keys.

All are generated: a seed and a length in the model's own tokens make them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data.generated import KEY_VALUE, LINES
from data.words import draw_keys, draw_record, draw_value
from pipelines.evaluation.tasks.scores import contains
from pipelines.evaluation.tasks.task import Example, Output, Prompt, PromptBuilder, Turn

TOPICS = (
    "keeping bees; the price of coffee; old railway bridges; how glaciers move; learning the violin; desert plants; "
    "the history of paper; training for a marathon; repairing bicycles; migrating birds; baking rye bread; "
    "volcanoes under the sea; folk dances; the invention of the zip; urban gardens; deep-sea fishing; chess openings; "
    "solar cookers; medieval castles; sign languages; cheese cellars; kite flying; star charts; lighthouse keepers"
)


def found(output: Output, example: Example) -> float:
    """Fraction of the reference values that occur in the answer.

    Example:
        >>> found(Output(["It is 41."], [], []), Example([], (), {"values": ["41", "7"]}))
        0.5
    """
    return contains(output.texts[-1], example.facts["values"])


@dataclass(frozen=True)
class Lookup:
    """A record of keys and values, as many as fit, and a question for the value of one of them.

    Attributes:
        head, row, tail: of the context; a row names ``{key}`` and ``{value}``.
        question, opening: of the question, and of the answer; both may name ``{key}``.
    """

    head: str
    row: str
    question: str
    opening: str
    tail: str = ""

    def __call__(self, builder: PromptBuilder) -> Iterator[Example]:
        """Examples; the keys of the questions lie at depths that are evenly spread over all of them."""
        rng = random.Random(builder.seed)
        for depth in _depths(builder.n):
            yield self._example(builder, depth, draw_record(rng))

    def _example(self, builder: PromptBuilder, depth: float, record: list[tuple[str, str]]) -> Example:
        def prompt(count: int) -> Prompt:
            key, _ = record[round(depth * (count - 1))]
            rows = "".join(self.row.format(key=key, value=value) for key, value in record[:count])
            return builder.prompt(
                f"{self.head}{rows}{self.tail}", self.question.format(key=key), self.opening.format(key=key)
            )

        count, (context, question) = builder.fit(prompt, len(record), least=2)
        _, value = record[round(depth * (count - 1))]
        facts = {"values": [value], "depth": depth, "rows": count}
        return Example(context, (Turn(question, builder.ids(value)),), facts)


lines = Lookup(
    head=LINES[0].head,
    row=LINES[0].row,
    question="\nThe record is over. What is the REGISTER_CONTENT in line {key}?",
    opening="line {key}: REGISTER_CONTENT is <",
)
key_value = Lookup(
    head=KEY_VALUE[0].head,
    row=KEY_VALUE[0].row,
    tail="}\n",
    question='\nWhat is the value of the key "{key}" in this JSON object?',
    opening='"{key}": "',
)


def needles(keys: int) -> Callable[[PromptBuilder], Iterator[Example]]:
    """A sentence with a number in a text about other things, at depths spread evenly over the examples.

    Args:
        keys: how many such sentences there are; the others lie anywhere. The question is for one of them.

    Source: Kamradt 2023, "Needle in a Haystack"; Hsieh et al. 2024, RULER (arXiv 2404.06654), table 2.
    """

    def examples(builder: PromptBuilder) -> Iterator[Example]:
        rng, runs = random.Random(builder.seed), builder.filler(builder.length)
        for depth in _depths(builder.n):
            pairs = [(key, draw_value(rng)) for key in draw_keys(rng)[:keys]]
            places = [depth, *(rng.random() for _ in pairs[1:])]
            yield _needle(builder, next(runs), pairs, places)

    return examples


def _needle(builder: PromptBuilder, run: list[str], pairs: list[tuple[str, str]], places: list[float]) -> Example:
    """Hide a sentence for each pair at its place in [0, 1]; ask for the first."""
    (target, value), *_ = pairs
    about = "The special number of the {}"

    def prompt(count: int) -> Prompt:
        parts = run[:count]
        for place, (key, number) in sorted(zip(places, pairs), reverse=True):
            parts.insert(round(place * count), f"{about.format(key)} is {number}.\n\n")
        question = f"What is the special number of the {target} in the text above?"
        return builder.prompt("".join(parts), question, f"{about.format(target)} is")

    _, (context, question) = builder.fit(prompt, len(run))
    facts = {"values": [value], "depth": places[0]}
    return Example(context, (Turn(question, builder.ids(f" {value}")),), facts)


def topics(builder: PromptBuilder) -> Iterator[Example]:
    """A conversation that goes from topic to topic; what was the first one?

    Source: Li et al. 2023, LongChat and LongEval (lmsys.org/blog/2023-06-29-longchat), coarse-grained topics.
    """
    rng, runs = random.Random(builder.seed), builder.filler(builder.length)
    for _ in range(builder.n):
        yield _topics(builder, next(runs), rng.sample(TOPICS.split("; "), k=TOPICS.count(";") + 1))


def _topics(builder: PromptBuilder, run: list[str], names: list[str]) -> Example:
    def prompt(count: int) -> Prompt:
        passages = [
            f"Now let us talk about {names[i // 2 % len(names)]}.\n{passage}" if i % 2 == 0 else passage
            for i, passage in enumerate(run[:count])
        ]
        question = "What was the first thing that we said we would talk about?"
        return builder.prompt("".join(passages), question, "First we said: Now let us talk about")

    _, (context, question) = builder.fit(prompt, len(run))
    return Example(context, (Turn(question, builder.ids(f" {names[0]}")),), {"values": names[:1]})


def _depths(n: int) -> list[float]:
    """From 0 to 1 in ``n`` even steps; one example has its needle in the middle."""
    return [round(i / (n - 1), 3) for i in range(n)] if n > 1 else [0.5]
