"""What a layer learns from its prompt: where each row begins, and the policy's first statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fade_runtime.attention import is_causal
from fade_runtime.fastgen import FastGen
from fade_runtime.policy import Policy, Prompt
from fade_runtime.store import TokenStore
from predictor import rope
from predictor.features import attention_and_mass

if TYPE_CHECKING:
    from fade_runtime.text import SeenText


def begin(
    policy: Policy,
    store: TokenStore,
    key: Tensor,
    query: Tensor,
    scaling: float,
    table: Callable[[int], rope.Table | None],
    text: SeenText | None = None,
    *,
    layer: int,
    plain: bool,
    mask: Tensor | None,
) -> Tensor | None:
    """First statistics, from the queries [B, Hq, S, D] of the whole prompt and its keys [B, H, S, D].

    Args:
        policy: says which. store: takes them. scaling: factor on the scores. table: rotary table of the first slots.
        text: what is known of the words, for a policy that reads them, and for an assistant. layer: its index.
        plain: whether attention may come with them: no softcap. mask: of the prompt.

    Returns:
        The attention [B, Q, Hq, D] where it comes with them: on a CPU, if the policy wants what all queries see, which
        SDPA would compute once more, and scores and mask are plain. None elsewhere.
    """
    full, upto = store.full, key.shape[2]
    if full.state is None:
        return None
    fits = query.device.type == "cpu" and query.dtype == torch.float32 and not query.requires_grad
    out, state = None, None
    if policy.whole_prompt and plain and fits and is_causal(mask, store.pad):
        out = query.new_zeros(*query.shape[:3], full.value.shape[3])
    for row, pad in enumerate(store.pad.tolist()):
        if pad >= upto:
            continue
        given = query[row, :, pad:], key[row, :, pad:], full.value[row, :, pad:upto]
        if out is not None:
            out[row, :, pad:], state = attention_and_mass(*given, scaling)
        else:
            state = policy.start(Prompt(*given, scaling, table, layer))
        if state is not None:
            state = _helped(policy, text, state, row, pad)
            full.state[row, :, pad:upto] = state
            if isinstance(policy, FastGen) and text is not None:
                assert store.policies is not None
                store.policies[row] = policy.profile(state, text.classes(upto)[row, pad:])
    return None if out is None else out.transpose(1, 2)


def _helped(policy: Policy, text: SeenText | None, state: Tensor, row: int, pad: int) -> Tensor:
    """First statistics [H, S] of a row, fused with an assistant's if there is one."""
    if text is None or text.assistant is None:
        return state
    length = state.shape[1]
    slots = torch.arange(length, device=state.device)
    unit = policy.score(torch.ones_like(state), slots, length, length)  # scores are linear in the state
    return text.helped(state * unit, row, pad) / unit


def note_padding(store: TokenStore, mask: Tensor | None, position_ids: Tensor | None) -> None:
    """Learn from a call of the prompt where each row begins, and how far its positions lag behind its slots."""
    if mask is not None:
        last = mask[:, 0, -1]  # [B, S]
        visible = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
        pad = torch.where(visible.any(-1), visible.int().argmax(-1), store.seen)
        store.pad = pad.expand(len(store.pad)).clone()
    if position_ids is not None:
        last = position_ids.reshape(-1, *position_ids.shape[-2:])[0][:, -1]
        store.shift = (store.seen - 1 - last).expand(len(store.pad)).clone()
