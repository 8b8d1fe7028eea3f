"""Files of text and of JSON lines -> text: the one place where bytes become characters.

UTF-8, or UTF-16 and UTF-32 with a byte order mark. Marks are taken off and line ends are one character, so that every
system's files give the same text. What is no text is refused by file and byte, or by file and line.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from predictor.errors import FadeError

CHUNK = 1 << 20  # bytes
MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"  # a byte order mark, decoded
_MARKS = (  # UTF-32 first: its little-endian mark opens with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\3\4": "zip"}


def read_text(path: str | Path, what: str = "text source") -> str:
    r"""Read a file of text.

    Args:
        path: of the file. what: it is, as an error opens.

    Raises:
        FadeError: it cannot be read, is compressed or binary, or has a byte that is none of its encoding; names it.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "note.txt"
        >>> _ = path.write_bytes("\ufeffone\r\ntwo".encode("utf-16-le"))
        >>> read_text(path)
        'one\ntwo'
    """
    return "".join(_decoded(Path(path), what))


def json_lines(path: str | Path, what: str = "text source", remedy: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a file of JSON lines, one object a line; blank lines are passed over.

    Args:
        path: of the file. what: it is, as an error opens. remedy: closes the error of a line.

    Yields:
        Where the record stands (file and line), and the record.

    Raises:
        FadeError: as :func:`read_text`, or a line that is no JSON object; names the line.
    """
    remedy = remedy or "give one object a line"
    for number, line in enumerate(_lines(path, what), 1):
        if not line.strip():
            continue
        where = f"{what} {path} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(":")[0]
            raise FadeError(f"{where} is not JSON ({why}); {remedy}") from error
        if not isinstance(record, dict):
            raise FadeError(f"{where} is no object but {type(record).__name__}; {remedy}")
        yield where, record


def proper(text: str, where: str) -> str:
    r"""A text from elsewhere (a record, the command line) as a file of text would give it.

    Args:
        text: to look at. where: it stands, as an error opens.

    Returns:
        The text without a byte order mark before it, line ends as one character.

    Raises:
        FadeError: it holds half of a surrogate pair, which is no character.

    Example:
        >>> proper("\ufeffone\r\ntwo\r", "record")
        'one\ntwo\n'
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FadeError(
            f"{where} has half of a surrogate pair ({text[error.start]!a}) at character {error.start}, which is no "
            "character: write the whole pair, or take it out"
        ) from error
    return text.removeprefix(MARK).replace("\r\n", "\n").replace("\r", "\n")


def _lines(path: str | Path, what: str) -> Iterator[str]:
    """Lines of a file, cut at line ends alone (JSON may hold other separators)."""
    begun: list[str] = []
    for piece in _decoded(Path(path), what):
        first, *rest = piece.split("\n")
        begun.append(first)
        for line in rest:
            yield "".join(begun)
            begun = [line]
    yield "".join(begun)


def _decoded(path: Path, what: str) -> Iterator[str]:
    """Pieces of a file's text."""
    ends = io.IncrementalNewlineDecoder(None, translate=True)
    try:
        with open(path, "rb") as file:
            first = file.read(CHUNK)
            for magic, name in _PACKED.items():
                if first.startswith(magic):
                    raise FadeError(f"{what} {path} is compressed ({name}); unpack it")
            mark, encoding = next((each for each in _MARKS if first.startswith(each[0])), (b"", "utf-8"))
            decoder, read = codecs.getincrementaldecoder(encoding)(), len(mark)
            for chunk in chain([first[read:]], iter(lambda: file.read(CHUNK), b""), [None]):
                last = chunk is None
                held = len(decoder.getstate()[0])  # bytes of a character that the chunk before has cut
                try:
                    text = ends.decode(decoder.decode(chunk or b"", last), last)
                except UnicodeDecodeError as error:
                    place = read - held + error.start
                    raise FadeError(
                        f"{what} {path} is not {encoding.upper()}: byte {error.object[error.start]:#04x} at {place}; "
                        "save it as UTF-8"
                    ) from error
                if "\0" in text:
                    raise FadeError(
                        f"{what} {path} is not text but binary (it holds NUL, as UTF-16 without a byte order mark "
                        "does); save it as UTF-8"
                    )
                yield text
                read += len(chunk or b"")
    except FileNotFoundError as error:
        raise FadeError(f"{what} {path} is not there; check the path") from error
    except OSError as error:
        raise FadeError(f"{what} {path} cannot be read: {error.strerror}; check the file") from error
