"""Something is hidden in a long context and asked for: needle, lines, topics, key-value, many keys.

All are generated: a seed and a length in the model's own tokens make them.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data.corpus import builtin_families
from pipelines.evaluation.tasks.scores import contains
from pipelines.evaluation.tasks.task import Example, Output, Prompt, Turn, Wish

ADJECTIVES = (
    "amber brave calm dusty eager faint gentle hollow icy jolly keen lively mellow narrow olive proud quiet rapid "
    "silent tidy upper vivid wooden young zesty bitter clever distant early frozen golden humble"
)
NOUNS = (
    "anchor basket canyon dagger engine falcon garden hammer island jacket kettle lantern magnet needle orchard "
    "pepper quarry ribbon saddle temple urchin valley window yogurt zipper beacon candle donkey ember fossil glacier "
    "harbor"
)
TOPICS = (
    "keeping bees; the price of coffee; old railway bridges; how glaciers move; learning the violin; desert plants; "
    "the history of paper; training for a marathon; repairing bicycles; migrating birds; baking rye bread; "
    "volcanoes under the sea; folk dances; the invention of the zip; urban gardens; deep-sea fishing; chess openings; "
    "solar cookers; medieval castles; sign languages; cheese cellars; kite flying; star charts; lighthouse keepers"
)


def found(output: Output, example: Example) -> float:
    """Share of the wanted values that occur in the answer.

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

    def __call__(self, wish: Wish) -> Iterator[Example]:
        """Examples; the keys that are asked for lie at depths that are evenly spread over all of them."""
        drawn = random.Random(wish.seed)
        for depth in _depths(wish.n):
            yield self._example(wish, depth, draw_record(drawn))

    def _example(self, wish: Wish, depth: float, record: list[tuple[str, str]]) -> Example:
        def prompt(count: int) -> Prompt:
            key, _ = record[round(depth * (count - 1))]
            rows = "".join(self.row.format(key=key, value=value) for key, value in record[:count])
            return wish.prompt(
                f"{self.head}{rows}{self.tail}", self.question.format(key=key), self.opening.format(key=key)
            )

        count, (context, question) = wish.fit(prompt, len(record), least=2)
        _, value = record[round(depth * (count - 1))]
        facts = {"values": [value], "depth": depth, "rows": count}
        return Example(context, (Turn(question, wish.ids(value)),), facts)


lines = Lookup(
    head="Below is a record of lines. Each has a name and a number. Remember them.\n\n",
    row="line {key}: REGISTER_CONTENT is <{value}>\n",
    question="\nThe record is over. What is the REGISTER_CONTENT in line {key}?",
    opening="line {key}: REGISTER_CONTENT is <",
)
key_value = Lookup(
    head="Here is a JSON object.\n\n{\n",
    row='"{key}": "{value}",\n',
    tail="}\n",
    question='\nWhat is the value of the key "{key}" in this JSON object?',
    opening='"{key}": "',
)


def needles(keys: int) -> Callable[[Wish], Iterator[Example]]:
    """A sentence with a number in a text about other things, at depths spread evenly over the examples.

    Args:
        keys: how many such sentences there are; the others lie anywhere. One of them is asked for.

    Source: Kamradt 2023, "Needle in a Haystack"; Hsieh et al. 2024, RULER (arXiv 2404.06654), table 2.
    """

    def examples(wish: Wish) -> Iterator[Example]:
        drawn, runs = random.Random(wish.seed), wish.filler(wish.length)
        for depth in _depths(wish.n):
            pairs = [(key, draw_value(drawn)) for key in draw_keys(drawn)[:keys]]
            places = [depth, *(drawn.random() for _ in pairs[1:])]
            yield _needle(wish, next(runs), pairs, places)

    return examples


def _needle(wish: Wish, run: list[str], pairs: list[tuple[str, str]], places: list[float]) -> Example:
    """Hide a sentence for each pair at its place in [0, 1]; ask for the first."""
    (wanted, value), *_ = pairs
    about = "The special number of the {}"

    def prompt(count: int) -> Prompt:
        parts = run[:count]
        for place, (key, number) in sorted(zip(places, pairs), reverse=True):
            parts.insert(round(place * count), f"{about.format(key)} is {number}.\n\n")
        question = f"What is the special number of the {wanted} in the text above?"
        return wish.prompt("".join(parts), question, f"{about.format(wanted)} is")

    _, (context, question) = wish.fit(prompt, len(run))
    facts = {"values": [value], "depth": places[0]}
    return Example(context, (Turn(question, wish.ids(f" {value}")),), facts)


def topics(wish: Wish) -> Iterator[Example]:
    """A conversation that goes from topic to topic; what was the first one?

    Source: Li et al. 2023, LongChat and LongEval (lmsys.org/blog/2023-06-29-longchat), coarse-grained topics.
    """
    drawn, runs = random.Random(wish.seed), wish.filler(wish.length)
    for _ in range(wish.n):
        yield _topics(wish, next(runs), drawn.sample(TOPICS.split("; "), k=TOPICS.count(";") + 1))


def _topics(wish: Wish, run: list[str], names: list[str]) -> Example:
    def prompt(count: int) -> Prompt:
        said = [
            f"Now let us talk about {names[i // 2 % len(names)]}.\n{passage}" if i % 2 == 0 else passage
            for i, passage in enumerate(run[:count])
        ]
        question = "What was the first thing that we said we would talk about?"
        return wish.prompt("".join(said), question, "First we said: Now let us talk about")

    _, (context, question) = wish.fit(prompt, len(run))
    return Example(context, (Turn(question, wish.ids(f" {names[0]}")),), {"values": names[:1]})


def _depths(n: int) -> list[float]:
    """From 0 to 1 in ``n`` even steps; one example has its needle in the middle."""
    return [round(i / (n - 1), 3) for i in range(n)] if n > 1 else [0.5]


def draw_record(drawn: random.Random) -> list[tuple[str, str]]:
    """Keys of two words and their values; no word is in two keys."""
    words = drawn.sample(_words(), len(_words()))
    return [(f"{one}-{other}", draw_value(drawn)) for one, other in zip(words[::2], words[1::2])]


def draw_keys(drawn: random.Random) -> list[str]:
    """All pairs of words, in an order of their own."""
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]
    return drawn.sample(pairs, len(pairs))


@functools.cache
def _words() -> list[str]:
    """Words of the text that comes with Python, each once: rows whose keys share words would be another task."""
    text = " ".join(text.text for family in builtin_families(0, "topics") for text in family)
    return sorted(set(re.findall(r"\b[a-z]{5,9}\b", text)))


def draw_value(drawn: random.Random) -> str:
    """A number of five digits."""
    return str(drawn.randint(10_000, 99_999))
