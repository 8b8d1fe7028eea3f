"""What every kind of stored tokens can do, whatever its bytes mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound="StoredTokens")


class StoredTokens(Protocol):
    """T tokens of one layer in R rows (batch x kv head), row after row; a row keeps as many as it keeps.

    A frozen dataclass: every change is a new object, :func:`dataclasses.replace` included.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def attention_stats(self) -> Tensor | None:
        """[T] float32 statistics of the policy, or None."""

    def __len__(self) -> int:
        """T: tokens over all rows."""

    def token_row(self) -> Tensor:
        """[T] int64: the row of each token, ascending."""

    def slots(self) -> Tensor:
        """[T] int64: the logical slot of each token."""

    def tiers(self) -> Tensor:
        """[T] int64 :class:`~fade_runtime.storage.tiers.Tier` of each token."""

    def keep(self: T, kept: Tensor) -> T:
        """Return the tokens of a [T] bool mask."""

    def select_rows(self: T, rows: Tensor) -> T:
        """Return rows by index [R'] int64, in that order and as often as named (beam search, batch selection)."""

    def join(self: T, other: T) -> T:
        """Return the union: within each row the tokens of ``self`` first, then those of ``other``."""

    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor by its name; the first dim of each counts tokens, pages or rows."""

    def key_decoder(self) -> Callable[[slice], Tensor]:
        """Function from a slice of t tokens to their keys [t, D] float32, as they were before they were stored."""

    def value_decoder(self) -> Callable[[slice], Tensor]:
        """Function from a slice of t tokens to their values [t, D] float32."""


def joined(first: Sequence[StoredTokens], second: Sequence[StoredTokens]) -> list[Any]:
    """Join the tokens of two lists, which have the same kinds in the same order; an empty list has no tokens."""
    if not first or not second:
        return list(first or second)
    return [ours.join(theirs) for ours, theirs in zip(first, second, strict=True)]


def none_of(tokens: T) -> T:
    """The same kind of tokens in the same rows, none of them."""
    return tokens.keep(torch.zeros(len(tokens), dtype=torch.bool, device=tokens.slots().device))
