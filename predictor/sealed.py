"""Directories of facts and tensors under one checksum: no digit of them changes unseen, nothing is read half-written.

Bundles, sessions and codebooks are such directories: facts in a JSON file, tensors in a safetensors file. The facts
hold the SHA-256 of the tensors' file, and their own text ends in the SHA-256 of all facts.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from predictor.errors import FadeError
from predictor.files import recover, sha256_file, write_aside

SEAL = "sha256"  # of the facts, in their own text
Header = dict[str, tuple[str, tuple[int, ...]]]  # of a safetensors file: name -> dtype, shape


def sealed(facts: Mapping[str, Any]) -> str:
    """The facts as JSON text that carries its own checksum.

    Example:
        >>> text = sealed({"version": 2})
        >>> is_sealed(text), is_sealed(text.replace("2", "3", 1)), is_sealed('{"version": 2}')
        (True, False, False)
    """
    plain = {name: value for name, value in facts.items() if name != SEAL}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    return json.dumps({**plain, SEAL: digest}, indent=1) + "\n"


def is_sealed(text: str) -> bool:
    """Whether a text is to the last byte what :func:`sealed` gave."""
    try:
        return sealed(json.loads(text)) == text
    except (ValueError, AttributeError, TypeError, RecursionError):  # no JSON, or no facts
        return False


@dataclass(frozen=True)
class Sealed:
    """A kind of directory.

    Attributes:
        noun: how messages call one, for example "bundle".
        facts, tensors: names of the two files.
        version: of the format that is written.
        oldest: version that is still read; those before ``sealed_since`` have no checksum over the facts, which a
            warning says.
        sealed_since: first version with one.
        remedy: what to do with a damaged one.
        absent: what to do where there is none.
        digest: name of the fact that holds the checksum of the tensors.
    """

    noun: str
    facts: str
    tensors: str
    version: int
    oldest: int
    sealed_since: int
    remedy: str
    absent: str
    digest: str = "weights_sha256"

    def refuse_other(self, path: Path) -> None:
        """Refuse a path where something else is.

        Raises:
            FadeError: it would be replaced.
        """
        if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / self.facts).is_file()):
            raise FadeError(f"{path} is there already and is not a {self.noun}; name another directory")

    def write(
        self,
        path: Path,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        more: Mapping[str, str] | None = None,
        *,
        shared: bool = True,
    ) -> Path:
        """Write a directory, whole or not at all; one of the same kind at ``path`` is replaced.

        Args:
            path: of the directory. facts: JSON-able. tensors: of any shape [...], by name.
            more: other text files, name -> text; they are not under the checksum.
            shared: whether others may read the tensors; safetensors writes for the owner only.

        Raises:
            FadeError: something else is at ``path``.
        """
        self.refuse_other(path)
        with write_aside(path) as aside:
            aside.mkdir()
            save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, aside / self.tensors)
            if shared:
                (aside / self.tensors).chmod(0o644)
            all_facts = {"version": self.version, **facts, self.digest: sha256_file(aside / self.tensors)}
            (aside / self.facts).write_text(sealed(all_facts), encoding="utf-8")
            for name, text in (more or {}).items():
                (aside / name).write_text(text, encoding="utf-8")
        return path

    def read_facts(self, path: Path, name: str) -> dict[str, Any]:
        """Read the facts and hold them to their checksum.

        Args:
            path: of the directory. name: how messages call it.

        Raises:
            FadeError: not there, damaged, or of a version that this release does not read.
        """
        what = f"{self.noun} {name}"
        if not path.exists():
            recover(path)
        if not path.is_dir():
            raise FadeError(f"there is no {self.noun} at {name}; {self.absent}")
        if not (path / self.facts).is_file():
            raise FadeError(f"{name} is not a {self.noun}: it has no {self.facts}; {self.absent}")
        try:
            text = (path / self.facts).read_bytes().decode("utf-8")
            facts = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.damaged(name, f"{self.facts} is not JSON") from error
        except OSError as error:
            raise self.damaged(name, f"{self.facts} cannot be read ({error.strerror})") from error
        version = facts.get("version") if isinstance(facts, dict) else None
        if type(version) is not int or version < 0:
            raise self.damaged(name, f"{self.facts} names no known format")
        if not self.oldest <= version <= self.version:
            reads = f"{self.version}" if self.oldest == self.version else f"{self.oldest} to {self.version}"
            remedy = "upgrade fade-predictor" if version > self.version else "use the release that wrote it"
            raise FadeError(f"{what} has format {version}, this release reads {reads}; {remedy}")
        if version >= self.sealed_since or SEAL in facts:
            if sealed(facts) != text:
                raise self.damaged(name, f"{self.facts} does not match its checksum")
        else:
            warnings.warn(
                f"{what} has format {version}, without a checksum over {self.facts}: a damaged number in it would not "
                f"be seen; load_{self.noun}(...).save(path) writes one of format {self.version}",
                stacklevel=3,
            )
        return facts

    def read_tensors(
        self, path: Path, name: str, facts: Mapping[str, Any], check: Callable[[Header], None] = lambda _: None
    ) -> dict[str, Tensor]:
        """Read the tensors, held to the checksum in the facts.

        Args:
            path: of the directory. name: how messages call it. facts: its facts.
            check: gets dtypes and shapes before any tensor is allocated, and raises.

        Returns:
            tensors [...] by name, on the CPU, of the dtypes and shapes that were written.

        Raises:
            FadeError: damaged.
        """
        file = path / self.tensors
        try:
            if sha256_file(file) != facts.get(self.digest):
                raise self.damaged(name, f"{self.tensors} does not match its checksum")
            check(header(file))
            return load_file(file)
        except OSError as error:
            raise self.damaged(name, f"{self.tensors} cannot be read") from error
        except SafetensorError as error:
            raise self.damaged(name, f"{self.tensors} is not a whole safetensors file") from error

    def damaged(self, name: str, why: str) -> FadeError:
        """The error that says what is wrong with one."""
        return FadeError(f"{self.noun} {name} is damaged: {why}; {self.remedy}")


def header(path: Path) -> Header:
    """Dtypes and shapes of a safetensors file, which is mapped and not read.

    Raises:
        SafetensorError: it is none.
    """
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
