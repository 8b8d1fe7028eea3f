"""The built-in corpus: real text that every machine with this project already has. Nothing is downloaded.

Four families to train on: the reference topics of the standard library, docstrings of its modules, source of its other
modules, and docstrings of installed scientific packages. A fifth to test on: what installed packages say of themselves
on their front pages. Files are read and parsed with ``ast``, never imported.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import random
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

from data.reading import read_text
from predictor.errors import FadeError

PACKAGES = ("networkx", "numpy", "pandas", "scipy", "sklearn", "sympy")  # dependencies of the dependencies
MIN_README = 4000  # characters
MIN_DOCSTRING = 400  # characters; shorter docstrings are mostly signatures
_LEFT_OUT = {
    "__pycache__", "_vendor", "conftest", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3",
    "pydoc_data", "site-packages", "test", "testing", "tests", "turtledemo",
}  # fmt: skip


class Text(NamedTuple):
    """A piece of text as its source gives it.

    Attributes:
        source: family, such as ``"topics"`` or ``"book.txt"``; documents are made of one source.
        origin: what it was cut from; two splits never share an origin.
        text: the text.
        whole: it is not cut at blank lines (a chat in its template).
    """

    source: str
    origin: str
    text: str
    whole: bool = False

    @property
    def record(self) -> str:
        """The file or record that it is a section of; a text of the built-in corpus is of a module or page."""
        return self.origin.rpartition(":")[0] or self.origin


def builtin_families(seed: int, only: str = "") -> list[Iterator[Text]]:
    """Open the families of the built-in corpus, each a lazy stream in an order drawn from ``seed``.

    Args:
        seed: of the order. only: the one family that is wanted, by default the four to train on; "readmes", what
            installed packages say of themselves, is there to test on, and comes by its name only.

    Raises:
        FadeError: there is no such family.

    Example:
        >>> topics = builtin_families(seed=0)[0]
        >>> next(topics).source
        'topics'
    """
    stdlib = _shuffled(python_files(Path(sysconfig.get_paths()["stdlib"])), seed)
    documented = [file for file in stdlib if not _reads_as_source(file)]
    families = {
        "topics": _topics(seed),
        "stdlib-docs": _docstrings("stdlib-docs", documented),
        "stdlib-source": _sources("stdlib-source", [file for file in stdlib if _reads_as_source(file)]),
        "package-docs": _docstrings("package-docs", _shuffled(_package_files(), seed)),
    }
    if not only:
        return list(families.values())
    families["readmes"] = _readmes(seed)
    if only not in families:
        raise FadeError(f"text source builtin:{only} is not known; the families are {', '.join(families)}")
    return [families[only]]


def _readmes(seed: int) -> Iterator[Text]:
    pages = dict(_page(one) for one in distributions())
    names = sorted(name for name, page in pages.items() if name and len(page) >= MIN_README)
    for name in random.Random(f"corpus {seed}").sample(names, len(names)):
        yield Text("readmes", f"readmes/{name}", pages[name].partition("\n\n")[2])


def _page(package: Distribution) -> tuple[str, str]:
    """What an installed package is called and says of itself; nothing where that is no UTF-8."""
    try:
        return package.metadata["Name"], package.read_text("METADATA") or ""
    except UnicodeDecodeError:
        return "", ""


def python_files(root: Path) -> list[tuple[str, Path]]:
    """List (dotted module name, file) of the modules under ``root``, without tests and vendored code, sorted."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # walks past what is left out
        for file in (Path(folder, name) for name in names):
            if file.suffix == ".py" and not file.stem.startswith("test_") and file.stem not in _LEFT_OUT:
                found.append((".".join(file.relative_to(root).with_suffix("").parts), file))
    return sorted(found, key=lambda one: one[1])


def docstrings(module: str, source: str) -> Iterator[tuple[str, str]]:
    r"""Yield (qualified name, docstring) of the module, its classes and functions; long ones only.

    Example:
        >>> code = "def f():\n    '''" + "Words of a docstring. " * 20 + "'''"
        >>> [name for name, _ in docstrings("m", code)]
        ['m.f']
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        name, node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= MIN_DOCSTRING:
                yield name, text
            inner = [n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
            stack.extend((f"{name}.{n.name}", n) for n in reversed(inner))


def _reads_as_source(file: tuple[str, Path]) -> bool:
    """Send a standard-library module to the source family or the docstring family, never to both."""
    return zlib.crc32(file[0].encode()) % 2 == 0


def _shuffled(files: list[tuple[str, Path]], seed: int) -> list[tuple[str, Path]]:
    return random.Random(f"corpus {seed}").sample(files, len(files))


def _package_files() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # finds a top-level package without importing it
        for folder in (spec.submodule_search_locations or []) if spec else []:
            found += [(f"{package}.{module}", file) for module, file in python_files(Path(folder))]
    return found


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except FadeError:  # other people's code, some of it in old encodings
        return ""


def _topics(seed: int) -> Iterator[Text]:
    from pydoc_data.topics import topics  # a third of a megabyte of text, and other families do without

    names = sorted(topics)
    for name in random.Random(f"corpus {seed}").sample(names, len(names)):
        yield Text("topics", f"topics/{name}", topics[name])


def _docstrings(family: str, files: list[tuple[str, Path]]) -> Iterator[Text]:
    for module, file in files:
        for name, text in docstrings(module, _read(file)):
            yield Text(family, module, f"{name}\n\n{text}\n")


def _sources(family: str, files: list[tuple[str, Path]]) -> Iterator[Text]:
    for module, file in files:
        if text := _read(file):
            yield Text(family, module, text)
