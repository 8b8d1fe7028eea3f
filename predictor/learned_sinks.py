"""Learned attention sinks: a logit of each query head that stands in the softmax's denominator and has no value.

The probabilities of tokens then sum to less than 1: ``exp(score) / (sum of exp(scores) + exp(sink))``. Not to be mixed
up with the first tokens of a text, which learn to do the same where a model has no such logits.

Source: OpenAI 2025, gpt-oss-120b and gpt-oss-20b model card (arXiv 2508.10925), section 2, "Attention".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

CHANNELS = 8  # that SDPA's tokens get more: its fast kernels want multiples of 8


def softmax(scores: Tensor, sinks: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Probabilities of tokens beside a sink.

    Args:
        scores: [..., S] float32. sinks: [...] logits, broadcast; None: there are none.
        out: takes the result, may be ``scores``.

    Returns:
        [..., S]; without sinks each row sums to 1, else to ``sigmoid(logsumexp(scores) - sink)``.

    Example:
        >>> softmax(torch.tensor([0.0, 0.0]), torch.tensor(0.0))
        tensor([0.3333, 0.3333])
    """
    if sinks is None:
        return torch.softmax(scores, -1, out=out)
    share = (scores.logsumexp(-1) - sinks).sigmoid()[..., None]
    return torch.mul(torch.softmax(scores, -1, out=out), share, out=out)


def attend(
    sdpa: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    sinks: Tensor,
) -> Tensor:
    """Attention beside sinks by an SDPA that knows none.

    Args:
        sdpa: attention [B, Q, Hq, D] of query, key, value and mask, with ``scaling``; causal where there is no mask and
            more than one query.
        query: [B, Hq, Q, D]. key, value: [B, H, S, D]. scaling: factor on the scores. sinks: [Hq].
        mask: [B or 1, 1 or Hq, Q, S], bool (True = visible) or additive; None: causal, or one query that sees all.

    Returns:
        [B, Q, Hq, D] in the values' dtype.

    Example:
        >>> def sdpa(query, key, value, mask):
        ...     attention = torch.nn.functional.scaled_dot_product_attention
        ...     return attention(query, key, value, mask, is_causal=True, scale=0.5).transpose(1, 2)
        >>> query, value = torch.zeros(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
        >>> attend(sdpa, query, query, value, None, 0.5, torch.zeros(1))[0, :, 0, 0]  # n / (n + 1)
        tensor([0.5000, 0.6667, 0.7500])
    """
    steps, dim = query.shape[2], value.shape[3]
    query, key, value, mask = with_sink_token(query, key, value, mask, scaling, sinks[:, None])
    if mask is None and steps > 1:
        query = pad(query, (0, 0, 1, 0))  # the sink's own, so that query and key at one place are of one token
    return sdpa(query, key, value, mask)[:, -steps:, :, :dim]


def with_sink_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sinks as one token more, the first, for an SDPA that knows none: its scores are the sinks, its value is zero.

    Its key is zero but for channels of its own, in which each query holds its sink. Two, since the second takes what
    half precision rounds off the first.

    Args:
        query: [..., Q, D]. key, value: [..., S, D]. mask: [..., Q, S], bool (True = visible) or additive, or None.
        scaling: factor on the scores. sinks: broadcast to [..., Q].

    Returns:
        query [..., Q, D + 8], key and value [..., S + 1, D + 8], mask [..., Q, S + 1] or None.
    """
    lowest, dim = torch.finfo(query.dtype).min, query.shape[-1]
    precise = torch.promote_types(query.dtype, torch.float32)
    wanted = (sinks.to(precise) / scaling).clamp(lowest, -lowest).expand(query.shape[:-1])
    first = wanted.to(query.dtype)
    rest = (wanted - first).to(query.dtype)
    own = pad(torch.stack((first, rest), dim=-1), (0, CHANNELS - 2))
    query = torch.cat((query, own), dim=-1)
    key, value = (pad(each, (0, CHANNELS, 1, 0)) for each in (key, value))
    key[..., 0, dim : dim + 2] = 1
    if mask is not None:
        mask = pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
    return query, key, value, mask
