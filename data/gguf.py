"""GGUF files: inside packages and wheels, whole or in parts, and what a model loaded from one must forget."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from predictor.errors import FadeError

SUFFIX = ".gguf"
_PART = re.compile(r"(.+\.gguf)\.part(\d+)")


def is_gguf(name: str | Path) -> bool:
    """Tell a GGUF file by its name.

    Example:
        >>> is_gguf("models/gemma-3-270m-q4_k_m.gguf"), is_gguf("org/name")
        (True, False)
    """
    return Path(name).suffix.lower() == SUFFIX


def refuse_missing_readers() -> None:
    """Refuse to go on where a package that transformers reads GGUF files with is not installed.

    Raises:
        FadeError: names it.
    """
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise FadeError(f"package {needed} is not installed; it reads GGUF files: pip install {needed}")


def forget_quantiser(model: Any) -> None:
    """Let a model whose weights were de-quantised as they were read be what it is, a plain one, which can be saved."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def in_package(package: str) -> list[Any]:
    """Find the GGUF file that a package holds, without importing it: the whole file, or its parts in order.

    Parts are called ``NAME.gguf.part00``, ``.part01``, and so on; the packages that this one requires may hold them.

    Args:
        package: name of an installed package, or a wheel; those that it requires then lie beside it.

    Returns:
        Paths, on disk or in a wheel.

    Raises:
        FadeError: no such package, one that it requires is missing, no GGUF file or more than one, a missing part.

    Example:
        >>> in_package("numpy")
        Traceback (most recent call last):
            ...
        predictor.errors.FadeError: package numpy holds no GGUF file; name one that does, or a file (gguf)
    """
    found, missing = _distributions(package)
    whole = [path for path in _paths(found[:1]) if is_gguf(path.name)]
    parts = [] if whole else [path for path in _paths(found) if _PART.fullmatch(path.name)]
    names = sorted({path.name for path in whole} | {_PART.sub(r"\1", path.name) for path in parts})
    if missing and not whole:
        raise FadeError(
            f"package {package} requires {missing[0]}, which is not there; get it too, for it may hold parts"
        )
    if len(names) != 1:
        held = f"the GGUF files {', '.join(names)}" if names else "no GGUF file"
        raise FadeError(
            f"package {package} holds {held}; name one that {'holds one' if names else 'does'}, or a file (gguf)"
        )
    return whole or _in_order(parts, package)


def join(parts: Sequence[Any], folder: Path) -> Path:
    """The file itself if it lies whole on disk, else one in ``folder`` of the parts' bytes."""
    first = parts[0]
    if len(parts) == 1 and isinstance(first, Path) and is_gguf(first):
        return first
    whole = folder / (_PART.sub(r"\1", first.name))
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 20)
    return whole


def _in_order(parts: Sequence[Any], package: str) -> list[Any]:
    numbered = {int(_PART.fullmatch(path.name)[2]): path for path in parts}  # type: ignore[index]
    first = min(min(numbered), 1)  # counted from 0 or from 1
    wanted = range(first, max(numbered) + 1)
    if lacking := [number for number in wanted if number not in numbered]:
        raise FadeError(f"package {package} lacks part {lacking[0]} of its GGUF file; install the package of that part")
    return [numbered[number] for number in wanted]


def _distributions(package: str) -> tuple[list[Distribution], list[str]]:
    """A package, then those that it requires without a condition, and the names of those that are not there."""
    wheel = Path(package) if package.endswith(".whl") else None
    name = wheel.name.partition("-")[0] if wheel else package
    places: dict[str, Any] = {"path": [str(one) for one in sorted(wheel.parent.glob("*.whl"))]} if wheel else {}
    look_up = lambda name: next(iter(distributions(name=name, **places)), None)
    named = None if wheel and not wheel.is_file() else look_up(name)
    if named is None:
        raise FadeError(
            f"package {package} is not there; install it (pip install --no-deps {name}), or name a wheel of it"
        )
    required = [re.match(r"[\w.-]+", line) for line in named.requires or [] if ";" not in line]
    names = [match[0] for match in required if match]
    others = {name: look_up(name) for name in names}
    return [named, *filter(None, others.values())], [name for name, one in others.items() if one is None]


def _paths(packages: Sequence[Distribution]) -> list[Any]:
    return [package.locate_file(file) for package in packages for file in package.files or []]
