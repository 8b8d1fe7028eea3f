"""Whether a text was trained on: told by its passages, wherever it comes from and whatever its folder is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from data.packing import KEY_BYTES, Document
from predictor.errors import FadeError

SHARED = 0.1  # of a text's passages that may stand in what was trained on: licences, boilerplate


def pack_keys(keys: Iterable[bytes]) -> str:
    """Keys of passages as one word, for JSON.

    Example:
        >>> unpack_keys(pack_keys([b"passage1", b"passage2"])) == {b"passage1", b"passage2"}
        True
    """
    return b"".join(keys).hex()


def unpack_keys(packed: str) -> set[bytes]:
    """The keys that :func:`pack_keys` packed."""
    joined = bytes.fromhex(packed)
    return {joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)}


def refuse_trained_on(documents: Sequence[Document], trained: Mapping[str, Any]) -> None:
    """Refuse text to measure on that a predictor was trained or chosen on.

    Args:
        documents: that are to be held out.
        trained: a bundle's manifest: ``passages``, packed keys of each document; or, where an earlier release wrote it,
            ``sources`` alone, the names of families with their counts, which must then be others.

    Raises:
        FadeError: names the text, and how much of it was trained on.
    """
    if "passages" not in trained:
        known = {each.rpartition(" ")[0] for each in str(trained.get("sources", "")).split(", ")}
        if names := sorted({one.source for one in documents} & known):
            raise FadeError(
                f"text {names[0]} has the name of a source that was trained on; name text of another source"
            )
        return
    keys = set().union(*map(unpack_keys, trained["passages"]))
    for one in documents:
        shared = sum(key in keys for key in one.keys)
        if shared > SHARED * len(one.keys):
            raise FadeError(
                f"text {one.origins[0]} was trained on: {shared} of {len(one.keys)} passages of {one.id} stand in the "
                "documents of the traces; name other text"
            )
