"""What a task is: prompts whose context a cache compresses, answers, and a score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from data.chat import chat_frame, role_lines
from data.encoding import encode
from data.sources import open_source, passages
from predictor.errors import FadeError

Prompt = tuple[list[int], list[int]]  # token ids of context and question


@dataclass(frozen=True)
class Turn:
    """A question and its reference answer, in tokens; None: whatever the full cache answers."""

    question: list[int]
    answer: list[int] | None = None


@dataclass(frozen=True)
class Example:
    """One prompt.

    Attributes:
        context: token ids that come first. turns: questions about them, one after the other; most have one.
        facts: what the score needs to know: references, choices, a test.
        choices: the answer is the one of them whose first token is likeliest; nothing is generated.
        cut: something of the source was left out, so that the prompt fits.
    """

    context: list[int]
    turns: tuple[Turn, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    cut: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the prompt of the first turn."""
        return len(self.context) + len(self.turns[0].question)


@dataclass(frozen=True)
class Output:
    """What a cache answered.

    Attributes:
        texts: of each turn. logprobs: of each token of the reference answers, nats.
        agrees: whether the most likely token is the full cache's, for each of them.
    """

    texts: list[str]
    logprobs: list[float]
    agrees: list[bool]


@dataclass(frozen=True)
class PromptBuilder:
    """Builds prompts of at most ``length`` tokens of a model.

    Attributes:
        tokenizer: of the model. n: number of prompts. length: tokens of a prompt at most.
        seed: of what is generated. source: text source or file of records.
    """

    tokenizer: Any
    n: int
    length: int
    seed: int
    source: str

    def ids(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def prompt(self, context: str, question: str, opening: str = "") -> Prompt:
        """Token ids of context and question as a user's message, and of the words that the answer opens with.

        A tokenizer without a chat template reads the bare text.
        """
        before: list[int] = encode(self.tokenizer, "")
        after: list[int] = []
        if getattr(self.tokenizer, "chat_template", None):
            before, after = chat_frame(self.tokenizer, add_generation_prompt=True)
        return [*before, *self.ids(context)], [*self.ids(question), *after, *self.ids(opening)]

    def fit(self, prompt: Callable[[int], Prompt], most: int, least: int = 1) -> tuple[int, Prompt]:
        """The largest count whose prompt has no more than ``length`` tokens, and that prompt.

        Args:
            prompt: count -> prompt, which grows with it. most, least: counts to choose from.

        Raises:
            FadeError: even the smallest does not fit.
        """
        size = lambda count: sum(map(len, prompt(count)))
        if size(least) > self.length:
            raise FadeError(f"length {self.length} is too short; the shortest prompt has {size(least)} tokens")
        low, high = least, most + 1  # fits; is too long, or more than there are
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if size(middle) <= self.length else (low, middle)
        return low, prompt(low)

    def cut(self, context: str, question: str, opening: str = "") -> tuple[list[int], list[int], bool]:
        """The prompt, of a context that loses its middle when it is too long, and whether it did.

        Source: Bai et al. 2023, LongBench (arXiv 2308.14508), section 4.1: the beginning and the end are kept.

        Raises:
            FadeError: the question alone is too long.
        """
        ids = self.ids(context)
        empty, question_ids = self.prompt("", question, opening)
        room = self.length - len(empty) - len(question_ids)
        if room < 1:
            raise FadeError(f"length {self.length} is too short for a question of {self.length - room} tokens")
        kept = ids if len(ids) <= room else ids[: room // 2] + ids[len(ids) - (room - room // 2) :]
        return [*empty, *kept], question_ids, len(ids) > room

    def filler(self, tokens: int) -> Iterator[list[str]]:
        """Runs of passages of the text source, each of ``tokens`` or more in all, none twice.

        Raises:
            FadeError: too little text.
        """
        stream = (
            passage
            for family in open_source(self.source, self.seed, role_lines)
            for text in family
            for passage in passages(text.text)
            if len(passage.split()) >= 8
        )
        while True:
            run: list[str] = []
            have = 0
            while have < tokens:
                if (passage := next(stream, None)) is None:
                    raise FadeError(f"{self.source} has too little text; ask for fewer or shorter prompts, or add text")
                run.append(passage.rstrip() + "\n\n")
                have += len(self.ids(run[-1]))
            yield run


@dataclass(frozen=True)
class Task:
    """A task is one line: where its examples come from and what an answer is worth.

    Attributes:
        name: in tables and options. source: text source, or file in the folder of task files.
        examples: gives those that a :class:`PromptBuilder` makes.
        score: of what a cache answered, given the example; in [0, 1], or a perplexity. None: there is no right answer,
            and answers are only compared with the full cache's.
        metric: what the score is, in words. new: tokens that an answer may have; 0: nothing is generated.
        stop: text that ends it. runs_code: the score runs what the model wrote; there is none unless that is allowed.
    """

    name: str
    source: str
    examples: Callable[[PromptBuilder], Sequence[Example] | Iterator[Example]]
    score: Callable[[Output, Example], float] | None
    metric: str
    new: int
    stop: str | None = None
    runs_code: bool = False

    def take(self, builder: PromptBuilder) -> list[Example]:
        """The examples.

        Raises:
            FadeError: there are fewer, or one does not fit; names the task.
        """
        try:
            found = list(islice(self.examples(builder), builder.n))
        except FadeError as error:
            raise FadeError(f"task {self.name}: {error}") from error
        if len(found) < builder.n:
            raise FadeError(
                f"task {self.name}: {builder.source} gives {len(found)} examples, not n {builder.n}; lower n"
            )
        return found
