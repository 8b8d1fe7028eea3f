"""Continuations of the model's own, chat templates, held-out sources, remote folders, processes without work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
import transformers

from data.chat import chat_frame
from data.checks import MARK, mark_of
from data.collect import TraceCollector, collect
from data.encoding import encode
from data.lm import load_lm, load_tokenizer
from data.plan import prepare
from data.record import record_forward
from data.trace import HASHED, Traces, read_manifest, write_manifest
from pipelines import cli
from pipelines.collect_traces import collect_traces
from predictor.errors import FadeError
from predictor.provenance import first_values_fingerprint, model_provenance
from tests.data.collecting import Make, assert_same, command, rows_of, stop_after
from tests.processes import run_python

from .conftest import write_prose


def test_greedy_traces_are_of_what_generate_writes(small: Make, tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = small(tmp_path / "out", continuation="greedy")
    collect(settings)
    model, tokenizer = load_lm(tiny_model_dir)
    found = rows_of(tmp_path / "out")
    for task in prepare(settings, tokenizer)[:2]:
        assert task.tokens.tolist() == encode(tokenizer, task.document.text)[: task.prompt]
        written = model.generate(task.tokens[None], max_new_tokens=13, do_sample=False)[0]
        expected = record_forward(model, written, task.prompt, settings.spec)
        rows = [row for row in found if row["doc"] == task.document.id]
        assert len(rows) == len(expected) == 4
        for row, right in zip(rows, expected):
            for name in ("tokens", "target_max", "future_mean", "history_mean"):
                np.testing.assert_array_equal(row[name], right[name])
    manifest = Traces(tmp_path / "out").manifest
    assert manifest["settings"]["continuation"] == "greedy"
    assert {one["tokens"] - one["prompt"] for one in manifest["documents"]} == {13}


def test_samples_are_the_same_after_an_interruption_and_differ_from_text(
    collected: Path, small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(continuation="sample", temperature=1.5, top_p=0.9, max_prompt=120)
    collect(small(tmp_path / "whole", **options))
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(RuntimeError, match="power cut"):
            collect(small(tmp_path / "parts", **options))
    torch.manual_seed(99)
    collect(small(tmp_path / "parts", **options))
    assert_same(tmp_path / "whole", tmp_path / "parts")
    collect(small(tmp_path / "text", max_prompt=120))
    text, own = rows_of(tmp_path / "text"), rows_of(tmp_path / "whole")
    assert any(not np.array_equal(a["target_max"], b["target_max"]) for a, b in zip(text, own))
    with pytest.raises(FadeError, match=r"temperature was 1.5, now 0.5"):
        collect(small(tmp_path / "whole", **{**options, "temperature": 0.5}))


@pytest.fixture
def chatty_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    path = Path(shutil.copytree(tiny_model_dir, tmp_path / "chatty"))
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("continuation", ["text", "greedy"])
def test_a_text_is_put_into_the_chat_template(continuation: str, small: Make, chatty_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chatty_dir)
    settings = small(tmp_path / "out", model=str(chatty_dir), template="chat", continuation=continuation)
    ends = "<assistant>" if continuation == "greedy" else ""
    for task in prepare(settings, tokenizer):
        text = tokenizer.decode(task.tokens)
        assert text.startswith("<user>" + task.document.text[:20])
        assert text.endswith(ends)
        assert len(task.tokens) == task.prompt + (13 if continuation == "text" else 0)
        inside = text.removeprefix("<user>").removesuffix(f"\n{ends}" if ends else "")
        assert task.document.text.startswith(inside)
    assert sum(map(len, chat_frame(tokenizer, add_generation_prompt=True))) == len("<user>\n<assistant>")
    plain = prepare(small(tmp_path / "out", model=str(chatty_dir)), tokenizer)[0]
    assert tokenizer.decode(plain.tokens).startswith(plain.document.text[:20])
    narrow: Any = dict(min_prompt=12, max_prompt=12)
    with pytest.raises(FadeError, match="has no room for the 18 of the chat template"):
        prepare(small(tmp_path, template="chat", continuation="greedy", **narrow), tokenizer)


def test_weights_and_held_out_sources_are_options_of_the_command(
    small: Make, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held, out = write_prose(tmp_path / "held", files=2, seed=7), tmp_path / "out"
    args = command(small(out))[2:] + [f"--validation_text=[{json.dumps(str(held))}]"]
    mixed = json.dumps({str(prose): 3, "builtin:topics": 1})
    assert cli.run(collect_traces, [f"--text={mixed}", *args]) == 0, capsys.readouterr().err
    manifest = Traces(out).manifest
    assert [(one["split"], one["source"]) for one in manifest["documents"]] == [
        *[("train", "prose")] * 3, ("train", "topics"), *[("validation", "held")] * 2,
    ]  # fmt: skip
    assert set(manifest["corpus"]["sources"]) == {"prose", "topics", "held"}
    assert cli.run(collect_traces, [f"--text={held}", *args, f"--out={tmp_path / 'other'}"]) == 2
    assert "is also in validation_text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"continuation": "beam"}, "continuation beam is not known; use one of text, greedy, sample"),
        ({"temperature": 0}, "temperature 0 is out of range"),
        ({"top_p": 1.5}, r"top_p 1.5 is out of range; use a share in \(0, 1\]"),
        ({"nodes": 0}, "nodes 0 is too small"),
    ],
)
def test_options_that_cannot_be_are_named(option: dict[str, Any], words: str, small: Make, tmp_path: Path) -> None:
    with pytest.raises(FadeError, match=words):
        small(tmp_path, **option)


def test_the_manifest_names_the_model_and_how_it_ran(collected: Path, small: Make, tiny_model_dir: Path) -> None:
    manifest = Traces(collected).manifest
    assert manifest["model"] == {
        "id": str(tiny_model_dir),
        "revision": None,
        "dtype": "float32",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    model, tokenizer = load_lm(tiny_model_dir)
    assert manifest["provenance"] == model_provenance(model, tokenizer)
    assert {"weights", "tokenizer", "rope"} <= set(manifest["provenance"])
    assert {"seed", "window", "block"} <= set(manifest["settings"])


def test_a_manifest_of_before_these_options_is_continued(collected: Path, small: Make, tmp_path: Path) -> None:
    out = Path(shutil.copytree(collected, tmp_path / "old"))
    manifest = json.loads((out / "manifest.json").read_text())
    for name in ("validation_text", "continuation", "temperature", "top_p", "template"):
        del manifest["settings"][name]
    del manifest["model"], manifest["sha256"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert collect(small(out)).kept == 3
    (out / "shard-00000.parquet").unlink()
    assert collect(small(out)).kept == 2
    assert_same(out, collected)


def test_a_collection_with_a_fingerprint_of_before_is_continued(
    collected: Path, small: Make, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """As earlier releases wrote it, in manifest and shards; the rest is of the same mark."""
    out, model = Path(shutil.copytree(collected, tmp_path / "old")), load_lm(tiny_model_dir)[0]
    manifest = read_manifest(out)
    assert manifest is not None
    manifest["provenance"]["weights"] = first_values_fingerprint(model)
    del manifest[HASHED]  # shards had no hashes before the end
    write_manifest(out, manifest | {"complete": False, "shards": [{**s, "sha256": None} for s in manifest["shards"]]})
    for path in out.glob("*.parquet"):
        table = parquet.read_table(path)
        parquet.write_table(table.replace_schema_metadata({MARK: json.dumps(mark_of(manifest))}), path)
    (out / "shard-00001.parquet").unlink()
    assert collect(small(out)).kept == 2
    assert read_manifest(out)["provenance"] == manifest["provenance"]  # type: ignore[index]
    traces = Traces(out)
    assert all(traces.read(shard["name"]) for shard in traces.manifest["shards"])


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_remote_folder_is_written_resumed_and_read(
    protocol: str, collected: Path, small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out: Any = f"{protocol}://{tmp_path}/far/traces"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(RuntimeError, match="power cut"):
            collect(small(out))
    with pytest.raises(FadeError, match=f"traces in {out} are unfinished"):
        Traces(out)
    assert collect(small(out)).kept == 1
    assert_same(out, collected)
    files, root = fsspec.core.url_to_fs(out)
    assert sorted(Path(name).name for name in files.ls(root, detail=False)) == sorted(
        file.name for file in collected.iterdir()
    )
    assert files.cat(f"{root}/shard-00001.parquet") == (collected / "shard-00001.parquet").read_bytes()
    files.rm(f"{root}/shard-00001.parquet")
    with pytest.raises(FadeError, match=f"shard {out}/shard-00001.parquet is missing"):
        Traces(out)
    assert Path("memory:").exists() is False


def test_a_protocol_that_is_not_known_is_named(small: Make) -> None:
    with pytest.raises(FadeError, match=r"folder carrier://pigeon/traces cannot be opened: .*fsspec plugin"):
        collect(small("carrier://pigeon/traces"))  # type: ignore[arg-type]


@pytest.mark.slow
def test_torchrun_goes_on_and_a_process_may_have_nothing_to_do(collected: Path, small: Make, tmp_path: Path) -> None:
    out = Path(shutil.copytree(collected, tmp_path / "traces"))
    (out / "shard-00001.parquet").unlink()  # one shard for two processes
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run_python(*torchrun, "-m", "pipelines.collect_traces", *command(small(out, devices=2)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("6 documents, ") == 1  # said once, not by each process
    assert_same(out, collected)


def test_documents_of_a_process_are_whole_shards(small: Make, tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = small(tmp_path, train_documents=7, validation_documents=3, max_prompt=110)
    tasks = prepare(settings, load_tokenizer(tiny_model_dir))
    dealt: list[str] = []
    for rank in range(3):
        module = TraceCollector(settings, tasks)
        module._trainer = type("Ranks", (), {"global_rank": rank, "world_size": 3})()  # type: ignore[assignment]
        mine = list(module.predict_dataloader())
        shards = {task.shard for task in mine}
        assert sum(task.shard in shards for task in tasks) == len(mine)
        dealt += [task.document.id for task in mine]
    assert sorted(dealt) == sorted(task.document.id for task in tasks)
