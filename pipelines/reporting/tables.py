"""Tables as text: Markdown for reports, columns for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


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


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines)]


def _padded(line: Sequence[str], widths: Sequence[int], words: int) -> list[str]:
    return [cell.ljust(width) if i < words else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))]
