"""BAMBOO's tasks of about 4,000 tokens: numbers that were changed, papers, hallucinations, code for a private library.

Source: Dong et al. 2023, BAMBOO (arXiv 2309.13345). The wording of the prompts is ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.tasks.records import records
from pipelines.tasks.scores import number, same_words
from pipelines.tasks.task import Example, Output, Turn, Wish
from predictor.errors import FadeError


def altqa(wish: Wish) -> Iterator[Example]:
    """A question about a document in which the number that answers it was changed."""
    for record in records(wish.source):
        document, found, question = record.text("content").rpartition("\n\nQuestion:")
        if not found:
            raise FadeError(f"{record.where} has no line 'Question:' in 'content'")
        question = f"Question: {question.strip()}\nAnswer with a number."
        context, asked, cut = wish.cut(f"{document}\n\n", question, "Answer:")
        answer = wish.ids(f" {record.text('answer')}")
        yield Example(context, (Turn(asked, answer),), {"values": [record.text("answer")]}, cut=cut)


def right_number(output: Output, example: Example) -> float:
    """Whether the first number of the answer is the right one."""
    return number(output.texts[-1], example.facts["values"][0])


def paperqa(wish: Wish) -> Iterator[Example]:
    """A question about a paper, with four answers to choose from."""
    for record in records(wish.source):
        options = record.texts("options")
        letters = [option[0] for option in options]
        answer = record.text("answer").strip('" ')
        if answer not in letters:
            raise FadeError(f"{record.where}: answer {answer!r} is none of the options {letters}")
        question = "\n".join((f"\nQuestion: {record.text('question')}", *options, "Answer with one letter."))
        context, asked, cut = wish.cut(f"A paper:\n{record.text('content')}\n", question, "Answer:")
        choices = tuple(f" {letter}" for letter in letters)
        yield Example(
            context, (Turn(asked, wish.ids(f" {answer}")),), {"values": [f" {answer}"]}, choices, cut
        )


def senhallu(wish: Wish) -> Iterator[Example]:
    """Whether what is said about a paper follows from it."""
    for record in records(wish.source):
        question = (
            f"\nClaim: {record.text('hypothesis')}\nDoes the claim agree with the paper? Answer yes or no."
        )
        context, asked, cut = wish.cut(f"A paper:\n{record.text('content')}\n", question, "Answer:")
        answer = " yes" if record.truth("answer") else " no"
        yield Example(context, (Turn(asked, wish.ids(answer)),), {"values": [answer]}, (" yes", " no"), cut)


def right_choice(output: Output, example: Example) -> float:
    """Whether the right answer was chosen."""
    return float(output.texts[-1] == example.facts["values"][0])


def private_eval(wish: Wish) -> Iterator[Example]:
    """Code that uses a library which only its documentation, in the prompt, describes."""
    for record in records(wish.source):
        document, found, rest = record.text("prompt").partition("# [end]")
        if not found:
            raise FadeError(f"{record.where} has no line '# [end]' in 'prompt'")
        wanted = record.texts("canonical_solution")[0]
        asked = wish.ids(found + rest)
        room = wish.length - len(asked)
        if room < 1:
            raise FadeError(
                f"length {wish.length} is too short for the {len(asked)} tokens of {record.where}"
            )
        ids = wish.ids(document)
        answer = wish.ids(wanted.splitlines()[0] + "\n")
        yield Example(ids[:room], (Turn(asked, answer),), {"values": [wanted]}, cut=len(ids) > room)


def same_line(output: Output, example: Example) -> float:
    """Whether the answer opens with the first line of the wanted code."""
    return same_words(output.texts[-1], example.facts["values"][0].splitlines()[0])
