"""Text to token ids; imports nothing, so that sources of text stay light."""

from __future__ import annotations

from typing import Any


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text of any length, with the special tokens that the model expects."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids
