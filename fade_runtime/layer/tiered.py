"""Attention of one call over a layer's store: its positions, its padding, and the statistics that it leaves."""

from __future__ import annotations

from torch import Tensor

from fade_runtime.layer.attention import AttentionCall, tiered_attention
from fade_runtime.layer.positions import Positions
from fade_runtime.layer.store import TokenStore
from fade_runtime.policies.base import Policy


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
    assert sequences.real is not None  # or all rows would begin
    out = call.query.new_zeros(*call.query.shape[:3], store.full.value.shape[3])
    for row, gained in enumerate(sequences.gained):
        if not gained:
            continue
        real = sequences.real[row]
        asks = real[-call.query.shape[2] :]
        view, weighs = store.row(row), None if sequences.begins[row] else policy
        out[row][:, asks] = _attend(view, positions, call.of_row(row, asks, real), weighs)[0]
        if weighs is not None:
            store.put_statistics(row, view)
    return out


def _attend(store: TokenStore, positions: Positions, call: AttentionCall, policy: Policy | None) -> Tensor:
    """The same over a store whose rows have all gained as many tokens as there are queries."""
    query, full, parts = positions.read(store, call.query)
    steps = query.shape[2]
    weights = None if policy is None else policy.weights(steps, query.device)
    stored = [store.full, *(tokens for tokens in store.body() if len(tokens))]
    states = [] if weights is None else [each.state for each in stored]
    return tiered_attention(
        query,
        full,
        parts,
        scaling=call.scaling,
        first=store.sequences.first_of(steps),
        mask=None if call.mask is None else store.sequences.by_slot(call.mask),
        weights=weights,
        softcap=call.softcap,
        into=[state for state in states if state is not None],
        decay=1.0 if policy is None else (policy.decay or 1.0) ** steps,
    )[0]
