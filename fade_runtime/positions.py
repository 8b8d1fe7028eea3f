"""At which positions the keys of a layer are read: those of the text, or contiguous over what was kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fade_runtime.attention import FullTokens
from fade_runtime.kernels.reference import Part
from fade_runtime.store import Body, TokenStore
from predictor import rope


class Positions:
    """Rotates the keys of one layer with the model's own rotary module, in float32.

    Keys stay as the model gave them, or are stored plain, that is un-rotated, and turned when they are read: at
    contiguous positions (streaming), or at those of the text (product quantisation, whose codebook serves all
    positions). A key is un-rotated in the call that brings it, by the angles that the model used in that call.

    Args:
        rotary: of the model, or None if positions enter in another way.
        layer: index of the layer.
        streaming: read keys at contiguous positions.
        plain: store keys un-rotated.

    Attributes:
        newest: [B or 1, Q] position ids of the tokens of the last call.
    """

    def __init__(self, rotary: rope.Rotary | None, layer: int, *, streaming: bool, plain: bool) -> None:
        self.rotary = rotary if rotary is not None and rotary.rotates(layer) and (streaming or plain) else None
        self.layer, self.streaming = layer, streaming
        self.newest: Tensor | None = None

    def _table(self, positions: Tensor) -> rope.Table:
        assert self.rotary is not None
        table = self.rotary.table(positions, self.layer)
        assert table is not None
        return table

    def _first(self, count: int, device: torch.device) -> rope.Table:
        return self._table(torch.arange(count, device=device))

    def take(self, store: TokenStore, new: int, position_ids: Tensor | None) -> None:
        """Note where the newest ``new`` tokens are, and store their keys plain if that is asked for."""
        if self.rotary is None:
            return
        if position_ids is None or position_ids.shape[-1] != new:
            self.newest = store.position_ids(store.full.slots[:, -new:])
        else:
            self.newest = position_ids.reshape(-1, *position_ids.shape[-2:])[0]  # of several (images), the text's
        newest = store.full.key[:, :, -new:].float()
        store.set_newest_keys(rope.unrotate(newest, self._table(self.newest)[:, None]))

    def full_key(self, store: TokenStore) -> Tensor:
        """[B, H, n, D] full-precision keys at their original positions."""
        full = store.full
        if self.rotary is None:
            return full.key
        at = store.position_ids(full.slots)[:, None]
        return rope.rotate(full.key.float(), self._first(store.seen, at.device)[at]).to(full.key.dtype)

    def original(self, store: TokenStore, tokens: Body) -> Part:
        """A tier of the body, to be read at its original positions."""
        if self.rotary is None:
            return Part(tokens)
        at = store.position_ids(tokens.slots(), tokens.token_row())
        return Part(tokens, self._first(store.seen, at.device), at)

    def read(self, store: TokenStore, query: Tensor) -> tuple[Tensor, FullTokens, list[Part]]:
        """The newest queries [B, Hq, Q, D], the full-precision tokens and the body, as attention is to read them."""
        full, steps = store.full, query.shape[2]
        if self.rotary is None or not self.streaming:
            parts = [self.original(store, tokens) for tokens in store.body() if len(tokens)]
            return query, full if self.rotary is None else replace(full, key=self.full_key(store)), parts
        at, body_at = store.contiguous()  # [B, H, n], and [T] of each tier
        table = self._first(int(at.max()) + 1, query.device)
        parts = [Part(tokens, table, where) for tokens, where in zip(store.body(), body_at) if len(tokens)]
        assert self.newest is not None
        asked = self._table(self.newest)[:, None, -steps:]
        plain = rope.unrotate(query.float(), asked).unflatten(1, (store.heads, -1))  # [B, H, G, Q, D]
        turned = rope.rotate(plain, table[at[:, :, None, -steps:]]).flatten(1, 2).to(query.dtype)
        return turned, replace(full, key=rope.rotate(full.key.float(), table[at]).to(full.key.dtype)), parts
