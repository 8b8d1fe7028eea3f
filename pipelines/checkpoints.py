"""What `lightning fit` leaves in a folder, and which traces a predictor was trained on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.trace import Traces
from predictor.bundle import Predictor, load_bundle
from predictor.cache_layers import in_words
from predictor.errors import FadeError
from predictor.files import recover

BEST = "best"  # the bundle of the best epoch, inside a folder that `lightning fit` wrote


def load_checkpoint(folder: str, what: str = "checkpoint") -> Predictor:
    """The predictor of the best epoch in a folder that `lightning fit` wrote, or of a bundle.

    Args:
        folder: of either. what: names it in the error.

    Raises:
        FadeError: it is not there, or a file of Lightning's own.
    """
    path = Path(folder)
    if path.suffix == ".ckpt":
        raise FadeError(f"{what} {folder} is Lightning's own file; give its folder, {path.parent}")
    if not path.is_dir():
        raise FadeError(f"there is no {what} folder {folder}; make one with: lightning fit --config ...")
    recover(path / BEST)
    return load_bundle(path / BEST if (path / BEST).is_dir() else path)


def refuse_other_traces(manifest: Mapping[str, Any], what: str, traces: Traces) -> None:
    """Refuse a predictor that was not trained on these traces.

    Args:
        manifest: of the predictor. what: names it in the error. traces: what it is to be used on.

    Raises:
        FadeError: it was trained on others.
    """
    if manifest.get("traces_sha256") != trace_facts(traces)["traces_sha256"]:
        raise FadeError(
            f"{what} was trained on other traces than {traces.folder}, and may have seen their validation documents; "
            "name its own traces, or train again"
        )


def trace_facts(traces: Traces) -> dict[str, Any]:
    """What a bundle remembers of its traces: the model, how much of which text, and hashes of it."""
    shards = traces.manifest["shards"]
    return {
        **read_facts(traces.manifest),
        "rows": sum(shard["rows"] for shard in shards),
        "recorded": f"{in_words(traces.layers)} of {traces.provenance['layers']}",
        "traces_sha256": hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest(),
    }


def read_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a bundle remembers of the text that was read: the model, how much of which, and hashes of it.

    Args:
        manifest: of a collection: ``settings``, ``documents`` and ``corpus``.
    """
    documents = manifest["documents"]
    passages = [document["passages"] for document in documents if "passages" in document]
    splits = Counter(document["split"] for document in documents)
    sources = Counter(document["source"] for document in documents)
    whole = {"passages": passages} if len(passages) == len(documents) else {}  # or they are of an earlier release
    return {
        "model": str(manifest["settings"]["model"]),
        "train_documents": splits["train"],
        "validation_documents": splits["validation"],
        "prompt_tokens": sum(document["prompt"] for document in documents),
        "sources": ", ".join(f"{source} {count}" for source, count in sorted(sources.items())),
        "text_sha256": manifest["corpus"]["sha256"],
        **whole,
    }
