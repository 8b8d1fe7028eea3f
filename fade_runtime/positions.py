"""At which positions the keys of a layer are read: those of the text, or contiguous over what was kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fade_runtime.attention import FullTokens
from fade_runtime.kernels.reference import Part
from fade_runtime.packed import PackedTokens
from fade_runtime.store import Body, TokenStore
from predictor import rope


class Positions:
    """Rotates the keys of one layer with the model's own rotary module, in float32.

    At "original" positions keys stay as the model gave them, but for the PQ tier, which holds them un-rotated. With
    "streaming" all keys are stored un-rotated and are rotated when they are read.

    Args:
        rotary: of the model, or None if positions enter in another way.
        layer: index of the layer.
        streaming: which of the two.

    Attributes:
        newest: [B or 1, Q] position ids of the tokens of the last call.
    """

    def __init__(self, rotary: rope.Rotary | None, layer: int, *, streaming: bool) -> None:
        self.rotary, self.layer = rotary, layer
        self.streaming = streaming and rotary is not None
        self.newest: Tensor | None = None

    def table(self, positions: Tensor) -> rope.Table | None:
        """What the model turns keys by at ``positions``; None in a layer that turns none."""
        return None if self.rotary is None else self.rotary.table(positions, self.layer)

    def first(self, count: int, device: torch.device) -> rope.Table | None:
        """Table of positions 0 .. count - 1."""
        return self.table(torch.arange(count, device=device))

    def take(self, store: TokenStore, new: int, position_ids: Tensor | None) -> None:
        """Note where the newest ``new`` tokens are; in streaming mode store their keys un-rotated."""
        slots = store.full.slots[:, -new:]
        if position_ids is None or position_ids.shape[-1] != new:
            self.newest = store.position_ids(slots)
        else:
            self.newest = position_ids.reshape(-1, *position_ids.shape[-2:])[
                0
            ]  # of several (images), the text's
        if self.streaming and (table := self.table(self.newest)) is not None:
            store.set_newest_keys(rope.unrotate(store.full.key[:, :, -new:].float(), table[:, None]))

    def full_key(self, store: TokenStore) -> Tensor:
        """[B, H, n, D] full-precision keys at their original positions."""
        full = store.full
        table = self.first(store.seen, full.key.device) if self.streaming else None
        if table is None:
            return full.key
        return rope.rotate(full.key.float(), table[store.position_ids(full.slots)[:, None]]).to(
            full.key.dtype
        )

    def unrotated(self, store: TokenStore, key: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        """Keys [T, D] of full-precision tokens for the PQ tier."""
        table = None if self.streaming else self.first(store.seen, key.device)
        return (
            key.float() if table is None else rope.unrotate(key.float(), table[store.position_ids(slot, row)])
        )

    def original(self, store: TokenStore, tokens: Body) -> Part:
        """A tier of the body, to be read at its original positions."""
        if isinstance(tokens, PackedTokens) and not self.streaming:
            return Part(tokens)
        slots = tokens.slots()
        return Part(
            tokens, self.first(store.seen, slots.device), store.position_ids(slots, tokens.token_row())
        )

    def read(self, store: TokenStore, query: Tensor) -> tuple[Tensor, FullTokens, list[Part]]:
        """The newest queries [B, Hq, Q, D], the full-precision tokens and the body, as attention is to read them."""
        body = [tokens for tokens in store.body() if len(tokens)]
        if not self.streaming:
            return query, store.full, [self.original(store, tokens) for tokens in body]
        full, steps = store.full, query.shape[2]
        at, body_at = store.contiguous()  # [B, H, n], and [T] of each tier
        table = self.first(int(at.max()) + 1, query.device)
        asked = None if self.newest is None else self.table(self.newest)
        if table is None or asked is None:
            return query, full, [Part(tokens) for tokens in body]
        parts = [Part(tokens, table, where) for tokens, where in zip(store.body(), body_at) if len(tokens)]
        plain = rope.unrotate(query.float(), asked[:, None, -steps:]).unflatten(
            1, (store.heads, -1)
        )  # [B, H, G, Q, D]
        turned = rope.rotate(plain, table[at[:, :, None, -steps:]]).flatten(1, 2).to(query.dtype)
        return turned, replace(full, key=rope.rotate(full.key.float(), table[at]).to(full.key.dtype)), parts
