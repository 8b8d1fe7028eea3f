"""The tokens of one layer by tier; how they move between tiers is in :mod:`fade_runtime.layer.movement`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fade_runtime.config.config import FadeConfig
from fade_runtime.layer.attention import FullTokens
from fade_runtime.layer.sequences import Sequences
from fade_runtime.policies.comparison import POINTS
from fade_runtime.storage.packed import PackedTokens
from fade_runtime.storage.pq import LayerCodebook, PQTokens
from fade_runtime.storage.spill import Spill, SpilledTokens
from fade_runtime.storage.tokens import StoredTokens, joined
from predictor.errors import FadeError


class BodyTokens(NamedTuple):
    """Tokens between sinks and recent window, of all rows.

    Attributes:
        rows: [T] int64 row (batch x kv head). slots: [T] int64. attention_stats: [T] float32, or None.
        tiers: [T] int64 present tiers.
    """

    rows: Tensor
    slots: Tensor
    attention_stats: Tensor | None
    tiers: Tensor


class TokenStore:
    """Sinks and newest tokens in full precision, the body packed or product-quantised, the rest gone.

    Args:
        config: options of the cache.
        key, value: [B, H, Q, D] of the first tokens, for their shapes, dtype and device; they are not stored.
        keeps_stats: whether to keep a statistic for each token.
        codebook: of the layer, for the PQ tier.
        profiled: whether kv heads have profiles (:meth:`fade_runtime.policies.Policy.profile`).
        shares: whether rows have more or fewer tokens than their own budgets.
        compares: whether tokens of different rows are compared by :mod:`fade_runtime.policies.comparison`.
        spill: where evicted tokens go, or None.
        window: tokens that a query attends to, itself included; None: all.

    Attributes:
        full: full-precision tokens: everything until the first compression, then sinks and newest.
        packed: the high tier and the low tier.
        pq: the PQ tier, or None if there is none.
        profiles: [B, H] int8 what each kv head is to keep of the text (:meth:`Policy.profile`), or None.
        extra: [B, H, 2] int32 how many tokens more or fewer than by itself each row has in the high and in the low tier
            when tokens move (:mod:`fade_runtime.layer.allocation`), or None.
        comparisons: [B, H, 2, POINTS] float32 that take statistics to comparable scores, or None.
        spilled: evicted tokens that can come back, or None. back: those, in the view that :meth:`whole` gives.
        sequences: which columns are tokens of which row; a token's slot is its place among them.
        moved: the slot up to which each row's tokens have left full precision, sinks excepted.
        oldest: the first slot of any row whose token is not gone since it left the window.
        seen: columns, padding included.
        evicted: tokens that left and are not back, over all rows.
    """

    def __init__(
        self,
        config: FadeConfig,
        key: Tensor,
        value: Tensor,
        *,
        keeps_stats: bool,
        codebook: LayerCodebook | None = None,
        profiled: bool = False,
        shares: bool = False,
        compares: bool = False,
        spill: Spill | None = None,
        window: int | None = None,
    ) -> None:
        batch, heads, _, dim = key.shape
        if dim % 4 or value.shape[3] % 4:
            raise FadeError(f"head dim {dim} is no multiple of 4, so that it cannot be packed; use transformers' cache")
        slots = torch.zeros(batch, 0, dtype=torch.int32, device=key.device)
        statistics = slots.new_zeros(batch, heads, 0, dtype=torch.float32) if keeps_stats else None
        self.config = config
        self.full = FullTokens(key[:, :, :0], value[:, :, :0], slots, statistics)
        self.packed = PackedTokens.empty(
            dim,
            key.device,
            value_dim=value.shape[3],
            bits=config.bits,
            page_tokens=config.page_tokens,
            keeps_stats=keeps_stats,
            pq=0 if codebook is None else codebook.width,
        )
        self.pq = (
            None if codebook is None else PQTokens.empty(batch * heads, codebook, key.device, keeps_stats=keeps_stats)
        )
        self.profiles = slots.new_zeros(batch, heads, dtype=torch.int8) if profiled else None
        self.extra = slots.new_zeros(batch, heads, 2) if shares else None
        self.comparisons = slots.new_zeros(batch, heads, 2, POINTS, dtype=torch.float32) if compares else None
        self.spilled = None if spill is None else SpilledTokens(spill, key.device)
        self.back: list[StoredTokens] = []
        self.sequences = Sequences(0, batch, key.device)
        self.moved = [0] * batch
        self.window = window
        self.seen = self.evicted = self.oldest = 0

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.full.key.shape[0]

    @property
    def heads(self) -> int:
        """Kv heads."""
        return self.full.key.shape[1]

    @property
    def compressed(self) -> bool:
        """Whether any token has left full precision."""
        return self.evicted > 0 or len(self.full) < self.seen or any(len(tokens) for tokens in self.body())

    def body(self) -> list[StoredTokens]:
        """The tiers below full precision, those that exist."""
        return [*self._tiers(), *self.back]

    def _tiers(self) -> list[StoredTokens]:
        """The packed tokens, then the product-quantised ones, if there is such a tier."""
        return [self.packed] if self.pq is None else [self.packed, self.pq]

    def whole(self) -> TokenStore:
        """A view of the same tokens with the spilled ones among them, to be read and then forgotten."""
        view = copy.copy(self)
        if self.spilled is not None:
            view.back = [body for bodies in self.spilled.read() for body in bodies if len(body)]
        return view

    def restore(self, chosen: Callable[[StoredTokens], Tensor] | None = None) -> int:
        """Bring spilled tokens back, all or those that a function of a tier chooses, [T] bool; returns their number."""
        return 0 if self.spilled is None else self.take_in(self.spilled.take(chosen))

    def take_in(self, bodies: Sequence[StoredTokens]) -> int:
        """Join tokens that were evicted to their tiers, one body for each tier or none; returns their number."""
        self.packed, *rest = joined(self._tiers(), list(bodies))
        self.pq = rest[0] if rest else None
        count = sum(map(len, bodies))
        self.evicted -= count
        return count

    def append(self, key: Tensor, value: Tensor) -> None:
        """Take in the next columns [B, H, Q, D]; :meth:`set_sequences` says which of them are tokens."""
        full, steps = self.full, key.shape[2]
        slots = torch.constant_pad_nd(full.slots, (0, steps), self.seen)
        if steps > 1:
            slots[:, -steps:] += torch.arange(steps, dtype=torch.int32, device=key.device)
        grown = FullTokens(
            torch.cat((full.key, key), dim=2),
            torch.cat((full.value, value), dim=2),
            slots,
            None if full.attention_stats is None else torch.constant_pad_nd(full.attention_stats, (0, steps)),
        )
        for known in {"holes", "oldest"} & vars(full).keys():  # a new token changes neither
            vars(grown)[known] = vars(full)[known]
        seen = self.seen + steps
        self.full, self.seen = grown, seen  # together, so that no interrupt comes between

    def set_sequences(self, sequences: Sequences) -> None:
        """Say which of the newest columns are tokens, and which slots they have."""
        self.sequences = sequences
        if sequences.real is not None:
            slots = self.full.slots.clone()
            slots[:, slots.shape[1] - sequences.new :] = sequences.newest_slots().to(slots.dtype)
            self.full = replace(self.full, slots=slots)

    def take_back(self, count: int) -> tuple[Tensor, Tensor]:
        """Forget the newest n columns, all in full precision; returns their keys and values [B, H, n, D]."""
        full, left = self.full, len(self.full) - count
        taken = full.key[:, :, left:], full.value[:, :, left:]
        keep = torch.arange(left, device=full.slots.device)
        shorter = full.taken(keep.expand(len(full.slots), -1))
        sequences = self.sequences.cropped(count) if self.sequences.seen == self.seen else self.sequences
        seen = self.seen - count
        self.full, self.sequences, self.seen = shorter, sequences, seen  # together, so that no interrupt comes between
        return taken

    def select(self, index: Tensor, sequences: Sequences) -> None:
        """Keep rows [n] of the batch, in the given order, as often as named; ``sequences`` are theirs."""
        full, heads = self.full, self.heads
        stats = None if full.attention_stats is None else full.attention_stats[index]
        self.full = FullTokens(full.key[index], full.value[index], full.slots[index], stats)
        self.sequences = sequences
        same = len(set(self.moved)) == 1  # a GPU would be waited for
        self.moved = self.moved[:1] * len(index) if same else [self.moved[row] for row in index.tolist()]
        self.profiles = None if self.profiles is None else self.profiles[index]
        self.extra = None if self.extra is None else self.extra[index]
        self.comparisons = None if self.comparisons is None else self.comparisons[index]
        rows = (index[:, None] * heads + torch.arange(heads, device=index.device)).flatten()
        self.packed = self.packed.select_rows(rows)
        self.pq = None if self.pq is None else self.pq.select_rows(rows)
        if self.spilled is not None:
            self.take_in(self.spilled.select_rows(rows))

    def row(self, row: int) -> TokenStore:
        """A copy of one row of the batch, as if it were alone; :meth:`put_statistics` takes its statistics back."""
        view, full = copy.copy(self), self.full
        at = self._tokens_of(row)
        key, value = full.key[row : row + 1, :, at], full.value[row : row + 1, :, at]
        stats = None if full.attention_stats is None else full.attention_stats[row : row + 1, :, at]
        view.full = FullTokens(key, value, full.slots[row : row + 1, at], stats)
        rows = torch.arange(row * self.heads, (row + 1) * self.heads, device=at.device)
        view.packed = self.packed.select_rows(rows)
        view.pq = None if self.pq is None else self.pq.select_rows(rows)
        view.back = [tokens.select_rows(rows) for tokens in self.back]
        view.sequences, view.spilled = self.sequences.row(row), None
        view.seen = view.sequences.seen
        return view

    def put_statistics(self, row: int, view: TokenStore) -> None:
        """Take over the statistics of a row's view."""
        if self.full.attention_stats is not None and view.full.attention_stats is not None:
            self.full.attention_stats[row][:, self._tokens_of(row)] = view.full.attention_stats[0]
        for tokens, changed in zip(self.body(), view.body()):
            if tokens.attention_stats is not None and changed.attention_stats is not None:
                tokens.attention_stats[tokens.token_row() // self.heads == row] = changed.attention_stats

    def _tokens_of(self, row: int) -> Tensor:
        return (self.full.slots[row] >= 0).nonzero()[:, 0]

    def waiting(self, row: int) -> int:
        """Tokens of a row in full precision that are neither sinks nor in the window."""
        length = self.sequences.counts[row]
        return max(0, length - self.config.recent_window - max(self.config.n_sink, self.moved[row]))

    def body_tokens(self) -> BodyTokens:
        """Every body token."""
        body = self.body()
        all_stats = [tokens.attention_stats for tokens in body if tokens.attention_stats is not None]
        return BodyTokens(
            torch.cat([tokens.token_row() for tokens in body]),
            torch.cat([tokens.slots() for tokens in body]),
            torch.cat(all_stats) if all_stats else None,
            torch.cat([tokens.tiers() for tokens in body]),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor `[...]` by its name: ``full.``, ``packed.``, ``pq.`` and field; "policies" (profiles)."""
        full = {name: tensor for name, tensor in vars(self.full).items() if isinstance(tensor, Tensor)}
        parts = {
            "full": full,
            "packed": self.packed.tensors(),
            "pq": {} if self.pq is None else self.pq.tensors(),
        }
        found = {f"{part}.{name}": tensor for part, stored in parts.items() for name, tensor in stored.items()}
        by_head = {"policies": self.profiles, "extra": self.extra, "comparisons": self.comparisons}
        return found | {name: tensor for name, tensor in by_head.items() if tensor is not None}

    def counts(self) -> dict[str, int]:
        """Tokens in each tier, summed over rows; padding is no token."""
        low, real = len(self.packed.low_key_codes), self.full.slots >= 0
        kept = {
            "FULL": int(real.sum()) * self.heads,
            "HIGH": len(self.packed) - low,
            "LOW": low,
            "PQ": 0 if self.pq is None else len(self.pq),
        }
        gone = 0 if self.window is not None else sum(self.sequences.counts) * self.heads - sum(kept.values())
        return {**kept, "EVICTED": gone}

    def body_size(self) -> tuple[int, int]:
        """Tokens of the body and the bytes that they take."""
        stored = [tensor for tokens in self.body() for tensor in tokens.tensors().values()]
        return sum(len(tokens) for tokens in self.body()), sum(t.untyped_storage().nbytes() for t in stored)

    def set_newest_keys(self, key: Tensor) -> None:
        """Replace the keys of the newest tokens by [B, H, Q, D]."""
        older = self.full.key[:, :, : len(self.full) - key.shape[2]]
        self.full = replace(self.full, key=torch.cat((older, key.to(older.dtype)), dim=2))
