"""Forecasts read as distributions over blocks or tokens, and the temperature that makes them honest.

Shapes: R rows, N blocks or tokens of each, G temperatures; ``mask`` marks the places that exist.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

INITIAL_TEMPERATURE = 1.1  # temperature before any validation document was seen
N_TEMPERATURES = 61  # temperatures tried, evenly in the logarithm
MAX_TEMPERATURE = 8.0  # the largest of them; the smallest is its inverse


def masked_log_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Log of a distribution over the masked-in places of the last axis.

    Args:
        logits: [..., N]. mask: [..., N] bool.

    Returns:
        [..., N] float32; exactly 0 where the mask is False.
    """
    return logits.float().masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)


def masked_probabilities(mass: Tensor, mask: Tensor) -> Tensor:
    """Mass over the masked-in places of the last axis, normalised to a sum of 1.

    Args:
        mass: [..., N], non-negative. mask: [..., N] bool.

    Returns:
        [..., N] float32; 0 where the mask is False, and everywhere in a row without mass.

    Example:
        >>> masked_probabilities(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor([0.2500, 0.7500, 0.0000])
    """
    mass = mass.float() * mask
    return mass / mass.sum(-1, keepdim=True).clamp(min=1e-30)


def masked_kl(logits: Tensor, mass: Tensor, mask: Tensor) -> Tensor:
    """KL(mass || softmax(logits)) over the masked-in places, in nats.

    Args:
        logits: [R, N]. mass: [R, N], non-negative. mask: [R, N] bool.

    Returns:
        [R] nats.

    Example:
        >>> p = torch.tensor([[0.25, 0.75]])
        >>> float(masked_kl(p.log(), p, torch.ones(1, 2, dtype=torch.bool)).abs().round(decimals=5))
        0.0
    """
    p = masked_probabilities(mass, mask)
    return (torch.xlogy(p, p) - p * masked_log_softmax(logits, mask)).sum(-1)


def temperatures() -> Tensor:
    """The temperatures tried, ascending, [G]."""
    return torch.linspace(-math.log(MAX_TEMPERATURE), math.log(MAX_TEMPERATURE), N_TEMPERATURES).exp()


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
    p = masked_probabilities(mass, mask)
    hidden = logits.float().masked_fill(~mask, -torch.inf)
    norm = torch.stack([(hidden / t).logsumexp(-1) for t in temperature], dim=-1)  # [R, G]
    mean = (p * logits.float().masked_fill(~mask, 0.0)).sum(-1, keepdim=True)
    kl = torch.xlogy(p, p).sum(-1, keepdim=True) - mean / temperature + norm
    return kl.masked_fill((p.sum(-1) == 0)[:, None], math.nan)


def best_temperature(kl: Tensor) -> tuple[float, float]:
    """The temperature with the lowest KL, and that KL in nats: the lowest point of a parabola.

    Args:
        kl: [G] mean KL at each of :func:`temperatures`, nats.
    """
    at, best = temperatures().log().tolist(), int(kl.argmin().clamp(1, N_TEMPERATURES - 2))
    left, low, right = kl[best - 1 : best + 2].tolist()
    bend = left - 2 * low + right
    shift = min(max(0.5 * (left - right) / bend, -1.0), 1.0) if bend > 0 else 0.0
    temperature = math.exp(at[best] + (at[1] - at[0]) * shift)
    return temperature, low + shift * (right - left) / 2 + shift * shift * bend / 2
