"""Records, chats, code and tables become text; mixed by weight; a family held out for validation."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.chat import chat_frame, chat_renderer, role_lines
from data.packing import Document
from data.records import SUFFIXES, file_texts, text_files
from data.text import load_documents, next_source
from predictor.errors import FadeError
from tests.data.texts import CHAT, sentences

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prose(path: Path, name: str, count: int = 60) -> str:
    path.write_text("\n\n".join(sentences(name, count)))
    return str(path)


@pytest.fixture
def chatty(tiny_tokenizer: Any) -> Any:
    tiny_tokenizer.chat_template = TEMPLATE
    return tiny_tokenizer


def test_chats_are_written_with_the_template_and_never_cut(chatty: Any, tmp_path: Path) -> None:
    chats = [[{**one, "content": f"{i}: {one['content']}"} for one in CHAT] for i in range(9)]
    file = write_jsonl(tmp_path / "chats.jsonl", [{"id": i, "messages": chat} for i, chat in enumerate(chats)])
    expected = [chatty.apply_chat_template(chat, tokenize=False) for chat in chats]
    render = chat_renderer(chatty)
    assert [part.text for part in file_texts(file, render=render)] == expected
    documents = load_documents([str(file)], train=2, validation=1, length=300, render=render)
    assert all(one.chat for one in documents)
    found = "".join(documents[i].text for i in (2, 0, 1))  # validation is drawn first
    assert "".join(expected).startswith(found)
    assert found.count("<user>") == found.count("<assistant>")


def test_without_a_template_chats_are_lines_of_roles(tiny_tokenizer: Any, chatty: Any, tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "image"}]}]
    assert role_lines([*parts, *CHAT[1:]]) == "user: Look.\nassistant: A greeting: dear all, hello.\n"
    file = write_jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT}])
    for render in (role_lines, chat_renderer(chatty, "raw")):
        (part,) = file_texts(file, render=render)
        assert part == (role_lines(CHAT), True)
    tiny_tokenizer.chat_template = None
    assert chat_renderer(tiny_tokenizer)(CHAT) == role_lines(CHAT)
    with pytest.raises(FadeError, match="template chat needs a tokenizer with a chat template"):
        chat_renderer(tiny_tokenizer, "chat")
    with pytest.raises(FadeError, match=r"template jinja is not known; use one of auto, chat, raw"):
        chat_renderer(tiny_tokenizer, "jinja")


def test_a_first_token_is_not_doubled(chatty: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    chatty.chat_template = "{{ bos_token }}" + TEMPLATE
    chatty.bos_token = "<|end|>"
    assert chat_renderer(chatty)(CHAT).startswith("<|end|><user>")  # nothing else would add it
    chatty.backend_tokenizer.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 256)])
    ids = chatty(chat_renderer(chatty)(CHAT))["input_ids"]
    assert ids == chatty.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert ids.count(256) == 1


def test_the_frame_is_what_the_template_puts_around_a_message(chatty: Any) -> None:
    text = "Some words of a user."
    before, after = chat_frame(chatty, add_generation_prompt=True)
    whole = chatty.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert [*before, *chatty(text)["input_ids"], *after] == whole
    assert chat_frame(chatty, add_generation_prompt=False) == (before, [])
    chatty.chat_template = "nothing of it"
    with pytest.raises(FadeError, match="leaves out or changes"):
        chat_frame(chatty, add_generation_prompt=True)
    chatty.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(FadeError, match="roles must alternate; mend it, or use template raw"):
        chat_frame(chatty, add_generation_prompt=True)


def test_named_fields_and_columns(tmp_path: Path) -> None:
    records = [
        {"question": f"Q{i}?", "answer": f"A{i}.", "text": "other", "score": i, "talk": CHAT} for i in range(100)
    ]
    file = write_jsonl(tmp_path / "rows.jsonl", records)
    pq.write_table(pa.Table.from_pylist([*records, dict.fromkeys(records[0])]), tmp_path / "rows.parquet")
    expected = [f"Q{i}?\nA{i}." for i in range(100)]
    for path in (file, tmp_path / "rows.parquet"):
        assert [part.text for part in file_texts(path, ["question", "answer"])] == expected
        assert [part.text for part in file_texts(path)] == ["other"] * 100
        assert [part.whole for part in file_texts(path, ["talk"])] == [True] * 100
        with pytest.raises(FadeError, match=r"rows.*body.*"):
            list(file_texts(path, ["body"]))
        with pytest.raises(FadeError, match=r"(line|row) 1 has no text field 'score'"):
            list(file_texts(path, ["score"]))
        (document,) = load_documents([f"{path}:question+answer"], train=1, validation=0, length=40)
        assert document.text == "\n\n".join(expected[:6])
        assert document.source == path.name


def test_a_dataset_by_name_gives_named_fields(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"body": text} for text in sentences("b", 20)])
    (document,) = load_documents([f"hf:{folder}:::body"], train=1, validation=0, length=300)
    assert document.text.startswith("b record 0 b0word0")
    with pytest.raises(FadeError, match=r"has no text column but \['body'\]"):
        load_documents([f"hf:{folder}"], train=1, validation=0, length=300)


def test_code_is_read_from_folders_and_any_suffix_by_name(tmp_path: Path) -> None:
    names = ("a.py", "b.C", "c.js", "d.md", "e.log", "f.bin", ".hidden/g.py", "deep/h.rs")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n\n".join(sentences(name, 5)))
    assert [str(file.relative_to(tmp_path)) for file in text_files(tmp_path)] == [
        "a.py", "b.C", "c.js", "d.md", "deep/h.rs",
    ]  # fmt: skip
    assert ".json" not in SUFFIXES
    (document,) = load_documents([str(tmp_path / "e.log")], train=1, validation=0, length=200)
    assert document.source == "e.log"
    (tmp_path / "f.bin").write_bytes(b"text\0text")
    with pytest.raises(FadeError, match=r"f.bin is not text but binary"):
        load_documents([str(tmp_path / "f.bin")], train=1, validation=0, length=200)
    (tmp_path / "g.parquet").write_bytes(b"PAR1")
    with pytest.raises(FadeError, match=r"g.parquet is not a whole Parquet file"):
        load_documents([str(tmp_path / "g.parquet")], train=1, validation=0, length=200)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 60))
def test_counts_never_leave_their_share_by_one(weights: list[int], total: int) -> None:
    shares = {str(i): Fraction(weight) for i, weight in enumerate(weights)}
    counts = dict.fromkeys(shares, 0)
    for n in range(1, total + 1):
        counts[next_source(counts, shares)] += 1
        for source, count in counts.items():
            assert abs(count - n * shares[source] / sum(weights)) < 1


def test_sources_are_mixed_by_weight_in_each_split(tmp_path: Path) -> None:
    sources = {
        prose(tmp_path / f"{name}.txt", name, 600): weight for name, weight in (("a", 3), ("b", 1.5), ("c", 0.5))
    }
    documents = load_documents(sources, train=20, validation=5, length=300)
    for split, total in (("train", 20), ("validation", 5)):
        counts = Counter(one.source for one in documents if one.split == split)
        for name, share in (("a.txt", 0.6), ("b.txt", 0.3), ("c.txt", 0.1)):
            assert abs(counts[name] - share * total) < 1
    assert documents == load_documents(sources, train=20, validation=5, length=300)
    first, second, third = sources
    with pytest.raises(FadeError, match=r"b.txt has weight 0; give a number above 0"):
        load_documents({first: 1, second: 0}, train=1, validation=1, length=300)
    with pytest.raises(FadeError, match=r"c.txt gives \d+ train documents, its weight of 9 asks for more"):
        load_documents({first: 1, third: 9}, train=200, validation=1, length=300)


def test_a_list_goes_on_with_the_others_and_is_fair_to_sources_not_families(tmp_path: Path) -> None:
    short = prose(tmp_path / "short.txt", "s", 8)
    documents = load_documents([short, "builtin"], train=8, validation=0, length=500)
    assert Counter(one.source == "short.txt" for one in documents)[True] in (1, 2)
    fair = load_documents([prose(tmp_path / "long.txt", "l", 99), "builtin"], train=8, validation=0, length=500)
    assert [one.source == "long.txt" for one in fair] == [True, False] * 4


def split_sources(documents: list[Document], split: str) -> set[str]:
    return {one.source for one in documents if one.split == split}


def test_one_family_of_the_builtin_corpus(tmp_path: Path) -> None:
    documents = load_documents(
        ["builtin:topics", "builtin:stdlib-docs"],
        train=4,
        validation=2,
        length=900,
        held_out=["builtin:package-docs"],
    )
    assert split_sources(documents, "train") == {"topics", "stdlib-docs"}
    assert split_sources(documents, "validation") == {"package-docs"}
    with pytest.raises(FadeError, match=r"builtin:poems is not known; the families are topics, stdlib-docs"):
        load_documents(["builtin:poems"], train=1, validation=1, length=900)


def test_what_is_held_out_is_refused_in_training_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "held").mkdir()
    prose(tmp_path / "train" / "a.txt", "a")
    held = prose(tmp_path / "held" / "h.txt", "h")
    arguments: Any = dict(train=3, validation=2, length=400, held_out=[held])
    documents = load_documents([str(tmp_path / "train")], **arguments)
    assert split_sources(documents, "validation") == {"h.txt"}
    assert split_sources(documents, "train") == {"train"}
    prose(tmp_path / "train" / "0.txt", "h")  # the same text under another name
    with pytest.raises(FadeError, match=r"0.txt:0:0 is also in validation_text \(.*h.txt:0:0\), .*take it out"):
        load_documents([str(tmp_path / "train")], **arguments)
    with pytest.raises(FadeError, match=r"validation_text gives 1 documents of at least 4000 characters"):
        load_documents([str(tmp_path / "train")], **{**arguments, "length": 4000})
