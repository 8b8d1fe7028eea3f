"""Training losses: how far a ranking of candidates is from the attention that they really received.

All take ``logits`` [R, K] (higher = keep), ``mass`` [R, K] (non-negative, attention received) and ``mask`` [R, K] bool
(candidates: what a policy may drop), and return a scalar []; a row without a candidate counts nothing. K is the tokens
or blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from predictor.calibration import masked_kl, masked_log_softmax, masked_probabilities
from predictor.features import FLOOR

POSITIVE_FRACTION = 0.25  # fraction of the candidates that count as positive in the "bce" loss
FRACTIONS = (0.5, 0.25, 0.1)  # of the candidates that are kept, in the "recovery" loss
EDGE_WIDTH = 0.5  # of the soft edge between kept and dropped, in nats


def recovery_loss(logits: Tensor, mass: Tensor, mask: Tensor) -> Tensor:
    """Fraction of the mass that a soft top-k loses, averaged over several budgets: what the gate measures, made smooth.

    A candidate is kept by ``sigmoid((logit - edge) / EDGE_WIDTH)``, where the edge lies just under the k-th largest
    logit. The edge moves with the logits so that the number kept stays the same (implicit differentiation):
    raising all scores gains nothing.

    Args:
        logits, mass, mask: [R, K] each.

    Returns:
        [] in [0, 1].

    Example:
        >>> mass, mask = torch.tensor([[0.9, 0.0, 0.1, 0.0]]), torch.ones(1, 4, dtype=torch.bool)
        >>> bool(recovery_loss(50 * mass, mass, mask) < 0.2 < recovery_loss(-50 * mass, mass, mask))
        True
    """
    p, fixed = masked_probabilities(mass, mask), logits.detach().masked_fill(~mask, float("-inf"))
    ranked, count = fixed.sort(dim=-1, descending=True).values, mask.sum(-1, keepdim=True)
    lost = logits.new_zeros(())
    for kept in FRACTIONS:
        place = (count * kept).ceil().long()  # the edge lies between this candidate and the one before
        around = ranked.gather(-1, torch.cat((place - 1, torch.minimum(place, count - 1)), dim=-1).clamp(min=0))
        edge = around.mean(-1, keepdim=True).nan_to_num(neginf=0.0)
        soft = ((logits.detach() - edge) / EDGE_WIDTH).sigmoid()
        slope = masked_probabilities(soft * (1 - soft), mask)
        edge = edge + (slope * (logits - logits.detach())).sum(-1, keepdim=True)
        lost = lost + (p.sum(-1) - (p * ((logits - edge) / EDGE_WIDTH).sigmoid()).sum(-1)).mean()
    return lost / len(FRACTIONS)


def listwise_loss(logits: Tensor, mass: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy between the target's distribution over the candidates and the predicted one.

    Args:
        logits, mass, mask: [R, K] each.

    Returns:
        [] nats.

    Source: Cao et al. 2007, ListNet (top-one probabilities), with the target's own mass as the probabilities.
    """
    return -(masked_probabilities(mass, mask) * masked_log_softmax(logits, mask)).sum(-1).mean()


def listwise_mass_loss(logits: Tensor, mass: Tensor, mask: Tensor) -> Tensor:
    """The listwise loss, each row weighted by the mass of its candidates: a row of faint ones decides little.

    Recovery counts mass, so a query that attends to the sinks alone, whatever is read, should not be learned from as
    much as one whose attention is at stake.

    Args:
        logits, mass, mask: [R, K] each.

    Returns:
        [] nats, times the mass of the candidates.

    Example:
        >>> logits, mass, mask = torch.zeros(2, 2), torch.tensor([[0.2, 0.0], [0.0, 0.6]]), torch.ones(2, 2) > 0
        >>> listwise_mass_loss(logits, mass, mask), listwise_loss(logits, mass, mask)  # log 2 is .6931
        (tensor(0.2773), tensor(0.6931))
    """
    return -(mass * mask * masked_log_softmax(logits, mask)).sum(-1).mean()


def kl_loss(logits: Tensor, mass: Tensor, mask: Tensor) -> Tensor:
    """KL from target to prediction: the listwise loss less its floor, so that 0 means perfect.

    Args:
        logits, mass, mask: [R, K] each.

    Returns:
        [] nats.
    """
    return masked_kl(logits, mass, mask).mean()


def bce_loss(logits: Tensor, mass: Tensor, mask: Tensor) -> Tensor:
    """Binary cross-entropy on whether a candidate is among the row's top quarter.

    Args:
        logits, mass, mask: [R, K] each.

    Returns:
        [] nats.
    """
    count = (mask.sum(-1, keepdim=True) * POSITIVE_FRACTION).ceil().long()
    order = mass.masked_fill(~mask, -1.0).argsort(dim=-1, descending=True)
    place = torch.arange(mass.shape[-1], device=mass.device)
    positive = torch.zeros_like(mass).scatter(-1, order, (place < count).to(mass))
    each = binary_cross_entropy_with_logits(logits, positive, reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


def mse_loss(logits: Tensor, mass: Tensor, mask: Tensor) -> Tensor:
    """Squared error of logarithms, each row centred: a forecast's scale does not matter to a ranking.

    Args:
        logits, mass, mask: [R, K] each.

    Returns:
        [] nats squared.
    """
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    error = (logits - mass.clamp(min=FLOOR).log()) * mask
    error = (error - error.sum(-1, keepdim=True) / count) * mask
    return error.square().sum() / mask.sum().clamp(min=1)


def mse_probability_loss(logits: Tensor, mass: Tensor, mask: Tensor) -> Tensor:
    """Squared error of the mass itself, ``logits`` being its logarithm: the heaviest decide.

    Args:
        logits, mass, mask: [R, K] each.

    Returns:
        [] attention probability squared.

    Source: AttentionPredictor (arXiv 2502.04077), section 4.2.
    """
    error = (logits.masked_fill(~mask, 0.0).exp() - mass) * mask
    return error.square().sum() / mask.sum().clamp(min=1)


LOSSES = {
    "recovery": recovery_loss,
    "listwise": listwise_loss,
    "listwise_mass": listwise_mass_loss,
    "kl": kl_loss,
    "bce": bce_loss,
    "mse": mse_loss,
    "mse_share": mse_probability_loss,  # the name in configs
}
