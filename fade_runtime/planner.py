"""From budgets and scores to the tiers of a layer's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fade_runtime.config import FadeConfig
from fade_runtime.policy import Policy
from fade_runtime.tiers import Budgets


def row_budgets(
    config: FadeConfig,
    policy: Policy,
    layer: int,
    lengths: Tensor,
    heads: int,
    most: Tensor | None = None,
    share: float | None = None,
) -> Budgets:
    """What each row (batch x kv head) of a layer may keep.

    Args:
        config: the budgets per kv head.
        policy: may give each kv head of the layer its own share of their sum.
        lengths: [B] tokens of each sequence so far, padding left out.
        heads: kv heads.
        most: [batch x kv heads] tokens that each row wants to keep at most; None: all that its budget allows.
        share: budget of a kv head as a share of the context, in place of the config's (:mod:`fade_runtime.memory`).

    Example:
        >>> config = FadeConfig(int4_budget=0.25, low_budget=8, n_sink=0)
        >>> budgets = row_budgets(config, Policy(), 0, torch.tensor([100, 40]), heads=2)
        >>> budgets.int4.tolist(), budgets.low.tolist()
        ([25, 25, 10, 10], [8, 8, 8, 8])
    """
    int4: list[int] = []
    low: list[int] = []
    wanted = None if most is None else most.view(-1, heads).tolist()
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
                totals = [min(each, cap) for each, cap in zip(totals, wanted[row])]
            first = [round(each * given[0] / max(total, 1)) for each in totals]
            int4 += first
            low += [each - some for each, some in zip(totals, first)]
    tau, low_tau = config.shares
    return Budgets(torch.tensor(int4, device=lengths.device), torch.tensor(low, device=lengths.device), tau, low_tau)
