"""From budgets and scores to the tiers of a layer's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fade_runtime.config.config import FadeConfig
from fade_runtime.policies.base import Policy, ProfiledTokens
from fade_runtime.storage.tiers import Budgets, plan_tiers

if TYPE_CHECKING:
    from fade_runtime.layer.layer import TieredLayer


def row_budgets(
    config: FadeConfig,
    policy: Policy,
    layer: int,
    lengths: Tensor,
    heads: int,
    asked: Tensor | None = None,
    share: float | None = None,
) -> Budgets:
    """What each row (batch x kv head) of a layer may keep.

    Args:
        config: the budgets per kv head.
        policy: may give each kv head of the layer its own share of their sum.
        lengths: [B] tokens of each sequence so far, padding left out.
        heads: kv heads.
        asked: [batch x kv heads] tokens that the text's profile asks for, or None. They lower a budget, or, if the
            policy says so and no memory target is set, raise it.
        share: budget of a kv head as a share of the context, in place of the config's
            (:mod:`fade_runtime.config.memory_target`).

    Example:
        >>> config = FadeConfig(int4_budget=0.25, low_budget=8, n_sink=0)
        >>> budgets = row_budgets(config, Policy(), 0, torch.tensor([100, 40]), heads=2)
        >>> budgets.int4.tolist(), budgets.low.tolist()
        ([25, 25, 10, 10], [8, 8, 8, 8])
    """
    int4: list[int] = []
    low: list[int] = []
    wanted = None if asked is None else asked.view(-1, heads).tolist()
    bound = min if not policy.profile_is_floor else max if share is None else lambda budget, _: budget
    for row, length in enumerate(lengths.tolist()):
        given = (config.budgets(length) or (length, 0)) if share is None else (int(share * length), 0)
        total = sum(given)
        shares = policy.head_shares(layer, min(total, length) / max(length, 1))
        if shares is None and wanted is None:
            int4 += [given[0]] * heads
            low += [given[1]] * heads
        else:
            totals = [total] * heads if shares is None else [round(share * length) for share in shares]
            if wanted is not None:
                totals = [bound(each, want) for each, want in zip(totals, wanted[row])]
            first = [round(each * given[0] / max(total, 1)) for each in totals]
            int4 += first
            low += [each - some for each, some in zip(totals, first)]
    tau, low_tau = config.shares
    return Budgets(torch.tensor(int4, device=lengths.device), torch.tensor(low, device=lengths.device), tau, low_tau)


def plan(
    layer: TieredLayer, rows: Tensor, slots: Tensor, state: Tensor | None, now: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Where a layer's policy and budgets want its body tokens.

    Args:
        layer: gives policy, budgets and what is known of the text.
        rows, slots, state, now: [T] row, slot, statistic and present tier of each token.

    Returns:
        [T] int64 tiers; [T] scores that decided, or None if everything goes to one tier.
    """
    config, policy, store = layer.config, layer.policy, layer.tokens
    if not config.ranks:
        return now if config.int4_budget is None else torch.full_like(now, int(config.low)), None
    scores = layer.scores(slots.float() if state is None else state, rows, slots)
    lengths, heads = store.sequences.lengths, store.heads
    most: Tensor | None = None
    if store.profiles is not None and layer.text is not None:
        classes = store.sequences.by_slot(layer.text.classes(store.seen))[rows // heads, slots]
        age = lengths[rows // heads] - 1 - slots
        tokens = ProfiledTokens(rows, classes, age, store.profiles.flatten(), lengths.repeat_interleave(heads))
        scores, most = policy.narrow(scores, tokens)
    share = None if layer.memory is None else layer.memory.share(lengths, heads, *store.widths())
    budgets = row_budgets(config, policy, layer.index, lengths, heads, most, share)
    return plan_tiers(scores, rows, budgets, slots=slots, tiers=now, low_tier=config.low).tiers.long(), scores
