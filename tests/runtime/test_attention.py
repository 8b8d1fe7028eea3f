"""One pass over tiers against torch's own SDPA on dequantised tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fade_runtime.kernels.reference import Part, dequantise
from fade_runtime.layer import attention
from fade_runtime.layer.attention import AttentionCall, FullTokens, tiered_attention
from fade_runtime.storage.packed import pack_tokens

DIM = 32


def _case(batch: int, heads: int, slots: int, body: list[int], steps: int) -> dict[str, Any]:
    """Rows that keep `body[r]` random slots of the middle, 3 sinks and the last 20 slots."""
    torch.manual_seed(0)
    key, value = torch.randn(2, batch, heads, slots, DIM)
    ends = torch.cat((torch.arange(3), torch.arange(slots - 20, slots)))
    full = FullTokens(key[:, :, ends], value[:, :, ends], ends.to(torch.int32).expand(batch, -1))
    rows = torch.arange(batch * heads).repeat_interleave(torch.tensor(body))
    middle = torch.cat([(torch.randperm(slots - 23)[:n] + 3).sort().values for n in body])
    flat = key.flatten(0, 1)[rows, middle], value.flatten(0, 1)[rows, middle]
    packed = pack_tokens(*flat, rows, middle, None, low=torch.rand(len(rows)) < 0.4)
    rows, middle = packed.token_row(), packed.slots()
    kept = torch.zeros(batch * heads, slots, dtype=torch.bool)
    kept[:, ends] = True
    kept[rows, middle] = True
    back_key, back_value = dequantise(packed, torch.float32)
    key.view(-1, slots, DIM)[rows, middle] = back_key
    value.view(-1, slots, DIM)[rows, middle] = back_value
    causal = torch.arange(slots) <= (slots - steps + torch.arange(steps))[:, None]
    return {"key": key, "value": value, "full": full, "packed": packed, "kept": kept, "causal": causal}


def _oracle(
    query: Tensor, case: dict[str, Any], visible: Tensor, scaling: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and probabilities [B, Hq, Q, S] by stock SDPA and by brute force; with sinks [Hq] both by brute force."""
    groups = query.shape[1] // case["key"].shape[1]
    key, value = (case[n].repeat_interleave(groups, 1) for n in ("key", "value"))
    kept = case["kept"].view(*case["key"].shape[:3]).repeat_interleave(groups, 1)[:, :, None]
    mask = kept & visible
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:3], 1)
        probs = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
        return probs @ value, probs
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling), scores.softmax(-1)


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("masked", ["causal", "bool", "additive", "per head"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_tiered_attention_equals_sdpa(groups: int, steps: int, masked: str, with_sinks: bool) -> None:
    batch, heads, slots = 2, 2, 231
    case = _case(batch, heads, slots, [150, 0, 63, 17], steps)
    query = torch.randn(batch, heads * groups, steps, DIM)
    visible = case["causal"][None, None]
    mask: Tensor | None = None
    if masked != "causal":
        width = heads * groups if masked == "per head" else 1
        visible = visible & (torch.rand(batch, width, steps, slots) < 0.8)
        visible[..., -steps - 3] = True
        mask = visible
    if masked == "additive":
        mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    sinks = 2 * torch.randn(heads * groups) if with_sinks else None
    expected, probs = _oracle(query, case, visible, 0.2, sinks)
    weights = torch.rand(steps)
    call = AttentionCall(query, mask, 0.2, sinks=sinks)
    out, to_full, masses = tiered_attention(
        call, case["full"], [Part(case["packed"])], first=slots - steps, weights=weights
    )
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    mass = (probs * weights[:, None]).sum(2).view(batch, heads, groups, slots).mean(2)  # [B, H, S]
    assert to_full is not None
    (to_packed,) = masses
    torch.testing.assert_close(to_full, mass[:, :, case["full"].slots[0].long()], atol=2e-5, rtol=1e-4)
    row, slot = case["packed"].token_row(), case["packed"].slots()
    torch.testing.assert_close(to_packed, mass.view(-1, slots)[row, slot], atol=2e-5, rtol=1e-4)


def test_chunks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case(1, 2, 90, [40, 11], 13)
    query = torch.randn(1, 4, 13, DIM)
    arguments: dict[str, Any] = dict(first=77, weights=torch.rand(13))
    whole = tiered_attention(AttentionCall(query, None, 0.3), case["full"], [Part(case["packed"])], **arguments)
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 4 * 74 * 5)
    parts = tiered_attention(AttentionCall(query, None, 0.3), case["full"], [Part(case["packed"])], **arguments)
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("at_once", [1 << 24, 4 * 74 * 5], ids=["one chunk", "chunks"])
def test_statistics_are_added_to_older_ones(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    case = _case(2, 2, 90, [40, 11, 0, 33], 13)
    query, parts = torch.randn(2, 4, 13, DIM), [Part(case["packed"])]
    arguments: dict[str, Any] = dict(first=77, weights=torch.rand(13))
    out, fresh, (fresh_packed,) = tiered_attention(AttentionCall(query, None, 0.3), case["full"], parts, **arguments)
    assert fresh is not None
    older = torch.rand_like(fresh), torch.rand_like(fresh_packed)
    states = [state.clone() for state in older]
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", at_once)
    again = tiered_attention(AttentionCall(query, None, 0.3), case["full"], parts, **arguments, into=states, decay=0.25)
    torch.testing.assert_close(again[0], out)
    for state, old, new in zip(states, older, (fresh, fresh_packed)):
        torch.testing.assert_close(state, 0.25 * old + new)


def test_holes_are_invisible() -> None:
    """Slot -1 marks a column of a short row; whatever lies there must not matter."""
    case = _case(1, 1, 60, [20], 1)
    query = torch.randn(1, 2, 1, DIM)
    full: FullTokens = case["full"]
    slots = full.slots.clone()
    slots[0, 1] = -1
    poisoned = full.key.clone()
    poisoned[:, :, 1] = 1e4
    case["kept"][:, 1] = False
    expected, _ = _oracle(query, case, case["causal"][None, None], 0.2)
    for mask in (None, torch.ones(1, 1, 1, 60, dtype=torch.bool)):
        out, _, _ = tiered_attention(
            AttentionCall(query, mask, 0.2),
            FullTokens(poisoned, full.value, slots),
            [Part(case["packed"])],
            first=59,
        )
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
