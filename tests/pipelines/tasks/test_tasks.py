"""Every task gives prompts that fit, hold their answer and come again from the same seed; bad files are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.evaluation.tasks import TASKS
from pipelines.evaluation.tasks.records import records
from pipelines.evaluation.tasks.task import Example, Output, PromptBuilder
from predictor.errors import FadeError

LENGTH = 3000  # bytes, each a token of the tiny tokenizer
GENERATED = ("lines", "key-value")
FROM_PROSE = ("needle", "many keys", "topics", "copy", "wikitext", "probes")
PAPER = "Attention is what a model pays. " * 200
RECORDS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": f"{i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(60)],
    "humaneval": [
        {
            "prompt": f"def add{i}(x):\n",
            "canonical_solution": f"    return x + {i}\n",
            "test": f"def check(f):\n    assert f(1) == {i + 1}\n",
            "entry_point": f"add{i}",
        }
        for i in range(60)
    ],
    "multi_news": [{"context": f"News {i}. NEWLINE_CHAR {PAPER}", "answers": [f"Summary {i}."]} for i in range(3)],
    "passage_retrieval": [
        {
            "context": "\n\n".join(f"段落{j}：{'书' * 40}" for j in range(1, 31)),
            "input": "书",
            "answers": [f"段落{i + 25}"],
            "language": "zh",
        }
        for i in range(3)
    ],
    "altqa": [
        {"content": f"Read.\n\nDocument:\n{PAPER}\n\nQuestion:\nwhen was 0", "answer": "1900"},
        {"content": f"Read.\n\nQuestion:\nwhen was 1\n\nDocument:\n{PAPER}", "answer": "1910"},
        {"content": f"Read.\n\nDocument:\n{PAPER}\n\nQuestion:\nwhen was 2", "answer": "1920"},
    ],
    "paperqa": [
        {
            "question": "Why?",
            "options": ["A. No.", "B. Yes.", "C. So.", "D. Not."],
            "answer": '"B"',
            "content": PAPER,
        }
        for _ in range(3)
    ],
    "senhallu": [{"content": PAPER, "hypothesis": "It is so.", "answer": i == 1} for i in range(3)],
    "private_eval": [
        {"prompt": f"# docs\n# {PAPER}\n# [end]\nimport bn\nx = ", "canonical_solution": ["bn.one()\n"]}
        for _ in range(3)
    ],
    "mt_bench": [{"turns": ["Write a poem.", "Make it rhyme."]} for _ in range(3)],
}


@pytest.fixture
def builder(tiny_tokenizer: Any, prose: Path, tmp_path: Path) -> Callable[..., PromptBuilder]:
    def make(name: str, n: int = 3, length: int = LENGTH, seed: int = 0) -> PromptBuilder:
        source = str(prose)
        if name in RECORDS:
            source = str(tmp_path / f"{name}.jsonl")
            Path(source).write_text("".join(json.dumps(record) + "\n" for record in RECORDS[name]))
        return PromptBuilder(tiny_tokenizer, n, length, seed, source)

    return make


def test_these_are_all_tasks() -> None:
    assert {*GENERATED, *FROM_PROSE, *RECORDS, "books"} == set(TASKS)


@pytest.mark.parametrize("name", [*GENERATED, *FROM_PROSE, *RECORDS])
def test_prompts_fit_and_come_again(name: str, builder: Callable[..., PromptBuilder]) -> None:
    task = TASKS[name]
    examples = task.take(builder(name))
    assert len(examples) == 3
    assert all(0 < example.tokens <= LENGTH and example.context and example.turns[0].question for example in examples)
    assert task.take(builder(name)) == examples
    if name not in ("mt_bench", "gsm8k", "humaneval"):
        assert min(example.tokens for example in examples) > LENGTH * 0.75
    if name in ("multi_news", "passage_retrieval", "altqa", "paperqa", "senhallu", "private_eval"):
        assert all(example.cut for example in examples)
    if name in GENERATED or name in ("needle", "many keys", "topics", "probes"):
        assert task.take(builder(name, seed=1)) != examples


@pytest.mark.parametrize("name", ["lines", "key-value", "needle", "many keys", "topics", "copy"])
def test_the_answer_is_in_the_context_once_and_at_its_depth(
    name: str, builder: Callable[..., PromptBuilder], tiny_tokenizer: Any
) -> None:
    task = TASKS[name]
    for index, example in enumerate(task.take(builder(name))):
        context, answer = (tiny_tokenizer.decode(ids) for ids in (example.context, example.turns[0].answer or []))
        (wanted,) = example.facts["values"]
        assert answer.strip() == wanted.strip()
        assert context.count(wanted) == 1
        assert task.score is not None
        assert task.score(Output([wanted], [], []), example) == 1
        assert task.score(Output(["no"], [], []), example) < 0.1
        if name in ("lines", "key-value", "needle", "many keys"):
            assert context.index(wanted) / len(context) == pytest.approx([0.03, 0.5, 0.97][index], abs=0.2)


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_chat_model_is_asked_in_its_template(builder: Callable[..., PromptBuilder], tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = CHAT
    (example, *_) = TASKS["lines"].take(builder("lines"))
    text = tiny_tokenizer.decode([*example.context, *example.turns[0].question])
    assert text.startswith("<user>Below is a record")
    assert "?<end><assistant>line " in text
    assert example.tokens <= LENGTH

    (example, *_) = TASKS["mt_bench"].take(builder("mt_bench"))
    first, second = (tiny_tokenizer.decode(turn.question) for turn in example.turns)
    assert tiny_tokenizer.decode(example.context) + first == "<user>Write a poem.<end><assistant>"
    assert second == "<end><user>Make it rhyme.<end><assistant>"


def test_a_copy_is_led_up_to(builder: Callable[..., PromptBuilder], tiny_tokenizer: Any) -> None:
    for example in TASKS["copy"].take(builder("copy")):
        prompt = tiny_tokenizer.decode([*example.context, *example.turns[0].question])
        lead, (wanted,) = prompt[-16:], example.facts["values"]
        assert lead + wanted in prompt


def test_shots_are_solved_and_the_asked_one_is_not_among_them(
    builder: Callable[..., PromptBuilder], tiny_tokenizer: Any
) -> None:
    for index, example in enumerate(TASKS["gsm8k"].take(builder("gsm8k"))):
        context = tiny_tokenizer.decode(example.context)
        assert context.count("####") > 20
        assert f"Question: {index} + {index}?" not in context
        assert tiny_tokenizer.decode(example.turns[0].question) == f"Question: {index} + {index}?\nAnswer:"
        assert _score("gsm8k", f"1, 2\n#### {2 * index}", example) == 1


def test_a_function_passes_its_own_tests(builder: Callable[..., PromptBuilder]) -> None:
    for index, example in enumerate(TASKS["humaneval"].take(builder("humaneval"))):
        assert _score("humaneval", f"    return x + {index}", example) == 1
        assert _score("humaneval", f"    return x - {index} - 1", example) == 0


def test_choices_numbers_and_paragraphs_are_scored(builder: Callable[..., PromptBuilder]) -> None:
    hallucinated = TASKS["senhallu"].take(builder("senhallu"))
    assert [_score("senhallu", " yes", example) for example in hallucinated] == [0, 1, 0]
    assert [example.choices for example in TASKS["paperqa"].take(builder("paperqa"))] == [(" A", " B", " C", " D")] * 3
    assert [_score("paperqa", " B", example) for example in TASKS["paperqa"].take(builder("paperqa"))] == [
        1,
        1,
        1,
    ]
    assert [_score("altqa", "It was 1910", example) for example in TASKS["altqa"].take(builder("altqa"))] == [
        0,
        1,
        0,
    ]
    found = TASKS["passage_retrieval"].take(builder("passage_retrieval"))
    assert [_score("passage_retrieval", "26", example) for example in found] == [0, 1, 0]
    lines = TASKS["private_eval"].take(builder("private_eval"))
    assert [_score("private_eval", said, lines[0]) for said in ("bn.one()\nx", "bn.two()")] == [1, 0]
    news = TASKS["multi_news"].take(builder("multi_news"))
    assert [_score("multi_news", "Summary 0.", example) for example in news] == [1, 0.5, 0.5]


def test_a_question_comes_after_its_document(builder: Callable[..., PromptBuilder], tiny_tokenizer: Any) -> None:
    for index, example in enumerate(TASKS["altqa"].take(builder("altqa"))):
        assert "when was" not in tiny_tokenizer.decode(example.context)
        assert f"when was {index}" in tiny_tokenizer.decode(example.turns[0].question)


def test_the_wanted_paragraph_is_never_left_out(builder: Callable[..., PromptBuilder], tiny_tokenizer: Any) -> None:
    for example in TASKS["passage_retrieval"].take(builder("passage_retrieval")):
        assert f"段落{example.facts['number']}：" in tiny_tokenizer.decode(example.context)


def _score(name: str, said: str, example: Example) -> float:
    score = TASKS[name].score
    assert score is not None
    return score(Output([said], [], []), example)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "line 2 is not JSON"),
        ("[1]", "line 2 is no object but list"),
        ('{"question": "1?"}', "line 2 has no text field 'answer' but ['question']"),
        ('{"question": 7, "answer": "x"}', "line 2 has no text field 'question' but 7"),
    ],
)
def test_a_malformed_line_is_named(line: str, words: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = tmp_path / "gsm8k.jsonl"
    good = json.dumps(RECORDS["gsm8k"][0])
    path.write_text(f"{good}\n{line}\n{good}\n{good}\n")
    with pytest.raises(FadeError) as caught:
        TASKS["gsm8k"].take(PromptBuilder(tiny_tokenizer, 3, 900, 0, str(path)))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert str(caught.value).startswith("task gsm8k: ")


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("altqa", {"content": "no question", "answer": "1"}, "no 'Document:' and 'Question:'"),
        ("paperqa", {**RECORDS["paperqa"][0], "answer": "E"}, "'E' is none of A, B, C, D"),
        ("senhallu", {**RECORDS["senhallu"][0], "answer": "yes"}, "no true or false field 'answer'"),
        ("private_eval", {**RECORDS["private_eval"][0], "prompt": "x"}, "no line '# [end]'"),
        ("mt_bench", {"turns": ["one"]}, "has 1 'turns', not 2"),
        ("multi_news", {"context": "x", "answers": []}, "no list of texts 'answers'"),
        (
            "passage_retrieval",
            {**RECORDS["passage_retrieval"][0], "answers": ["段落99"]},
            "names no paragraph",
        ),
    ],
)
def test_a_record_that_is_no_task_is_named(
    name: str, record: dict[str, Any], words: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(f"\n{json.dumps(record)}\n")
    with pytest.raises(FadeError, match="line 2") as caught:
        TASKS[name].take(PromptBuilder(tiny_tokenizer, 1, LENGTH, 0, str(path)))
    assert words in str(caught.value)


def test_records_of_a_dataset_are_those_of_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "test.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS["gsm8k"]))
    found = list(records(f"hf:{folder}"))
    assert [dict(record.fields) for record in found] == RECORDS["gsm8k"]
    assert found[1].where == f"hf:{folder} record 1"
    with pytest.raises(FadeError, match="record 0 has no text field 'context' but"):
        TASKS["multi_news"].take(PromptBuilder(None, 1, LENGTH, 0, f"hf:{folder}"))
    with pytest.raises(FadeError, match=r"hf:\S*:no_such_split cannot be loaded"):
        list(records(f"hf:{folder}::no_such_split"))


def test_what_is_missing_or_too_small_is_said(builder: Callable[..., PromptBuilder], tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xe9"}')
    for path, words in (
        (tmp_path / "none.jsonl", "is not there"),
        (empty, "is empty"),
        (tmp_path / "latin.jsonl", "UTF-8"),
    ):
        with pytest.raises(FadeError, match=words):
            list(records(str(path)))
    for name, n, length, words in [
        ("mt_bench", 4, LENGTH, "gives 3 examples, not n 4"),
        ("lines", 1, 100, "length 100 is too short"),
        ("needle", 1, 100, "length 100 is too short"),
        ("copy", 1, 100, "length 100 is too short"),
        ("gsm8k", 60, LENGTH, "n 60 leaves none"),
        ("gsm8k", 1, 20, "length 20 is too short"),
        ("altqa", 1, 20, "length 20 is too short"),
        ("needle", 999, LENGTH, "too little text"),
    ]:
        with pytest.raises(FadeError) as caught:
            TASKS[name].take(builder(name, n, length))
        assert words in str(caught.value)
