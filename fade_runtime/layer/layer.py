"""One attention layer of the tiered cache: transformers' cache contract, attention, and when tokens change tier."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fade_runtime import transformers_api as hf
from fade_runtime.config.config import FadeConfig
from fade_runtime.layer import gradients
from fade_runtime.layer.attention import AttentionCall
from fade_runtime.layer.checks import check_tokens
from fade_runtime.layer.held import HeldCall
from fade_runtime.layer.planner import plan
from fade_runtime.layer.positions import Positions, dense
from fade_runtime.layer.prefill import begin
from fade_runtime.layer.sequences import Shared
from fade_runtime.layer.store import TokenStore
from fade_runtime.layer.stored_layer import StoredLayer
from fade_runtime.layer.tiered import attend_tiers
from fade_runtime.policies.base import Policy
from fade_runtime.storage.heap import give_back
from predictor import rope
from predictor.errors import FadeError

if TYPE_CHECKING:
    from fade_runtime.config.memory_target import MemoryController
    from fade_runtime.guard.guard import Watch
    from fade_runtime.policies.text import SeenText
    from fade_runtime.storage.pq import LayerCodebook

Observer = Callable[["TieredLayer", float], None]  # called with a layer and the milliseconds its compression took


NO_DROPOUT = (
    "attention dropout is not applied to packed tokens; call model.eval(), set the model's attention dropout to 0, or "
    "use FadeConfig(compression='off')"
)


class TieredLayer(StoredLayer):
    """Sinks and the newest tokens in full precision, the body packed, the rest evicted.

    A call of the model is *counted* when its queries enter the statistics and the tokens that have left the window
    move. Most calls are counted at once. Some are held until the next call, as long as they may still be taken back:
    those of a few tokens (drafts, a question), all of them after :meth:`activate_past_recording`, the chunks of a
    prompt, and with ``on_rollback="redecode"`` the steps that the guard has not found in order yet.

    Attributes:
        index: of the layer in the model.
        sharers: later layers that read this layer's tokens after it, in each call (Gemma 4, Gemma 3n).
        text: what the cache knows of the words, if its policy asks for it.
        memory: gives the budget, if the target is bytes; shared by the layers.
        watch: the guard's, or None.
        observer: told of each compression, or None.
        last_plan: [T] scores or None, tiers before and tiers after the last plan; kept only for an observer.
    """

    def __init__(
        self,
        config: FadeConfig,
        policy: Policy,
        model_config: Any,
        rotary: rope.Rotary | None,
        index: int = 0,
        *,
        codebook: LayerCodebook | None = None,
        sharers: int = 0,
        text: SeenText | None = None,
        memory: MemoryController | None = None,
        watch: Watch | None = None,
        shared: Shared | None = None,
    ) -> None:
        super().__init__(Shared() if shared is None else shared)
        self.config, self.policy, self.index, self.sharers = config, policy, index, sharers
        self.text, self.memory, self.watch = text, memory, watch
        self._config: Callable[[], Any] = weakref.ref(model_config)
        self._codebook = codebook
        self._rotary = rotary
        self.positions = Positions(rotary, index, streaming=config.positions == "streaming", plain=codebook is not None)
        self.observer: Observer | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._new = self._attended = 0
        self._counts_now = True  # whether the running call is counted at its end
        self.last_plan: tuple[Tensor | None, Tensor, Tensor] | None = None
        if self.watch is not None:
            self.watch.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch size, heads, dims, dtype and device from the first keys."""
        self.store = TokenStore(
            self.config,
            key_states,
            value_states,
            state=self._keeps_state,
            codebook=self._codebook,
            profiled=self.policy.reads_text,
            spill=None if self.watch is None else self.watch.guard.spill,
        )
        self.prompts = [0] * len(key_states)
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

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
        self._new, self._attended = key_states.shape[2], 0
        call, attached = kwargs.get("kwargs"), hf.is_attached(self._config())
        if self.held.calls:
            self.count_held(self._not_to_hold_longer() if attached else None)
        self.tokens.append(key, value)
        if attached:
            return hf.hand_over(self, key_states, call), value_states
        self._take_in(None, (call or {}).get("position_ids"))
        self._attended = 1
        self._note_prompts()
        key, value = self.materialise()
        if gradients.needed(key_states, value_states):
            key, value = gradients.joined(self, key, value, key_states, value_states)
        self._compress_if_due()
        self._end_call()
        return key, value

    # -- attention -----------------------------------------------------------------------------------------------

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None = None,
        position_ids: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attention of the queries [B, Hq, Q, D] that belong to the last ``update``: [B, Q, Hq, D].

        While nothing has left full precision this is transformers' own SDPA on the same tensors.

        Raises:
            FadeError: dropout, and something has left full precision.
        """
        store, self._attended = self.tokens, self._attended + 1
        own = self._attended == 1  # the others come from layers that share this one's tokens
        if own:
            self._take_in(mask, position_ids)
        call = AttentionCall(query, None if store.sequences.plain else mask, scaling, softcap)
        if own:
            self._begin_call(call)
        counts = own and self._counts_now
        out = self._first_statistics(call) if counts else None
        if out is None and not store.compressed:
            key = self.positions.full_key(store)
            out = hf.dense_attention(module, query, key, store.full.value, mask, scaling, softcap, dropout)
        elif dropout:
            raise FadeError(NO_DROPOUT)
        follows = counts and self._keeps_state and not all(store.sequences.begins)
        if out is None or follows:
            tiered = attend_tiers(store, self.positions, call, self.policy if follows else None)
            out = tiered.transpose(1, 2) if out is None else out
        if self._attended == 1 + self.sharers:
            if self._counts_now:
                self._compress_if_due()
            if self.watch is not None and self._is_watched:
                self.watch.end(self, self._new)
            self._end_call()
        return out

    def _take_in(self, mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Learn from the call which of the newest columns are tokens, and where."""
        store, new, kept = self.tokens, self._new, self.positions.kept
        before = store.sequences
        ids = position_ids if kept else None
        step = functools.partial(before.extended, new, mask, ids, keep_positions=kept)
        store.tell(self.shared.step(before, new, step, mask, ids))
        if kept:
            self.positions.take(store)

    def _note_prompts(self) -> None:
        """Remember how long the first prompt of each row is that begins in the call that is counted."""
        sequences = self.tokens.sequences
        if any(sequences.begins):
            pairs = zip(sequences.begins, sequences.counts, self.prompts)
            self.prompts = [count if begins else prompt for begins, count, prompt in pairs]

    def _begin_call(self, call: AttentionCall) -> None:
        """Decide whether the call is counted at once or held."""
        sequences = self.tokens.sequences
        self._counts_now = not self._holds()
        if not self._counts_now:
            self.held.calls.append(HeldCall(call, sequences))
        else:
            self._note_prompts()
        if self._counts_now and (self._keeps_state or self.watch is not None):
            self.final = self.seen
        if self.watch is not None and self._is_watched:
            self.watch.begin(self, call)

    @property
    def attended(self) -> bool:
        """Whether the tokens of the running call have been attended to."""
        return self._attended > 0

    def _end_call(self) -> None:
        self.shared.ended(self.index)

    @property
    def _is_watched(self) -> bool:
        """Whether the guard looks at the running call: not if it is held, unless the guard decides how long."""
        return self._counts_now or self._redecodes

    @property
    def _redecodes(self) -> bool:
        return self.config.on_rollback == "redecode"

    def _first_statistics(self, call: AttentionCall) -> Tensor | None:
        """First statistics of rows that begin, and with them the attention [B, Q, Hq, D] where it costs no more."""
        store = self.tokens
        if store.full.state is None or not any(store.sequences.begins):
            return None
        key = self.positions.full_key(store)
        return begin(self.policy, store, key, call, self._table, self.text, layer=self.index)

    def _table(self, count: int) -> rope.Table | None:
        """Rotary table of the first positions, for a policy."""
        return None if self._rotary is None else self._rotary.table(torch.arange(count, device=self.device), self.index)

    def scores(self, state: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """The policy's scores [T] of tokens by statistic, row (batch x kv head) and slot, [T] each."""
        store, counts = self.tokens, self.tokens.sequences.counts
        if len(set(counts)) == 1 and len(set(self.prompts)) == 1:
            return self.policy.score(state, slots, counts[0], self.prompts[0])
        row = rows // store.heads
        prompts = torch.tensor(self.prompts, device=slots.device)
        return self.policy.score(state, slots, store.sequences.lengths[row], prompts[row])

    # -- calls that are held ---------------------------------------------------------------------------------------

    def _holds(self) -> bool:
        """Whether the running call may still be taken back, so that it is not counted yet."""
        if not self._keeps_state and self.config.compression == "off":
            return False
        new, first = self._new, self._new == self.seen
        if self.record_past or (self.config.chunked_prefill and new > 1):
            return True
        if self._redecodes:
            return new == 1 and not first
        return 1 < new < self.config.reassign_every and not first

    def _not_to_hold_longer(self) -> int:
        """How many of the held calls are counted before a new one, the oldest first."""
        calls, new = self.held.calls, self._new
        if self.record_past:
            return self.held.older_than(self.seen + new - self.config.recent_window + 1)
        if self.config.chunked_prefill and new > 1:
            return 0
        if self._redecodes and new == 1 and self.watch is not None:
            return self.held.older_than(min(watch.good for watch in self.watch.guard.watches) + 1)
        return len(calls)

    def count_held(self, number: int | None = None) -> None:
        """Count the oldest of the held calls, all by default, as if each had been counted when it came."""
        held = self.held
        if self.config.chunked_prefill and not self.record_past and number != 0:
            held.join()
        number = len(held.calls) if number is None else min(number, len(held.calls))
        if not number:
            return
        new, self.whole, self.final = self._new, False, max(self.final, held.calls[number - 1].sequences.seen)
        inference = torch.inference_mode(self.tokens.full.key.is_inference())  # as when they came, wherever this is
        with torch.no_grad(), inference, torch.autocast(self.device.type, enabled=False):
            for each in held.replayed(self.tokens, number):
                self._count(each)
        self._new, self.whole = new, True

    def _count(self, held: HeldCall) -> None:
        self._new, looks = held.sequences.new, self.watch is not None and not self._redecodes
        self._note_prompts()
        if looks and self.watch is not None:
            self.watch.begin(self, held.call)
        self._first_statistics(held.call)
        if self._keeps_state and not all(held.sequences.begins):
            attend_tiers(self.tokens, self.positions, held.call, self.policy)
        self._compress_if_due()
        if looks and self.watch is not None:
            self.watch.end(self, self._new)

    # -- tiers ---------------------------------------------------------------------------------------------------

    def _compress_if_due(self) -> None:
        """At the end of a row's prompt at once; while decoding when enough of its tokens have left the window."""
        if self.config.compression == "off":
            return
        store, every = self.tokens, self.config.reassign_every
        sequences = store.sequences
        soonest = min(store.moved) + self.config.recent_window + every
        if sequences.real is None and self._new < every and self._new < sequences.seen < soonest:
            return  # in most steps: nothing has waited long enough
        due = [
            store.waiting(row) >= (1 if new and (new == count or new >= every) else every)
            for row, (new, count) in enumerate(zip(sequences.gained, sequences.counts))
        ]
        if any(due):
            self.compress(due)

    def compress(self, due: list[bool] | None = None) -> None:
        """Move what has left the window into the body, within the budgets; evict the rest.

        Args:
            due: rows of the batch that take part; all by default.
        """
        store, started, whole = self.tokens, time.perf_counter(), self.whole
        if store.sequences.seen < store.seen:  # nobody attended to the newest
            self._take_in(None, None)
        self.final, self.whole = self.seen, False
        rows = torch.tensor([True] * store.batch if due is None else due, device=self.device)
        store.compress(rows, functools.partial(self._reviewed_plan, rows))
        if self.memory is not None:
            self.memory.note(self.index, *store.body_size())
        self.whole = whole
        if self._new > 1 and self.index % 4 == 3:  # a prompt; in each layer it would cost 4 % of the time
            give_back(self.device)
        if self.observer is not None:
            self.observer(self, 1e3 * (time.perf_counter() - started))
            self.last_plan = None

    def _reviewed_plan(self, due: Tensor, rows: Tensor, slots: Tensor, state: Tensor | None, now: Tensor) -> Tensor:
        """Tiers [T] of body tokens by score and budget, after the guard has seen what is to be evicted."""
        tiers, scores = plan(self, rows, slots, state, now)
        tiers = torch.where(due[rows // self.tokens.heads], tiers, now)
        if self.watch is not None:
            tiers = self.watch.review(self, self._new, self.seen, rows, slots, now, tiers)
        if self.observer is not None:
            self.last_plan = scores, now, tiers
        return tiers

    def virtual_plan(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, slot and tier [T] of each body token, as the policy alone would have it now."""
        rows, slots, state, now = self.tokens.body_tokens()
        return rows, slots, plan(self, rows, slots, state, now)[0]

    def materialise(self) -> tuple[Tensor, Tensor]:
        """All keys and values [B, H, S, D] in the model's dtype, for a foreign attention function; nothing is kept.

        Raises:
            FadeError: something was evicted; a foreign attention function could not skip it.
        """
        store = self.tokens
        if not store.compressed:
            return self.positions.full_key(store), store.full.value
        store = store.whole()
        if store.evicted > sum(map(len, store.back)):
            raise FadeError(
                f"attention implementation {self._config()._attn_implementation!r} cannot skip evicted tokens; "
                "call cache.attach(), or use FadeConfig.safe()"
            )
        return dense(store, self.positions)

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def _keeps_state(self) -> bool:
        return self.config.ranks and self.policy.decay is not None
