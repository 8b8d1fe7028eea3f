"""Files of task records: JSON lines, or a dataset by name. A mistake in one is named by its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.reading import json_lines, proper
from predictor.errors import FadeError, first_line


class Record:
    """One record of a file, which knows where it stands.

    Attributes:
        fields: field -> value. where: file and line.
    """

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields, self.where = fields, where

    def text(self, name: str) -> str:
        """A field that is a text.

        Raises:
            FadeError: it is not there, or something else, or has half of a surrogate pair.
        """
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise FadeError(f"{self.where} has no text field {name!r} but {self._found(name)}")
        return proper(value, self.where)

    def texts(self, name: str) -> list[str]:
        """A field that is a list of texts, one at least.

        Raises:
            FadeError: it is not there, or something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            raise FadeError(f"{self.where} has no list of texts {name!r} but {self._found(name)}")
        return [proper(one, self.where) for one in value]

    def truth(self, name: str) -> bool:
        """A field that is true or false.

        Raises:
            FadeError: it is not there, or something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, bool):
            raise FadeError(f"{self.where} has no true or false field {name!r} but {self._found(name)}")
        return value

    def _found(self, name: str) -> str:
        return repr(self.fields[name])[:60] if name in self.fields else str(sorted(self.fields))


def records(source: str) -> Iterator[Record]:
    """Records of ``FILE.jsonl``, or of ``hf:NAME``, ``hf:NAME:CONFIG``, ``hf:NAME:CONFIG:SPLIT`` (test by default).

    Raises:
        FadeError: the file is absent, no text, or has a line that is no JSON object; the dataset cannot be loaded.
    """
    if source.startswith("hf:"):
        yield from _dataset(source)
        return
    path = Path(source)
    if not path.is_file():
        raise FadeError(f"task file {path} is not there; give the folder by data, or the file or hf:NAME by files")
    empty = True
    for where, fields in json_lines(path, "task file"):
        empty = False
        yield Record(fields, where)
    if empty:
        raise FadeError(f"task file {path} is empty; get it again")


def _dataset(source: str) -> Iterator[Record]:
    """Stream a dataset; only a source that starts with ``hf:`` ever reaches the network."""
    from datasets import load_dataset  # three seconds

    name, config, split = (source.removeprefix("hf:").split(":") + ["", ""])[:3]
    try:
        rows = load_dataset(name, config or None, split=split or "test", streaming=True)
        for number, fields in enumerate(rows):
            yield Record(fields, f"{source} record {number}")
    except FadeError:
        raise
    except Exception as error:  # datasets raises many kinds, most of them with a page of text
        reason = first_line(error)
        raise FadeError(
            f"task records {source} cannot be loaded: {reason}; check name, config and split (hf:NAME:CONFIG:SPLIT)"
        ) from error
