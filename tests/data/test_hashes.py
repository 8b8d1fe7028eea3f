"""Shards are what was written, bit by bit: when an interrupted collection goes on, and whenever one is read."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.collect import collect
from data.folder import Folder
from data.trace import HASH, HASHED, Traces, read_manifest
from data.writer import whole_shard
from predictor.errors import FadeError
from predictor.sealed import SEAL
from tests.data.collecting import Make, assert_same, stop_after

FLIPS = 200


def interrupt(out: Path, small: Make, documents: int) -> None:
    """Collect so many documents more; two are a shard."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, documents)
        with pytest.raises(RuntimeError, match="power cut"):
            collect(small(out))


@pytest.fixture(scope="module")
def interrupted(small: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection that ended after two of its three shards."""
    out = tmp_path_factory.mktemp("interrupted") / "traces"
    interrupt(out, small, 5)
    return out


@pytest.fixture
def begun(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "begun"))


@pytest.fixture
def copy(collected: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(collected, tmp_path / "copy"))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def flips(path: Path, count: int = FLIPS) -> list[int]:
    """Bits of a file: those of its ends, where Parquet keeps what describes the rest, and others anywhere."""
    size, drawn = 8 * path.stat().st_size, random.Random(0)
    ends = [*drawn.sample(range(64), count // 8), *drawn.sample(range(size - 4096, size), count // 4)]
    return ends + drawn.sample(range(64, size - 4096), count - len(ends))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, which then carries no checksum, as those of old."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop(SEAL, None)
    change(manifest)
    path.write_text(json.dumps(manifest))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_hash_lies_beside_its_shard_until_the_manifest_has_it(begun: Path, small: Make) -> None:
    shards = sorted(begun.glob("*.parquet"))
    assert len(shards) == 2
    for shard in shards:
        assert (begun / f"{shard.name}{HASH}").read_text() == f"{sha256(shard)}  {shard.name}\n"
    assert collect(small(begun)).kept == 2
    manifest = json.loads((begun / "manifest.json").read_text())
    assert {one["name"]: one["sha256"] for one in manifest["shards"]} == {
        file.name: sha256(file) for file in begun.glob("*.parquet")
    }
    assert not list(begun.glob(f"*{HASH}"))


def test_no_bit_of_a_shard_flips_unseen_before_its_collection_is_finished(begun: Path) -> None:
    manifest = read_manifest(begun)
    assert manifest is not None
    first, seen = manifest["shards"][0], 0
    shard = begun / first["name"]
    seal = begun / f"{shard.name}{HASH}"
    assert whole_shard(Folder(begun), manifest, first, manifest) == sha256(shard)
    for path, bits in ((shard, flips(shard)), (seal, range(64 * 8))):
        for bit in bits:
            flip(path, bit)
            try:
                seen += whole_shard(Folder(begun), manifest, first, manifest) is None
            except FadeError:  # the flip makes it a shard of another collection
                seen += 1
            flip(path, bit)
    assert seen == FLIPS + 64 * 8


def test_no_bit_of_a_shard_flips_unseen_when_it_is_read(copy: Path) -> None:
    traces = Traces(copy)
    name = traces.shards("train")[0]
    for bit in flips(copy / name):
        assert traces.read(name, ["h2o"])  # however often it was whole
        flip(copy / name, bit)
        with pytest.raises(FadeError, match=rf"shard .*{name} (is damaged|was collected)"):
            traces.read(name, ["h2o"])
        flip(copy / name, bit)


@pytest.mark.parametrize("where", [0.1, 0.9])
def test_a_flipped_shard_of_an_interrupted_collection_is_collected_again(
    where: float, begun: Path, small: Make, collected: Path
) -> None:
    shard = begun / "shard-00000.parquet"
    flip(shard, int(8 * where * shard.stat().st_size))
    assert collect(small(begun)).kept == 1
    assert_same(begun, collected)


def test_hashes_of_a_finished_collection_outlive_the_mending_of_one_shard(
    copy: Path, small: Make, collected: Path
) -> None:
    (copy / "shard-00001.parquet").unlink()
    interrupt(copy, small, 1)
    flip(copy / "shard-00000.parquet", 40_000)
    assert collect(small(copy)).kept == 1
    assert_same(copy, collected)


def test_a_damaged_shard_is_not_there_when_its_mending_is_interrupted(copy: Path, small: Make) -> None:
    flip(copy / "shard-00001.parquet", 40_000)
    interrupt(copy, small, 1)
    assert not (copy / "shard-00001.parquet").exists()


def test_a_shard_that_lost_its_hash_or_never_came_is_collected_again(begun: Path, small: Make, collected: Path) -> None:
    (begun / f"shard-00000.parquet{HASH}").unlink()
    (begun / "shard-00001.parquet").unlink()  # as if the end had come between the two
    assert collect(small(begun)).kept == 0
    assert_same(begun, collected)


@pytest.mark.filterwarnings("ignore:.*of a release that wrote no checksum")
def test_collections_from_before_there_were_hashes_are_read_and_go_on(copy: Path, small: Make, collected: Path) -> None:
    def of_old(manifest: dict[str, Any]) -> None:
        del manifest[HASHED]
        for shard in manifest["shards"]:
            del shard["sha256"]

    edit(copy, of_old)
    assert_same(copy, collected)
    edit(copy, lambda manifest: manifest.update(complete=False))
    (copy / "shard-00002.parquet").unlink()
    assert collect(small(copy)).kept == 2
    assert_same(copy, collected)
    assert all(one["sha256"] == sha256(copy / one["name"]) for one in Traces(copy).manifest["shards"])


def test_what_is_there_stays_until_all_of_the_new_is_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder("memory://half-uploaded")
    with folder.write("manifest.json") as path:
        path.write_text("old and whole")

    def half(source: str, target: str, **options: Any) -> None:
        folder._files.pipe_file(target, Path(source).read_bytes()[:3])
        raise OSError("the line is cut")

    with monkeypatch.context() as patch:
        patch.setattr(folder._files, "put_file", half)
        with pytest.raises(OSError, match="cut"), folder.write("manifest.json") as path:
            path.write_text("new and whole")
    with folder.fetch("manifest.json") as path:
        assert path.read_text() == "old and whole"
    assert folder.names() == ["manifest.json"]
    folder.remove("manifest.json")
    folder.remove("manifest.json")
    assert folder.names() == []
