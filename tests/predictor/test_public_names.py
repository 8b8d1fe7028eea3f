"""The names that `predictor` and `data` export exist, and importing a package costs only what its name needs."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from tests.commands import ROOT

LOADED = "import sys; print(*sorted({{name.split('.')[0] for name in sys.modules}} & {heavy}))"


def heavy_after(statement: str) -> list[str]:
    """Heavy libraries that a fresh interpreter has loaded after a statement."""
    heavy = {"torch", "lightning", "mlflow", "torchmetrics", "transformers", "datasets", "pyarrow", "matplotlib"}
    command = [sys.executable, "-c", f"{statement}\n{LOADED.format(heavy=heavy)}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("package", ["predictor", "data"])
def test_public_names_exist(package: str) -> None:
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match=f"module {package} has no attribute nothing"):
        module.nothing  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import predictor, data", []),
        ("from predictor import *", ["torch"]),
        ("from data import load_documents, Text", ["pyarrow"]),
        ("from data import load_lm", ["torch"]),
    ],
)
def test_an_import_loads_what_the_name_needs(statement: str, loaded: list[str]) -> None:
    assert heavy_after(statement) == loaded
