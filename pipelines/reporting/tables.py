"""Tables as text: Markdown for reports, columns for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """A Markdown table whose source is aligned too; all but the first ``words`` columns are numbers.

    Example:
        >>> print(markdown_table(("cache", "KL"), [("safe", "0.0012")], words=1))
        | cache |     KL |
        | ----- | -----: |
        | safe  | 0.0012 |
    """
    widths = _widths([columns, *lines])
    rule = [("-" * width if i < words else "-" * (width - 1) + ":") for i, width in enumerate(widths)]
    first, *rest = [_padded(line, widths, words) for line in [columns, *lines]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [first, rule, *rest])


def plain_table(columns: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """Columns for a terminal; all but the first ``words`` are numbers.

    Example:
        >>> print(plain_table(("by", "recovery"), [("net", "0.91"), ("ema", "")], words=1))
        by   recovery
        net      0.91
        ema
    """
    widths = _widths([columns, *lines])
    return "\n".join("  ".join(_padded(line, widths, words)).rstrip() for line in [columns, *lines])


def listed_options(configs: Mapping[str, Any]) -> str:
    """Configurations as a Markdown list, their options as JSON.

    Example:
        >>> print(listed_options({"k4v2": {"int4_budget": 0}}))
        - k4v2: `{"int4_budget": 0}`
    """
    return "\n".join(f"- {name}: `{json.dumps(options)}`" for name, options in configs.items())


def machine_line(machine: Mapping[str, Any], more: Mapping[str, str] | None = None) -> str:
    """What numbers were measured with, as a sentence.

    Args:
        machine: of :func:`pipelines.reporting.machine.machine`. more: versions of other packages.

    Example:
        >>> machine_line({"processor": "abacus", "threads": 1, "python": "3.11", "versions": {"torch": "2.11"}})
        'abacus, 1 threads; Python 3.11, torch 2.11.'
    """
    versions = ", ".join(f"{name} {number}" for name, number in {**machine["versions"], **(more or {})}.items())
    return f"{machine['processor']}, {machine['threads']} threads; Python {machine['python']}, {versions}."


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines)]


def _padded(line: Sequence[str], widths: Sequence[int], words: int) -> list[str]:
    return [cell.ljust(width) if i < words else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))]
