"""What a layer learns from its prompt: the policy's first statistics."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fade_runtime.layer.attention import AttentionCall
from fade_runtime.layer.store import TokenStore
from fade_runtime.policies import Policy, Prompt
from fade_runtime.policies.comparison import comparison
from fade_runtime.policies.text import SeenText
from predictor import rope
from predictor.features import attention_and_mass


def prefill_stats(
    policy: Policy,
    store: TokenStore,
    key: Tensor,
    call: AttentionCall,
    table: Callable[[int], rope.Table | None],
    text: SeenText | None = None,
    *,
    layer: int,
) -> Tensor | None:
    """First statistics of the rows that begin in a call.

    Args:
        policy: says which. store: takes them; ``store.sequences`` are those after the call.
        key: [B, H, n, D] full-precision keys. call: the prompt's.
        table: rotary table of the first positions.
        text: what is known of the words, for a policy that reads them, and for an assistant. layer: its index.

    Returns:
        The attention [B, Q, Hq, D] where it comes with them: on a CPU, if the policy wants what all queries see, which
        SDPA would compute once more, all rows begin, and scores and mask are plain. None elsewhere.
    """
    full, sequences, query = store.full, store.sequences, call.query
    if full.attention_stats is None:
        return None
    before = sequences.seen - sequences.new  # columns
    older = len(full) - sequences.new  # of the full-precision tokens
    fits = query.device.type == "cpu" and query.dtype == torch.float32 and not query.requires_grad
    plain = call.softcap is None and call.mask is None and fits
    out = None
    if policy.whole_prompt and plain and before == 0:
        out = query.new_zeros(*query.shape[:3], full.value.shape[3])
    for row, begins in enumerate(sequences.begins):
        if not begins:
            continue
        own = sequences.tokens_of(row, before)
        queried, kept = _shifted(own, -before), _shifted(own, older - before)
        queries, keys, values = query[row][:, queried], key[row][:, kept], full.value[row][:, kept]
        stats: Tensor | None
        importance: Tensor | None = None
        if out is not None:
            out[row][:, queried], stats = attention_and_mass(queries, keys, values, call.scaling, sinks=call.sinks)
        else:
            stats, importance = policy.forecast(Prompt(queries, keys, values, call.scaling, table, layer, call.sinks))
        if stats is not None:
            stats = _helped(policy, text, stats, row, own)
            full.attention_stats[row][:, kept] = stats
            if store.comparisons is not None and importance is not None:
                store.comparisons[row] = comparison(stats, importance)
            if store.profiles is not None and text is not None:
                profile = policy.profile(stats, text.classes(sequences.seen)[row, own])
                assert profile is not None  # of a policy that reads text
                store.profiles[row] = profile
    return None if out is None else out.transpose(1, 2)


def _shifted(columns: slice | Tensor, by: int) -> slice | Tensor:
    if isinstance(columns, slice):
        return slice(columns.start + by, columns.stop + by)
    return columns + by


def _helped(policy: Policy, text: SeenText | None, stats: Tensor, row: int, columns: slice | Tensor) -> Tensor:
    """First statistics [H, S] of a row, fused with an assistant's if there is one."""
    if text is None or text.assistant is None:
        return stats
    length = stats.shape[1]
    slots = torch.arange(length, device=stats.device)
    unit = policy.score(torch.ones_like(stats), slots, length, length)  # scores are linear in the statistics
    return text.helped(stats * unit, row, columns) / unit
