"""The trace format: what one Parquet row holds, how a collection is written, and how it is read back with care.

A collection is a directory of ``shard-00000.parquet`` ... and ``manifest.json``. One row is one (document, layer,
kv head). Each shard holds a few documents of one split; the manifest says which, for which model and from which
text. A shard appears under its name only when it is whole, and the manifest says ``complete`` only at the end.

The SHA-256 of a shard is taken before it is written. It lies beside the shard (``shard-00000.parquet.sha256``, as
``sha256sum -c`` reads it) until the manifest of the finished collection takes it over. Every reading is held to it: a
millisecond for each MB, a fifth of what decoding it takes.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.checks import (
    AGAIN,
    MARK,
    SHARDS,
    refuse_not_finite,
    refuse_other_collection,
    refuse_other_shards,
    refuse_shared_documents,
)
from data.folder import Folder
from predictor.errors import FadeError
from predictor.features import FeatureSpec
from predictor.files import write_aside
from predictor.sealed import SEAL, sealed

SCHEMA_VERSION = 1
HIDDEN_VERSION = 2  # with keys and values
MANIFEST = "manifest.json"
HASH = ".sha256"  # ends the name of the file with a shard's hash
HASHED = "hashed"  # in a manifest: every shard had its hash from the beginning
RECORDED = "recorded_layers"  # in a manifest: real indices of the layers that rows are of

# S prompt tokens, F features, W history steps, T future steps, D channels
# N = ceil(S / block) blocks of the prompt, M = ceil((S + T) / block) of prompt and future
ARRAYS: dict[str, tuple[str, ...]] = {
    "tokens": ("S", "F"),  # predictor.features.FEATURES
    "h2o": ("S",),  # log of the attention received from the prompt, divided by the queries that could see it
    "history_mean": ("W", "N"),  # attention of the last W prompt queries, pooled over the tokens of a block
    "history_max": ("W", "N"),
    "future_mean": ("T", "M"),  # attention of the T queries after the prompt, over all S + T tokens
    "future_max": ("T", "M"),
    "target_sum": ("S",),  # log of the attention received from the T future queries, divided by T
    "target_max": ("S",),  # log of the largest attention received from one of them
    "key": ("S", "D"),  # before its rotation; this and the next only from HIDDEN_VERSION on
    "value": ("S", "D"),
}
HIDDEN = ("key", "value")
SCALARS: dict[str, pa.DataType] = {
    "doc": pa.string(),
    "split": pa.string(),
    "source": pa.string(),
    "layer": pa.int16(),
    "head": pa.int16(),
    "length": pa.int32(),  # S
    "steps": pa.int16(),  # T
}

Row = dict[str, Any]  # scalars as they are, arrays as numpy float16


def write_shard(path: str | Path, rows: Sequence[Row], mark: Mapping[str, Any] | None = None) -> str:
    """Write rows to one Parquet file, aside first and then renamed; arrays are cast to float16.

    Arrays become float16 bytes. ``h2o`` is null where it was not recorded; keys and values are no columns then.

    Args:
        path: of the file. rows: of a few documents.
        mark: from :func:`data.checks.mark_of`; goes into the file's metadata.

    Returns:
        SHA-256 of the file's bytes in hexadecimal, taken before they were written.
    """
    columns = {name: [row[name] for row in rows] for name in SCALARS}
    arrays = [name for name in ARRAYS if name not in HIDDEN or any(name in row for row in rows)]
    for name in arrays:
        columns[name] = [np.asarray(row[name], np.float16).tobytes() if name in row else None for row in rows]
    schema = pa.schema([*SCALARS.items(), *((name, pa.binary()) for name in arrays)])
    table = pa.table(columns, schema=schema.with_metadata({MARK: json.dumps(mark)} if mark else None))
    made = pa.BufferOutputStream()
    pq.write_table(table, made, compression="zstd", use_dictionary=["doc", "split", "source"])
    data = made.getvalue()
    with write_aside(path) as aside:
        aside.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def read_shard(
    path: str | Path, spec: FeatureSpec, columns: Iterable[str] | None = None, sha256: str | None = None
) -> list[Row]:
    """Read the rows of one Parquet file.

    Args:
        path: of the file. spec: its features. columns: names of the arrays wanted, all of them when None.
        sha256: what :func:`write_shard` returned; the very bytes that are read are held to it.

    Raises:
        FadeError: the file is missing, has other bytes, is not a whole shard, or holds a NaN.
    """
    arrays = [name for name in ARRAYS if columns is None or name in set(columns)]
    try:
        data = Path(path).read_bytes()
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise _damaged(path, "its bytes are not those the manifest was written for")
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            present = set(file.schema_arrow.names)
            arrays = [name for name in arrays if name not in HIDDEN or name in present]
            table = file.read(columns=[*SCALARS, *arrays])
    except FileNotFoundError as error:
        raise FadeError(f"shard {path} is missing; run {AGAIN}") from error
    except FadeError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, "it is not a whole Parquet file of traces") from error
    rows = [_decode(row, arrays, spec, path) for row in table.to_pylist()]
    for row in rows:
        refuse_not_finite(row, f"shard {path}", f"delete it and run {AGAIN}, in float32 or bfloat16")
    return rows


def _decode(row: Row, arrays: list[str], spec: FeatureSpec, path: str | Path) -> Row:
    slots, steps = row["length"], row["steps"]
    size = {
        "S": slots,
        "F": len(spec.names),
        "W": spec.window,
        "T": steps,
        "N": math.ceil(slots / spec.block),
        "M": math.ceil((slots + steps) / spec.block),
        "D": -1,
    }
    for name in arrays:
        raw = row.pop(name)
        if raw is None:
            continue
        try:
            row[name] = np.frombuffer(raw, np.float16).reshape([size[axis] for axis in ARRAYS[name]])
        except ValueError as error:
            raise _damaged(path, f"column {name} has {len(raw)} bytes") from error
    return row


def rows_of(path: str | Path) -> int:
    """Number of rows of a shard.

    Raises:
        FadeError: it is no whole Parquet file.
    """
    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, "it is not a whole Parquet file of traces") from error


def _damaged(path: str | Path, why: str) -> FadeError:
    return FadeError(f"shard {path} is damaged ({why}); delete it and run {AGAIN}")


def write_manifest(folder: Folder | str | Path, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` with its checksum, aside first and then renamed."""
    with Folder.of(folder).write(MANIFEST) as aside:
        aside.write_text(sealed(manifest), encoding="utf-8")


def read_manifest(folder: Folder | str | Path) -> dict[str, Any] | None:
    """Read ``manifest.json``, or return None when there is none.

    Raises:
        FadeError: it is damaged, or of another schema version.

    Warns:
        UserWarning: it is of an earlier release and has no checksum.
    """
    folder = Folder.of(folder)
    if not folder.names(MANIFEST):
        return None
    try:
        with folder.fetch(MANIFEST) as path:
            text = path.read_bytes().decode("utf-8")
        manifest = json.loads(text)
        version = manifest["schema_version"]
        if SEAL in manifest and sealed(manifest) != text:
            raise ValueError("checksum")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FadeError(f"manifest {folder}/{MANIFEST} is damaged; delete the folder and run {AGAIN}") from error
    if version not in (SCHEMA_VERSION, HIDDEN_VERSION):
        raise FadeError(
            f"manifest {folder}/{MANIFEST} has schema version {version}, this release reads {SCHEMA_VERSION} and "
            f"{HIDDEN_VERSION}; collect the traces again into another folder"
        )
    if manifest.pop(SEAL, None) is None:
        warnings.warn(
            f"manifest {folder}/{MANIFEST} is of a release that wrote no checksum: a damaged number in it would not be "
            "seen; to be sure, collect the traces again into another folder",
            stacklevel=2,
        )
    return manifest


def recorded_layers(manifest: Mapping[str, Any]) -> list[int]:
    """Which layers of the model a collection has rows of: in manifests of earlier releases, all.

    Example:
        >>> model = {"provenance": {"layers": 3}}
        >>> recorded_layers(model), recorded_layers(model | {"recorded_layers": [2]})
        ([0, 1, 2], [2])
    """
    return list(manifest.get(RECORDED) or range(manifest["provenance"]["layers"]))


class Traces:
    """A complete collection, opened for reading.

    Args:
        folder: directory with ``manifest.json``, or a URL that fsspec knows.

    Attributes:
        folder: where it is. manifest: the manifest, as read. spec: its FeatureSpec.
        provenance: the model it was made with. layers: those of its layers that were recorded.

    Raises:
        FadeError: no collection, an unfinished one, one of another version, shards that are missing or of another
            collection, or a validation split that shares documents with training.
    """

    def __init__(self, folder: Folder | str | Path):
        self.folder = Folder.of(folder)
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise FadeError(f"no traces in {folder}; collect some with: python -m pipelines.collect_traces")
        if not manifest["complete"]:
            raise FadeError(f"traces in {folder} are unfinished; run {AGAIN} to continue")
        self.manifest = manifest
        self.spec = FeatureSpec.from_dict(manifest["spec"])
        self.provenance: dict[str, Any] = manifest["provenance"]
        self.layers = recorded_layers(manifest)
        refuse_other_shards(self.folder, manifest)
        present = set(self.folder.names(SHARDS))
        for shard in manifest["shards"]:
            if shard["name"] not in present:
                raise FadeError(f"shard {self.folder}/{shard['name']} is missing; run {AGAIN}")
        refuse_shared_documents(manifest, f"traces in {folder}")

    def shards(self, split: str) -> list[str]:
        """Names of the shards of ``"train"`` or ``"validation"``, in order."""
        return [shard["name"] for shard in self.manifest["shards"] if shard["split"] == split]

    def read(self, name: str, columns: Iterable[str] | None = None) -> list[Row]:
        """Read one shard's rows; its bytes are compared with the manifest's hash each time.

        Raises:
            FadeError: the shard is damaged, or belongs to another collection.
        """
        shard = next(shard for shard in self.manifest["shards"] if shard["name"] == name)
        sha256 = shard.get("sha256")  # collections of old may have none
        with self.folder.fetch(name) as path:
            try:
                return read_shard(path, self.spec, columns, sha256)
            except FadeError:
                refuse_other_collection(path, f"{self.folder}/{name}", self.manifest)
                raise
