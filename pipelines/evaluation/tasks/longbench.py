"""LongBench: summaries of several news articles, and which paragraph a summary belongs to; with its own metrics.

Source: Bai et al. 2023, LongBench (arXiv 2308.14508). The wording of the prompts is ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipelines.evaluation.tasks.records import Record, records
from pipelines.evaluation.tasks.scores import fraction_of_numbers, rouge_l
from pipelines.evaluation.tasks.task import Example, Output, Prompt, PromptBuilder, Turn
from predictor.errors import FadeError

_PARAGRAPH = re.compile(r"(?=^(?:Paragraph |段落)\d+[:：])", re.MULTILINE)


def multi_news(builder: PromptBuilder) -> Iterator[Example]:
    """Several articles about one event, to be summed up."""
    for record in records(builder.source):
        text = record.text("context").replace("NEWLINE_CHAR", "\n")
        context, question, cut = builder.cut(
            f"Here are several news articles about one event.\n\n{text}\n\n",
            "Write a summary of all these articles together.",
        )
        yield Example(context, (Turn(question),), {"values": record.texts("answers")}, cut=cut)


def summary(output: Output, example: Example) -> float:
    """ROUGE-L of the summary."""
    return rouge_l(output.texts[-1], example.facts["values"])


def passage_retrieval(builder: PromptBuilder) -> Iterator[Example]:
    """Numbered paragraphs, and a summary of one of them: which?

    Where the record is longer than a prompt may be, the last paragraphs are left out, never the target.
    """
    for record in records(builder.source):
        numbered, target = _paragraphs(record)
        yield _which(builder, record, numbered, target)


def _which(builder: PromptBuilder, record: Record, numbered: dict[int, str], target: int) -> Example:
    others = [number for number in numbered if number != target]
    chinese = record.fields.get("language") == "zh"

    def prompt(count: int) -> Prompt:
        text = "\n\n".join(numbered[number] for number in sorted([*others[: count - 1], target]))
        question = f"Which of the paragraphs does this summary belong to?\n\n{record.text('input')}"
        opening = f"The summary belongs to {'段落' if chinese else 'Paragraph'}"
        return builder.prompt(f"Here are numbered paragraphs.\n\n{text}\n\n", question, opening)

    count, (context, question) = builder.fit(prompt, len(numbered), least=2)
    answer = builder.ids(str(target) if chinese else f" {target}")
    return Example(context, (Turn(question, answer),), {"number": target}, cut=count < len(numbered))


def right_paragraph(output: Output, example: Example) -> float:
    """Fraction of the numbers in the answer that are the right one."""
    return fraction_of_numbers(output.texts[-1], example.facts["number"])


def _paragraphs(record: Record) -> tuple[dict[int, str], int]:
    """Paragraphs by number, and the number of the target."""
    target = re.search(r"\d+", record.texts("answers")[0])
    parts = [part.strip() for part in _PARAGRAPH.split(record.text("context")) if part.strip()]
    numbered = {int(found[0]): part for part in parts if (found := re.search(r"\d+", part[:20]))}
    if target is None or int(target[0]) not in numbered:
        raise FadeError(f"{record.where} names no paragraph of its context in 'answers'")
    return numbered, int(target[0])
