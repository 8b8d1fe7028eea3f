"""From budgets and scores to the tiers of a layer's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fade_runtime.config import FadeConfig
from fade_runtime.policy import Policy
from fade_runtime.tiers import Budgets


def row_budgets(config: FadeConfig, policy: Policy, layer: int, lengths: Tensor, heads: int) -> Budgets:
    """What each row (batch x kv head) of a layer may keep.

    Args:
        config: the budgets per kv head.
        policy: may give each kv head of the layer its own share of their sum.
        lengths: [B] tokens of each sequence so far, padding left out.
        heads: kv heads.

    Example:
        >>> config = FadeConfig(int4_budget=0.25, low_budget=8, n_sink=0)
        >>> budgets = row_budgets(config, Policy(), 0, torch.tensor([100, 40]), heads=2)
        >>> budgets.int4.tolist(), budgets.low.tolist()
        ([25, 25, 10, 10], [8, 8, 8, 8])
    """
    int4: list[int] = []
    low: list[int] = []
    for length in lengths.tolist():
        given = config.budgets(length)
        assert given is not None, "no budgets: everything stays in the INT4 tier"
        total = sum(given)
        shares = policy.head_shares(layer, min(total, length) / max(length, 1))
        if shares is None:
            int4 += [given[0]] * heads
            low += [given[1]] * heads
        else:
            totals = [round(share * length) for share in shares]
            first = [round(each * given[0] / max(total, 1)) for each in totals]
            int4 += first
            low += [each - some for each, some in zip(totals, first)]
    tau, low_tau = config.shares
    return Budgets(torch.tensor(int4, device=lengths.device), torch.tensor(low, device=lengths.device), tau, low_tau)
