"""What each cache answers to the examples of a task, beside the full cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipelines.evaluation.measure import Measured, require_full_first
from pipelines.evaluation.runs import Method, Run, full_twin, read_prompt, start
from pipelines.evaluation.tasks.task import Example, Output, Task

COMPRESS = ("prompt", "context")


@dataclass
class Answer:
    """One method on one example.

    Attributes:
        output: what it answered. score: of the output, or None where there is none.
        measured: KL and agreement at each token of the reference answers, and bytes after them.
        same: whether it answered what the full cache did, every word of every turn.
    """

    output: Output
    score: float | None
    measured: Measured
    same: bool


class TaskRunner:
    """A language model, and caches that all run the same examples.

    Args:
        model: the language model; it is switched to tiered attention, the full cache and peers run on a twin.
        tokenizer: of the model.
        compress: what a cache has read when it first compresses: the "prompt" less its last token, as `generate()`
            has, or only the "context", as when many questions follow one document.
        run_code: score what must be run to be scored.
    """

    def __init__(self, model: Any, tokenizer: Any, compress: str = "prompt", run_code: bool = False) -> None:
        self.model, self.twin, self.tokenizer = model, full_twin(model), tokenizer
        self.compress, self.run_code = compress, run_code
        ends = getattr(model.generation_config, "eos_token_id", None)
        self.end_tokens = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    @torch.inference_mode()
    def run(
        self,
        task: Task,
        example: Example,
        methods: Sequence[Method],
        on_method: Callable[[], None] = lambda: None,
    ) -> list[Answer]:
        """Run every method on an example, the full cache first, and score its answers.

        Each cache answers greedily by itself. Then it reads the reference answer, or the full cache's where none is
        known, so that all stand before the same next token: KL and agreement are those of its tokens.

        Args:
            task, example: what to run. methods: the caches; the first must be the full one.
            on_method: called after each.
        """
        require_full_first(methods)
        first = example.turns[0].question
        in_prompt = len(first) - 1 if self.compress == "prompt" else 0  # tokens of the question
        questions = [first[in_prompt:], *(turn.question for turn in example.turns[1:])]
        runs = start(methods, self.model, self.twin)
        read_prompt(runs, torch.tensor([[*example.context, *first[:in_prompt]]]))
        transcripts: list[_Transcript] = []
        for run in runs:
            full = transcripts[0] if transcripts else None
            transcripts.append(self._transcript(run, task, example, questions, full))
            on_method()
        return [
            self._answer(task, example, method.name, run, transcript, transcripts[0])
            for method, run, transcript in zip(methods, runs, transcripts)
        ]

    def _transcript(
        self, run: Run, task: Task, example: Example, questions: Sequence[list[int]], full: _Transcript | None
    ) -> _Transcript:
        """Let one cache answer each turn by itself, and then read the reference."""
        transcript = _Transcript()
        unread: list[int] = []  # the last token of a reference is read with the next question
        for index, question in enumerate(questions):
            logits = run.follow(torch.tensor([[*unread, *question]]))[-1]
            if example.choices:
                answer = self._choose(logits, example.choices)
            else:
                answer = self._generate(run, logits, task, [] if full is None else full.answers[index])
            transcript.answers.append(answer)
            reference = example.turns[index].answer or self._without_end((full or transcript).answers[index])
            transcript.references.append(reference)
            transcript.logits.append(logits[None])
            if len(reference) > 1:
                transcript.logits.append(run.follow(torch.tensor([reference[:-1]])))
            unread = reference[-1:]
        return transcript

    def _choose(self, logits: Tensor, choices: Sequence[str]) -> list[int]:
        """The choice whose first token is likeliest under logits [V]."""
        ids = [self.tokenizer(choice, add_special_tokens=False)["input_ids"] for choice in choices]
        return max(ids, key=lambda each: float(logits[each[0]]))

    def _generate(self, run: Run, logits: Tensor, task: Task, draft: list[int]) -> list[int]:
        """The most likely tokens after logits [V], until the answer ends; the run itself stays where it is.

        Where the full cache's answer is at hand it is read at once, and what follows the first difference is made
        token by token: the same answer, sooner.

        Source: Leviathan et al. 2023, speculative decoding (arXiv 2211.17192), section 2, with greedy sampling.
        """
        if task.new == 0:
            return []
        answer: list[int] = []
        if draft:
            rest = [run.copied().follow(torch.tensor([draft[:-1]]))] if len(draft) > 1 else []
            rows = torch.cat([logits[None], *rest])  # [n, V]
            accepted = (rows.argmax(-1) == torch.tensor(draft)).long().cumprod(0)
            answer = draft[: int(accepted.sum())]
            if len(answer) == len(draft):
                return answer
            logits = rows[len(answer)]
        run = run.copied()
        if answer:
            run.follow(torch.tensor([answer]))
        while True:
            answer = [*answer, int(logits.argmax())]
            if self._ends(answer, task):
                return answer
            logits = run.follow(torch.tensor([answer[-1:]]))[-1]

    def _ends(self, answer: list[int], task: Task) -> bool:
        if answer[-1] in self.end_tokens or len(answer) >= task.new:
            return True
        return bool(task.stop and task.stop in self._text(answer))

    def _answer(
        self, task: Task, example: Example, name: str, run: Run, transcript: _Transcript, full: _Transcript
    ) -> Answer:
        measured = Measured(name)
        expected, logits = torch.cat(full.logits), torch.cat(transcript.logits)  # [n, V]
        measured.add(expected, logits)
        measured.weigh(run)
        reference = torch.tensor([token for each in transcript.references for token in each])
        logprobs = logits.double().log_softmax(-1).gather(1, reference[:, None])[:, 0].tolist()
        texts = [self._text(answer, task.stop) for answer in transcript.answers]
        output = Output(texts, logprobs, measured.agree)
        may_score = self.run_code or not task.runs_code
        score = task.score(output, example) if task.score and may_score else None
        same = transcript.answers == full.answers if task.new else all(measured.agree)
        return Answer(output, score, measured, same)

    def _text(self, answer: list[int], stop: str | None = None) -> str:
        text = self.tokenizer.decode(self._without_end(answer), skip_special_tokens=True)
        return text.split(stop)[0] if stop else text

    def _without_end(self, answer: list[int]) -> list[int]:
        return answer[:-1] if len(answer) > 1 and answer[-1] in self.end_tokens else answer


@dataclass
class _Transcript:
    """What one cache answered and read.

    Attributes:
        answers: tokens of its own answer to each turn, the end token too. references: tokens that it read after it.
        logits: [n, V] each, in order; together of all reference tokens.
    """

    answers: list[list[int]] = field(default_factory=list)
    references: list[list[int]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
