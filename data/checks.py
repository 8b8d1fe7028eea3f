"""What must hold between a manifest and its shards, and inside both, or be refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.folder import Folder
from predictor.errors import FadeError

SHARDS = "shard-*.parquet"
MARK = b"fade"  # key of a shard's Parquet metadata: which collection it belongs to
AGAIN = "python -m pipelines.collect_traces with the same config"


def mark_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What every shard of a collection carries: schema version, the model's weights, a hash of settings and text."""
    decides = json.dumps([manifest["settings"], manifest["corpus"]["sha256"]], sort_keys=True)
    return {
        "schema_version": manifest["schema_version"],
        "weights": manifest["provenance"]["weights"],
        "settings": hashlib.sha256(decides.encode()).hexdigest(),
    }


def read_mark(path: str | Path) -> dict[str, Any] | None:
    """Read what :func:`mark_of` gave; None for a file that carries nothing, or is no Parquet file."""
    try:
        held = (pq.read_schema(path).metadata or {}).get(MARK)
        return json.loads(held) if held else None
    except (OSError, pa.ArrowException, ValueError):
        return None


def refuse_other_collection(path: str | Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a shard that carries another mark than that of its manifest.

    Args:
        path: of the shard. name: for the error. manifest: with the provenance of a model.

    Raises:
        FadeError: names what differs: schema, model, or settings and text.
    """
    held = read_mark(path)
    if held is None:
        return
    mark = mark_of(manifest)
    for what, words in (
        ("schema_version", "with another schema"),
        ("weights", "from another model"),
        ("settings", "with other settings or text"),
    ):
        if held.get(what) != mark[what]:
            raise FadeError(
                f"shard {name} was collected {words} than its manifest says ({what} {str(held.get(what))[:12]}, not "
                f"{str(mark[what])[:12]}); collections must not be mixed: put it back, or delete it and run {AGAIN}"
            )


def refuse_not_finite(row: Mapping[str, Any], where: str, remedy: str) -> None:
    """Refuse a row with a NaN or an infinity in one of its arrays.

    Raises:
        FadeError: names the column, document, layer and head.
    """
    for name, held in row.items():
        if isinstance(held, np.ndarray) and not np.isfinite(held).all():
            raise FadeError(
                f"{where} holds NaN or infinity in {name} of document {row.get('doc')}, layer {row['layer']}, kv head "
                f"{row['head']}; {remedy}"
            )


def refuse_other_shards(folder: Folder, manifest: Mapping[str, Any]) -> None:
    """Refuse a folder with shards that its manifest does not name.

    Raises:
        FadeError: names the first of them.
    """
    known = {shard["name"] for shard in manifest["shards"]}
    for name in sorted(set(folder.names(SHARDS)) - known):
        raise FadeError(
            f"shard {folder}/{name} is not in the manifest; it is of another collection: take it out of the folder"
        )


def refuse_shared_documents(manifest: Mapping[str, Any], what: str) -> None:
    """Refuse a manifest whose splits share a document, or something that documents were put together from.

    Args:
        manifest: of a collection. what: names it in the error.

    Raises:
        FadeError: names what is shared.
    """
    read: dict[str, set[str]] = {"train": set(), "validation": set()}
    for document in manifest["documents"]:
        read[document["split"]] |= {document["id"], *document.get("origins", ())}
    for shared in sorted(read["train"] & read["validation"]):
        raise FadeError(
            f"{what} train and validate on the same document {shared}; measured recovery would be too good: "
            "collect them again"
        )
