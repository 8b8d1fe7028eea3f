"""How the tokens of a layer move between tiers: out of full precision, down, out, into the spill store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fade_runtime.kernels.dispatch import pick_quantiser
from fade_runtime.layer.store import BodyTokens, TokenStore
from fade_runtime.storage.packed import PackedTokens, pack_tokens
from fade_runtime.storage.tiers import Tier

Planner = Callable[[BodyTokens], Tensor]  # -> the tiers [T] that they are to have


class _Leaving(NamedTuple):
    """Tokens on their way out of full precision: row (batch x kv head), column, slot and statistic of each, [T]."""

    row: Tensor
    column: Tensor
    slot: Tensor
    attention_stats: Tensor | None

    def at(self, mask: Tensor) -> _Leaving:
        return _Leaving(*(None if each is None else each[mask] for each in self))  # type: ignore[arg-type]


def move(store: TokenStore, due: Tensor, plan: Planner) -> None:
    """Move what has left the window into the body, and the body's tokens to the tiers that a plan gives them.

    Args:
        store: holds the tokens. due: [B] bool, rows that take part; the others stay as they are.
        plan: decides.
    """
    from_recent = (store.sequences.lengths - store.config.recent_window).clamp(min=0)  # [B]
    leaves = _leaves(store, due, from_recent)
    leaving, body = _leaving(store, leaves), store.body()
    counts = [len(tokens) for tokens in body] + [len(leaving.row)]
    tokens = _candidates(store, leaving)
    tiers = plan(tokens)
    gone = tiers == Tier.EVICTED
    if store.spilled is not None and bool(gone.any()) and not _spill(store, leaving, gone.split(counts)):
        tiers = torch.where(gone, tokens.tiers, tiers)  # kept, since it could not be stored
    _carry_out(store, leaving, tiers.split(counts))
    store.full = store.full.taken(_staying(store, leaves))
    store.moved = torch.where(due, from_recent, torch.tensor(store.moved, device=due.device)).tolist()
    store.evicted += int((tiers == Tier.EVICTED).sum())
    if store.window is not None:
        store.oldest = max(min(store.moved) + store.config.recent_window - store.window + 1, 0)


def demote(store: TokenStore, tiers: Tensor) -> None:
    """Move the body's tokens alone to lower tiers [T], or out."""
    body = store.body()
    leaving = _leaving(store, torch.zeros_like(store.full.slots, dtype=torch.bool))
    counts = [*map(len, body), 0]
    gone = tiers == Tier.EVICTED
    if store.spilled is not None and bool(gone.any()) and not _spill(store, leaving, gone.split(counts)):
        return  # kept as they are, since they could not be stored
    _carry_out(store, leaving, tiers.split(counts))
    store.evicted += int(gone.sum())


def candidates(store: TokenStore, lengths: Tensor) -> BodyTokens:
    """The body's tokens, and those that leave the window once the sequences have ``lengths`` [B] tokens."""
    every = torch.ones_like(lengths, dtype=torch.bool)
    from_recent = (lengths - store.config.recent_window).clamp(min=0)
    return _candidates(store, _leaving(store, _leaves(store, every, from_recent)))


def _carry_out(store: TokenStore, leaving: _Leaving, tiers: Sequence[Tensor]) -> None:
    """Give the tokens of each body tier, and those that leave full precision, the tiers that they are to have."""
    packed_tiers, *pq_tiers, fate = tiers
    packs = (fate == Tier.HIGH) | (fate == Tier.LOW)
    added = _pack(store, leaving.at(packs), fate[packs] == Tier.LOW)
    if store.pq is not None:
        joins = leaving.at(fate == Tier.PQ)
        kept = store.pq.keep(pq_tiers[0] == Tier.PQ).absorb(store.packed, packed_tiers == Tier.PQ)
        store.pq = kept.add(*_key_value(store, joins), joins.row, joins.slot, joins.attention_stats)
    if bool((packed_tiers != store.packed.tiers()).any()):
        store.packed = store.packed.retier(packed_tiers)
    store.packed = store.packed.join(added)


def _leaves(store: TokenStore, due: Tensor, from_recent: Tensor) -> Tensor:
    """[B, n] bool: full-precision tokens of due rows that are neither sinks nor recent; sinks that left the window."""
    slots = store.full.slots
    moves = slots >= store.config.n_sink
    if store.window is not None:
        moves = moves | (slots <= (store.sequences.lengths - store.window)[:, None])
    return moves & (slots >= 0) & (slots < from_recent[:, None]) & due[:, None]


def _leaving(store: TokenStore, leaves: Tensor) -> _Leaving:
    """The tokens that a mask [B, n] names, of every kv head."""
    full, columns = store.full, len(store.full)
    row, column = leaves[:, None].expand(-1, store.heads, -1).reshape(-1, columns).nonzero(as_tuple=True)
    stats = None if full.attention_stats is None else full.attention_stats.reshape(-1, columns)[row, column]
    return _Leaving(row, column, full.slots[row // store.heads, column].long(), stats)


def _candidates(store: TokenStore, leaving: _Leaving) -> BodyTokens:
    """The body's tokens, then those that leave full precision, as if all of them were in the high tier."""
    body = store.body_tokens()
    stats = None
    if body.attention_stats is not None and leaving.attention_stats is not None:
        stats = torch.cat((body.attention_stats, leaving.attention_stats))
    return BodyTokens(
        torch.cat((body.rows, leaving.row)),
        torch.cat((body.slots, leaving.slot)),
        stats,
        torch.cat((body.tiers, torch.full_like(leaving.row, Tier.HIGH))),
    )


def _pack(store: TokenStore, chosen: _Leaving, low: Tensor | None = None) -> PackedTokens:
    """Chosen tokens in fresh pages, those of a mask in the low tier."""
    key, value = _key_value(store, chosen)
    return pack_tokens(
        key,
        value,
        chosen.row,
        chosen.slot,
        chosen.attention_stats,
        low=low,
        bits=store.config.bits,
        pq_codes=None if store.pq is None else store.pq.codebook.encode(key, value),
        page_tokens=store.config.page_tokens,
        quantise=pick_quantiser(key.device),
    )


def _key_value(store: TokenStore, chosen: _Leaving) -> tuple[Tensor, Tensor]:
    """Keys and values [T, D] of chosen full-precision tokens."""
    key, value = (t.flatten(0, 1)[chosen.row, chosen.column] for t in (store.full.key, store.full.value))
    return key, value


def _spill(store: TokenStore, leaving: _Leaving, gone: Sequence[Tensor]) -> bool:
    """Store what is to be evicted, by masks of each body tier and of what leaves; whether that was possible."""
    assert store.spilled is not None
    *old, new = gone
    packed, *rest = (tokens.keep(mask) for tokens, mask in zip(store.body(), old))
    return store.spilled.add([packed.join(_pack(store, leaving.at(new))), *rest])


def _staying(store: TokenStore, leaves: Tensor) -> Tensor:
    """Columns [B, n] of the full-precision tokens that stay, in order; -1 where a row has fewer than others."""
    stays = (store.full.slots >= 0) & ~leaves
    most = int(stays.sum(1).max())
    order = (~stays).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return torch.where(stays.gather(1, order), order, -1)
