"""Body tokens of one layer in their stored form: ragged rows, sealed pages, two tiers, nothing dequantised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fade_runtime.storage import quant
from fade_runtime.storage.codes import TwoTierCodes
from fade_runtime.storage.tiers import Tier, rank_in_row


class Bits(NamedTuple):
    """Bits of a key and of a value in the high tier, then in the low tier; each 2, 4 or 8."""

    key: int = 4
    value: int = 4
    low_key: int = 4
    low_value: int = 2


DEFAULT_BITS = Bits()


@dataclass(frozen=True)
class PackedTokens:
    """Packed keys and values of all rows (batch x kv head), row after row, page after page.

    T tokens, of which T4 in the high tier and T2 in the low tier, in P pages over R rows. A row keeps as many tokens
    as it keeps, a page between 1 and 64 of them: first those of the high tier, then the low ones, each by slot.
    Both tiers of a page share its scales: the codes of the low tier are the highest bits of those of the high tier.

    Attributes:
        key_codes, value_codes: [T4, D * bits / 8] uint8. low_key_codes, low_value_codes: [T2, D * bits / 8] uint8.
        key_scale, key_zero: [P, D] uint8, key_reach: [P, 3] float16: scale and zero of the high tier's codes, as
            :func:`fade_runtime.storage.quant.page_affine` writes them.
        value_scale, value_zero: [T, groups] float16, of the high tier's codes, as
            :func:`fade_runtime.storage.quant.affine` writes them.
        page_len, page_low, page_row, page_slot: [P] int32: tokens left in a page, how many of them are low, its row,
            and the slot of its first token.
        offset: [T] slot of a token less its page's ``page_slot``, in the smallest integer type that holds it.
        bits: of the codes. page_tokens: most tokens of a page.
        attention_stats: [T] float32 statistics of the policy, or None.
        pq_codes: [T, n] uint8 product-quantised form that a token will be demoted to, or None.
    """

    key_codes: Tensor
    value_codes: Tensor
    low_key_codes: Tensor
    low_value_codes: Tensor
    key_scale: Tensor
    key_zero: Tensor
    key_reach: Tensor
    value_scale: Tensor
    value_zero: Tensor
    page_len: Tensor
    page_low: Tensor
    page_row: Tensor
    page_slot: Tensor
    offset: Tensor
    bits: Bits = DEFAULT_BITS
    page_tokens: int = quant.PAGE
    attention_stats: Tensor | None = None
    pq_codes: Tensor | None = None

    PER_PAGE: ClassVar = ("key_scale", "key_zero", "key_reach", "page_len", "page_low", "page_row", "page_slot")
    PER_HIGH: ClassVar = ("key_codes", "value_codes")
    PER_LOW: ClassVar = ("low_key_codes", "low_value_codes")
    READ: ClassVar = (  # what attention reads of them, in the order of the kernels' structures
        "page_len", "page_low", "key_codes", "low_key_codes", "value_codes", "low_value_codes",
        "key_scale", "key_zero", "key_reach", "value_scale", "value_zero",
        "page_slot", "offset", "page_row",
    )  # fmt: skip

    def __len__(self) -> int:
        """Tokens over all rows."""
        return self.offset.shape[0]

    @classmethod
    def empty(
        cls,
        dim: int,
        device: torch.device,
        *,
        value_dim: int | None = None,
        bits: Bits = DEFAULT_BITS,
        keeps_stats: bool = False,
        pq: int = 0,
        page_tokens: int = quant.PAGE,
    ) -> PackedTokens:
        """No tokens, of head dim ``dim``, with or without statistics and ``pq`` product-quantised codes."""
        none = torch.zeros(0, dtype=torch.long, device=device)
        key, value = (torch.zeros(0, width, device=device) for width in (dim, value_dim or dim))
        codes = torch.zeros(0, pq, dtype=torch.uint8, device=device) if pq else None
        statistics = key[:, 0] if keeps_stats else None
        return pack_tokens(key, value, none, none, statistics, bits=bits, pq_codes=codes, page_tokens=page_tokens)

    @functools.cached_property
    def derived(self) -> dict[str, Any]:
        """What a kernel computes from these tokens once and keeps with them, by a name; every copy begins anew."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: not what was derived, which may hold addresses of these very tensors."""
        return {name: each for name, each in vars(self).items() if name != "derived"}

    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor by its name; shapes as above."""
        stored = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in stored.items() if isinstance(tensor, Tensor)}

    @property
    def tile(self) -> int:
        """Tokens of a page's tile in a kernel: a power of two, at least 16."""
        return max(16, 1 << (self.page_tokens - 1).bit_length())

    def key_params(self, pages: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero of the keys' channels in some pages, [p, D] float32."""
        return quant.page_params(self.key_scale[pages], self.key_zero[pages], self.key_reach[pages])

    def value_params(self, tokens: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero of some tokens' values, [..., groups] float32."""
        return quant.params(self.value_scale[tokens], self.value_zero[tokens])

    @functools.cached_property
    def wide(self) -> bool:
        """Whether there are keys or values that float16 cannot describe (:func:`quant.is_wide`)."""
        return any(bool(quant.is_wide(each).any()) for each in (self.key_reach[:, :1], self.value_scale))

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

    def low(self) -> Tensor:
        """[T] bool: the tokens of the low tier."""
        if not len(self.low_key_codes):
            return torch.zeros_like(self.offset, dtype=torch.bool)
        page = self.token_page()
        return rank_in_row(page) >= (self.page_len - self.page_low).long()[page]

    def tiers(self) -> Tensor:
        """[T] int64 tier of each token, HIGH or LOW."""
        return torch.where(self.low(), int(Tier.LOW), int(Tier.HIGH))

    def codes(self, name: Literal["key", "value"]) -> TwoTierCodes:
        """The codes of keys or of values, to be read some tokens at a time."""
        high, low = getattr(self, f"{name}_codes"), getattr(self, f"low_{name}_codes")
        bits, low_bits = getattr(self.bits, name), getattr(self.bits, f"low_{name}")
        return TwoTierCodes(high, low, bits, low_bits, self.low())

    def key_decoder(self) -> Callable[[slice], Tensor]:
        """Function from a slice of t tokens to their keys [t, D] float32, rotated back."""
        page, codes = self.token_page(), self.codes("key")

        def decode(tokens: slice) -> Tensor:
            scale, zero = self.key_params(page[tokens])
            return quant.hadamard(codes(tokens, torch.float32) * scale + zero)

        return decode

    def value_decoder(self) -> Callable[[slice], Tensor]:
        """Function from a slice of t tokens to their values [t, D] float32, rotated back."""
        groups, codes = self.value_scale.shape[1], self.codes("value")

        def decode(tokens: slice) -> Tensor:
            scale, zero = self.value_params(tokens)  # [t, groups]
            values = codes(tokens, torch.float32).unflatten(-1, (groups, -1)) * scale[..., None] + zero[..., None]
            return quant.hadamard(values.flatten(-2))

        return decode

    def retier(self, tiers: Tensor) -> PackedTokens:
        """Return the tokens as a plan wants them: kept, demoted by code, or left out.

        Pages that end up empty go, scales stay with their pages, nothing is quantised again.

        Args:
            tiers: [T] of :class:`Tier`; LOW demotes a token of the high tier. Whatever is neither HIGH nor LOW
                leaves.
        """
        was_low, is_low = self.low(), tiers == Tier.LOW
        kept = is_low | (tiers == Tier.HIGH) & ~was_low
        page = self.token_page()
        chosen = kept.nonzero(as_tuple=True)[0]
        chosen = chosen[(page[chosen] * 2 + is_low[chosen]).argsort(stable=True)]
        left = torch.bincount(page[chosen], minlength=len(self.page_len))
        left_low = torch.bincount(page[is_low], minlength=len(self.page_len))
        pages = left > 0
        at_high = (~was_low).cumsum(0) - 1  # [T] a token's place among those of its tier
        at_low = was_low.cumsum(0) - 1
        high, low = chosen[~is_low[chosen]], chosen[is_low[chosen]]
        demoted = ~was_low[low]
        changes = {"page_len": left[pages].to(torch.int32), "page_low": left_low[pages].to(torch.int32)}
        for name, bits, low_bits in (
            ("key_codes", self.bits.key, self.bits.low_key),
            ("value_codes", self.bits.value, self.bits.low_value),
        ):
            codes, old = getattr(self, name), getattr(self, f"low_{name}")
            new = old.new_empty(len(low), old.shape[1])
            new[demoted] = quant.recode(codes[at_high[low[demoted]]], bits, low_bits)
            new[~demoted] = old[at_low[low[~demoted]]]
            changes[f"low_{name}"] = new
        return self._take(chosen, pages, at_high[high], None, **changes)

    def keep(self, kept: Tensor) -> PackedTokens:
        """Return the tokens of a [T] bool mask, each in its tier."""
        return self.retier(torch.where(kept, self.tiers(), int(Tier.EVICTED)))

    def select_rows(self, rows: Tensor) -> PackedTokens:
        """Return rows by index [R'] int64, in that order and as often as named (beam search, batch selection)."""
        owner, low = self.token_row(), self.low()
        tokens, high, lows = (_segments(each, rows)[0] for each in (owner, owner[~low], owner[low]))
        pages, row_of_page = _segments(self.page_row.long(), rows)
        return self._take(tokens, pages, high, lows, page_row=row_of_page.to(torch.int32))

    def join(self, other: PackedTokens) -> PackedTokens:
        """Return the union: within each row the tokens of ``self`` first, then those of ``other``."""
        if not len(self) or not len(other):
            return self if len(self) else other
        theirs = other.tensors()
        joined: dict[str, Any] = {name: torch.cat((t, theirs[name])) for name, t in self.tensors().items()}
        both = replace(self, **joined, page_tokens=max(self.page_tokens, other.page_tokens))
        owner = torch.cat((self.token_row(), other.token_row()))
        low = torch.cat((self.low(), other.low()))
        pages = torch.cat((self.page_row, other.page_row))
        return both._take(*(each.argsort(stable=True) for each in (owner, pages, owner[~low], owner[low])))

    def _take(self, tokens: Tensor, pages: Tensor, high: Tensor, low: Tensor | None, **changes: Tensor) -> PackedTokens:
        """Index every tensor by what its first dim counts."""
        index = {
            **dict.fromkeys(self.PER_PAGE, pages),
            **dict.fromkeys(self.PER_HIGH, high),
            **dict.fromkeys(self.PER_LOW, low),
        }
        picked: dict[str, Any] = {
            name: tensor[index.get(name, tokens)] for name, tensor in self.tensors().items() if name not in changes
        }
        return replace(self, **{**picked, **changes})


def _segments(owner: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the elements that belong to ``rows`` [R'], one row after the other, and the new owner of each.

    ``owner`` [N], ascending, is the row that each element belongs to.
    """
    counts = torch.bincount(owner, minlength=int(rows.max()) + 1 if len(rows) else 0)
    starts = counts.cumsum(0) - counts
    owner_new = torch.arange(len(rows), device=rows.device).repeat_interleave(counts[rows])
    return starts[rows][owner_new] + rank_in_row(owner_new), owner_new


class Quantised(NamedTuple):
    """Rotated, quantised and packed tokens; shapes as in :class:`PackedTokens`."""

    key_codes: Tensor
    key_scale: Tensor
    key_zero: Tensor
    key_reach: Tensor
    value_codes: Tensor
    value_scale: Tensor
    value_zero: Tensor


Quantiser = Callable[[Tensor, Tensor, Tensor, Bits], Quantised]  # arguments as those of :func:`quantise`


def quantise(key: Tensor, value: Tensor, page_len: Tensor, bits: Bits) -> Quantised:
    """Rotate, quantise and pack tokens, in plain torch.

    Args:
        key, value: [T, D] in any float dtype. page_len: [P] tokens of each page. bits: those of the high tier are used.

    Returns:
        codes of the high tier with their scales: of keys by page, of values by token.
    """
    pages = torch.arange(len(page_len), device=key.device)
    page = pages.repeat_interleave(page_len.long(), output_size=len(key))
    keys = quant.quantise_keys(quant.hadamard(key.float()), page, len(page_len), bits.key)
    return Quantised(*keys, *quant.quantise_values(quant.hadamard(value.float()), bits.value))


def pack_tokens(
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    slots: Tensor,
    stats: Tensor | None,
    *,
    low: Tensor | None = None,
    bits: Bits = DEFAULT_BITS,
    pq_codes: Tensor | None = None,
    page_tokens: int = quant.PAGE,
    quantise: Quantiser = quantise,
) -> PackedTokens:
    """Quantise tokens into fresh pages.

    Args:
        key, value: [T, D] in any float dtype. rows: [T] sorted ascending. slots: [T] ascending within a row.
        attention_stats: [T] statistics or None.
        low: [T] bool, the tokens that go to the low tier; None for none.
        bits: of the codes of both tiers.
        pq_codes: [T, n] uint8 to keep beside the codes, or None.
        page_tokens: most tokens of a page, whose keys share scales.
        quantise: what rotates, quantises and packs on the device of ``key``; plain torch by default.

    Example:
        >>> rows = torch.tensor([0] * 70 + [1] * 3)
        >>> packed = pack_tokens(torch.randn(73, 16), torch.randn(73, 16), rows, torch.arange(73), None)
        >>> packed.page_len.tolist(), packed.page_row.tolist(), len(packed.keep(packed.slots() > 68))
        ([64, 6, 3], [0, 0, 1], 4)
    """
    rank = rank_in_row(rows)
    opens = rank % page_tokens == 0
    page = opens.cumsum(0) - 1  # [T]
    page_row = rows[opens].to(torch.int32)
    page_len = torch.bincount(page, minlength=len(page_row)).to(torch.int32)
    quantised = quantise(key, value, page_len, bits)
    page_slot = slots[opens]
    packed = PackedTokens(
        **quantised._asdict(),
        low_key_codes=quantised.key_codes.new_empty(0, key.shape[1] * bits.low_key // 8),
        low_value_codes=quantised.key_codes.new_empty(0, value.shape[1] * bits.low_value // 8),
        page_len=page_len,
        page_low=torch.zeros_like(page_len),
        page_row=page_row,
        page_slot=page_slot.to(torch.int32),
        offset=_smallest(slots - page_slot[page]),
        bits=bits,
        page_tokens=page_tokens,
        attention_stats=None if stats is None else stats.float(),
        pq_codes=pq_codes,
    )
    if low is None or not bool(low.any()):
        return packed
    return packed.retier(torch.where(low, int(Tier.LOW), int(Tier.HIGH)))


def packed_bytes(
    key_dim: int, value_dim: int, bits: Bits = DEFAULT_BITS, page_tokens: int = quant.PAGE, *, keeps_stats: bool = False
) -> float:
    """Bytes of a token of the high tier in a full page, its share of the page included.

    Example:
        >>> packed_bytes(64, 64, page_tokens=32, keeps_stats=True) * 32
        2486.0
        >>> rows, x = torch.zeros(32, dtype=torch.long), torch.randn(32, 64)
        >>> stored = pack_tokens(x, x, rows, torch.arange(32), x[:, 0], page_tokens=32).tensors().values()
        >>> sum(tensor.nbytes for tensor in stored)
        2486
    """
    groups = quant.value_groups(value_dim)
    token = (key_dim * bits.key + value_dim * bits.value) / 8 + 2 * 2 * groups + 1 + 4 * keeps_stats
    return token + (2 * key_dim + 3 * 2 + 4 * 4) / page_tokens


def _smallest(offset: Tensor) -> Tensor:
    largest = int(offset.max()) if len(offset) else 0
    dtype = next(t for t in (torch.uint8, torch.int16, torch.int32) if largest <= torch.iinfo(t).max)
    return offset.to(dtype)
