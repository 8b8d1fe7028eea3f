"""Problems after solved ones, as many as fit: grade-school mathematics and Python functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipelines.evaluation.tasks.records import Record, records
from pipelines.evaluation.tasks.run_code import passes
from pipelines.evaluation.tasks.scores import number
from pipelines.evaluation.tasks.task import Example, Output, PromptBuilder, Turn
from predictor.errors import FadeError


@dataclass(frozen=True)
class Shots:
    """Solved problems as the context, and one more to solve; all of them from the same file.

    Attributes:
        problem, solution: of a record, as text. facts: what the score needs.
    """

    problem: Callable[[Record], str]
    solution: Callable[[Record], str]
    facts: Callable[[Record], dict[str, object]]

    def __call__(self, builder: PromptBuilder) -> Iterator[Example]:
        """Examples in the order of the file; the shots are drawn from the rest of it.

        Raises:
            FadeError: no record is left to be a shot.
        """
        every = list(records(builder.source))
        if len(every) <= builder.n:
            raise FadeError(
                f"{builder.source} has {len(every)} records; n {builder.n} leaves none to show how; lower n"
            )
        rng = random.Random(builder.seed)
        for record in every[: builder.n]:
            rest = rng.sample(every[builder.n :], len(every) - builder.n)
            problem_ids = builder.ids(self.problem(record))
            context: list[int] = []
            for shot in rest:
                more = builder.ids(self.problem(shot) + self.solution(shot) + "\n\n\n")
                if len(context) + len(more) + len(problem_ids) > builder.length:
                    break
                context += more
            if not context:
                raise FadeError(f"length {builder.length} is too short for one solved problem and {record.where}")
            yield Example(context, (Turn(problem_ids, builder.ids(self.solution(record))),), self.facts(record))


gsm8k = Shots(
    problem=lambda record: f"Question: {record.text('question')}\nAnswer:",
    solution=lambda record: f" {record.text('answer')}",
    facts=lambda record: {"number": record.text("answer").rpartition("####")[2].strip()},
)
humaneval = Shots(
    problem=lambda record: record.text("prompt"),
    solution=lambda record: record.text("canonical_solution").rstrip(),
    facts=lambda record: {name: record.text(name) for name in ("prompt", "test", "entry_point")},
)


def right_result(output: Output, example: Example) -> float:
    """Whether the last number of the answer is the result.

    Source: Cobbe et al. 2021, GSM8K (arXiv 2110.14168), section 2: the result follows four hashes.
    """
    return number(output.texts[-1], example.facts["number"], last=True)


def pass_at_1(output: Output, example: Example) -> float:
    """Whether the function passes its tests. Runs code that the model wrote.

    Source: Chen et al. 2021, HumanEval (arXiv 2107.03374), section 2.1, with one sample.
    """
    facts = example.facts
    program = f"{facts['prompt']}{output.texts[-1]}\n\n{facts['test']}\n\ncheck({facts['entry_point']})\n"
    return float(passes(program))
