"""What each cache answers to the examples of a task, beside the full cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipelines.evaluation.measure import Measured, Method, Run, read_prompt, start
from pipelines.evaluation.tasks.task import Example, Output, Task
from predictor.twin import dense_twin

COMPRESS = ("prompt", "context")


@dataclass
class Answer:
    """One method on one example.

    Attributes:
        output: what it answered. score: its worth, or None where there is none.
        measured: KL and agreement at each token of the wanted answers, and bytes after them.
        same: whether it answered what the full cache did, every word of every turn.
    """

    output: Output
    score: float | None
    measured: Measured
    same: bool


class Asking:
    """A language model, and caches that are all asked the same.

    Args:
        model: the language model; it is switched to tiered attention, the full cache and peers run on a twin.
        tokenizer: of the model.
        compress: what a cache has read when it first compresses: the "prompt" less its last token, as `generate()`
            has, or only the "context", as when many questions are asked about one document.
        run_code: score what must be run to be scored.
    """

    def __init__(self, model: Any, tokenizer: Any, compress: str = "prompt", run_code: bool = False) -> None:
        self.model, self.twin, self.tokenizer = model, dense_twin(model), tokenizer
        self.compress, self.run_code = compress, run_code
        ends = getattr(model.generation_config, "eos_token_id", None)
        self.ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    @torch.inference_mode()
    def ask(
        self,
        task: Task,
        example: Example,
        methods: Sequence[Method],
        on_method: Callable[[], None] = lambda: None,
    ) -> list[Answer]:
        """Ask every method, the full cache first, and score what it answers.

        Each cache answers greedily by itself. Then it is made to read the wanted answer, or the full cache's where none
        is known, so that all stand before the same next token: KL and agreement are those of its tokens.

        Args:
            task, example: what to ask. methods: whom; the first must be the full cache. on_method: called after each.
        """
        if not methods or methods[0].config is not None:
            raise ValueError("the first method must be the full cache")
        first = example.turns[0].question
        held = len(first) - 1 if self.compress == "prompt" else 0
        questions = [first[held:], *(turn.question for turn in example.turns[1:])]
        runs = start(methods, self.model, self.twin)
        read_prompt(runs, torch.tensor([[*example.context, *first[:held]]]))
        heard: list[_Heard] = []
        for run in runs:
            heard.append(self._hear(run, task, example, questions, heard[0] if heard else None))
            on_method()
        return [
            self._answer(task, example, method.name, run, one, heard[0])
            for method, run, one in zip(methods, runs, heard)
        ]

    def _hear(
        self, run: Run, task: Task, example: Example, questions: Sequence[list[int]], full: _Heard | None
    ) -> _Heard:
        """Let one cache answer each turn by itself, and then read what is wanted."""
        one = _Heard([], [], [])
        unread: list[int] = []  # the last token of a wanted answer is read with the next question
        for index, question in enumerate(questions):
            logits = run.follow(torch.tensor([[*unread, *question]]))[-1]
            if example.choices:
                said = self._choose(logits, example.choices)
            else:
                said = self._greedy(run, logits, task, [] if full is None else full.said[index])
            one.said.append(said)
            wanted = example.turns[index].answer or self._without_end((full or one).said[index])
            one.wanted.append(wanted)
            one.logits.append(logits[None])
            if len(wanted) > 1:
                one.logits.append(run.follow(torch.tensor([wanted[:-1]])))
            unread = wanted[-1:]
        return one

    def _choose(self, logits: Tensor, choices: Sequence[str]) -> list[int]:
        """The choice whose first token is likeliest."""
        ids = [self.tokenizer(choice, add_special_tokens=False)["input_ids"] for choice in choices]
        return max(ids, key=lambda each: float(logits[each[0]]))

    def _greedy(self, run: Run, logits: Tensor, task: Task, draft: list[int]) -> list[int]:
        """The most likely tokens, one after the other, until the answer ends; the run itself stays where it is.

        Where the full cache's answer is at hand it is read at once, and what follows the first difference is made
        token by token: the same answer, sooner.

        Source: Leviathan et al. 2023, speculative decoding (arXiv 2211.17192), section 2, with greedy sampling.
        """
        if task.new == 0:
            return []
        said: list[int] = []
        if draft:
            rest = [run.copied().follow(torch.tensor([draft[:-1]]))] if len(draft) > 1 else []
            rows = torch.cat([logits[None], *rest])
            agrees = (rows.argmax(-1) == torch.tensor(draft)).long()
            said = draft[: int(agrees.cumprod(0).sum())]
            if len(said) == len(draft):
                return said
            logits = rows[len(said)]
        run = run.copied()
        if said:
            run.follow(torch.tensor([said]))
        while True:
            said = [*said, int(logits.argmax())]
            if said[-1] in self.ends or len(said) >= task.new or (task.stop and task.stop in self._text(said)):
                return said
            logits = run.follow(torch.tensor([said[-1:]]))[-1]

    def _answer(self, task: Task, example: Example, name: str, run: Run, one: _Heard, full: _Heard) -> Answer:
        measured = Measured(name)
        theirs, mine = torch.cat(full.logits), torch.cat(one.logits)
        measured.add(theirs, mine)
        measured.resident_bytes, measured.full_bytes = run.half_precision_bytes()
        wanted = torch.tensor([token for answer in one.wanted for token in answer])
        logprobs = mine.double().log_softmax(-1).gather(1, wanted[:, None])[:, 0].tolist()
        texts = [self._text(said, task.stop) for said in one.said]
        output = Output(texts, logprobs, measured.agree)
        scored = task.score is not None and (self.run_code or not task.runs_code)
        score = task.score(output, example) if task.score and scored else None
        same = one.said == full.said if task.new else all(measured.agree)
        return Answer(output, score, measured, same)

    def _text(self, said: list[int], stop: str | None = None) -> str:
        text = self.tokenizer.decode(self._without_end(said), skip_special_tokens=True)
        return text.split(stop)[0] if stop else text

    def _without_end(self, said: list[int]) -> list[int]:
        return said[:-1] if len(said) > 1 and said[-1] in self.ends else said


@dataclass
class _Heard:
    """What one cache said.

    Attributes:
        said: tokens of its own answer to each turn, the end token too. wanted: tokens that it was made to read.
        logits: [n, V] pieces, of all wanted tokens together.
    """

    said: list[list[int]]
    wanted: list[list[int]]
    logits: list[Tensor]
