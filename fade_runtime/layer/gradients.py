"""Gradients of attention over a tiered layer: for the queries, keys and values of the very call.

The call runs as ever. When gradients are asked for, a copy of the layer as it was then answers it again in plain torch.
What is stored carries no gradients: keys and values of an earlier call could not be reached, and that is refused.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fade_runtime.layer.held import HeldCalls
from fade_runtime.layer.sequences import Shared
from fade_runtime.policies.base import Policy
from predictor.errors import FadeError

if TYPE_CHECKING:
    from fade_runtime.layer.layer import TieredLayer


TRACKED = "tracked"  # attribute of a store: tokens seen before the first call whose gradients were wanted


def needed(*tensors: Tensor) -> bool:
    """Whether autograd is to see what is computed from these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def attend(
    layer: TieredLayer,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **more: Any,
) -> Tensor:
    """:meth:`TieredLayer.attend` [B, Q, Hq, D], of which autograd knows, with dropout of the probabilities.

    Args:
        key, value: [B, H, Q, D] that came with the last update; the layer has stored them without gradients.
    """
    key, value = key.as_subclass(Tensor), value.as_subclass(Tensor)
    cut = _cut(layer, key, value)
    if not dropout:
        return _Recomputed.apply(query, key, value, layer, (module, mask, scaling, more), cut)
    if cut:
        key, value = _Cut.apply(key), _Cut.apply(value)
    out = reader(layer, key, value).attend(module, query, mask, scaling, dropout=dropout, **more)
    with torch.no_grad():
        layer.attend(module, query, mask, scaling, **more)  # statistics, and what has left the window, as ever
    return out


def reader(layer: TieredLayer, key: Tensor, value: Tensor) -> TieredLayer:
    """A copy of a layer that answers the running call, with these keys and values [B, H, Q, D] for the newest.

    It changes nothing, keeps no statistics, and autograd can look through it.
    """
    other, store = copy.copy(layer), copy.copy(layer.tokens)
    older = len(store.full) - key.shape[2]
    keys, values = (
        torch.cat((old[:, :, :older], new), dim=2) for old, new in ((store.full.key, key), (store.full.value, value))
    )
    store.full = replace(store.full, key=keys, value=values, state=None)
    store.packed = replace(store.packed, state=None)
    store.pq = None if store.pq is None else replace(store.pq, state=None)
    other.config = copy.copy(layer.config)
    object.__setattr__(other.config, "compression", "off")
    other.store, other.held, other.shared, other.prompts = store, HeldCalls(), Shared(), [0] * store.batch
    other._attended, other.policy, other.watch, other.observer = 0, Policy(), None, None
    return other


def joined(layer: TieredLayer, key: Tensor, value: Tensor, new_key: Tensor, new_value: Tensor) -> tuple[Tensor, Tensor]:
    """All keys and values [B, H, S, D] that a layer holds, of which the newest are these, for autograd to see."""
    cut, older = _cut(layer, new_key, new_value), key.shape[2] - new_key.shape[2]
    if cut:
        new_key, new_value = _Cut.apply(new_key), _Cut.apply(new_value)
    return torch.cat((key[:, :, :older], new_key), dim=2), torch.cat((value[:, :, :older], new_value), dim=2)


def _cut(layer: TieredLayer, key: Tensor, value: Tensor) -> bool:
    """Whether tokens of an earlier call wanted gradients and are still there; notes whether those of this one do."""
    store, first = layer.tokens, layer.seen - key.shape[2]
    tracked = getattr(store, TRACKED, None)
    cut = tracked is not None and tracked < first  # else those have been taken back
    setattr(store, TRACKED, tracked if cut else first if needed(key, value) else None)
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
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layer: TieredLayer, call: tuple[Any, ...], cut: bool
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.reader, ctx.call, ctx.cut = reader(layer, key.detach(), value.detach()), call, cut
        module, mask, scaling, more = call
        return layer.attend(module, query, mask, scaling, **more)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.cut:
            _refuse()
        query, key, value = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        module, mask, scaling, more = ctx.call
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            out = reader(ctx.reader, key, value).attend(module, query, mask, scaling, **more)
        return *torch.autograd.grad(out, (query, key, value), grad), None, None, None
