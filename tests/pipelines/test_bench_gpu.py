"""The GPU benchmark where there is no GPU, its layers, its ledger, and the launch table that tuning writes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fade_runtime.kernels import reference
from fade_runtime.kernels.reference import Part
from fade_runtime.kernels.triton import launch_table as launches
from fade_runtime.kernels.triton.launch_table import Launch
from pipelines import bench
from pipelines.benchmarks import gpu as bench_gpu
from pipelines.benchmarks import gpu_model
from pipelines.benchmarks.gpu_layer import random_layer, stored_bytes
from pipelines.benchmarks.ledger import add_rows
from predictor.errors import FadeError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@no_gpu
@pytest.mark.parametrize("name", ["gpu", "tune"])
def test_without_a_gpu_it_says_so(name: str, capsys: Any) -> None:
    assert bench.main([name]) == 2
    told = capsys.readouterr()
    assert told.err == (
        "error: this benchmark needs a GPU that torch can use, and there is none; run it where there is one\n"
    )
    assert told.out == ""


@no_gpu
@pytest.mark.slow
def test_only_torch_triton_and_transformers_are_needed() -> None:
    """On a bare GPU machine the option parser and the training libraries are absent."""
    absent = "jsonargparse lightning torchmetrics datasets pyarrow mlflow sklearn fsspec.generic"
    code = f"""import sys
sys.modules.update(dict.fromkeys({absent.split()!r}))
from pipelines import bench
import pipelines.benchmarks.gpu_layer, fade_runtime.kernels.triton.self_test
import fade_runtime, fade_runtime.transformers_api
sys.exit(bench.main(["gpu"]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("error: this benchmark needs a GPU"), done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--groups", "[5]"], "groups [5] must divide the 32 query heads"),
        (["--lengths", "[100]"], "lengths 100 is too small; use at least 133"),
        (["--repeats", "0"], "repeats 0 is too small"),
        (["--model", "70b"], "model '70b' is not known; use one of 1b, 8b, or null"),
    ],
    ids=str,
)
def test_bad_options_are_named(words: list[str], said: str, capsys: Any) -> None:
    assert bench.main(["gpu", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("tokens", [64, 100])
def test_a_random_layer_is_what_a_cache_would_hold(tokens: int, low: bool) -> None:
    layer = random_layer(torch.device("cpu"), 3, tokens, 4, 2, 64, low=low)
    packed = layer.packed
    assert packed.token_row().tolist() == [row for row in range(3) for _ in range(tokens)]
    assert packed.slots().tolist() == list(range(tokens)) * 3
    assert int(packed.low().sum()) == len(packed.low_key_codes)
    assert layer.length == tokens + 4
    key, value = (t.view(3, tokens, 64) for t in reference.dequantise(packed, torch.float32))
    assert abs(float(key.std()) - 1.38) < 0.1  # codes are uniform: 16 / 12 ** .5 * .3
    query, full = layer.query.float(), (layer.key.float(), layer.value.float())
    every = [torch.cat((mine, stored), 1)[:, None] for mine, stored in zip(full, (key, value))]
    expected = torch.nn.functional.scaled_dot_product_attention(query[:, None], *every, scale=1.0)[:, 0]
    torch.testing.assert_close(reference.attend(query, *full, [Part(packed)])[0], expected, rtol=1e-4, atol=1e-4)
    per_token = 64 * 0.5 * 2 + 4 - (64 * 0.25 * 0.5 if low else 0)  # codes, a value's scale and zero; 2 bits of some
    assert stored_bytes(layer) == pytest.approx(3 * (tokens * per_token + 4 * 64 * 4 + 2 * 64 * 4), rel=0.1)


def test_what_does_not_fit_is_named_and_the_rest_goes_on(capsys: Any) -> None:
    def measure(cell: dict[str, Any]) -> list[dict[str, Any]]:
        if cell["length"] == 2:
            raise torch.OutOfMemoryError("too much")
        return [cell]

    cells = [{"length": 1}, {"length": 2}, {"length": 3}]
    assert list(bench_gpu._until(time.monotonic() + 60, cells, measure)) == [{"length": 1}, {"length": 3}]
    assert list(bench_gpu._until(time.monotonic() - 1, cells[2:], measure)) == []
    told = capsys.readouterr().out.splitlines()
    assert told == ["left out, not enough memory: length 2", "left out, no time left: length 3"]


def test_a_random_llama_decodes_with_every_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2, head_dim=16)
    monkeypatch.setitem(gpu_model.SIZES, "tiny", tiny)
    monkeypatch.setattr(gpu_model, "VOCABULARY", 50)
    lm = gpu_model.random_llama("tiny", torch.device("cpu"))
    rows = [gpu_model.decode_row(lm, method=name, context=400, steps=3) for name in gpu_model.METHODS]
    assert [row["method"] for row in rows] == ["full", "safe", "balanced"]
    assert rows[0]["bytes"] == 2 * 2 * 8 * 16 * 2 * (400 + 5)  # k and v, layers, kv heads, dim, bfloat16
    assert rows[0]["bytes"] > rows[1]["bytes"] > rows[2]["bytes"]
    assert all(set(row) <= set(bench_gpu.COLUMNS) and row["tokens_per_second"] > 0 for row in rows)
    assert (rows[0]["group"], rows[0]["layers"], rows[0]["dim"]) == (4, 2, 16)


def test_the_ledger_keeps_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.csv"
    add_rows(path, bench_gpu.COLUMNS, [{"device": "a, b", "p50": 0.5}])
    add_rows(path, bench_gpu.COLUMNS, [{"p20": 1 / 3}])
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(bench_gpu.COLUMNS)
    assert len(lines) == 3
    assert '"a, b"' in lines[1]
    with pytest.raises(FadeError, match="has other columns"):
        add_rows(path, ["date"], [{"date": "today"}])
    with pytest.raises(ValueError, match="dict contains fields"):
        add_rows(path, bench_gpu.COLUMNS, [{"hour": 1}])


def test_a_launch_is_chosen_by_the_first_row_that_fits(tmp_path: Path) -> None:
    table = tmp_path / "launches.json"
    mine = {"device": "GPU", "dim": 64, "bits": 4, "kind": "plain", "pages": 8, "programs": 2, "warps": 1, "stages": 3}
    launches.add_rows([{**mine, "dense": [[0, 7]]}], table)
    assert launches.choose("GPU", 64, 4, "plain", table) == Launch(8, 2, 1, 3, ((0, 7),))
    assert launches.choose("GPU", 64, 4, "tiered", table) == launches.choose("GPU", 64, 4, "tiered")
    launches.add_rows([{**mine, "warps": 8, "dense": []}], table)  # in place of the first
    assert launches.choose("GPU", 64, 4, "plain", table).warps == 8
    assert len(launches.read_table(table)) == len(launches.read_table()) + 1
    for kind in launches.KINDS:
        for dim in (64, 96, 128, 256):
            assert launches.choose("unknown", dim, 2, kind).warps > 0


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{"device": "any"}]}'], ids=str)
def test_a_damaged_launch_table_is_named(text: str, tmp_path: Path) -> None:
    table = tmp_path / "launches.json"
    table.write_text(text)
    with pytest.raises(FadeError, match="launch table .* cannot be read"):
        launches.choose("GPU", 64, 4, "plain", table)
    table.write_text(json.dumps({"rows": []}))
    launches.read_table.cache_clear()
    with pytest.raises(FadeError, match="has no row for"):
        launches.choose("GPU", 64, 4, "plain", table)
