"""Every YAML under configs/ says what it does, and is taken by the command that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.commands import ROOT, run_command

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
LABELS = ("cost", "command", "writes")


def opening(path: Path) -> str:
    """The comment that a config opens with, less its hashes."""
    lines = path.read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:end])


def command_of(path: Path) -> list[str]:
    """The command that a config's opening comment names."""
    found = re.search(r"(?im)^command:\s*(.+?)(?:\s{3,}.*)?$", opening(path))
    assert found, f"{path.name} names no command"
    return shlex.split(found[1])


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 7


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_opens_with_what_it_does_costs_runs_and_writes(path: Path) -> None:
    first, *rest = opening(path).splitlines()
    assert first.endswith(".")
    assert len(first) > 30
    labels = [line.split(":")[0].strip().lower() for line in rest if ":" in line]
    for label in LABELS:
        assert any(found.startswith(label) for found in labels), f"{path.name} does not say its {label}"
    assert f"--config configs/{path.name}" in opening(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_command_takes_every_key(path: Path) -> None:
    status, out, err = run_command([*command_of(path), "--print_config"])
    assert status == 0, err
    resolved, written = yaml.safe_load(out), yaml.safe_load(path.read_text())
    assert written
    _holds(resolved, written)


def _holds(resolved: object, written: object) -> None:
    """Everything that was written is in what the command understood."""
    if isinstance(written, dict):
        assert isinstance(resolved, dict)
        if "class_path" in resolved and "class_path" not in written:  # that of the default
            resolved = resolved["init_args"]
        for key, value in written.items():
            _holds(resolved[key], value)
    elif isinstance(written, list) and isinstance(resolved, list):
        assert list(resolved) == written
    else:
        assert resolved == written


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_wrong_key_is_one_line_that_names_it(path: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(path.read_text() + "\nno_such_option: 1\n")
    words = [str(wrong) if word == f"configs/{path.name}" else word for word in command_of(path)]
    status, out, err = run_command(words)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "no_such_option" in err
