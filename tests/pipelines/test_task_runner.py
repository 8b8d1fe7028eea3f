"""What caches answer: against transformers' own generation, against single steps by hand, against `compare`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines.evaluation.measure import compare
from pipelines.evaluation.runs import Method
from pipelines.evaluation.task_runner import TaskRunner
from pipelines.evaluation.tasks.task import Example, Output, Task, Turn
from pipelines.reporting.rows import FULL

NEW = 24
METHODS = [
    Method(FULL, None),
    Method("exact", FadeConfig.safe(recent_window=1000)),
    Method("safe", FadeConfig.safe()),
    Method("h2o", FadeConfig(int4_budget=0.1, reassign_every=8)),
]


def ids(n: int, seed: int) -> list[int]:
    return torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def length_of(output: Output, example: Example) -> float:
    return len(output.texts[-1]) / 100


TASK = Task("task", "generated", lambda wish: [], length_of, "length", new=NEW)
EXAMPLE = Example(ids(300, 0), (Turn(ids(30, 1), ids(20, 2)),))


def by_hand(model: Any, config: FadeConfig | None, head: list[int], rest: list[int]) -> list[int]:
    """Read a prompt, then tokens one by one, then generate one by one."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config) if config is None else create_tiered_cache(model, config)
    kwargs, said = forward_kwargs(cache, model), []
    model(torch.tensor([head]), **kwargs)
    for token in rest:
        logits = model(torch.tensor([[token]]), **kwargs).logits[0, -1]
    for _ in range(NEW):
        said.append(int(logits.argmax()))
        logits = model(torch.tensor([said[-1:]]), **kwargs).logits[0, -1]
    return said


@pytest.mark.parametrize("compress", ["prompt", "context"])
def test_each_cache_says_what_single_steps_say(
    compress: str, tiny_model: Callable[..., Any], tiny_tokenizer: Any
) -> None:
    model = tiny_model()
    answers = TaskRunner(model, tiny_tokenizer, compress).run(TASK, EXAMPLE, METHODS)
    prompt = [*EXAMPLE.context, *EXAMPLE.turns[0].question]
    split = len(prompt) - 1 if compress == "prompt" else len(EXAMPLE.context)
    said = {}
    for method, answer in zip(METHODS, answers):
        said[method.name] = by_hand(tiny_model(), method.config, prompt[:split], prompt[split:])
        assert answer.output.texts == [tiny_tokenizer.decode(said[method.name])]
        assert answer.same == (said[method.name] == said[FULL])
        assert answer.score == len(answer.output.texts[0]) / 100
    assert [answer.same for answer in answers[:2]] == [True, True]
    assert not answers[3].same


def test_the_full_cache_says_what_generate_says(tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> None:
    full, *_ = TaskRunner(tiny_model(), tiny_tokenizer).run(TASK, EXAMPLE, METHODS[:1])
    prompt = torch.tensor([[*EXAMPLE.context, *EXAMPLE.turns[0].question]])
    out = tiny_model().generate(prompt, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert full.output.texts == [tiny_tokenizer.decode(out[0, prompt.shape[1] :])]


def test_loss_on_the_wanted_answer_is_that_of_compare(tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> None:
    answers = TaskRunner(tiny_model(), tiny_tokenizer).run(TASK, EXAMPLE, METHODS)
    wanted = EXAMPLE.turns[0].answer
    assert wanted is not None
    tokens = torch.tensor([[*EXAMPLE.context, *EXAMPLE.turns[0].question, *wanted]])[:, :-1]
    measured = compare(tiny_model(), METHODS, tokens, len(wanted), timed=False)
    for answer, expected in zip(answers, measured):
        assert answer.measured.kl == pytest.approx(expected.kl, rel=0.02, abs=1e-6)
        assert answer.measured.agree == expected.agree
        assert answer.measured.resident_bytes == expected.resident_bytes
    logprobs = tiny_model()(tokens).logits[0, -len(wanted) :].log_softmax(-1)
    expected_logprobs = [float(row[token]) for row, token in zip(logprobs, wanted)]
    assert answers[0].output.logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_second_turns_follow_the_full_caches_first_answer(tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> None:
    example = Example(ids(300, 0), (Turn(ids(5, 1)), Turn(ids(9, 3))))
    task = Task("chat", "generated", lambda wish: [], None, "drift", new=NEW)
    full, exact, safe, h2o = TaskRunner(tiny_model(), tiny_tokenizer).run(task, example, METHODS)
    first = by_hand(tiny_model(), None, [*example.context, *ids(5, 1)[:-1]], ids(5, 1)[-1:])
    second = by_hand(tiny_model(), None, example.context, [*ids(5, 1), *first, *ids(9, 3)])
    assert full.output.texts == [tiny_tokenizer.decode(first), tiny_tokenizer.decode(second)]
    assert exact.output.texts == full.output.texts
    assert exact.measured.kl == pytest.approx([0.0] * 2 * NEW, abs=1e-6)
    assert len(safe.measured.kl) == 2 * NEW
    assert sum(safe.measured.kl) < sum(h2o.measured.kl)
    assert full.score is None


def test_a_choice_is_the_likeliest_first_token(tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> None:
    example = Example(EXAMPLE.context, EXAMPLE.turns, choices=("a", "b", "c", "d"))
    task = Task("choice", "generated", lambda wish: [], length_of, "choice", new=1)
    full, *_ = TaskRunner(tiny_model(), tiny_tokenizer).run(task, example, METHODS)
    logits = tiny_model()(torch.tensor([[*example.context, *example.turns[0].question]])).logits[0, -1]
    assert full.output.texts == [max("abcd", key=lambda letter: float(logits[ord(letter)]))]


def test_answers_end_at_a_stop_an_end_token_or_their_length(
    tiny_model: Callable[..., Any], tiny_tokenizer: Any
) -> None:
    long = TaskRunner(tiny_model(), tiny_tokenizer).run(TASK, EXAMPLE, METHODS[:1])[0].output.texts[0]
    stop = next(long[i] for i in range(3, len(long)) if long[i] not in long[:i])
    stopped = Task("task", "generated", lambda wish: [], None, "length", new=NEW, stop=stop)
    assert TaskRunner(tiny_model(), tiny_tokenizer).run(stopped, EXAMPLE, METHODS[:1])[0].output.texts == [
        long.split(stop)[0]
    ]

    runner = TaskRunner(tiny_model(), tiny_tokenizer)
    runner.end_tokens = {tiny_tokenizer(stop)["input_ids"][0]}
    for answer in runner.run(TASK, EXAMPLE, METHODS[:2]):
        assert answer.output.texts == [long.split(stop)[0]]


def test_code_is_scored_only_when_that_is_allowed(tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> None:
    task = Task("code", "generated", lambda wish: [], length_of, "pass@1", new=2, runs_code=True)
    for allowed in (False, True):
        (full,) = TaskRunner(tiny_model(), tiny_tokenizer, run_code=allowed).run(task, EXAMPLE, METHODS[:1])
        assert (full.score is not None) == allowed


def test_the_full_cache_comes_first(tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="must be the full cache"):
        TaskRunner(tiny_model(), tiny_tokenizer).run(TASK, EXAMPLE, METHODS[1:])
