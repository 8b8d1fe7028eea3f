"""`python -m pipelines.reselect`: one table of networks, averages, the fixed selection and the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.cli import run
from pipelines.reselect import cost_ms, format_rows, reselect
from predictor.bundle import Predictor, load_bundle
from predictor.temporal import EmaBank, PublishedCNN


@pytest.fixture(scope="module")
def bank(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained bank for the tiny model: by construction one of its averages."""
    like = load_bundle(bundles["cnn"])
    folder = tmp_path_factory.mktemp("bank") / "bank"
    return Predictor(EmaBank(), spec=like.spec, provenance=like.provenance, metrics={}, manifest={}).save(folder)


@pytest.mark.slow
def test_an_untrained_bank_is_its_average_and_nothing_beats_the_oracle(bank, bundles, tiny_traces, capsys):
    arguments = [
        "--predictors",
        f"[{bank}, {bundles['cnn']}]",
        "--traces",
        str(tiny_traces),
        "--every",
        "[1, 8]",
    ]
    assert run(reselect, arguments) == 0
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert [table.split(",")[0] for table in tables] == [
        "choosing again every 1 steps",
        "choosing again every 8 steps",
    ]
    for table in tables:
        header, *lines = table.splitlines()[1:]
        assert header.split()[:3] == ["by", "recovery", "gap_closed"]
        rows = {line.split()[0]: line.split()[1:] for line in lines}
        recovery = {name: float(cells[0]) for name, cells in rows.items()}
        assert {"bank", "cnn", "fixed", "oracle", "ema70", "ema95"} <= set(rows)
        assert recovery["bank"] == recovery["ema70"]
        assert max(recovery.values()) == recovery["oracle"]
        assert rows["bank"][-2] == str(sum(p.numel() for p in EmaBank().parameters()))


def test_bad_input_is_one_line(bank, bundles, tiny_traces, tmp_path, capsys):
    def told(*predictors):
        assert (
            run(
                reselect,
                ["--predictors", f"[{', '.join(map(str, predictors))}]", "--traces", str(tiny_traces)],
            )
            == 2
        )
        return capsys.readouterr().err

    assert "no predictor folder" in told(tmp_path / "nowhere")
    assert "TokenMLP scores tokens" in told(bundles["mlp"])
    assert "same name" in told(bank, bank)


def test_cost_counts_the_update_and_the_forecast():
    for bank in (EmaBank(hidden=4), EmaBank(hidden=4, layers=30, kv_heads=3)):
        assert 0 < cost_ms(bank, rounds=1) < cost_ms(PublishedCNN(), rounds=1)


def test_columns_line_up():
    lines = format_rows([{"by": "one", "x": 1}, {"by": "b", "x": 0.5}]).splitlines()
    assert lines == ["by        x", "one       1", "b    0.5000"]
