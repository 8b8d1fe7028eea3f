"""One attention layer of the tiered cache: what it holds, and when tokens change tier."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from fade_runtime import hf
from fade_runtime.attention import FullTokens, tiered_attention
from fade_runtime.config import FadeConfig
from fade_runtime.kernels.reference import dequantise
from fade_runtime.packed import PackedTokens, pack_tokens
from fade_runtime.policy import Policy, Prompt
from fade_runtime.tiers import plan_tiers
from predictor import rope
from predictor.errors import FadeError


class TieredLayer(CacheLayerMixin):
    """Sinks and the newest tokens in full precision, the body packed, the rest evicted.

    Attributes:
        full: full-precision tokens: everything until the first compression, then sinks and newest.
        packed: the body.
        seen: logical tokens, padding included.
        prompt: logical tokens of the first prompt.
        index: of the layer in the model.
        pad: [B] slots of left padding in each row.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self, config: FadeConfig, policy: Policy, model_config: Any, rotary: nn.Module | None, index: int = 0
    ) -> None:
        super().__init__()
        self.config, self.policy, self.index = config, policy, index
        self._model_config = model_config
        self._rotary = weakref.ref(rotary) if rotary is not None else lambda: None
        self.reset()

    # -- the Cache contract of transformers ----------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.full: FullTokens | None = None
        self.packed: PackedTokens | None = None
        self.pad: Tensor | None = None
        self.seen = self.prompt = self.evicted = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch size, heads, dims, dtype and device from the first keys."""
        batch, heads, _, dim = key_states.shape
        self.device, self.dtype = key_states.device, key_states.dtype
        slots = torch.zeros(batch, 0, dtype=torch.int32, device=self.device)
        state = slots.new_zeros(batch, heads, 0, dtype=torch.float32) if self._keeps_state else None
        self.full = FullTokens(key_states[:, :, :0], value_states[:, :, :0], slots, state)
        self.packed = PackedTokens.empty(dim, self.device, state=self._keeps_state)
        self.pad = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in new tokens [B, H, Q, D]; give back the new ones, or all of them to a foreign attention function."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self._full.key.shape[0]:
            raise FadeError(
                f"the batch size changed from {self._full.key.shape[0]} to {key_states.shape[0]}; "
                "call cache.reset() before another batch"
            )
        self._append(key_states, value_states)
        if hf.is_attached(self._model_config):
            return hf.hand_over(self, key_states, kwargs.get("kwargs")), value_states
        key, value = self.materialise()
        self._compress_if_due(key_states.shape[2])
        return key, value

    def get_seq_length(self) -> int:
        """Logical tokens seen, never tokens kept."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are over logical slots."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest ``-tokens_to_remove`` tokens.

        Raises:
            FadeError: some of them have left full precision already.
        """
        if tokens_to_remove > 0:
            raise FadeError(f"crop({tokens_to_remove}): give a negative number, the tokens to take back")
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        count = -tokens_to_remove
        free = len(self._full) - (self.config.n_sink if self._compressed else 0)
        if count > free:
            raise FadeError(
                f"cannot take back {count} tokens: only the newest {free} are in full precision; raise recent_window"
            )
        keep = torch.arange(len(self._full) - count, device=self.device)
        self.full = self._full_columns(keep.expand(self._full.slots.shape[0], -1))
        self.seen -= count
        self.prompt = min(self.prompt, self.seen)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows of the batch, in the given order, as often as named."""
        if not self.is_initialized:
            return
        full, heads = self._full, self._full.key.shape[1]
        index = torch.arange(full.key.shape[0], device=self.device)[indices.to(self.device)]  # bool masks too
        if torch.equal(index, torch.arange(full.key.shape[0], device=self.device)):
            return
        state = None if full.state is None else full.state[index]
        self.full = FullTokens(full.key[index], full.value[index], full.slots[index], state)
        self.pad = self._pad[index]
        rows = (index[:, None] * heads + torch.arange(heads, device=self.device)).flatten()
        self.packed = self._packed.select_rows(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.is_initialized:
            rows = torch.arange(self._full.key.shape[0], device=self.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def offload(self) -> None:
        """Refuse: packed tokens stay on their device."""
        raise FadeError("the tiered cache does not offload layers; use an offloaded DynamicCache or a smaller budget")

    prefetch = offload

    # -- attention -----------------------------------------------------------------------------------------------

    def attend(self, module: nn.Module, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attention of the queries [B, Hq, Q, D] that belong to the last ``update``: [B, Q, Hq, D].

        While nothing has left full precision this is transformers' own SDPA on the same tensors.
        """
        steps = query.shape[2]
        first = self.seen - steps
        weights = self.policy.weights(steps, self.device) if self._keeps_state else None
        starts = first == 0
        out: Tensor | None = None
        if starts or not self._compressed:
            out = hf.dense_attention(module, query, self._full.key, self._full.value, mask, scaling)
        if starts:
            self._start(query, mask, scaling)
        elif out is None or weights is not None:
            tiered, to_full, to_packed = tiered_attention(
                query, self._full, self._packed, scaling=scaling, first=first, mask=mask, weights=weights
            )
            out = tiered.transpose(1, 2) if out is None else out
            if weights is not None:
                self._fold(to_full, to_packed, steps)
        self._compress_if_due(steps)
        assert out is not None
        return out

    def _start(self, query: Tensor, mask: Tensor | None, scaling: float) -> None:
        """Padding and first statistics, from the prompt."""
        full = self._full
        self.prompt = self.seen
        if mask is not None:
            last = mask[:, 0, -1] if mask.dtype == torch.bool else mask[:, 0, -1] == 0
            pad = torch.where(last.any(-1), last.int().argmax(-1), self.seen)
            self.pad = pad.expand(full.key.shape[0]).clone()
        if full.state is None:
            return
        for row, pad in enumerate(self._pad.tolist()):
            if pad == self.seen:
                continue
            prompt = Prompt(query[row, :, pad:], full.key[row, :, pad:], full.value[row, :, pad:], scaling, self._table)
            state = self.policy.start(prompt)
            if state is not None:
                full.state[row, :, pad:] = state

    def _table(self, slots: int) -> rope.Table | None:
        return rope.rotary_table(self._rotary(), torch.arange(slots, device=self.device))

    def _fold(self, to_full: Tensor | None, to_packed: Tensor | None, steps: int) -> None:
        """Decay the statistics by the new steps and add the attention that came with them."""
        decay = (self.policy.decay or 1.0) ** steps
        full, packed = self._full, self._packed
        for state, received in ((full.state, to_full), (packed.state, to_packed)):
            assert state is not None
            assert received is not None
            state.mul_(decay).add_(received)

    # -- tiers ---------------------------------------------------------------------------------------------------

    def _append(self, key: Tensor, value: Tensor) -> None:
        full = self._full
        batch, heads, steps, _ = key.shape
        slots = torch.arange(self.seen, self.seen + steps, dtype=torch.int32, device=self.device)
        state = full.state
        if state is not None:
            state = torch.cat((state, state.new_zeros(batch, heads, steps)), dim=2)
        self.full = FullTokens(
            torch.cat((full.key, key), dim=2),
            torch.cat((full.value, value), dim=2),
            torch.cat((full.slots, slots.expand(batch, -1)), dim=1),
            state,
        )
        self.seen += steps

    def _compress_if_due(self, steps: int) -> None:
        """At the end of a prompt at once; while decoding when enough tokens have left the window."""
        beyond = len(self._full) - self.config.n_sink - self.config.recent_window
        prompt = steps == self.seen or steps >= self.config.reassign_every
        if beyond >= (1 if prompt else self.config.reassign_every):
            self.compress()

    def compress(self) -> None:
        """Move what has left the window into the body, within the budget; evict the rest."""
        full = self._full
        _, heads, columns, dim = full.key.shape
        from_recent = self.seen - self.config.recent_window
        leaving = (full.slots >= self._pad[:, None] + self.config.n_sink) & (full.slots < from_recent)  # [B, n]
        row, column = leaving[:, None].expand(-1, heads, -1).reshape(-1, columns).nonzero(as_tuple=True)
        slot = full.slots[row // heads, column].long()
        state = None if full.state is None else full.state.reshape(-1, columns)[row, column]
        staying = self._staying(from_recent)

        kept_old, kept_new = self._choose(row, slot, state)
        packed = self._packed if kept_old is None else self._packed.keep(kept_old)
        if kept_new is not None:
            row, column, slot = row[kept_new], column[kept_new], slot[kept_new]
            state = None if state is None else state[kept_new]
        key, value = (t.reshape(-1, columns, dim)[row, column] for t in (full.key, full.value))
        self.packed = packed.join(pack_tokens(key, value, row, slot, state))
        self.full = self._full_columns(staying)

    def _choose(self, row: Tensor, slot: Tensor, state: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Which packed and which leaving tokens stay: [T] and [new] bool, or None for all."""
        if not self.config.evicts:
            return None, None
        packed, heads = self._packed, self._full.key.shape[1]
        rows = torch.cat((packed.token_row(), row))
        slots = torch.cat((packed.slots(), slot))
        states = slots.float() if state is None or packed.state is None else torch.cat((packed.state, state))
        lengths = (self.seen - self._pad).tolist()  # padding earns no budget
        budgets = torch.tensor([budget for n in lengths for budget in self._budgets(n, heads)], device=self.device)
        order = rows.argsort(stable=True)
        scores = self.policy.score(states[order], slots[order], self.seen, self.prompt)
        plan = plan_tiers(scores, rows[order], budgets)
        kept = torch.empty_like(plan.kept())
        kept[order] = plan.kept()
        self.evicted += int((~kept).sum())
        return kept[: len(packed)], kept[len(packed) :]

    def _budgets(self, length: int, heads: int) -> list[int]:
        """Body tokens that each kv head may keep of a sequence of ``length``."""
        budget = self.config.budget(length)
        assert budget is not None
        shares = self.policy.head_shares(self.index, budget / max(length, 1))
        return [budget] * heads if shares is None else [round(share * length) for share in shares]

    def _staying(self, from_recent: int) -> Tensor:
        """Columns [B, n_sink + window] of the full-precision tokens that stay; -1 where a short row has none."""
        full = self._full
        sinks = self._pad[:, None] + torch.arange(self.config.n_sink, device=self.device)  # [B, n_sink] slots
        found = full.slots[:, None, :] == sinks[:, :, None]
        there = found.any(-1) & (sinks < from_recent)
        sinks = torch.where(there, found.int().argmax(-1), -1)
        recent = torch.arange(len(full) - min(self.config.recent_window, len(full)), len(full), device=self.device)
        return torch.cat((sinks, recent.expand(sinks.shape[0], -1)), dim=1)

    def _full_columns(self, columns: Tensor) -> FullTokens:
        """Full-precision tokens at ``columns`` [B, n] (-1: a hole), copied."""
        full = self._full
        index = columns.clamp(min=0)
        wide = index[:, None, :, None].expand(-1, full.key.shape[1], -1, full.key.shape[3])
        slots = full.slots.gather(1, index).masked_fill(columns < 0, -1)
        state = None if full.state is None else full.state.gather(2, wide[..., 0])
        return FullTokens(full.key.gather(2, wide), full.value.gather(2, wide), slots, state)

    def materialise(self) -> tuple[Tensor, Tensor]:
        """All keys and values [B, H, S, D] in the model's dtype, for a foreign attention function; nothing is kept.

        Raises:
            FadeError: something was evicted; a foreign attention function could not skip it.
        """
        full, packed = self._full, self._packed
        if not self._compressed:
            return full.key, full.value
        if self.evicted:
            raise FadeError(
                f"attention implementation {self._model_config._attn_implementation!r} cannot skip evicted tokens; "
                "set it back to 'fade' or use FadeConfig.safe()"
            )
        batch, heads, _, dim = full.key.shape
        row, slot = packed.token_row(), packed.slots()
        there = full.slots >= 0
        result = []
        for stored, body in zip((full.key, full.value), dequantise(packed, self.dtype), strict=True):
            out = stored.new_zeros(batch, heads, self.seen, dim)
            out.view(-1, self.seen, dim)[row, slot] = body
            at, column = there.nonzero(as_tuple=True)
            out[at, :, full.slots[at, column].long()] = stored[at, :, column]
            result.append(out)
        return result[0], result[1]

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def _full(self) -> FullTokens:
        assert self.full is not None
        return self.full

    @property
    def _packed(self) -> PackedTokens:
        assert self.packed is not None
        return self.packed

    @property
    def _pad(self) -> Tensor:
        assert self.pad is not None
        return self.pad

    @property
    def _keeps_state(self) -> bool:
        return self.config.evicts and self.policy.decay is not None

    @property
    def _compressed(self) -> bool:
        """Whether any token has left full precision."""
        return len(self._packed) > 0 or self.evicted > 0 or len(self._full) < self.seen
