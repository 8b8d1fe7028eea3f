"""How option groups refuse a value: one line that names the option, its value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predictor.errors import FadeError


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number of at least ``least``."""
    if not is_whole(value) or value < least:
        raise FadeError(f"{name} {value!r} is not a whole number of at least {least}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse what is none of the choices."""
    if value not in choices:
        raise FadeError(f"{name} {value!r} is not one of {', '.join(map(str, choices))}")


def check_fraction(name: str, value: Any) -> None:
    """Refuse what is not in (0, 1]."""
    if not 0 < value <= 1:
        raise FadeError(f"{name} {value!r} is not a share in (0, 1]")


def check_budget(name: str, budget: Any, *words: str) -> None:
    """Refuse what is neither a number of tokens, nor a fraction of the context, nor one of ``words``, nor None."""
    if budget is None or budget in words:
        return
    if (is_whole(budget) and budget >= 0) or (isinstance(budget, float) and 0 < budget <= 1):
        return
    raise FadeError(
        f"{name} {budget!r} is neither a whole number of tokens (at least 0), nor a share of the context "
        f"(a float in (0, 1]), nor {' nor '.join([*map(repr, words), 'None'])}"
    )
