"""Caches of equal bytes: what is fitted, and that the bytes are those of the cache that runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import evaluate
from pipelines.evaluation.sizing import CLOSE, ENDS, Sized, fit, reaches, to_fit
from predictor.errors import FadeError


@given(
    ratio=st.floats(2, 12),
    share=st.floats(0.02, 1.0),
    base=st.floats(0.0, 0.2),
    bend=st.floats(0.8, 1.4),
    up=st.booleans(),
    smaller=st.booleans(),
)
def test_the_option_is_found_on_the_right_side(
    ratio: float, share: float, base: float, bend: float, up: bool, smaller: bool
) -> None:
    size = lambda value: base + share * (value if up else 1 - value) ** bend
    (found,) = fit(
        [Sized("it", "it", ratio, "option")], lambda each: [1 / size(one.value) for one in each], lambda _: smaller
    )
    reachable = min(map(size, ENDS)) < 1 / ratio * (1 - CLOSE) and max(map(size, ENDS)) > 1 / ratio * (1 + CLOSE)
    assert found.compression == pytest.approx(1 / size(found.value))
    if reachable:
        assert found.compression == pytest.approx(ratio, rel=0.02)
        assert (found.compression >= ratio) == smaller
    else:
        assert found.value in ENDS or found.compression == pytest.approx(ratio, rel=0.02)
    if found.compression != pytest.approx(ratio, rel=0.06):
        assert not reaches(found, smaller)


def test_mistakes_are_named() -> None:
    for configs, ratios, words in [
        ({"a": {"x": "fit", "y": "fit"}}, [3.0], "config 'a' fits x and y; only one"),
        ({"a": {"x": "fit"}}, [], "config 'a' fits x; say to which sizes"),
        ({"a": {"x": 1}}, [3.0], "no config has an option 'fit'"),
        ({"a": {"x": "fit"}}, [0.5], "ratios has 0.5"),
    ]:
        with pytest.raises(FadeError) as caught:
            to_fit(configs, ratios)
        assert words in str(caught.value)


@pytest.mark.slow
def test_ours_and_oracles_get_the_bytes_that_were_asked_for(
    tiny_model_dir: Path, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = {
        "ours": {"int4_budget": "fit", "recent_window": 16},
        "oracle": {"oracle": True, "int4_budget": "fit", "recent_window": 16},
    }
    status = evaluate.main(
        [
            *("--model", str(tiny_model_dir), "--traces", "null", "--methods", "[safe, ours, oracle]"),
            *("--configs", json.dumps(configs), "--ratios", "[2.5, 3]", "--context", "440", "--steps", "8"),
            *("--text", json.dumps({"prose": [str(prose)], "recall": ["generated:lines"]}), "--documents", "2"),
            *("--speed", "false", "--out", str(tmp_path / "out")),
        ]
    )
    assert status == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    names = ["full", "safe", "ours 2.5x", "ours 3x", "oracle 2.5x", "oracle 3x"]
    by = {row["method"]: row for row in rows if row["kind"] == "method"}
    assert list(by) == names
    assert [text["source"] for text in rows[0]["texts"]] == ["prose", "prose", "recall", "recall"]
    assert {one["method"] for one in rows[0]["sized"]} == set(names[2:])
    first = {row["method"]: row for row in rows if row["kind"] == "document" and row["source"] == "prose"}
    for one in rows[0]["sized"]:
        row = first[one["method"]]
        assert rows[0]["settings"]["configs"][one["method"]]["int4_budget"] == one["value"]
        assert row["full_bytes"] / row["resident_bytes"] == pytest.approx(one["ratio"], rel=0.02)
    assert by["oracle 3x"]["kl"] < by["ours 3x"]["kl"]


def test_a_size_that_cannot_be_reached_is_named_and_the_rest_is_written(
    tiny_model_dir: Path,
    prose: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The window stays exact, so that no budget makes the cache fifty times smaller."""
    configs = {"ours": {"int4_budget": "fit"}, "wide": {"recent_window": 300}}
    status = evaluate.main(
        [
            *("--model", str(tiny_model_dir), "--traces", "null", "--methods", json.dumps(["safe", *configs])),
            *("--configs", json.dumps(configs), "--ratios", "[50, 60]", "--context", "440", "--steps", "2"),
            *("--text", json.dumps([str(prose)]), "--documents", "1"),
            *("--speed", "false", "--out", str(tmp_path / "out")),
        ]
    )
    err = capsys.readouterr().err
    assert status == 2
    for ratio in (50, 60):
        words = (
            rf"skipped: ours {ratio}x: cannot be {ratio} times smaller, the nearest is [\d.]+x, with int4_budget 0.01"
        )
        assert re.search(words, err)
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows if row["kind"] == "method"] == ["full", "safe", "wide"]
    assert rows[0]["sized"] == []
    assert rows[0]["failed"] == [["ours 50x"], ["ours 60x"]]


def test_one_of_two_sizes_that_can_be_reached_has_its_row(
    tiny_model_dir: Path, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = evaluate.main(
        [
            *("--model", str(tiny_model_dir), "--traces", "null", "--methods", "[ours]"),
            *("--configs", json.dumps({"ours": {"int4_budget": "fit", "recent_window": 16}}), "--ratios", "[3, 50]"),
            *("--context", "440", "--steps", "2", "--text", json.dumps([str(prose)]), "--documents", "1"),
            *("--speed", "false", "--out", str(tmp_path / "out")),
        ]
    )
    assert status == 2, capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows if row["kind"] == "method"] == ["full", "ours 3x"]
