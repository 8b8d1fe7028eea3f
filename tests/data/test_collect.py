"""Collections: what the manifest promises, interruption and resumption, and a line for every mistake."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data.collect import collect
from data.plan import CollectSettings
from data.trace import Traces, write_manifest
from pipelines import cli, inspect_traces
from pipelines.collect_traces import collect_traces
from predictor.errors import FadeError
from predictor.provenance import model_provenance
from tests.conftest import make_tiny_tokenizer
from tests.data.collecting import Make, assert_same, command, stop_after
from tests.families import FAMILIES
from tests.processes import Process, run_python

ROOT = Path(__file__).parents[2]


def test_the_manifest_says_what_the_shards_hold(collected: Path, small: Make, tiny_model: Callable[..., Any]) -> None:
    traces = Traces(collected)
    manifest = traces.manifest
    documents = {one["id"]: one for one in manifest["documents"]}
    assert [one["split"] for one in manifest["documents"]] == ["train"] * 4 + ["validation"] * 2
    assert len({one["prompt"] for one in manifest["documents"]}) > 2
    for shard in manifest["shards"]:
        rows = traces.read(shard["name"])
        assert shard["rows"] == len(rows) == 2 * 2 * len(shard["documents"])
        assert {row["doc"] for row in rows} == set(shard["documents"])
        assert {row["split"] for row in rows} == {shard["split"]}
        assert sorted((r["doc"], r["layer"], r["head"]) for r in rows) == sorted(
            (doc, layer, head) for doc in shard["documents"] for layer in (0, 1) for head in (0, 1)
        )
        for row in rows:
            assert row["length"] == documents[row["doc"]]["prompt"]
            assert 101 <= row["length"] <= 149
            assert documents[row["doc"]]["tokens"] == row["length"] + 13
            assert np.isfinite(row["tokens"]).all()
    assert {name: value for name, value in traces.provenance.items() if name != "tokenizer"} == model_provenance(
        tiny_model("llama")
    )
    assert traces.spec == small(collected).spec
    assert sorted(file.name for file in collected.iterdir()) == [
        "manifest.json",
        *(s["name"] for s in manifest["shards"]),
    ]


def _saved(family: str, folder: Path) -> Path:
    FAMILIES[family]().save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def test_sliding_layers_are_left_out_and_the_manifest_says_so(
    small: Make, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out, model = tmp_path / "traces", _saved("gemma3", tmp_path / "gemma3")
    settings = small(out, model=str(model), train_documents=1, validation_documents=1)
    collect(settings)
    traces = Traces(out)
    assert traces.manifest["recorded_layers"] == traces.layers == [0, 2]
    for split in ("train", "validation"):
        rows = traces.read(traces.shards(split)[0])
        assert [(row["layer"], row["head"]) for row in rows] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert inspect_traces.main([str(out)]) == 0
    assert "4 layers x 2 kv heads, recorded: layers 0, 2, the others keep" in capsys.readouterr().out
    assert inspect_traces.main([str(out), "--layer=1"]) == 2
    assert "they hold layers 0, 2 and kv heads 0 to 1" in capsys.readouterr().err
    begun = {name: value for name, value in traces.manifest.items() if name != "recorded_layers"}
    write_manifest(out, begun | {"complete": False})  # as a release that recorded all layers left it
    (out / traces.shards("validation")[0]).unlink()
    with pytest.raises(FadeError, match="a release that did not record just layers 0, 2 of"):
        collect(settings)


def test_nothing_is_begun_for_a_model_of_windows_alone(small: Make, tmp_path: Path) -> None:
    with pytest.raises(FadeError, match="no layer of mistral keeps all its tokens"):
        collect(small(tmp_path / "traces", model=str(_saved("mistral_sliding", tmp_path / "mistral"))))
    assert not list((tmp_path / "traces").glob("*"))


def test_an_interrupted_run_resumes_to_the_same_rows(
    collected: Path, small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "traces"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(RuntimeError, match="power cut"):
            collect(small(out))
    assert sorted(file.name for file in out.glob("*.parquet")) == ["shard-00000.parquet"]
    with pytest.raises(FadeError, match="unfinished"):
        Traces(out)
    with monkeypatch.context() as patch:
        read = stop_after(patch, 99)
        summary = collect(small(out))
    assert summary.kept == 1
    assert summary.documents == 6
    assert len(read) == 4  # two documents were whole; the third is read again
    assert_same(out, collected)


def test_ctrl_c_is_a_line_and_a_status(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(monkeypatch, 1, KeyboardInterrupt)
    assert cli.run(collect_traces, command(small(tmp_path / "out"))) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: interrupted; run the same command again")
    with pytest.raises(FadeError, match="unfinished"):
        Traces(tmp_path / "out")


def test_a_whole_collection_is_left_alone(collected: Path, small: Make) -> None:
    before = {file: file.stat().st_mtime_ns for file in collected.iterdir()}
    assert collect(small(collected)).kept == 3
    assert {file: file.stat().st_mtime_ns for file in collected.iterdir()} == before


@pytest.mark.parametrize("harm", ["deleted", "truncated", "flipped"])
def test_a_damaged_shard_is_collected_again(harm: str, collected: Path, small: Make, tmp_path: Path) -> None:
    out = Path(shutil.copytree(collected, tmp_path / "traces"))
    shard = out / "shard-00001.parquet"
    data = bytearray(shard.read_bytes())
    if harm == "deleted":
        shard.unlink()
    elif harm == "truncated":
        shard.write_bytes(data[:-20])
    else:
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    assert collect(small(out)).kept == 2
    assert_same(out, collected)


def test_other_settings_text_or_weights_are_refused_by_name(
    collected: Path, small: Make, tmp_path: Path, tiny_model: Callable[..., Any], tiny_model_dir: Path
) -> None:
    with pytest.raises(FadeError, match=r"other settings: future was 13, now 14; choose another out"):
        collect(small(collected, future=14))
    out = Path(shutil.copytree(collected, tmp_path / "traces"))
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["corpus"]["sha256"] = "0" * 64
    write_manifest(out, manifest)
    with pytest.raises(FadeError, match="other text: sha256 was 000"):
        collect(small(out))
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    out = tmp_path / "again"
    collect(small(out, model=str(model)))
    (out / "shard-00000.parquet").unlink()
    tiny_model("llama", seed=9).save_pretrained(model)
    with pytest.raises(FadeError, match="begun with other weights"):
        collect(small(out, model=str(model)))


def test_shards_without_a_manifest_are_not_overwritten(collected: Path, small: Make, tmp_path: Path) -> None:
    out = Path(shutil.copytree(collected, tmp_path / "traces"))
    (out / "manifest.json").unlink()
    with pytest.raises(FadeError, match="shards without a manifest"):
        collect(small(out))


def test_prompts_longer_than_the_model_was_made_for_are_refused(
    small: Make, tmp_path: Path, tiny_model: Callable[..., Any], tiny_model_dir: Path
) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    tiny_model("llama", max_position_embeddings=128).save_pretrained(model)
    with pytest.raises(FadeError, match=r"max_prompt 149 and future 13 pass the 128 positions"):
        collect(small(tmp_path / "out", model=str(model)))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--text=nowhere.txt", ["nowhere.txt", "does not exist", "builtin"]),
        ("--train_documents=0", ["train_documents 0", "at least 1"]),
        ("--train_documents=400", ["400 train", "ask for fewer"]),
        ("--min_prompt=11", ["min_prompt 11", "at least 12"]),
        ("--max_prompt=100", ["max_prompt 100", "at least 101"]),
        ("--model=no/such/model", ["no/such/model", "python -m pipelines.demo_model"]),
        ("--dtype=float12", ["dtype float12", "bfloat16"]),
        ("--futrue=4", ["'futrue' is not known", "'future'"]),
        ("--future=x", ["future", "int"]),
    ],
)
def test_mistakes_are_one_line_with_status_2(
    option: str, words: list[str], small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(collect_traces, [*command(small(tmp_path / "out")), option]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    assert "Traceback" not in "".join(lines)
    for word in words:
        assert word in errors[0]


def test_the_command_reads_flat_yaml_and_says_what_it_did(
    small: Make, collected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "collect.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(vars(small(out))))
    assert cli.run(collect_traces, ["--config", str(config)]) == 0
    assert f"6 documents, {sum(d['tokens'] for d in Traces(out).manifest['documents']):,} tokens, 24 rows" in (
        capsys.readouterr().out
    )
    assert_same(out, collected)


@pytest.mark.parametrize("name", ["collect_demo.yaml", "collect.yaml"])
def test_configs_are_complete_and_open_with_what_they_cost(name: str) -> None:
    text = (ROOT / "configs" / name).read_text()
    comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert text.startswith("# ")
    for word in (
        "Cost: ",
        " GiB",
        " of disk",
        f"Command: python -m pipelines.collect_traces --config configs/{name}",
    ):
        assert word in comment
    assert "Writes: " in comment
    CollectSettings(**yaml.safe_load(text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "devices"),
    [(signal.SIGKILL, -9, 1), (signal.SIGTERM, 143, 1), (signal.SIGTERM, 143, 2)],
)
def test_a_process_that_is_ended_leaves_nothing_that_looks_whole(
    number: int, status: int, devices: int, collected: Path, small: Make, tmp_path: Path
) -> None:
    out = tmp_path / "traces"
    run = ["-m", "pipelines.collect_traces", *command(small(out, devices=devices))]
    process = Process(*run)
    limit = time.monotonic() + 240
    while not (out / "shard-00000.parquet").exists() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.001)
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == status, said
    assert (out / "shard-00000.parquet").exists()
    assert not json.loads((out / "manifest.json").read_text())["complete"]
    if number == signal.SIGTERM:
        assert "error: terminated; run the same command again to continue" in said
        # of two processes the first kills the other one, which may be writing
        assert devices == 2 or not [file.name for file in out.iterdir() if file.name.startswith(".")]
    done = run_python(*run)
    assert done.returncode == 0, done.stderr
    assert "that were there already" in done.stdout
    assert_same(out, collected)


@pytest.mark.slow
def test_two_processes_lose_and_double_nothing(collected: Path, small: Make, tmp_path: Path) -> None:
    out = tmp_path / "traces"
    done = run_python("-m", "pipelines.collect_traces", *command(small(out, devices=2)))
    assert done.returncode == 0, done.stderr
    assert "4/4" in done.stdout  # of the first process: it reads two shards, the other process one
    assert_same(out, collected)
