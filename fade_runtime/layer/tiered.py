"""Attention of one call over a layer's store: its positions, its padding, and the statistics that it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from fade_runtime.layer.attention import AttentionCall, tiered_attention
from fade_runtime.layer.positions import Positions
from fade_runtime.layer.store import TokenStore
from fade_runtime.policies import Policy


class RowCall(NamedTuple):
    """One row of a batch in a call, as if it were alone.

    Attributes:
        row: its number. store: a view of its tokens. call: its queries that are tokens. real: [Q] bool, which they are.
    """

    row: int
    store: TokenStore
    call: AttentionCall
    real: Tensor


def rows_alone(store: TokenStore, call: AttentionCall) -> Iterator[RowCall]:
    """The rows of a padded call one by one; those in which every query is padding are left out."""
    sequences, steps = store.sequences, call.query.shape[2]
    assert sequences.real is not None
    for row in range(store.batch):
        columns = sequences.real[row]
        real = columns[-steps:]
        if bool(real.any()):
            yield RowCall(row, store.row(row), call.of_row(row, real, columns), real)


def attend_tiers(store: TokenStore, positions: Positions, call: AttentionCall, policy: Policy | None) -> Tensor:
    """Attention [B, Hq, Q, D] of the newest columns' queries over all tiers; 0 where a query is padding.

    Args:
        store: holds the call's tokens already. positions: says where its keys are read. call: the queries.
        policy: weighs the queries in the statistics of ``store``, which decay by each row's new tokens; None: they
            stay. Rows that begin in this call have their first statistics from elsewhere.
    """
    sequences = store.sequences
    if not (sequences.padded or (policy is not None and any(sequences.begins))):
        return _attend(store, positions, call, policy)
    out = call.query.new_zeros(*call.query.shape[:3], store.full.value.shape[3])
    for alone in rows_alone(store, call):
        weighs = None if sequences.begins[alone.row] else policy
        out[alone.row][:, alone.real] = _attend(alone.store, positions, alone.call, weighs)[0]
        if weighs is not None:
            store.put_statistics(alone.row, alone.store)
    return out


def _attend(store: TokenStore, positions: Positions, call: AttentionCall, policy: Policy | None) -> Tensor:
    """The same over a store whose rows have all gained as many tokens as there are queries."""
    query, full, parts = positions.read(store, call.query)
    steps, mask = query.shape[2], None if call.mask is None else store.sequences.by_slot(call.mask)
    first, window = store.sequences.first_of(steps), call.window
    if window is not None and isinstance(first, int) and first + steps - 1 - window < store.oldest:
        window = None  # no token that is there has left it
    weights = None if policy is None else policy.weights(steps, query.device)
    older = (
        []
        if weights is None
        else [store.full.attention_stats, *(tokens.attention_stats for tokens in store.body() if len(tokens))]
    )
    return tiered_attention(
        call._replace(query=query, mask=mask, window=window),
        full,
        parts,
        first=first,
        weights=weights,
        into=[stats for stats in older if stats is not None],
        decay=1.0 if policy is None else (policy.decay or 1.0) ** steps,
    )[0]
