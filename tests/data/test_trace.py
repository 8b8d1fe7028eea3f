"""Shards and manifests: round trip, and damage told from wholeness."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.trace import ARRAYS, HIDDEN, Traces, read_manifest, read_shard, write_shard
from predictor.errors import FadeError
from predictor.features import FeatureSpec
from predictor.sealed import sealed
from tests.data.drawn import random_rows


@given(
    slots=st.integers(1, 70), steps=st.integers(1, 9), window=st.integers(8, 20), block=st.integers(1, 17),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_round_trip(
    slots: int, steps: int, window: int, block: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = FeatureSpec(window=window, block=block)
    rows = random_rows(3, slots, steps, spec, seed)
    del rows[1]["h2o"]
    if seed % 2:  # a collection without keys and values, as it was written before there were any
        rows = [{name: value for name, value in row.items() if name not in HIDDEN} for row in rows]
    path = tmp_path_factory.mktemp("shard") / "shard-00000.parquet"
    write_shard(path, rows)
    back = read_shard(path, spec)
    assert [set(row) for row in back] == [set(row) for row in rows]
    for row, again in zip(rows, back):
        for name, value in row.items():
            np.testing.assert_array_equal(again[name], value)
    assert set(pq.read_schema(path).names).isdisjoint(HIDDEN) == bool(seed % 2)
    assert set(read_shard(path, spec, ["tokens"])[0]) == {*(set(rows[0]) - set(ARRAYS)), "tokens"}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_shard_is_named(share: float, tmp_path: Path) -> None:
    spec, path = FeatureSpec(window=8), tmp_path / "shard-00000.parquet"
    write_shard(path, random_rows(4, 33, 5, spec, 0))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(FadeError, match=r"shard-00000.parquet is damaged .*collect_traces"):
        read_shard(path, spec)


def test_a_shard_read_with_another_spec_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.parquet"
    write_shard(path, random_rows(1, 33, 5, FeatureSpec(window=8), 0))
    with pytest.raises(FadeError, match="column history_mean has"):
        read_shard(path, FeatureSpec(window=9))


@pytest.fixture
def copy(collected: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(collected, tmp_path / "copy"))


def edit(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(sealed(json.loads(path.read_text()) | changes))


def test_a_shard_that_reads_well_but_is_another_is_found(copy: Path) -> None:
    traces = Traces(copy)
    first, second = traces.shards("train")
    rows = traces.read(first)
    rows[0]["tokens"] = rows[0]["tokens"] + np.float16(1)
    write_shard(copy / second, rows)
    assert len(read_shard(copy / second, traces.spec)) == len(rows)
    with pytest.raises(FadeError, match=f"{second} is damaged .*not those the manifest"):
        traces.read(second)


def test_missing_unfinished_damaged_and_foreign_collections_are_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(FadeError, match=r"no traces in .*nowhere; collect some"):
        Traces(tmp_path / "nowhere")
    edit(copy, complete=False)
    with pytest.raises(FadeError, match="unfinished"):
        Traces(copy)
    edit(copy, complete=True, schema_version=99)
    with pytest.raises(FadeError, match="schema version 99, this release reads 1"):
        Traces(copy)
    edit(copy, schema_version=1, spec={"version": 7})
    with pytest.raises(FadeError, match="feature spec version 7"):
        Traces(copy)
    (copy / "manifest.json").write_text('{"schema_')
    with pytest.raises(FadeError, match=r"manifest .* is damaged"):
        Traces(copy)


def test_no_bit_of_a_manifest_changes_unseen(copy: Path) -> None:
    """A flip is refused; one in the name of the checksum makes it a manifest of an earlier release, which is said."""
    path, drawn = copy / "manifest.json", random.Random(0)
    whole = path.read_bytes()
    for _ in range(200):
        content = bytearray(whole)
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        path.write_bytes(content)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                Traces(copy)
            except FadeError:
                continue
        assert "no checksum" in str(told[0].message)


def test_a_manifest_without_a_checksum_is_read_with_a_warning(copy: Path) -> None:
    manifest = read_manifest(copy)
    (copy / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    with pytest.warns(UserWarning, match="of a release that wrote no checksum"):
        assert Traces(copy).manifest == manifest


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / "shard-00001.parquet").unlink()
    with pytest.raises(FadeError, match=r"shard .*shard-00001.parquet is missing"):
        Traces(copy)
