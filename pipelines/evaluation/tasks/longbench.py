"""LongBench: summaries of several news articles, and which paragraph a summary belongs to; with its own metrics.

Source: Bai et al. 2023, LongBench (arXiv 2308.14508). The wording of the prompts is ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipelines.evaluation.tasks.records import Record, records
from pipelines.evaluation.tasks.scores import rouge_l, share_of_numbers
from pipelines.evaluation.tasks.task import Example, Output, Prompt, Turn, Wish
from predictor.errors import FadeError

_PARAGRAPH = re.compile(r"(?=^(?:Paragraph |段落)\d+[:：])", re.MULTILINE)


def multi_news(wish: Wish) -> Iterator[Example]:
    """Several articles about one event, to be summed up."""
    for record in records(wish.source):
        text = record.text("context").replace("NEWLINE_CHAR", "\n")
        context, question, cut = wish.cut(
            f"Here are several news articles about one event.\n\n{text}\n\n",
            "Write a summary of all these articles together.",
        )
        yield Example(context, (Turn(question),), {"values": record.texts("answers")}, cut=cut)


def summary(output: Output, example: Example) -> float:
    """ROUGE-L of the summary."""
    return rouge_l(output.texts[-1], example.facts["values"])


def passage_retrieval(wish: Wish) -> Iterator[Example]:
    """Numbered paragraphs, and a summary of one of them: which?

    Where the record is longer than what is asked for, the last paragraphs are left out, never the one that is wanted.
    """
    for record in records(wish.source):
        numbered, wanted = _paragraphs(record)
        yield _which(wish, record, numbered, wanted)


def _which(wish: Wish, record: Record, numbered: dict[int, str], wanted: int) -> Example:
    others = [number for number in numbered if number != wanted]
    chinese = record.held.get("language") == "zh"

    def prompt(count: int) -> Prompt:
        text = "\n\n".join(numbered[number] for number in sorted([*others[: count - 1], wanted]))
        question = f"Which of the paragraphs does this summary belong to?\n\n{record.text('input')}"
        opening = f"The summary belongs to {'段落' if chinese else 'Paragraph'}"
        return wish.prompt(f"Here are numbered paragraphs.\n\n{text}\n\n", question, opening)

    count, (context, question) = wish.fit(prompt, len(numbered), least=2)
    answer = wish.ids(str(wanted) if chinese else f" {wanted}")
    return Example(context, (Turn(question, answer),), {"number": wanted}, cut=count < len(numbered))


def right_paragraph(output: Output, example: Example) -> float:
    """Share of the numbers in the answer that are the right one."""
    return share_of_numbers(output.texts[-1], example.facts["number"])


def _paragraphs(record: Record) -> tuple[dict[int, str], int]:
    """Paragraphs by number, and the number that is wanted."""
    wanted = re.search(r"\d+", record.texts("answers")[0])
    parts = [part.strip() for part in _PARAGRAPH.split(record.text("context")) if part.strip()]
    numbered = {int(found[0]): part for part in parts if (found := re.search(r"\d+", part[:20]))}
    if wanted is None or int(wanted[0]) not in numbered:
        raise FadeError(f"{record.where} names no paragraph of its context in 'answers'")
    return numbered, int(wanted[0])
