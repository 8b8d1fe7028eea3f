"""Gradients of attention over a tiered layer: for the queries, keys, values and learned sinks of the very call.

The call runs as ever. When gradients are asked for, a copy of the layer as it was then answers it again in plain torch.
What is stored carries no gradients: keys and values of an earlier call could not be reached, and that is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fade_runtime.layer.attention import AttentionCall, wants_gradients
from fade_runtime.layer.store import TokenStore
from predictor.errors import FadeError

TRACKED = "tracked"  # attribute of a store: tokens seen before the first call whose gradients were wanted


class Differentiable(Protocol):
    """A layer whose attention autograd can look through."""

    @property
    def seen(self) -> int:
        """Columns, padding included."""

    @property
    def tokens(self) -> TokenStore:
        """What it holds."""

    def attend(
        self, module: nn.Module, call: AttentionCall, position_ids: Tensor | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Attention [B, Q, Hq, D] of the queries of the running call."""

    def reader(self, key: Tensor, value: Tensor) -> Differentiable:
        """A copy that answers the running call with other newest keys and values [B, H, Q, D], and keeps nothing."""


def attend(
    layer: Differentiable,
    module: nn.Module,
    call: AttentionCall,
    key: Tensor,
    value: Tensor,
    position_ids: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """``layer.attend`` [B, Q, Hq, D], of which autograd knows, with dropout of the probabilities.

    Args:
        layer: has stored ``key`` and ``value`` without gradients. module: the attention module. call: its queries.
        key, value: [B, H, Q, D] that came with the last update. position_ids: [B or 1, Q]. dropout: of probabilities.
    """
    key, value = key.as_subclass(Tensor), value.as_subclass(Tensor)
    cut = _cut(layer, key, value)

    def answer(over: Differentiable, query: Tensor, sinks: Tensor | None, dropout: float = 0.0) -> Tensor:
        return over.attend(module, call._replace(query=query, sinks=sinks), position_ids, dropout)

    if not dropout:
        return _Recomputed.apply(call.query, key, value, call.sinks, layer, answer, cut)
    if cut:
        key, value = _Cut.apply(key), _Cut.apply(value)
    out = answer(layer.reader(key, value), call.query, call.sinks, dropout)
    with torch.no_grad():
        answer(layer, call.query, call.sinks)  # statistics, and what has left the window, as ever
    return out


def joined(
    layer: Differentiable, key: Tensor, value: Tensor, new_key: Tensor, new_value: Tensor
) -> tuple[Tensor, Tensor]:
    """All keys and values [B, H, S, D] that a layer holds, of which the newest are these, for autograd to see."""
    cut, older = _cut(layer, new_key, new_value), key.shape[2] - new_key.shape[2]
    if cut:
        new_key, new_value = _Cut.apply(new_key), _Cut.apply(new_value)
    return torch.cat((key[:, :, :older], new_key), dim=2), torch.cat((value[:, :, :older], new_value), dim=2)


def _cut(layer: Differentiable, key: Tensor, value: Tensor) -> bool:
    """Whether tokens of an earlier call wanted gradients and are still there; notes whether those of this one do."""
    store, first = layer.tokens, layer.seen - key.shape[2]
    tracked = getattr(store, TRACKED, None)
    cut = tracked is not None and tracked < first  # else those have been taken back
    setattr(store, TRACKED, tracked if cut else first if wants_gradients(key, value) else None)
    return cut


def _refuse() -> None:
    raise FadeError(
        "gradients do not reach the tokens of earlier calls, which the cache holds without them; read those under "
        "torch.no_grad(), or give all tokens in one call"
    )


class _Cut(torch.autograd.Function):
    """Leaves a tensor as it is, and refuses its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        _refuse()


class _Recomputed(torch.autograd.Function):
    """Attention whose gradients a copy of the layer computes."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layer: Differentiable,
        answer: Callable[..., Tensor],
        cut: bool,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.reader, ctx.answer, ctx.cut = layer.reader(key.detach(), value.detach()), answer, cut
        return answer(layer, query, sinks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.cut:
            _refuse()
        *tokens, sinks = ctx.saved_tensors
        query, key, value = (tensor.detach().requires_grad_() for tensor in tokens)
        wanted = [query, key, value]
        if sinks is not None:
            sinks = sinks.detach().requires_grad_()
            wanted.append(sinks)
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            out = ctx.answer(ctx.reader.reader(key, value), query, sinks)
        found = torch.autograd.grad(out, wanted, grad)
        return *found, *(None,) * (7 - len(found))
