"""Heuristic importance scores: pure functions, higher = keep.

Policies of the runtime and baselines of the training both call these. Shapes: ``[..., S]`` over the slots of one
sequence; attention rows are ``[..., W, S]``, averaged over the query heads of a kv head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

CONTINUES = (
    0.3  # measured with SmolLM2-135M and Gemma 3 270M: .3 to 3 serve copies alike, more than .3 costs plain text
)


def position(slots: Tensor) -> Tensor:
    """Score a token by its slot: the newest are kept.

    Args:
        slots: [..., S] integers.

    Returns:
        [..., S] float32.

    Source: Xiao et al. 2023, StreamingLLM (arXiv 2309.17453), section 3.2.
    """
    return slots.float()


def h2o(mass: Tensor, visible: Tensor) -> Tensor:
    """Score a token by the attention it received from the queries that could see it.

    Args:
        mass: [..., S] attention received, summed over queries.
        visible: [..., S] number of queries that could see the token.

    Returns:
        [..., S] float32.

    Source: Zhang et al. 2023, H2O (arXiv 2306.14048), section 4.2, divided by the number of queries, without which
    early tokens always win.

    Example:
        >>> h2o(torch.tensor([3.0, 2.0]), torch.tensor([6, 2])).tolist()
        [0.5, 1.0]
    """
    return mass.float() / visible.clamp(min=1)


def ema_weights(steps: int, decay: float, device: torch.device | str = "cpu") -> Tensor:
    """Weights ``[steps]`` of an exponential moving average whose newest row is last; they sum to 1."""
    weights = decay ** torch.arange(steps - 1, -1, -1, device=device, dtype=torch.float32)
    return weights / weights.sum()


def ema(rows: Tensor, decay: float = 0.95) -> Tensor:
    """Exponential moving average of attention rows, the newest row last.

    Args:
        rows: [..., W, S].
        decay: weight of a row relative to the one after it.

    Returns:
        [..., S].

    Example:
        >>> ema(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), decay=0.5).tolist()
        [0.3333333432674408, 0.6666666865348816]
    """
    return torch.einsum("w,...ws->...s", ema_weights(rows.shape[-2], decay, rows.device), rows.float())


def snapkv(rows: Tensor, kernel: int = 5) -> Tensor:
    """Mean of the last window's attention rows, average-pooled over neighbours.

    Args:
        rows: [..., W, S] attention. kernel: tokens that are pooled.

    Returns:
        [..., S] float32.

    Source: Li et al. 2024, SnapKV (arXiv 2404.14469), section 4.2; average-pool 5 as measured best here.
    """
    mean = rows.float().mean(dim=-2)
    flat = mean.reshape(1, -1, mean.shape[-1])
    pooled = avg_pool1d(flat, kernel, stride=1, padding=kernel // 2, count_include_pad=False)
    return pooled.reshape(mean.shape)


def ahead(rows: Tensor, reach: int, skip: int = 0) -> Tensor:
    """The most attention that a token, or one of those shortly before it, received of late.

    Text that is being repeated is read in its order: what follows the place that is looked at now is looked at next.

    Args:
        rows: [..., W, S] attention of the newest queries. reach: tokens that are looked back over, itself included.
        skip: first tokens (attention sinks), which are looked at for another reason and do not count.

    Returns:
        [..., S] float32.

    Source: Olsson et al. 2022, In-context Learning and Induction Heads (arXiv 2209.11895), section "Induction heads":
    attention goes to the token after an earlier occurrence of the present one.

    Example:
        >>> ahead(torch.tensor([[0.5, 0.0, 0.3, 0.0, 0.0, 0.2]]), reach=3, skip=1).tolist()
        [0.0, 0.0, 0.30000001192092896, 0.30000001192092896, 0.30000001192092896, 0.20000000298023224]
    """
    most = rows.float().amax(dim=-2)
    most[..., :skip] = 0
    flat = pad(most.reshape(-1, 1, most.shape[-1]), (reach - 1, 0))
    return max_pool1d(flat, reach, stride=1).reshape(most.shape)


def with_ahead(forecast: Tensor, read_on: Tensor) -> Tensor:
    """A forecast of attention that gives no token less than what reading on would give it.

    Args:
        forecast: [..., S] mean attention of the coming steps.
        read_on: [..., S] what a token gets in the mean if it is read once in these steps, with the attention that the
            place read now gets: :func:`ahead` divided by the steps. That happens with the probability
            :data:`CONTINUES`.

    Returns:
        [..., S].

    Example:
        >>> with_ahead(torch.tensor([0.01, 0.2]), torch.tensor([0.1, 0.1])).tolist()
        [0.030000001192092896, 0.20000000298023224]
    """
    return torch.maximum(forecast, CONTINUES * read_on)


def ema_ea(log_ema: Tensor, log_ea: Tensor) -> Tensor:
    """Closed form: log EMA plus log Expected Attention, which ranks as the geometric mean of the two forecasts does.

    Args:
        log_ema, log_ea: [..., S].

    Returns:
        [..., S].
    """
    return log_ema + log_ea


def match_quantiles(ranking: Tensor, values: Tensor) -> Tensor:
    """Give the order of one score the values of another: the best-ranked token gets the largest value.

    Scores that only rank have no unit (a softmax of them may underflow to ties); the result has the unit of
    ``values``, keeps their sum, and ranks as ``ranking`` does.

    Args:
        ranking, values: [..., S].

    Returns:
        [..., S] in the dtype of ``values``.

    Example:
        >>> match_quantiles(torch.tensor([900.0, -900.0, 0.0]), torch.tensor([0.1, 0.7, 0.2])).tolist()
        [0.699999988079071, 0.10000000149011612, 0.20000000298023224]
    """
    return torch.empty_like(values).scatter_(-1, ranking.argsort(dim=-1, stable=True), values.sort(dim=-1).values)
