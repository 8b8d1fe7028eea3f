"""What generated text states: keys, values, and the words that they are made of."""

from __future__ import annotations

import functools
import random
import re

from data.corpus import builtin_families

ADJECTIVES = (
    "amber brave calm dusty eager faint gentle hollow icy jolly keen lively mellow narrow olive proud quiet rapid "
    "silent tidy upper vivid wooden young zesty bitter clever distant early frozen golden humble"
)
NOUNS = (
    "anchor basket canyon dagger engine falcon garden hammer island jacket kettle lantern magnet needle orchard "
    "pepper quarry ribbon saddle temple urchin valley window yogurt zipper beacon candle donkey ember fossil glacier "
    "harbor"
)
Facts = list[tuple[str, str]]  # keys and their values


def draw_record(rng: random.Random) -> list[tuple[str, str]]:
    """Keys of two words and their values; no word is in two keys."""
    words = rng.sample(_words(), len(_words()))
    return [(f"{one}-{other}", draw_value(rng)) for one, other in zip(words[::2], words[1::2])]


def draw_keys(rng: random.Random) -> list[str]:
    """All pairs of words, in an order of their own."""
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]
    return rng.sample(pairs, len(pairs))


@functools.cache
def _words() -> list[str]:
    """Words of the text that comes with Python, each once: rows whose keys share words would be another task."""
    text = " ".join(text.text for family in builtin_families(0, "topics") for text in family)
    return sorted(set(re.findall(r"\b[a-z]{5,9}\b", text)))


def draw_value(rng: random.Random) -> str:
    """A number of five digits."""
    return str(rng.randint(10_000, 99_999))


def draw_facts(rng: random.Random) -> Facts:
    """Keys and values of one of several kinds, for text to train on: words or numbers, short or long."""
    words = rng.sample(_words(), len(_words()))
    numbers = rng.sample(range(100, 10_000), len(words) // 2)
    keys = {
        "pair": [f"{one}-{other}" for one, other in zip(words[::2], words[1::2])],
        "phrase": [key.replace("-", " ") for key in draw_keys(rng)],
        "number": [f"{rng.choice('ABCDKMNRSTXZ')}{number}" for number in numbers],
        "word": words,
    }
    values = {
        "number": lambda: str(rng.randint(100, 9_999_999)),
        "code": lambda: f"{rng.getrandbits(24):06x}",
        "name": lambda: f"{rng.choice(words)} {rng.choice(words)}",
    }
    value = rng.choice(list(values.values()))
    return [(key, value()) for key in rng.choice(list(keys.values()))]
