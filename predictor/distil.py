"""Distillation through the model: gates that let a loss on the model's output reach the scores that evict tokens.

While training, a token is neither kept nor evicted: the logarithm of its gate, ``sigmoid((score - tau) /
temperature)``, is added to attention's scores. The threshold ``tau`` is one for all heads and layers of a sequence, and
is solved so that the mean gate is the budget; it moves with the scores, and its gradient is that of the implicit
function. As the temperature falls the gates become the tokens that a cache keeps.

Shapes: L layers, H kv heads, E body tokens that may be evicted, T following tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from predictor.errors import FadeError

HALVINGS = 50  # of the interval that the threshold lies in: to the last bit of float32
REACH = 20.0  # temperatures beyond the scores, where all gates are open, or closed, to the last bit
FLOOR = 0.01  # KL in nats below which a loss counts as small, and no longer as a share of itself


def threshold(scores: Tensor, budget: float, temperature: float) -> Tensor:
    """The threshold at which the mean gate is the budget, as a differentiable function of the scores.

    Its gradient, by the implicit function theorem on ``mean(sigmoid((scores - tau) / temperature)) = budget``, is
    ``d tau / d score_i = w_i / sum(w)`` with ``w_i = gate_i (1 - gate_i)``.

    Args:
        scores: [...] of all tokens that compete. budget: mean gate in (0, 1). temperature: above 0.

    Returns:
        [] threshold.

    Raises:
        FadeError: a budget that keeps all or none, or a score that is no number.

    Example:
        >>> scores = torch.tensor([0.0, 1.0, 2.0, 3.0], requires_grad=True)
        >>> tau = threshold(scores, budget=0.5, temperature=0.1)
        >>> tau.backward()
        >>> round(tau.item(), 4), [round(each, 3) for each in scores.grad.tolist()]
        (1.5, [0.0, 0.5, 0.5, 0.0])
    """
    if not 0 < budget < 1:
        raise FadeError(f"budget {budget:g} leaves nothing to choose; use a share of the body tokens in (0, 1)")
    fixed = scores.detach()
    low, high = fixed.min() - REACH * temperature, fixed.max() + REACH * temperature
    if not bool((high - low).isfinite()):
        raise FadeError("a score is not a finite number; lower the learning rate")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        too_many = torch.sigmoid((fixed - middle) / temperature).mean() > budget
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    gates = torch.sigmoid((fixed - low) / temperature)
    weights = gates * (1 - gates)
    weights = weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    return low + (weights * (scores - fixed)).sum()


def log_gates(scores: Tensor, budget: float, temperature: float) -> Tensor:
    """Logarithms of soft gates whose mean is the budget, to be added to attention's scores.

    Args:
        scores: [L, H, E] comparable between heads. budget: mean gate in (0, 1). temperature: above 0.

    Returns:
        [L, H, E], below 0.

    Source: Łańcucki et al. 2025, DMS (arXiv 2506.05345), section 3, trains eviction through a frozen model by
    relaxed gates; one threshold over all heads is ours.

    Example:
        >>> round(log_gates(torch.randn(2, 3, 50), budget=0.3, temperature=0.5).exp().mean().item(), 4)
        0.3
    """
    return logsigmoid((scores - threshold(scores, budget, temperature)) / temperature)


def kept(scores: Tensor, count: int) -> Tensor:
    """Tokens that a cache keeps: the ``count`` best of all heads and layers together.

    Args:
        scores: [L, H, E] comparable between heads. count: tokens kept in all of them.

    Returns:
        [L, H, E] bool.

    Example:
        >>> kept(torch.tensor([[[3.0, 1.0], [0.0, 2.0]]]), count=2).tolist()
        [[[True, False], [False, True]]]
    """
    best = scores.flatten().topk(min(count, scores.numel())).indices
    return torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device).index_fill(0, best, True).view_as(scores)


def kept_by_head(scores: Tensor, counts: Tensor) -> Tensor:
    """Tokens that a cache keeps where each head has a budget of its own.

    Args:
        scores: [L, H, E]. counts: [L, H] tokens kept in each.

    Returns:
        [L, H, E] bool.

    Example:
        >>> kept_by_head(torch.tensor([[[3.0, 1.0], [0.0, 2.0]]]), torch.tensor([[2, 0]])).tolist()
        [[[True, True], [False, False]]]
    """
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return rank < counts[..., None]


def divergence(full: Tensor, gated: Tensor) -> Tensor:
    """KL(full || gated) of each following token, in nats.

    Args:
        full, gated: [T, V] logits.

    Returns:
        [T] float32.

    Example:
        >>> divergence(torch.zeros(1, 2), torch.tensor([[0.0, 0.0]])).item()
        0.0
    """
    reference, other = full.float().log_softmax(-1), gated.float().log_softmax(-1)
    return (reference.exp() * (reference - other)).sum(-1)


def relative(loss: Tensor) -> Tensor:
    """A loss [] as a share of itself: its value says nothing, its gradient is that of the loss's logarithm.

    So that small budgets, whose loss is a hundred times larger, do not drown the others.

    Example:
        >>> kl = torch.tensor(2.0, requires_grad=True)
        >>> relative(kl**2).backward()
        >>> round(kl.grad.item(), 3)  # 2 * 2 / (4 + FLOOR)
        0.998
    """
    return loss / (loss.detach() + FLOOR)


def level_offsets(scores: Tensor, shares: Tensor, length: int) -> Tensor:
    """Offsets that make one threshold, at 0, give each head its share of the tokens.

    Args:
        scores: [L, H, E] without offsets. shares: [L, H] of the context that each head is to keep.
        length: tokens of the context, which has sinks and window besides the E.

    Returns:
        [L, H].

    Example:
        >>> scores = torch.tensor([[[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]])
        >>> level_offsets(scores, torch.tensor([[0.5, 0.25]]), length=4)
        tensor([[ -2., -13.]])
    """
    counts = (shares * length).long().clamp(1, scores.shape[-1])
    return -scores.sort(-1, descending=True).values.gather(-1, counts[..., None] - 1).squeeze(-1)
