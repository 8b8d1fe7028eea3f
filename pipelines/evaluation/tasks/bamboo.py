"""BAMBOO's tasks of about 4,000 tokens: numbers that were changed, papers, hallucinations, code for a private library.

Source: Dong et al. 2023, BAMBOO (arXiv 2309.13345). The wording of the prompts is ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipelines.evaluation.tasks.records import records
from pipelines.evaluation.tasks.scores import number, same_words
from pipelines.evaluation.tasks.task import Example, Output, PromptBuilder, Turn
from predictor.errors import FadeError

LETTERS = ("A", "B", "C", "D")
_PARTS = re.compile(r"^(Document|Question):$", re.MULTILINE)


def altqa(builder: PromptBuilder) -> Iterator[Example]:
    """A question about a document in which the number that answers it was changed.

    Half of the records have their question before the document; here it always comes after.
    """
    for record in records(builder.source):
        _, *parts = _PARTS.split(record.text("content"))
        sections = dict(zip(parts[::2], parts[1::2]))
        if set(sections) != {"Document", "Question"}:
            raise FadeError(f"{record.where} has no 'Document:' and 'Question:' in 'content'")
        question = f"Question: {sections['Question'].strip()}\nAnswer with a number."
        context, question_ids, cut = builder.cut(f"Document:\n{sections['Document'].strip()}\n\n", question, "Answer:")
        answer = record.text("answer")
        yield Example(context, (Turn(question_ids, builder.ids(f" {answer}")),), {"values": [answer]}, cut=cut)


def right_number(output: Output, example: Example) -> float:
    """Whether the first number of the answer is the right one."""
    return number(output.texts[-1], example.facts["values"][0])


def paperqa(builder: PromptBuilder) -> Iterator[Example]:
    """A question about a paper, with four answers to choose from (some records of the published file have fewer)."""
    for record in records(builder.source):
        answer = record.text("answer").strip('" ')
        if answer not in LETTERS:
            raise FadeError(f"{record.where}: answer {answer!r} is none of {', '.join(LETTERS)}")
        question = "\n".join(
            (f"\nQuestion: {record.text('question')}", *record.texts("options"), "Answer with one letter.")
        )
        context, question_ids, cut = builder.cut(f"A paper:\n{record.text('content')}\n", question, "Answer:")
        choices = tuple(f" {letter}" for letter in LETTERS)
        yield Example(
            context, (Turn(question_ids, builder.ids(f" {answer}")),), {"values": [f" {answer}"]}, choices, cut
        )


def senhallu(builder: PromptBuilder) -> Iterator[Example]:
    """Whether a claim about a paper follows from it."""
    for record in records(builder.source):
        question = f"\nClaim: {record.text('hypothesis')}\nDoes the claim agree with the paper? Answer yes or no."
        context, question_ids, cut = builder.cut(f"A paper:\n{record.text('content')}\n", question, "Answer:")
        answer = " yes" if record.truth("answer") else " no"
        yield Example(context, (Turn(question_ids, builder.ids(answer)),), {"values": [answer]}, (" yes", " no"), cut)


def right_choice(output: Output, example: Example) -> float:
    """Whether the right answer was chosen."""
    return float(output.texts[-1] == example.facts["values"][0])


def private_eval(builder: PromptBuilder) -> Iterator[Example]:
    """Code that uses a library which only its documentation, in the prompt, describes."""
    for record in records(builder.source):
        document, end, rest = record.text("prompt").partition("# [end]")
        if not end:
            raise FadeError(f"{record.where} has no line '# [end]' in 'prompt'")
        solution = record.texts("canonical_solution")[0]
        question_ids = builder.ids(end + rest)
        room = builder.length - len(question_ids)
        if room < 1:
            raise FadeError(
                f"length {builder.length} is too short for the {len(question_ids)} tokens of {record.where}"
            )
        ids = builder.ids(document)
        answer = builder.ids(solution.splitlines()[0] + "\n")
        yield Example(ids[:room], (Turn(question_ids, answer),), {"values": [solution]}, cut=len(ids) > room)


def same_line(output: Output, example: Example) -> float:
    """Whether the answer opens with the first line of the reference code."""
    return same_words(output.texts[-1], example.facts["values"][0].splitlines()[0])
