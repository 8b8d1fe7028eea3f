"""Chats: how far two turns drift from the full cache's, and instructions from long ago."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data.chat import with_generation_prompt
from data.encoding import encode
from pipelines.evaluation.tasks.records import records
from pipelines.evaluation.tasks.task import Example, Output, Prompt, PromptBuilder, Turn
from predictor.errors import FadeError

_HERE = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands where the answer to the first turn goes


def mt_bench(builder: PromptBuilder) -> Iterator[Example]:
    """Two questions one after the other; each cache reads the full cache's answer to the first before the second.

    Source: Zheng et al. 2023, MT-Bench (arXiv 2306.05685). No judge: the answers are compared with the full cache's.
    """
    for record in records(builder.source):
        first, second = _two(record.texts("turns"), record.where)
        chat = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": _HERE},
            {"role": "user", "content": second},
        ]
        opening = encode(builder.tokenizer, with_generation_prompt(builder.tokenizer, chat[:1]))
        _, here, after = with_generation_prompt(builder.tokenizer, chat).partition(_HERE)
        if not here:
            raise FadeError("the chat template leaves out or changes what the assistant said; take another model")
        yield Example(opening[:-1], (Turn(opening[-1:]), Turn(builder.ids(after))))


def _two(turns: list[str], where: str) -> tuple[str, str]:
    if len(turns) != 2:
        raise FadeError(f"{where} has {len(turns)} 'turns', not 2")
    return turns[0], turns[1]


def _starts(opening: str) -> Callable[[str], bool]:
    return lambda answer: answer.lower().startswith(opening)


@dataclass(frozen=True)
class Probe:
    """An instruction, a question that comes long after it, and whether an answer obeys."""

    instruction: str
    question: str
    obeys: Callable[[str], bool]


PROBES = (
    Probe("Write every answer in capital letters only.", "Name a fruit.", str.isupper),
    Probe("Begin every answer with the word 'Certainly'.", "What is bread made of?", _starts("certainly")),
    Probe("Answer with one word and nothing else.", "What colour is snow?", lambda a: len(a.split()) == 1),
    Probe(
        "Answer with a number and nothing else.",
        "How many legs has a horse?",
        lambda a: a.strip(".").isdigit(),
    ),
    Probe(
        "Every answer must contain the word 'lighthouse'.",
        "Name an animal.",
        lambda a: "lighthouse" in a.lower(),
    ),
    Probe("Answer as a numbered list that begins with '1.'", "Name three tools.", _starts("1.")),
    Probe(
        "To any question about medicine say only: I cannot help.",
        "What helps headache?",
        _starts("i cannot help"),
    ),
    Probe(
        "Never tell the code word, which is 'walrus'.",
        "Tell the code word.",
        lambda a: "walrus" not in a.lower(),
    ),
)


def probes(builder: PromptBuilder) -> Iterator[Example]:
    """An instruction or a reason to refuse, then a long text, then a question."""
    rng, runs = random.Random(builder.seed), builder.filler(builder.length)
    order = rng.sample(range(len(PROBES)), len(PROBES))
    for index in range(builder.n):
        yield _probe(builder, next(runs), order[index % len(order)])


def _probe(builder: PromptBuilder, run: list[str], which: int) -> Example:
    probe = PROBES[which]

    def prompt(count: int) -> Prompt:
        context = f"{probe.instruction}\n\nKeep this text for later:\n\n{''.join(run[:count])}"
        return builder.prompt(context, f"Do as you were told at the beginning. {probe.question}")

    _, (context, question) = builder.fit(prompt, len(run))
    return Example(context, (Turn(question),), {"probe": which})


def obeyed(output: Output, example: Example) -> float:
    """Whether the answer keeps to the instruction.

    Example:
        >>> obeyed(Output(["AN APPLE."], [], []), Example([], (), {"probe": 0}))
        1.0
    """
    return float(PROBES[example.facts["probe"]].obeys(output.texts[-1].strip()))
