"""Generated text: what its end asks for was said before, with templates that training and evaluation do not share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data.generated import KINDS, Generated
from data.lm import load_tokenizer
from data.plan import CollectSettings, prepare
from data.templates import FACTS, KEY_VALUE, LINES, NEEDLES
from data.text import load_documents
from predictor.errors import FadeError


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path):
    return load_tokenizer(tiny_model_dir)


@pytest.mark.parametrize("held_out", [False, True], ids=["train", "held out"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_asks_and_what_follows_was_said_before(tokenizer, kind, held_out):
    for seed in range(6):
        text = Generated(kind, str(seed), held_out)
        ids = text.ids(tokenizer, 2311, 83)
        assert len(ids) == 2311 + 83
        assert ids == text.ids(tokenizer, 2311, 83)
        prompt, answer = tokenizer.decode(ids[:2311]), tokenizer.decode(ids[2311:])
        first = answer.split("\n")[0].strip(' <>".')
        stated = re.findall(r"[\w-]+", first)
        assert first
        assert all(word in prompt[:-40] for word in stated), (first, prompt[-100:])


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_and_splits_give_other_texts(tokenizer, kind):
    texts = {tuple(Generated(kind, str(seed), held).ids(tokenizer, 1500, 30)) for seed in range(5) for held in (0, 1)}
    assert len(texts) == 10


@pytest.mark.parametrize("templates", [LINES, KEY_VALUE, NEEDLES, FACTS])
def test_no_template_to_train_on_is_held_out(templates):
    held_out, *others = templates
    shape = re.sub(r"[^\w{}]", " ", held_out.row).split()
    assert len(set(templates)) == len(templates) > 3
    for one in others:
        assert re.sub(r"[^\w{}]", " ", one.row).split() != shape or one.row.strip() != held_out.row.strip()
        asked = one.ask + one.answer if one.ask else one.row
        assert "{key}" in asked
        assert "{value}" in asked
        assert asked.find("{value}") > asked.find("{key}") or "{value}" not in one.ask


def test_documents_of_a_mix_keep_their_weights_and_validation_has_held_out_templates(tokenizer):
    mixed = {"builtin:topics": 3, "generated:lines": 1, "generated:key-value": 1}
    documents = load_documents(mixed, train=10, validation=5, length=1200, seed=3)
    train, validation = documents[:10], documents[10:]
    assert [one.source for one in train].count("generated:lines") == 2
    assert [one.source for one in validation].count("generated:lines") == 1
    for one in documents:
        if one.source == "generated:lines":
            assert ("REGISTER_CONTENT" in one.text) == (one.split == "validation")
            assert len(one.text) >= 1200
    assert documents == load_documents(mixed, train=10, validation=5, length=1200, seed=3)
    assert not {one.id for one in train} & {one.id for one in validation}


def test_a_collection_ends_each_prompt_with_the_question(tiny_model_dir, tokenizer):
    settings = CollectSettings(
        text=["generated:needles"], model=str(tiny_model_dir), train_documents=3, validation_documents=2,
        min_prompt=2800, max_prompt=3100, future=40,
    )  # fmt: skip
    tasks = prepare(settings, tokenizer)
    assert len({task.prompt for task in tasks}) > 3
    for task in tasks:
        text = tokenizer.decode(task.tokens[task.prompt :])
        assert len(task.tokens) == task.prompt + 40
        assert task.document.source == "generated:needles"
        if task.document.split == "validation":
            assert text.startswith("The special number of the")
    assert [task.tokens.tolist() for task in tasks] == [task.tokens.tolist() for task in prepare(settings, tokenizer)]


def test_mistakes_are_named(tokenizer):
    with pytest.raises(FadeError, match="text generated:songs is not known; choose from generated:lines"):
        load_documents(["generated:songs"], train=1, validation=1, length=100)
    with pytest.raises(FadeError, match="generated:lines: length 12 is too short"):
        Generated("lines", "0", held_out=True).ids(tokenizer, 12, 3)
    with pytest.raises(FadeError, match="generated:needles: .* too little for 1000 and 2000"):
        Generated("needles", "0").ids(tokenizer, 1000, 2000)
