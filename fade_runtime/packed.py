"""Body tokens of one layer in their stored form: ragged rows, sealed pages, nothing dequantised."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from fade_runtime import quant
from fade_runtime.tiers import rank_in_row

BITS = 4


@dataclass(frozen=True)
class PackedTokens:
    """Packed keys and values of all rows (batch x kv head), row after row.

    T tokens in P pages over R rows; a row keeps as many tokens as it keeps, a page between 1 and 64 of them.

    Attributes:
        key_codes: [T, D / 2] uint8. key_scale, key_zero: [P, D] float16.
        value_codes: [T, D / 2] uint8. value_scale, value_zero: [T, groups] float16.
        page_len, page_row, page_slot: [P] int32: tokens left in a page, its row, and the slot of its first token.
        offset: [T] slot of a token less its page's ``page_slot``, in the smallest integer type that holds it.
        state: [T] float32 statistics of the policy, or None.
    """

    key_codes: Tensor
    key_scale: Tensor
    key_zero: Tensor
    value_codes: Tensor
    value_scale: Tensor
    value_zero: Tensor
    page_len: Tensor
    page_row: Tensor
    page_slot: Tensor
    offset: Tensor
    state: Tensor | None = None

    PER_PAGE: ClassVar = ("key_scale", "key_zero", "page_len", "page_row", "page_slot")

    def __len__(self) -> int:
        """Tokens over all rows."""
        return self.key_codes.shape[0]

    @classmethod
    def empty(cls, dim: int, device: torch.device, *, state: bool) -> PackedTokens:
        """No tokens, of head dim ``dim``, with or without statistics."""
        none = torch.zeros(0, dtype=torch.long, device=device)
        vectors = torch.zeros(0, dim, device=device)
        return pack_tokens(vectors, vectors, none, none, vectors[:, 0] if state else None)

    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor by its name."""
        stored = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in stored.items() if tensor is not None}

    def token_page(self) -> Tensor:
        """[T] int64: the page of each token."""
        pages = torch.arange(len(self.page_len), device=self.page_len.device)
        return pages.repeat_interleave(self.page_len.long(), output_size=len(self))

    def token_row(self) -> Tensor:
        """[T] int64: the row of each token."""
        return self.page_row.long().repeat_interleave(self.page_len.long(), output_size=len(self))

    def slots(self) -> Tensor:
        """[T] int64: the logical slot of each token."""
        return self.page_slot.long()[self.token_page()] + self.offset

    def _take(self, tokens: Tensor, pages: Tensor, **changes: Tensor) -> PackedTokens:
        picked = {
            name: tensor[pages if name in self.PER_PAGE else tokens]
            for name, tensor in self.tensors().items()
            if name not in changes
        }
        return replace(self, **picked, **changes)

    def keep(self, kept: Tensor) -> PackedTokens:
        """Return the tokens of a [T] bool mask; pages that end up empty go, scales stay with their pages."""
        left = torch.bincount(self.token_page()[kept], minlength=len(self.page_len)).to(torch.int32)
        pages = left > 0
        return self._take(kept, pages, page_len=left[pages])

    def select_rows(self, rows: Tensor) -> PackedTokens:
        """Return rows by index, in the given order and as often as named (beam search, batch selection)."""
        tokens, _ = _segments(self.token_row(), rows)
        pages, row_of_page = _segments(self.page_row.long(), rows)
        return self._take(tokens, pages, page_row=row_of_page.to(torch.int32))

    def join(self, other: PackedTokens) -> PackedTokens:
        """Return the union: within each row the tokens of ``self`` first, then those of ``other``."""
        if not len(self) or not len(other):
            return self if len(self) else other
        tokens = torch.cat((self.token_row(), other.token_row())).argsort(stable=True)
        pages = torch.cat((self.page_row, other.page_row)).argsort(stable=True)
        theirs = other.tensors()
        joined = {
            name: torch.cat((tensor, theirs[name]))[pages if name in self.PER_PAGE else tokens]
            for name, tensor in self.tensors().items()
        }
        return replace(self, **joined)


def _segments(owner: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the elements of ``rows`` one after the other, given their sorted ``owner``, and the new owner."""
    counts = torch.bincount(owner, minlength=int(rows.max()) + 1 if len(rows) else 0)
    starts = counts.cumsum(0) - counts
    owner_new = torch.arange(len(rows), device=rows.device).repeat_interleave(counts[rows])
    return starts[rows][owner_new] + rank_in_row(owner_new), owner_new


def pack_tokens(key: Tensor, value: Tensor, rows: Tensor, slots: Tensor, state: Tensor | None) -> PackedTokens:
    """Quantise tokens into fresh pages of up to 64.

    Args:
        key, value: [T, D] in any float dtype. rows: [T] sorted ascending. slots: [T] ascending within a row.
        state: [T] statistics or None.

    Example:
        >>> rows = torch.tensor([0] * 70 + [1] * 3)
        >>> packed = pack_tokens(torch.randn(73, 16), torch.randn(73, 16), rows, torch.arange(73), None)
        >>> packed.page_len.tolist(), packed.page_row.tolist(), len(packed.keep(packed.slots() > 68))
        ([64, 6, 3], [0, 0, 1], 4)
    """
    rank = rank_in_row(rows)
    opens = rank % quant.PAGE == 0
    page = opens.cumsum(0) - 1  # [T]
    page_row = rows[opens].to(torch.int32)
    page_len = torch.bincount(page, minlength=len(page_row)).to(torch.int32)
    key_codes, key_scale, key_zero = quant.quantise_keys(quant.hadamard(key.float()), page, len(page_row), BITS)
    value_codes, value_scale, value_zero = quant.quantise_values(quant.hadamard(value.float()), BITS)
    page_slot = slots[opens]
    return PackedTokens(
        key_codes=key_codes,
        key_scale=key_scale,
        key_zero=key_zero,
        value_codes=value_codes,
        value_scale=value_scale,
        value_zero=value_zero,
        page_len=page_len,
        page_row=page_row,
        page_slot=page_slot.to(torch.int32),
        offset=_smallest(slots - page_slot[page]),
        state=None if state is None else state.float(),
    )


def _smallest(offset: Tensor) -> Tensor:
    largest = int(offset.max()) if len(offset) else 0
    dtype = next(t for t in (torch.uint8, torch.int16, torch.int32) if largest <= torch.iinfo(t).max)
    return offset.to(dtype)
