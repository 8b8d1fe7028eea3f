"""Scores by which tokens of all kv heads can be compared, from statistics that rank the tokens of one.

A statistic is a share of attention, so that decoding can add to it; how much a token of one head matters beside a token
of another is a predictor's importance, which knows no unit. Both have the same order within a head, so a few quantiles
of both, kept for each row, take the one to the other as long as the row lives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from predictor.budgets import FRACTIONS

POINTS = len(FRACTIONS)
LEAST = torch.finfo(torch.float32).tiny


def comparison(stats: Tensor, importance: Tensor) -> Tensor:
    """Quantiles of log statistics and of importance, by which :func:`comparable` takes the first to the second.

    Args:
        stats: [H, S] statistics after the prompt. importance: [H, S] comparable between heads.

    Returns:
        [H, 2, POINTS] float32, both ascending.

    Example:
        >>> points = comparison(torch.tensor([[0.1, 0.4, 0.2]]), torch.tensor([[-5.0, 2.0, 1.0]]))
        >>> comparable(torch.tensor([0.4, 0.1, 0.2]), points[[0, 0, 0]]).tolist()
        [2.0, -5.0, 1.0]
    """
    last = stats.shape[1] - 1
    at = torch.tensor([round((1 - fraction) * last) for fraction in FRACTIONS[::-1]], device=stats.device)
    both = torch.stack((stats.float().clamp(min=LEAST).log(), importance.float()), dim=1)
    return both.sort(dim=-1).values[..., at]


def comparable(scores: Tensor, points: Tensor) -> Tensor:
    """Scores [T] of tokens of one or many rows, comparable between rows.

    Args:
        scores: [T] float32 shares of attention. points: [T, 2, POINTS] of each token's row.

    Returns:
        [T] float32: linear between two points, as the logarithm beyond the outer ones.
    """
    log = scores.float().clamp(min=LEAST).log()
    known, wanted = points.unbind(1)
    right = (log[:, None] > known).sum(1).clamp(1, POINTS - 1)[:, None]
    x, y = (torch.cat((each.gather(1, right - 1), each.gather(1, right)), dim=1) for each in (known, wanted))
    inside = log.clamp(known[:, 0], known[:, -1])
    width = x[:, 1] - x[:, 0]
    part = torch.where(width > 0, (inside - x[:, 0]) / width.clamp(min=LEAST), 1.0)
    return y[:, 0] + part.clamp(0, 1) * (y[:, 1] - y[:, 0]) + (log - inside)
