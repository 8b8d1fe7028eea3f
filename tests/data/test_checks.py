"""Shards and manifests that do not belong together, numbers that are none, splits that share a document."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from data.checks import MARK
from data.collect import collect
from data.datamodule import TraceDataModule
from data.plan import CollectSettings
from data.trace import Traces, read_manifest, read_shard, write_manifest, write_shard
from predictor.errors import FadeError
from predictor.features import FeatureSpec
from tests.data.drawn import random_rows

Make = Callable[..., CollectSettings]


@pytest.fixture
def copy(collected: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(collected, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    change(manifest)
    write_manifest(folder, manifest)


def test_shards_of_two_models_are_not_mixed(
    copy: Path, small: Make, tmp_path: Path, tiny_model: Callable[..., Any], tiny_model_dir: Path
) -> None:
    other = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    tiny_model("llama", seed=5).save_pretrained(other)
    collect(small(tmp_path / "other", model=str(other)))
    shutil.copy(tmp_path / "other" / "shard-00001.parquet", copy / "shard-00001.parquet")
    module = TraceDataModule(str(copy))
    module.setup()
    words = r"shard .*shard-00001.parquet was collected from another model than its manifest says \(weights "
    with pytest.raises(FadeError, match=words):
        list(module.train_dataloader())
    edit(
        copy,
        lambda manifest: manifest.update(complete=False) or [s.pop("sha256") for s in manifest["shards"]],
    )
    with pytest.raises(FadeError, match=words):
        collect(small(copy))


def test_shards_of_two_schemas_or_settings_are_not_mixed(
    copy: Path, small: Make, tmp_path: Path, tiny_model_dir: Path
) -> None:
    path = copy / "shard-00000.parquet"
    whole = path.read_bytes()
    table = pq.read_table(path)
    mark = json.loads(table.schema.metadata[MARK])
    changed = {MARK: json.dumps({**mark, "schema_version": 7})}
    pq.write_table(table.replace_schema_metadata(changed), path)
    with pytest.raises(FadeError, match=r"another schema than its manifest says \(schema_version 7, not 1\)"):
        Traces(copy).read(path.name)
    path.write_bytes(whole)
    Traces(copy).read(path.name)
    collect(small(tmp_path / "other", seed=1))
    shutil.copy(tmp_path / "other" / path.name, path)
    with pytest.raises(FadeError, match="with other settings or text than its manifest says"):
        Traces(copy).read(path.name)


def test_shards_that_the_manifest_does_not_name_are_refused(copy: Path, small: Make) -> None:
    shutil.copy(copy / "shard-00001.parquet", copy / "shard-00009.parquet")
    for use in (lambda: Traces(copy), lambda: collect(small(copy))):
        with pytest.raises(FadeError, match=r"shard-00009.parquet is not in the manifest; .*take it out"):
            use()


@pytest.mark.parametrize("what", ["id", "origins"])
def test_splits_that_share_a_document_are_refused(what: str, copy: Path) -> None:
    def share(manifest: dict[str, Any]) -> None:
        first, *_, last = manifest["documents"]
        assert (first["split"], last["split"]) == ("train", "validation")
        last[what] = first[what]

    edit(copy, share)
    with pytest.raises(FadeError, match="train and validate on the same document .*prose"):
        Traces(copy)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("column", ["target_max", "target_sum", "tokens", "future_mean"])
def test_a_number_that_is_none_is_named(column: str, value: float, tmp_path: Path) -> None:
    spec, path = FeatureSpec(window=8), tmp_path / "shard-00000.parquet"
    rows = random_rows(3, 33, 5, spec, 0)
    rows[2][column].flat[7] = value
    write_shard(path, rows)
    with pytest.raises(
        FadeError, match=f"shard-00000.parquet holds NaN or infinity in {column} of document d2, layer 2"
    ):
        read_shard(path, spec)
    others = set(rows[0]) - {column}
    assert len(read_shard(path, spec, others)) == 3


def test_a_model_that_gives_no_numbers_is_refused_while_it_is_watched(
    small: Make, tmp_path: Path, tiny_model: Callable[..., Any], tiny_model_dir: Path
) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    broken = tiny_model("llama")
    broken.model.layers[1].self_attn.k_proj.weight[3, 3] = np.nan
    broken.save_pretrained(model)
    with pytest.raises(FadeError, match=r"attention holds NaN .*, layer 1, kv head 0; use another dtype than float32"):
        collect(small(tmp_path / "out", model=str(model)))
    assert not list((tmp_path / "out").glob("*.parquet"))
