"""Forecasts read as distributions: the temperature that makes them honest, their repair, and what they select.

Logits and log-shares are ``[..., N]`` over blocks (or tokens), and ``mask`` marks the places that count.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

START = 1.1  # temperature before any validation document was seen
STEPS = 61  # temperatures tried, evenly in the logarithm
WIDEST = 8.0  # the largest of them; the smallest is its inverse


def masked_log_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Log of a distribution over the masked-in places of the last axis; exactly 0 elsewhere."""
    return logits.float().masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)


def masked_share(mass: Tensor, mask: Tensor) -> Tensor:
    """Non-negative mass over the masked-in places of the last axis, normalised to 1; zeros if none."""
    mass = mass.float() * mask
    return mass / mass.sum(-1, keepdim=True).clamp(min=1e-30)


def kl_divergence(logits: Tensor, mass: Tensor, mask: Tensor) -> Tensor:
    """KL(mass || softmax(logits)) over the masked-in places, in nats.

    Args:
        logits, mass, mask: [R, N].

    Returns:
        [R].

    Example:
        >>> p = torch.tensor([[0.25, 0.75]])
        >>> float(kl_divergence(p.log(), p, torch.ones(1, 2, dtype=torch.bool)).abs().round(decimals=5))
        0.0
    """
    share = masked_share(mass, mask)
    return (torch.xlogy(share, share) - share * masked_log_softmax(logits, mask)).sum(-1)


def temperatures() -> Tensor:
    """The temperatures tried, ascending, [STEPS]."""
    return torch.linspace(-math.log(WIDEST), math.log(WIDEST), STEPS).exp()


def tempered_kl(logits: Tensor, mass: Tensor, mask: Tensor, temperature: Tensor) -> Tensor:
    """KL(mass || softmax(logits / t)) over the masked-in places, in nats, for each temperature.

    Args:
        logits: [R, N]. mass: [R, N], non-negative. mask: [R, N] bool. temperature: [G].

    Returns:
        [R, G]; nan for a row without mass, which has no distribution.

    Example:
        >>> logits, yes = torch.tensor([[0.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> kl = tempered_kl(logits, (logits / 4).softmax(-1), yes, torch.tensor([1.0, 4.0]))
        >>> bool(kl[0, 0] > kl[0, 1].abs() + 0.1)
        True
    """
    share = masked_share(mass, mask)
    hidden = logits.float().masked_fill(~mask, -torch.inf)
    norm = torch.stack([(hidden / t).logsumexp(-1) for t in temperature], dim=-1)  # [R, G]
    mean = (share * logits.float().masked_fill(~mask, 0.0)).sum(-1, keepdim=True)
    kl = torch.xlogy(share, share).sum(-1, keepdim=True) - mean / temperature + norm
    return kl.masked_fill((share.sum(-1) == 0)[:, None], math.nan)


def best_temperature(kl: Tensor) -> tuple[float, float]:
    """The temperature with the lowest KL, and that KL, from the mean KL at each of :func:`temperatures`, [STEPS].

    A parabola through the lowest three, over the logarithm, finds it between them.
    """
    at, best = temperatures().log().tolist(), int(kl.argmin().clamp(1, STEPS - 2))
    left, low, right = kl[best - 1 : best + 2].tolist()
    bend = left - 2 * low + right
    shift = min(max(0.5 * (left - right) / bend, -1.0), 1.0) if bend > 0 else 0.0
    temperature = math.exp(at[best] + (at[1] - at[0]) * shift)
    return temperature, low + shift * (right - left) / 2 + shift * shift * bend / 2


def recalibrate(log_share: Tensor, row: Tensor, weight: float = 0.5) -> Tensor:
    """Pull a forecast towards one true row of attention, as seen every few steps.

    The mixture's KL from the row is at most ``1 - weight`` times the forecast's: it never rises. The difference from
    ``log_share`` is an offset that corrects the forecasts until the next true row.

    Args:
        log_share: [..., N] forecast, normalised. row: [..., N] attention, non-negative; rows of zeros change nothing.
        weight: of the true row, in [0, 1].

    Returns:
        [..., N] log of the mixture, normalised.

    Example:
        >>> recalibrate(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0])).exp()
        tensor([0.7500, 0.2500])
    """
    total = row.sum(-1, keepdim=True)
    share = torch.where(total > 0, row / total.clamp(min=1e-30), log_share.exp())
    if weight == 1:
        return share.log()
    return torch.logaddexp(log_share + math.log1p(-weight), (weight * share).log())


def select_threshold(share: Tensor, tau: float) -> Tensor:
    """The smallest set of places that holds at least ``tau`` of a distribution.

    Args:
        share: [..., N], non-negative, summing to 1 over the last axis. tau: in [0, 1].

    Returns:
        [..., N] bool.

    Example:
        >>> select_threshold(torch.tensor([0.1, 0.5, 0.1, 0.3]), tau=0.7).tolist()
        [False, True, False, True]
    """
    ranked, order = share.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    return torch.zeros_like(share, dtype=torch.bool).scatter(-1, order, before < tau)


def select_topk(score: Tensor, mask: Tensor, least: int = 128, share: float = 0.05) -> Tensor:
    """The best ``max(least, share * S)`` places of each row, or all when it has fewer.

    Args:
        score: [..., S], higher = keep. mask: [..., S] bool, places that exist; S is how many of them there are.
        least, share: lower bounds on what is kept.

    Returns:
        [..., S] bool.

    Source: AttentionPredictor (arXiv 2502.04077), whose budgets are tokens, with a floor that grows with the context.

    Example:
        >>> yes = torch.ones(4, dtype=torch.bool)
        >>> select_topk(torch.tensor([0.1, 0.4, 0.2, 0.3]), yes, least=1, share=0.5).tolist()
        [False, True, False, True]
    """
    count = torch.maximum((mask.sum(-1, keepdim=True) * share).ceil(), torch.tensor(float(least)))
    order = score.float().masked_fill(~mask, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(score.shape[-1], device=score.device)
    return torch.zeros_like(mask).scatter(-1, order, place < count) & mask
