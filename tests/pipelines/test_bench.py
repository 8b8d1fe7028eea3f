"""The decode benchmark on a tiny model: what it prints, writes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines import bench
from pipelines.benchmarks import decode
from pipelines.proof import decode_part
from predictor.errors import FadeError


def test_decode_prints_ratios_and_adds_rows(tiny_model_dir: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["decode", "--model", str(tiny_model_dir), "--contexts", "[200,300]", "--steps", "3"]
    for _ in range(2):
        assert bench.main([*arguments, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert told.count("1.00x") >= 4
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 2 * 5
    first = {row["method"]: row for row in rows[:5]}
    assert list(first) == ["stock", "static", "int4", "int4+statistics", "k4v2"]
    assert first["static"]["of_static"] == first["stock"]["of_stock"] == 1
    assert first["int4"]["of_static"] == pytest.approx(first["static"]["p50"] / first["int4"]["p50"])
    assert first["stock"]["bytes"] == 2 * 2 * 2 * 16 * 4 * (200 + 4)  # k and v, layers, kv heads, dim, float32
    assert (
        first["k4v2"]["bytes"]
        < first["int4"]["bytes"]
        < first["int4+statistics"]["bytes"]
        < first["stock"]["bytes"] / 1.9
    )
    assert all(0 < row["p20"] <= row["p50"] <= row["p80"] for row in rows)
    assert "| int4 " in decode_part(rows)  # the report of make proof reads them


@pytest.mark.parametrize("method", ["static", "k4v2"])
def test_times_of_caches_that_disagree_are_not_shown(
    method: str, tiny_model_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = decode._filled

    def spoiled(*args: Any) -> Any:
        caches, twin = filled(*args)
        (caches[method] if method == "static" else twin).layers[0].values.mul_(2)
        return caches, twin

    monkeypatch.setattr(decode, "_filled", spoiled)
    assert bench.main(["decode", "--model", str(tiny_model_dir), "--contexts", "[100]", "--steps", "1"]) == 2
    told = capsys.readouterr()
    assert f"logits of {method} are" in told.err
    assert "ms/step" not in told.out


def test_bad_options_are_named(tiny_model_dir: Path, capsys: Any) -> None:
    assert bench.main(["decode", "--steps", "0"]) == 2
    assert "steps 0 is too small" in capsys.readouterr().err
    assert bench.main(["flight"]) == 2
    assert bench.main(["--help"]) == 0
    assert f"usage: python -m pipelines.bench {{{','.join(bench.BENCHMARKS)}}}" in capsys.readouterr().out
    with pytest.raises(FadeError, match="contexts 0 is too small"):
        decode.decode(decode.DecodeSettings(model=str(tiny_model_dir), contexts=[]))
