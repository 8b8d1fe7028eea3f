"""One attention layer of the tiered cache, call by call: prefill, chunk of a prompt, decode step, held call."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fade_runtime import transformers_api as hf
from fade_runtime.layer import gradients
from fade_runtime.layer.attention import AttentionCall, wants_gradients
from fade_runtime.layer.checks import check_tokens
from fade_runtime.layer.compressed_layer import CompressedLayer, LayerHooks
from fade_runtime.layer.held import HeldCall, HeldCalls
from fade_runtime.layer.prefill import prefill_stats
from fade_runtime.layer.sequences import Shared
from fade_runtime.layer.setup import LayerSetup
from fade_runtime.layer.tiered import attend_tiers
from fade_runtime.policies import Policy
from predictor import rope
from predictor.errors import FadeError

NO_DROPOUT = (
    "attention dropout is not applied to packed tokens; call model.eval(), set the model's attention dropout to 0, or "
    "use FadeConfig(compression='off')"
)


@dataclass
class RunningCall:
    """One call of the model, as a layer sees it.

    Attributes:
        new: columns that it brought.
        readers: layers that have attended to them so far: this one, then those that share its tokens.
        held: whether it may still be taken back, so that it is not counted at its end.
    """

    new: int = 0
    readers: int = 0
    held: bool = False


class TieredLayer(CompressedLayer):
    """Sinks and the newest tokens in full precision, the body packed, the rest evicted.

    A call of the model is *counted* when its queries enter the statistics and the tokens that have left the window
    move. Most calls are counted at once. Some are held until the next call, as long as they may still be taken back:
    those of a few tokens (drafts, a question), all of them after :meth:`activate_past_recording`, the chunks of a
    prompt, and with ``on_rollback="redecode"`` the steps that the guard has not found in order yet.

    Attributes:
        running: the running call, or the last one.
    """

    def __init__(self, setup: LayerSetup, hooks: LayerHooks | None = None, shared: Shared | None = None) -> None:
        self.running = RunningCall()
        super().__init__(setup, hooks, shared)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.running = RunningCall()

    # -- a call brings its tokens ----------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in new tokens [B, H, Q, D]; give back the new ones, or all of them to a foreign attention function.

        Raises:
            FadeError: another batch size, device or dtype than before, or keys or values that are not finite.
        """
        if hf.is_autocast(key_states.device.type):
            return hf.as_attended(self.update, key_states, value_states, *args, **kwargs)
        key, value = key_states.detach(), value_states.detach()
        check_tokens(self.index, None if self.store is None else self.store.full.key, key, value)
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        self.running = RunningCall(key_states.shape[2])
        call, attached = kwargs.get("kwargs"), hf.is_attached(self.setup.model_config())
        if self.held.calls:
            self.count_held(self._not_to_hold_longer() if attached else None)
        self.tokens.append(key, value)
        if attached:
            return hf.hand_over(self, key_states, call), value_states
        return self._foreign_attention(key_states, value_states, (call or {}).get("position_ids"))

    def _foreign_attention(
        self, key_states: Tensor, value_states: Tensor, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Everything in full precision [B, H, S, D], for an attention function that knows no tiers."""
        self.take_in(None, position_ids)
        self.running.readers = 1
        self._note_prompts()
        key, value = self.materialise()
        if wants_gradients(key_states, value_states):
            key, value = gradients.joined(self, key, value, key_states, value_states)
        self.compress_if_due(self.running.new)
        self.shared.ended(self.index)
        return key, value

    # -- and attends to them ---------------------------------------------------------------------------------------

    @torch.compiler.disable
    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None = None,
        position_ids: Tensor | None = None,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """:meth:`attend` outside of compiled graphs, under autocast as SDPA, and with gradients: [B, Q, Hq, D].

        Args:
            module: the attention module. query: [B, Hq, Q, D].
            key, value: [B, H, Q, D] that came with the last update, and have been stored.
            mask: [B or 1, 1 or Hq, Q, S] over columns, bool (True = visible) or additive; None: causal.
            scaling: factor on the scores. softcap: of the scores. position_ids: [B or 1, Q]. dropout: of probabilities.
            sinks: [Hq] learned sinks, or None.
        """
        if hf.is_autocast(query.device.type):
            more = dict(softcap=softcap, position_ids=position_ids, dropout=dropout, sinks=sinks)
            return hf.as_attended(self.attention, module, query, key, value, mask, scaling, **more)
        call = AttentionCall(query, mask, scaling, softcap, sinks=sinks)
        if dropout or wants_gradients(query, key, value, sinks):
            return gradients.attend(self, module, call, key, value, position_ids, dropout)
        return self.attend(module, call, position_ids)

    def attend(
        self, module: nn.Module, call: AttentionCall, position_ids: Tensor | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Attention of the queries [B, Hq, Q, D] that belong to the last ``update``: [B, Q, Hq, D].

        While nothing has left full precision this is transformers' own SDPA on the same tensors.

        Raises:
            FadeError: dropout, and something has left full precision.
        """
        running, mask = self.running, call.mask
        running.readers += 1
        first = running.readers == 1  # later ones share this layer's tokens
        if first:
            self.take_in(mask, position_ids)
        if self.tokens.sequences.plain and (mask is not None or self.setup.window is not None):
            call = call._replace(mask=None, window=self.setup.window)
        out = self._begin_call(call) if first else None
        if out is None or not (self.tokens.compressed or self._is_prefill):
            out = self._without_stats(module, call, mask, dropout)
        elif dropout:
            raise FadeError(NO_DROPOUT)
        if running.readers == 1 + self.kv_sharers:
            self._end_call()
        return out

    def _begin_call(self, call: AttentionCall) -> Tensor | None:
        """Hold the call, or count its queries; attention [B, Q, Hq, D] where that gives it along."""
        running = self.running
        running.held = self._may_be_taken_back()
        if running.held:
            self.held.calls.append(HeldCall(call, self.tokens.sequences))
        elif self.setup.keeps_stats or self.hooks is not None:
            self.final = self.seen
        if self.hooks is not None and self._is_watched:
            self.hooks.begin(self, call)
        return None if running.held else self._count_queries(call)

    def _end_call(self) -> None:
        """All layers that read these tokens have: move what is due."""
        running = self.running
        if not running.held:
            self.compress_if_due(running.new)
        if self.hooks is not None and self._is_watched:
            self.hooks.end(self, running.new)
        self.shared.ended(self.index)

    # -- its phases ------------------------------------------------------------------------------------------------

    def _count_queries(self, call: AttentionCall) -> Tensor | None:
        """Let the queries enter the statistics; attention [B, Q, Hq, D] where that gives it along."""
        self._note_prompts()
        if not self.setup.keeps_stats:
            return None
        begins = self.tokens.sequences.begins
        out = self._prefill(call) if any(begins) else None
        return out if all(begins) else self._chunk_or_step(call)

    def _prefill(self, call: AttentionCall) -> Tensor | None:
        """The first call of some rows: their first statistics come from the policy."""
        store = self.tokens
        key = self.positions.full_key(store)
        return prefill_stats(self.policy, store, key, call, self._table, self.text, layer=self.index)

    def _chunk_or_step(self, call: AttentionCall) -> Tensor:
        """More of a prompt, or a decode step: statistics decay, and grow by the attention of the new queries."""
        return attend_tiers(self.tokens, self.positions, call, self.policy).transpose(1, 2)

    def _without_stats(self, module: nn.Module, call: AttentionCall, mask: Tensor | None, dropout: float) -> Tensor:
        """Attention [B, Q, Hq, D] that leaves the statistics as they are."""
        store = self.tokens
        if not store.compressed:
            key = self.positions.full_key(store)
            return hf.dense_attention(
                module, call.query, key, store.full.value, mask, call.scaling, call.softcap, dropout, call.sinks
            )
        if dropout:
            raise FadeError(NO_DROPOUT)
        return attend_tiers(store, self.positions, call, None).transpose(1, 2)

    def _note_prompts(self) -> None:
        """Remember how long the first prompt of each row is that begins in the call that is counted."""
        sequences = self.tokens.sequences
        if any(sequences.begins):
            pairs = zip(sequences.begins, sequences.counts, self.prompts)
            self.prompts = [count if begins else prompt for begins, count, prompt in pairs]

    def _table(self, count: int) -> rope.Table | None:
        """Rotary table of the first positions, for a policy."""
        rotary = self.setup.rotary
        return None if rotary is None else rotary.table(torch.arange(count, device=self.device), self.index)

    @property
    def attended(self) -> bool:
        """Whether the tokens of the running call have been attended to."""
        return self.running.readers > 0

    @property
    def _is_prefill(self) -> bool:
        return all(self.tokens.sequences.begins)

    @property
    def _is_watched(self) -> bool:
        """Whether the guard watches the running call: not if it is held, unless the guard decides how long."""
        return not self.running.held or self._redecodes

    @property
    def _redecodes(self) -> bool:
        return self.config.on_rollback == "redecode"

    # -- calls that are held ---------------------------------------------------------------------------------------

    def _may_be_taken_back(self) -> bool:
        """Whether the running call is held."""
        if not self.setup.keeps_stats and self.config.compression == "off":
            return False
        new, first = self.running.new, self.running.new == self.seen
        if self.record_past or (self.config.chunked_prefill and new > 1):
            return True
        if self._redecodes:
            return new == 1 and not first
        return 1 < new < self.config.reassign_every and not first

    def _not_to_hold_longer(self) -> int:
        """How many of the held calls are counted before a new one, the oldest first."""
        calls, new = self.held.calls, self.running.new
        if self.record_past:
            return self.held.older_than(self.seen + new - self.config.recent_window + 1)
        if self.config.chunked_prefill and new > 1:
            return 0
        if self._redecodes and new == 1 and self.hooks is not None:
            return self.held.older_than(self.hooks.settled + 1)
        return len(calls)

    def count_held(self, number: int | None = None) -> None:
        """Count the oldest of the held calls, all by default, as if each had been counted when it came."""
        held = self.held
        if self.config.chunked_prefill and not self.record_past and number != 0:
            held.join()
        number = len(held.calls) if number is None else min(number, len(held.calls))
        if not number:
            return
        self.whole, self.final = False, max(self.final, held.calls[number - 1].sequences.seen)
        inference = torch.inference_mode(self.tokens.full.key.is_inference())  # as when they came, wherever this is
        with torch.no_grad(), inference, torch.autocast(self.device.type, enabled=False):
            for each in held.replayed(self.tokens, number):
                self._count(each)
        self.whole = True

    def _count(self, held: HeldCall) -> None:
        new, hooks = held.sequences.new, None if self._redecodes else self.hooks
        if hooks is not None:
            hooks.begin(self, held.call)
        self._count_queries(held.call)
        self.compress_if_due(new)
        if hooks is not None:
            hooks.end(self, new)

    # -- for autograd ----------------------------------------------------------------------------------------------

    def reader(self, key: Tensor, value: Tensor) -> TieredLayer:
        """A copy that answers the running call, with these keys and values [B, H, Q, D] for the newest.

        It changes nothing, keeps no statistics, and autograd can look through it.
        """
        other, store = copy.copy(self), copy.copy(self.tokens)
        older = len(store.full) - key.shape[2]
        keys, values = (
            torch.cat((old[:, :, :older], new), dim=2)
            for old, new in ((store.full.key, key), (store.full.value, value))
        )
        store.full = replace(store.full, key=keys, value=values, attention_stats=None)
        store.packed = replace(store.packed, attention_stats=None)
        store.pq = None if store.pq is None else replace(store.pq, attention_stats=None)
        exact = copy.copy(self.config)
        object.__setattr__(exact, "compression", "off")  # without checks and their warnings: it was checked before
        other.setup = replace(self.setup, config=exact, policy=Policy())
        other.store, other.held, other.shared, other.prompts = store, HeldCalls(), Shared(), [0] * store.batch
        other.running, other.hooks, other.observer = RunningCall(self.running.new), None, None
        return other
