"""At which positions the keys of a layer are read: those of the text, or contiguous over what was kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fade_runtime.kernels.reference import Part, decoded
from fade_runtime.layer.attention import FullTokens
from fade_runtime.layer.store import TokenStore
from fade_runtime.storage.tiers import rank_in_row
from fade_runtime.storage.tokens import StoredTokens
from predictor import rope


class Positions:
    """Rotates the keys of one layer with the model's own rotary module, in float32.

    Keys stay as the model gave them, or are stored plain, that is un-rotated, and rotated when they are read: at
    contiguous positions (streaming), or at those of the text (product quantisation, whose codebook serves all
    positions). A key is un-rotated in the call that brings it, by the angles that the model used in that call.

    Args:
        rotary: of the model, or None if positions enter in another way.
        layer: index of the layer.
        streaming: read keys at contiguous positions.
        plain: store keys un-rotated.
    """

    def __init__(self, rotary: rope.Rotary | None, layer: int, *, streaming: bool, plain: bool) -> None:
        self.rotary = rotary if rotary is not None and rotary.rotates(layer) and (streaming or plain) else None
        self.layer, self.streaming = layer, streaming

    @property
    def kept(self) -> bool:
        """Whether position ids are needed after the call that brings them."""
        return self.rotary is not None

    def _table(self, positions: Tensor) -> rope.Table:
        assert self.rotary is not None
        table = self.rotary.table(positions, self.layer)
        assert table is not None
        return table

    def _newest(self, store: TokenStore) -> rope.Table:
        """Angles [B, 1, Q] of the last call's columns."""
        sequences = store.sequences
        assert sequences.positions is not None
        return self._table(sequences.positions[:, sequences.seen - sequences.new :].long())[:, None]

    def take(self, store: TokenStore) -> None:
        """Store the keys of the last call's columns plain, if keys are stored un-rotated."""
        if self.rotary is not None and store.sequences.new:
            newest = store.full.key[:, :, len(store.full) - store.sequences.new :].float()
            store.set_newest_keys(rope.unrotate(newest, self._newest(store)))

    def full_key(self, store: TokenStore) -> Tensor:
        """[B, H, n, D] full-precision keys at their original positions; those of padding at any."""
        full = store.full
        if self.rotary is None:
            return full.key
        ids, index = store.sequences.distinct
        at = index.gather(1, full.slots.long().clamp(min=0))[:, None]
        return rope.rotate(full.key.float(), self._table(ids)[at]).to(full.key.dtype)

    def original(self, store: TokenStore, tokens: StoredTokens) -> Part:
        """A tier of the body, to be read at its original positions."""
        if self.rotary is None:
            return Part(tokens)
        ids, index = store.sequences.distinct
        return Part(tokens, self._table(ids), index[tokens.token_row() // store.heads, tokens.slots()])

    def read(self, store: TokenStore, query: Tensor) -> tuple[Tensor, FullTokens, list[Part]]:
        """The newest queries [B, Hq, Q, D], the full-precision tokens and the body, as attention is to read them."""
        full, steps = store.full, query.shape[2]
        if self.rotary is None or not self.streaming:
            parts = [self.original(store, tokens) for tokens in store.body() if len(tokens)]
            return query, full if self.rotary is None else replace(full, key=self.full_key(store)), parts
        at, body_at = contiguous(store)  # [B, H, n], and [T] of each tier
        table = self._table(torch.arange(int(at.max()) + 1, device=query.device))
        parts = [Part(tokens, table, where) for tokens, where in zip(store.body(), body_at) if len(tokens)]
        plain = rope.unrotate(query.float(), self._newest(store)[:, :, -steps:])
        rotated = rope.rotate(plain.unflatten(1, (store.heads, -1)), table[at[:, :, None, -steps:]])  # [B, H, G, Q, D]
        key = rope.rotate(full.key.float(), table[at]).to(full.key.dtype)
        return rotated.flatten(1, 2).to(query.dtype), replace(full, key=key), parts


def contiguous(store: TokenStore) -> tuple[Tensor, list[Tensor]]:
    """Positions counted over the kept tokens of each row, oldest first.

    Returns:
        [B, H, n] int64 of the full-precision tokens (any for padding), and [T] of each tier of the body.
    """
    full, body = store.full, store.body()
    rows = torch.cat([tokens.token_row() for tokens in body])
    order = torch.cat([tokens.slots() for tokens in body]).argsort(stable=True)
    order = order[rows[order].argsort(stable=True)]
    rank = torch.empty_like(rows)
    rank[order] = rank_in_row(rows[order])
    real = full.slots >= 0  # [B, n]
    is_sink = real & (full.slots < store.config.n_sink)
    sinks = is_sink.sum(1)  # [B]
    kept = torch.bincount(rows, minlength=store.batch * store.heads).view(-1, store.heads, 1)  # [B, H, 1]
    at = (real.cumsum(1) - 1).clamp(min=0)[:, None] + kept * (real & ~is_sink)[:, None]
    return at, list((rank + sinks[rows // store.heads]).split([len(tokens) for tokens in body]))


def dense(store: TokenStore, positions: Positions) -> tuple[Tensor, Tensor]:
    """All keys and values [B, H, S, D] in the model's dtype, by column, if nothing was evicted.

    They are 0 where padding is, and where a token has left its window.
    """
    full, columns = store.full, store.sequences.columns
    key, value = (t.new_zeros(store.batch, store.heads, store.seen, t.shape[3]) for t in (full.key, full.value))
    for tokens in store.body():
        row, slot = tokens.token_row(), tokens.slots()
        column = slot if columns is None else columns[row // store.heads, slot]
        keys, values = decoded(positions.original(store, tokens))
        key.flatten(0, 1)[row, column] = keys.to(key.dtype)
        value.flatten(0, 1)[row, column] = values.to(value.dtype)
    at, place = (full.slots >= 0).nonzero(as_tuple=True)
    slots = full.slots[at, place].long()
    column = slots if columns is None else columns[at, slots]
    for out, stored in ((key, positions.full_key(store)), (value, full.value)):
        out[at, :, column] = stored[at, :, place]
    return key, value
