"""Records of which parts come again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from data.lm import load_tokenizer
from data.templates import AGAIN
from pipelines.evaluation.tasks import PROSE
from pipelines.evaluation.tasks.recall import recalled
from pipelines.evaluation.tasks.task import PromptBuilder
from predictor.errors import FadeError


@pytest.fixture(scope="module")
def builder(tiny_model_dir: Path) -> PromptBuilder:
    return PromptBuilder(load_tokenizer(tiny_model_dir), 2, 1500, 0, PROSE)


@pytest.mark.parametrize("name", ["lines", "key-value", "needles"])
def test_what_comes_again_was_in_the_record_in_another_order(name: str, builder: PromptBuilder) -> None:
    texts = list(recalled(name, builder, 90))
    assert [len(ids) for ids in texts] == [1590, 1590]
    assert texts[0] != texts[1]
    assert texts == list(recalled(name, builder, 90))
    for ids in texts:
        record, again = builder.tokenizer.decode(ids).split(AGAIN)
        assert len(builder.ids(again)) == pytest.approx(90, abs=5)
        pieces = [piece for piece in again.split("\n") if piece]
        assert all(piece in record for piece in pieces)  # the last one may be cut
        places = [record.index(piece) for piece in pieces[:-1]]
        assert places != list(range(len(places)))
        assert record.index(pieces[0]) < len(record) - len(again) or len(pieces) > 1


def test_mistakes_are_named(builder: PromptBuilder) -> None:
    with pytest.raises(
        FadeError, match="generated:songs is not known; choose from generated:lines, generated:key-value"
    ):
        next(recalled("songs", builder, 10))
    for length in (20, 40):  # shorter than what stands around the record
        with pytest.raises(FadeError, match=f"generated:lines: length {length} is too short"):
            next(recalled("lines", replace(builder, length=length), 1))
    with pytest.raises(FadeError, match="too little for 1500 and 5000"):
        next(recalled("lines", builder, 5000))
