"""The tokens of one layer by tier, and how they move between tiers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor

from fade_runtime.attention import FullTokens
from fade_runtime.config import FadeConfig
from fade_runtime.kernels.reference import Part, decoded
from fade_runtime.packed import PackedTokens, pack_tokens
from fade_runtime.tiers import Tier, rank_in_row
from predictor.errors import FadeError

if TYPE_CHECKING:
    from fade_runtime.pq import LayerCodebook, PQTokens

Body = Union[PackedTokens, "PQTokens"]
# rows, slots, statistics or None, present tiers of body tokens, each [T] -> the tiers they are to have
Planner = Callable[[Tensor, Tensor, "Tensor | None", Tensor], Tensor]


class TokenStore:
    """Sinks and newest tokens in full precision, the body packed or product-quantised, the rest gone.

    Args:
        config: options of the cache.
        key, value: [B, H, Q, D] of the first tokens, for their shapes, dtype and device; they are not stored.
        state: whether to keep a statistic for each token.
        codebook: of the layer, for the PQ tier.
        profiled: whether each kv head has a policy of its own (:mod:`fade_runtime.fastgen`).

    Attributes:
        full: full-precision tokens: everything until the first compression, then sinks and newest.
        packed: the INT4 tier and the INT2 tier.
        pq: the PQ tier, or None if there is none.
        policies: [B, H] int8 policy of each kv head (``fastgen.Keeps``), or None.
        pad: [B] int64 slots of left padding in each row.
        shift: [B] int64 slot less position id.
        seen: logical tokens, padding included.
        evicted: tokens that left, over all rows.
    """

    def __init__(
        self,
        config: FadeConfig,
        key: Tensor,
        value: Tensor,
        *,
        state: bool,
        codebook: LayerCodebook | None = None,
        profiled: bool = False,
    ) -> None:
        batch, heads, _, dim = key.shape
        if dim % 4 or value.shape[3] % 4:
            raise FadeError(
                f"head dim {dim} is no multiple of 4, so that it cannot be packed; use transformers' cache"
            )
        slots = torch.zeros(batch, 0, dtype=torch.int32, device=key.device)
        statistics = slots.new_zeros(batch, heads, 0, dtype=torch.float32) if state else None
        self.config = config
        self.full = FullTokens(key[:, :, :0], value[:, :, :0], slots, statistics)
        self.packed = PackedTokens.empty(
            dim,
            key.device,
            value_dim=value.shape[3],
            bits=config.bits,
            state=state,
            pq=0 if codebook is None else codebook.width,
        )
        self.pq: PQTokens | None = None
        if codebook is not None:
            from fade_runtime.pq import PQTokens

            self.pq = PQTokens.empty(batch * heads, codebook, key.device, state=state)
        self.policies = slots.new_zeros(batch, heads, dtype=torch.int8) if profiled else None
        self.pad = torch.zeros(batch, dtype=torch.long, device=key.device)
        self.shift = torch.zeros_like(self.pad)
        self.seen = self.evicted = 0

    @property
    def heads(self) -> int:
        """Kv heads."""
        return self.full.key.shape[1]

    @property
    def compressed(self) -> bool:
        """Whether any token has left full precision."""
        return self.evicted > 0 or len(self.full) < self.seen or any(len(tokens) for tokens in self.body())

    def body(self) -> list[Body]:
        """The tiers below full precision, those that exist."""
        return [self.packed] if self.pq is None else [self.packed, self.pq]

    def position_ids(self, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """Original position ids of slots [B, n], or of slots [T] of rows [T] (batch x kv head)."""
        shift = self.shift[:, None] if rows is None else self.shift[rows // self.heads]
        return (slots - shift).clamp(min=0)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Take in the next tokens [B, H, Q, D]."""
        full, steps = self.full, key.shape[2]
        slots = torch.arange(self.seen, self.seen + steps, dtype=torch.int32, device=key.device)
        state = full.state
        if state is not None:
            state = torch.cat((state, state.new_zeros(*key.shape[:3])), dim=2)
        self.full = FullTokens(
            torch.cat((full.key, key), dim=2),
            torch.cat((full.value, value), dim=2),
            torch.cat((full.slots, slots.expand(key.shape[0], -1)), dim=1),
            state,
        )
        self.seen += steps

    def take_back(self, count: int) -> None:
        """Forget the newest ``count`` tokens.

        Raises:
            FadeError: some of them have left full precision already.
        """
        free = len(self.full) - (self.config.n_sink if self.compressed else 0)
        if count > free:
            raise FadeError(
                f"cannot take back {count} tokens: only the newest {free} are in full precision; raise recent_window"
            )
        keep = torch.arange(len(self.full) - count, device=self.pad.device)
        self.full = self._columns(keep.expand(len(self.pad), -1))
        self.seen -= count

    def select(self, index: Tensor) -> None:
        """Keep rows [n] of the batch, in the given order, as often as named."""
        full, heads = self.full, self.heads
        state = None if full.state is None else full.state[index]
        self.full = FullTokens(full.key[index], full.value[index], full.slots[index], state)
        self.pad, self.shift = self.pad[index], self.shift[index]
        self.policies = None if self.policies is None else self.policies[index]
        rows = (index[:, None] * heads + torch.arange(heads, device=index.device)).flatten()
        self.packed = self.packed.select_rows(rows)
        self.pq = None if self.pq is None else self.pq.select_rows(rows)

    def compress(self, upto: int, plan: Planner) -> None:
        """Move what has left the window into the body, and the body's tokens to the tiers that a plan gives them.

        Args:
            upto: logical tokens that count as seen; the window is the last of them.
            plan: decides.
        """
        full, heads, columns = self.full, self.heads, len(self.full)
        from_recent = upto - self.config.recent_window
        leaving = (full.slots >= self.pad[:, None] + self.config.n_sink) & (
            full.slots < from_recent
        )  # [B, n]
        row, column = leaving[:, None].expand(-1, heads, -1).reshape(-1, columns).nonzero(as_tuple=True)
        slot = full.slots[row // heads, column].long()
        state = None if full.state is None else full.state.reshape(-1, columns)[row, column]

        body = self.body()
        states = [tokens.state for tokens in body] + [state]
        counts = [len(tokens) for tokens in body] + [len(row)]
        tiers = plan(
            torch.cat([tokens.token_row() for tokens in body] + [row]),
            torch.cat([tokens.slots() for tokens in body] + [slot]),
            None if state is None else torch.cat([each for each in states if each is not None]),
            torch.cat([self.tiers(tokens) for tokens in body] + [torch.full_like(row, Tier.INT4)]),
        )
        packed_tiers, *pq_tiers, new = tiers.split(counts)

        stays = new != Tier.EVICTED
        row, column, slot, new = row[stays], column[stays], slot[stays], new[stays]
        state = None if state is None else state[stays]
        key, value = (t.flatten(0, 1)[row, column] for t in (full.key, full.value))
        codes = None if self.pq is None else self.pq.codebook.encode(key, value)
        fresh, packs = (codes, row, slot, state), new != Tier.PQ
        added = pack_tokens(
            key[packs],
            value[packs],
            row[packs],
            slot[packs],
            None if state is None else state[packs],
            low=new[packs] == Tier.INT2,
            bits=self.config.bits,
            pq_codes=None if codes is None else codes[packs],
        )
        if self.pq is not None:
            self.pq = self._to_pq(packed_tiers == Tier.PQ, pq_tiers[0] == Tier.PQ, fresh, ~packs)
        if bool((packed_tiers != self.tiers(self.packed)).any()):
            self.packed = self.packed.retier(packed_tiers)
        self.packed = self.packed.join(added)
        self.full = self._columns(self._staying(from_recent))
        self.evicted += int((tiers == Tier.EVICTED).sum())

    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor by its name: "pad", "shift", "policies"; ``full.``, ``packed.``, ``pq.`` and field."""
        full = {name: tensor for name, tensor in vars(self.full).items() if isinstance(tensor, Tensor)}
        parts = {
            "full": full,
            "packed": self.packed.tensors(),
            "pq": {} if self.pq is None else self.pq.tensors(),
        }
        found = {
            f"{part}.{name}": tensor for part, stored in parts.items() for name, tensor in stored.items()
        }
        rows = {"pad": self.pad, "shift": self.shift, "policies": self.policies}
        return {**found, **{name: tensor for name, tensor in rows.items() if tensor is not None}}

    def counts(self) -> dict[str, int]:
        """Tokens in each tier, summed over rows; padding is no token."""
        low, real = len(self.packed.low_key_codes), self.full.slots >= self.pad[:, None]
        kept = {
            "FP16": int(real.sum()) * self.heads,
            "INT4": len(self.packed) - low,
            "INT2": low,
            "PQ": 0 if self.pq is None else len(self.pq),
        }
        return {**kept, "EVICTED": int((self.seen - self.pad).sum()) * self.heads - sum(kept.values())}

    def body_size(self) -> tuple[int, int]:
        """Tokens of the body and the bytes that they take."""
        stored = [tensor for tokens in self.body() for tensor in tokens.tensors().values()]
        return sum(len(tokens) for tokens in self.body()), sum(t.untyped_storage().nbytes() for t in stored)

    def widths(self) -> tuple[int, int, float]:
        """Numbers of a key and a value together, bytes of each in full precision, bytes of both as INT4 codes."""
        key, value, bits = self.full.key, self.full.value, self.config.bits
        codes = (key.shape[3] * bits.key + value.shape[3] * bits.value) / 8
        return key.shape[3] + value.shape[3], key.element_size(), codes

    def tiers(self, tokens: Body) -> Tensor:
        """[T] int64 tier of each body token."""
        if isinstance(tokens, PackedTokens):
            return torch.where(tokens.low(), int(Tier.INT2), int(Tier.INT4))
        return torch.full_like(tokens.slots(), Tier.PQ)

    def _to_pq(
        self,
        demoted: Tensor,
        kept: Tensor,
        fresh: tuple[Tensor | None, Tensor, Tensor, Tensor | None],
        joins: Tensor,
    ) -> PQTokens:
        """The PQ tier with what is demoted to it from the packed tokens, and what joins it from full precision."""
        from fade_runtime.pq import PQTokens

        assert self.pq is not None
        packed = self.packed
        ours = (packed.pq_codes, packed.token_row(), packed.slots(), packed.state)
        old = self.pq.keep(kept)
        for (codes, row, slot, state), chosen in ((ours, demoted), (fresh, joins)):
            assert codes is not None
            more = PQTokens.make(
                codes[chosen],
                row[chosen],
                slot[chosen],
                count=len(self.pq.row_len),
                codebook=self.pq.codebook,
                state=None if state is None else state[chosen],
            )
            old = old.join(more)
        return old

    def _staying(self, from_recent: int) -> Tensor:
        """Columns [B, n_sink + window] of the full-precision tokens that stay; -1 where a short row has none."""
        full, device = self.full, self.pad.device
        sinks = self.pad[:, None] + torch.arange(self.config.n_sink, device=device)  # [B, n_sink] slots
        found = full.slots[:, None, :] == sinks[:, :, None]
        there = found.any(-1) & (sinks < from_recent)
        sinks = torch.where(there, found.int().argmax(-1), -1)
        recent = torch.arange(len(full) - min(self.seen - from_recent, len(full)), len(full), device=device)
        return torch.cat((sinks, recent.expand(sinks.shape[0], -1)), dim=1)

    def _columns(self, columns: Tensor) -> FullTokens:
        """Full-precision tokens at ``columns`` [B, n] (-1: a hole), copied."""
        full, index = self.full, columns.clamp(min=0)
        wide = index[:, None, :, None].expand(-1, self.heads, -1, -1)
        key, value = (t.gather(2, wide.expand(-1, -1, -1, t.shape[3])) for t in (full.key, full.value))
        slots = full.slots.gather(1, index).masked_fill(columns < 0, -1)
        state = None if full.state is None else full.state.gather(2, wide[..., 0])
        return FullTokens(key, value, slots, state)

    def set_newest_keys(self, key: Tensor) -> None:
        """Replace the keys of the newest tokens by [B, H, Q, D]."""
        older = self.full.key[:, :, : len(self.full) - key.shape[2]]
        self.full = replace(self.full, key=torch.cat((older, key.to(older.dtype)), dim=2))

    def contiguous(self) -> tuple[Tensor, list[Tensor]]:
        """Positions counted over the kept tokens of each row, oldest first.

        Returns:
            [B, H, n] int64 of the full-precision tokens (0 for padding and holes), and [T] of each tier of the body.
        """
        full, body = self.full, self.body()
        rows = torch.cat([tokens.token_row() for tokens in body])
        order = torch.cat([tokens.slots() for tokens in body]).argsort(stable=True)
        order = order[rows[order].argsort(stable=True)]
        rank = torch.empty_like(rows)
        rank[order] = rank_in_row(rows[order])
        real = full.slots >= self.pad[:, None]  # [B, n]
        is_sink = real & (full.slots < self.pad[:, None] + self.config.n_sink)
        sinks = is_sink.sum(1)  # [B]
        kept = torch.bincount(rows, minlength=len(self.pad) * self.heads).view(-1, self.heads, 1)  # [B, H, 1]
        at = (real.cumsum(1) - 1).clamp(min=0)[:, None] + kept * (real & ~is_sink)[:, None]
        return at, list((rank + sinks[rows // self.heads]).split([len(tokens) for tokens in body]))

    def dense(self, full_key: Tensor, read: Callable[[TokenStore, Body], Part]) -> tuple[Tensor, Tensor]:
        """All keys and values [B, H, S, D] in the model's dtype, if nothing was evicted.

        Args:
            full_key: [B, H, n, D] keys of the full-precision tokens, rotated.
            read: says how the keys of a tier are to be rotated.
        """
        full = self.full
        batch, heads = full.key.shape[:2]
        key, value = (t.new_zeros(batch, heads, self.seen, t.shape[3]) for t in (full.key, full.value))
        for tokens in self.body():
            row, slot = tokens.token_row(), tokens.slots()
            keys, values = decoded(read(self, tokens))
            key.flatten(0, 1)[row, slot] = keys.to(key.dtype)
            value.flatten(0, 1)[row, slot] = values.to(value.dtype)
        at, column = (full.slots >= 0).nonzero(as_tuple=True)
        for out, stored in ((key, full_key), (value, full.value)):
            out[at, :, full.slots[at, column].long()] = stored[at, :, column]
        return key, value


def check_tokens(layer: int, held: Tensor | None, key: Tensor, value: Tensor) -> None:
    """Refuse keys and values [B, H, Q, D] that a layer cannot take.

    Args:
        layer: its index. held: keys that it has, or None at the start.

    Raises:
        FadeError: another batch size, device or dtype than before, or numbers that are not finite.
    """
    if held is not None and key.shape[0] != held.shape[0]:
        raise FadeError(
            f"the batch size changed from {held.shape[0]} to {key.shape[0]}; call cache.reset() before another batch"
        )
    for name in () if held is None else ("device", "dtype"):
        before, now = getattr(held, name), getattr(key, name)
        if before != now:
            raise FadeError(
                f"layer {layer} holds tokens of {name} {before}, the model now gives {now}; call cache.reset()"
            )
    # a GPU would have to be waited for in each layer of each step
    if key.device.type != "cpu" or math.isfinite(key.sum().item() + value.sum().item()):
        return
    for name, tensor in (("keys", key), ("values", value)):
        if not bool(tensor.isfinite().all()):  # else only their sum is out of range
            raise FadeError(f"layer {layer} was given {name} that are not finite; check the model's dtype and input")
