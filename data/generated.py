"""Generated text that can only be read on by looking back: records, copies, facts in passing, an end that asks.

Each kind has templates to train on, drawn at random for each document, and one that is held out for validation and
evaluation. A seed and a length in the model's own tokens make a text.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from data.corpus import builtin_families
from data.encoding import encode
from data.sources import passages
from data.templates import AGAIN, FACTS, KEY_VALUE, LINES, NEEDLES, Template
from data.words import draw_facts, draw_keys, draw_record, draw_value
from predictor.errors import FadeError

GENERATED = "generated:"  # opens the name of such a source
HIDDEN = 8  # sentences in the text about other things
PROSE = {False: "package-docs", True: "topics"}  # of the built-in corpus, about other things: to train on, held out
POOL = 600_000  # characters of it to choose from
WORDS, CHARACTERS = 8, 600  # of a passage, at least and at most
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Recall:
    """A text before it has a length.

    Attributes:
        head: opens it. passages: follow, as many as fit.
        again: place of a passage, and what asks for it and answers; the end has some of those whose passage fitted.
        tail: closes what is to be remembered. ordered: the end keeps the order of ``again``, from anywhere on.
    """

    head: str
    passages: list[str]
    again: list[tuple[int, str, str]]
    tail: str
    ordered: bool = False

    def ids(self, encoded: Encode, start: list[int], length: int, steps: int, rng: random.Random) -> list[int]:
        """Token ids of ``length`` tokens, of which the last ask, and ``steps`` more, which answer and ask for others.

        Args:
            encoded: text -> ids without special tokens. start: ids that a text begins with.
            length, steps: tokens. rng: of the order of the end.

        Raises:
            FadeError: there is too little text, or no room for it.
        """
        body, after = [*start, *encoded(self.head)], encoded(self.tail)
        longest = max((len(encoded(ask)) for _, ask, _ in self.again), default=0)
        room = length - len(after)
        if len(body) > room - longest:
            raise FadeError(f"length {length} is too short for generated text; lengthen it")
        pieces: list[Sequence[int]] = []
        have = len(body)
        for passage in self.passages:
            if have >= room:
                break
            pieces.append(encoded(passage))
            have += len(pieces[-1])
        ends = list(accumulate(map(len, pieces), initial=len(body)))[1:]
        again = [one for one in self.again if one[0] < len(ends) and ends[one[0]] <= room - longest]
        if not self.ordered:
            rng.shuffle(again)
        tails = [(encoded(ask), encoded(answer)) for _, ask, answer in again]
        if self.ordered:  # from anywhere on where enough follows
            left = list(accumulate((len(ask) + len(answer) for ask, answer in reversed(tails)), initial=0))[::-1]
            enough = [at for at, (ask, _) in enumerate(tails) if left[at] - len(ask) >= steps]
            tails = tails[rng.choice(enough) :] if enough else []
        ask = tails[0][0] if tails else []
        continued = [token for one in tails for part in one for token in part][len(ask) :]
        if have < room - len(ask) or len(continued) < steps:
            raise FadeError(f"generated text has too little for {length} and {steps} tokens; change them")
        flat = [*body, *(token for piece in pieces for token in piece)]
        return [*flat[: room - len(ask)], *after, *ask, *continued[:steps]]


Filler = Callable[[], list[str]]  # gives a run of passages about other things
Make = Callable[[bool, random.Random, Filler], Recall]  # whether held-out templates are meant, draws, filler


def _rows(templates: tuple[Template, ...], held_out: bool, rng: random.Random, filler: Filler) -> Recall:
    """A record of facts."""
    template = _choose(templates, held_out, rng)
    facts = [template.recall(*fact) for fact in (draw_record(rng) if held_out else draw_facts(rng))]
    again = [(place, ask, answer) for place, (_, ask, answer) in enumerate(facts)]
    return Recall(template.head, [row for row, _, _ in facts], again, template.tail)


def _hidden(templates: tuple[Template, ...], dense: bool, held_out: bool, rng: random.Random, filler: Filler) -> Recall:
    """Facts among passages about other things: a few of them, or as many as there are passages."""
    if held_out:
        drawn = [(key, draw_value(rng)) for key in draw_keys(rng)[: None if dense else HIDDEN]]
    else:
        drawn = draw_facts(rng)[: None if dense else HIDDEN]
    texts, template = filler(), _choose(templates, held_out, rng)
    facts = [template.recall(*fact) for fact in drawn[: len(texts)]]
    for place, (row, _, _) in enumerate(facts):
        texts.insert(2 * place if dense else round((place + rng.random()) / len(facts) * 0.8 * len(texts)), row)
    again = [(texts.index(row), ask, answer) for row, ask, answer in facts]
    return Recall(template.head, texts, again, template.tail)


def _chat(held_out: bool, rng: random.Random, filler: Filler) -> Recall:
    """A chat about other things, in which the user states facts, and later asks for them."""

    def turns() -> list[str]:
        return [f"user: {passage.rstrip()}\nassistant: I see.\n" for passage in filler()]

    return _hidden(FACTS, False, held_out, rng, turns)


def _copies(held_out: bool, rng: random.Random, filler: Filler) -> Recall:
    """Passages, and some of them once more in the same order; the end stands in the middle of one."""
    texts = filler()
    halves = [max(text.find(" ", len(text) // 2), 0) for text in texts]
    again = [(place, text[:half], text[half:]) for place, (text, half) in enumerate(zip(texts, halves))]
    return Recall("", texts, again, AGAIN if held_out or rng.random() < 0.5 else "", ordered=True)


def _choose(templates: tuple[Template, ...], held_out: bool, rng: random.Random) -> Template:
    return templates[0] if held_out else rng.choice(templates[1:])


KINDS: dict[str, Make] = {
    "lines": functools.partial(_rows, LINES),
    "key-value": functools.partial(_rows, KEY_VALUE),
    "needles": functools.partial(_hidden, NEEDLES, False),
    "multi-key": functools.partial(_hidden, NEEDLES, True),
    "chat-facts": _chat,
    "copies": _copies,
}


def kind_of(source: str) -> str:
    """The kind that a source ``generated:KIND`` names.

    Raises:
        FadeError: there is none of that name.

    Example:
        >>> kind_of("generated:lines")
        'lines'
    """
    kind = source.removeprefix(GENERATED)
    if kind not in KINDS:
        raise FadeError(f"text {source} is not known; choose from {', '.join(GENERATED + name for name in KINDS)}")
    return kind


@dataclass(frozen=True)
class Generated:
    """A generated text, which has any length that it is asked for.

    Attributes:
        kind: a key of :data:`KINDS`. seed: of all that is drawn. held_out: with the template that is never trained on.
    """

    kind: str
    seed: str
    held_out: bool = False

    def ids(self, tokenizer: Any, length: int, steps: int) -> list[int]:
        """Token ids [length + steps]: the last of the first ``length`` ask, what follows answers.

        Args:
            tokenizer: of the model. length: tokens of the prompt. steps: tokens after it.

        Raises:
            FadeError: too short for this kind, or longer than there is text.
        """
        encoded = functools.partial(_encode, tokenizer)
        rng = self._rng()
        recall = KINDS[self.kind](self.held_out, rng, lambda: _passages(self.held_out, rng, length, encoded))
        try:
            return recall.ids(encoded, encode(tokenizer, ""), length, steps, rng)
        except FadeError as error:
            raise FadeError(f"text {GENERATED}{self.kind}: {error}") from error

    def parts(self, length: int, measure: Callable[[str], int]) -> list[str]:
        """What the text says before its end asks, in parts of ``length`` in all by what measures a text."""
        rng = self._rng()
        recall = KINDS[self.kind](
            self.held_out, rng, lambda: _passages(self.held_out, rng, length, lambda text: range(measure(text)))
        )
        sizes = accumulate(map(measure, recall.passages), initial=measure(recall.head))
        spoken = [passage for passage, have in zip(recall.passages, sizes) if have < length]
        return [recall.head, *spoken, recall.tail]

    def _rng(self) -> random.Random:
        return random.Random(f"{self.kind} {self.held_out} {self.seed}")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _passages(held_out: bool, rng: random.Random, tokens: int, encoded: Encode) -> list[str]:
    """A run of passages about other things, of ``tokens`` or more in all, from anywhere in the pool."""
    pool = _pool(PROSE[held_out])
    at, run, have = rng.randrange(len(pool)), [], 0
    for place in range(len(pool)):
        run.append(pool[(at + place) % len(pool)])
        have += len(encoded(run[-1]))
        if have >= tokens:
            break
    return run


@functools.cache
def _pool(family: str) -> list[str]:
    pool: list[str] = []
    size = 0
    for text in builtin_families(0, family)[0]:
        found = [
            f"{each.rstrip()}\n\n"
            for each in passages(text.text)
            if len(each.split()) >= WORDS and len(each) <= CHARACTERS
        ]
        pool += found
        size += sum(map(len, found))
        if size >= POOL:
            break
    return pool
