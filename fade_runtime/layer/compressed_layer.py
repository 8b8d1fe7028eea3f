"""When the tokens of a layer move between tiers: what is due, who decides, who is notified."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fade_runtime.config import FadeConfig, MemoryController
from fade_runtime.layer.allocation import Contenders, GlobalAllocation
from fade_runtime.layer.attention import AttentionCall
from fade_runtime.layer.movement import candidates, demote, move
from fade_runtime.layer.planner import contenders, plan, row_budgets
from fade_runtime.layer.positions import Positions, dense
from fade_runtime.layer.sequences import Shared
from fade_runtime.layer.setup import LayerSetup
from fade_runtime.layer.store import BodyTokens, TokenStore
from fade_runtime.layer.stored_layer import StoredLayer
from fade_runtime.policies import Policy
from fade_runtime.policies.text import SeenText
from fade_runtime.storage.heap import trim_heap
from fade_runtime.storage.tiers import Budgets, plan_tiers
from predictor.errors import FadeError

# called with a layer and the milliseconds its compression took
Observer = Callable[["CompressedLayer", float], None]


class LayerHooks(Protocol):
    """Who looks on as a layer works, and may keep what its policy would evict: the guard."""

    @property
    def settled(self) -> int:
        """Columns up to which every layer of the cache has been found in order."""

    def reset(self) -> None:
        """Forget the text."""

    def facts(self) -> dict[str, Any]:
        """What a session stores."""

    def from_facts(self, facts: Mapping[str, Any]) -> LayerHooks:
        """Hooks that go on from :meth:`facts`."""

    def begin(self, layer: CompressedLayer, call: AttentionCall) -> None:
        """A call begins whose tokens are in the layer."""

    def review(self, layer: CompressedLayer, new: int, tokens: BodyTokens, tiers: Tensor) -> Tensor:
        """Tiers [T] to have in place of the planned ones; ``new``: columns of the call."""

    def end(self, layer: CompressedLayer, new: int) -> None:
        """The call, of ``new`` columns, is over."""


class CompressedLayer(StoredLayer):
    """A layer whose tokens leave full precision by its policy's scores; its subclass says which calls count.

    Attributes:
        setup: what it is made of. hooks: the guard's, or None.
        positions: where its keys are read.
        observer: called after each compression, or None.
        last_plan: [T] scores or None, tiers before and tiers after the last plan; kept only for an observer.
    """

    def __init__(self, setup: LayerSetup, hooks: LayerHooks | None = None, shared: Shared | None = None) -> None:
        super().__init__(Shared() if shared is None else shared)
        self.setup, self.hooks = setup, hooks
        self.positions = Positions(
            setup.rotary,
            setup.index,
            streaming=setup.config.positions == "streaming" and setup.window is None,
            plain=setup.codebook is not None,
        )
        self.observer: Observer | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.last_plan: tuple[Tensor | None, Tensor, Tensor] | None = None
        if self.hooks is not None:
            self.hooks.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch size, heads, dims, dtype and device from the first keys [B, H, Q, D]."""
        setup = self.setup
        self.store = TokenStore(
            setup.config,
            key_states,
            value_states,
            keeps_stats=setup.keeps_stats,
            codebook=setup.codebook,
            profiled=setup.policy.reads_text,
            shares=setup.allocation is not None,
            compares=setup.allocation is not None and setup.policy.compares,
            spill=setup.spill,
            window=setup.window,
        )
        self.prompts = [0] * len(key_states)
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    # -- scores --------------------------------------------------------------------------------------------------

    def scores(self, stats: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """The policy's scores [T] of tokens by statistic, row (batch x kv head) and slot, [T] each."""
        store, counts = self.tokens, self.tokens.sequences.counts
        if len(set(counts)) == 1 and len(set(self.prompts)) == 1:
            return self.policy.score(stats, slots, counts[0], self.prompts[0])
        row = rows // store.heads
        prompts = torch.tensor(self.prompts, device=slots.device)
        return self.policy.score(stats, slots, store.sequences.lengths[row], prompts[row])

    def _ranked(self, tokens: BodyTokens) -> Tensor:
        """Scores [T] of body tokens."""
        stats = tokens.slots.float() if tokens.attention_stats is None else tokens.attention_stats
        return self.scores(stats, tokens.rows, tokens.slots)

    def _plan(self, tokens: BodyTokens, reads: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Tiers [T] as policy and budgets want them; scores [T] that decided, or None."""
        scores = self._ranked(tokens) if self.setup.ranks else None
        return plan(self.setup, self.tokens, tokens, scores, reads)

    def virtual_plan(self) -> tuple[BodyTokens, Tensor]:
        """The body tokens, and the tiers [T] that the policy alone would give them now."""
        tokens = self.tokens.body_tokens()
        return tokens, self._plan(tokens)[0]

    def next_contenders(self) -> Contenders:
        """Body tokens for :class:`GlobalAllocation` as they will be when tokens move again."""
        store, config = self.tokens, self.config
        lengths = store.sequences.lengths + config.reassign_every
        tokens = candidates(store, lengths)
        fraction = None if self.memory is None else self.memory.share(store.sequences.lengths)
        budgets = row_budgets(config, self.policy, self.index, lengths, store.heads, fraction=fraction)
        return contenders(self.setup, store, tokens, self._ranked(tokens), lengths, budgets)

    def expect(self, given: Budgets, own: Budgets, due: Tensor) -> None:
        """Take in what each due row will be given when tokens move again, and what it would have by itself: [R]."""
        extra = torch.stack((given.high - own.high, given.low - own.low), dim=1).int()
        store = self.tokens
        assert store.extra is not None
        store.extra = torch.where(due[:, None, None], extra.view(store.batch, store.heads, 2), store.extra)

    # -- tiers ---------------------------------------------------------------------------------------------------

    def compress_if_due(self, new: int) -> None:
        """At the end of a row's prompt at once; while decoding when enough of its tokens have left the window.

        Args:
            new: columns of the call that was just counted.
        """
        if self.config.compression == "off":
            return
        store, every = self.tokens, self.config.reassign_every
        sequences = store.sequences
        soonest = min(store.moved) + self.config.recent_window + every
        if sequences.real is None and new < every and new < sequences.seen < soonest:
            return  # in most steps: nothing has waited long enough
        reads = [
            0 < gained and (gained == count or gained >= every)
            for gained, count in zip(sequences.gained, sequences.counts)
        ]
        due = [store.waiting(row) >= (1 if prompt else every) for row, prompt in enumerate(reads)]
        if any(due):
            self.compress(due, new, [prompt and moves for prompt, moves in zip(reads, due)])

    def compress(self, due: list[bool] | None = None, new: int = 0, reads: list[bool] | None = None) -> None:
        """Move what has left the window into the body, within the budgets; evict the rest.

        Args:
            due: rows of the batch that take part; all by default. new: columns of the call that it ends.
            reads: rows of which it ends a prompt; none by default.
        """
        store, started, whole = self.tokens, time.perf_counter(), self.whole
        if store.sequences.seen < store.seen:  # nobody attended to the newest
            self.take_in(None, None)
        self.final, self.whole = self.seen, False
        rows = torch.tensor([True] * store.batch if due is None else due, device=self.device)
        prompts = torch.tensor(reads, device=self.device) if reads is not None and any(reads) else None
        move(store, rows, functools.partial(self.reviewed_plan, rows, new, prompts))
        self.whole = whole
        if new > 1 and self.index % 4 == 3:  # a prompt; in each layer it would cost 4 % of the time
            trim_heap(self.device)
        self._moved(started)
        if self.allocation is not None and prompts is not None:
            self.allocation.settle(rows, prompts)
        elif self.allocation is not None:
            self.allocation.share_next(self.index, self.next_contenders(), rows)

    def reviewed_plan(self, due: Tensor, new: int, reads: Tensor | None, tokens: BodyTokens) -> Tensor:
        """Tiers [T] of body tokens by score and budget, after the guard has seen what is to be evicted."""
        return self._reviewed(due, new, tokens, *self._plan(tokens, reads))

    def settle(self, budgets: Budgets, due: Tensor) -> None:
        """Let go what is beyond the budgets [R] in due rows of the batch, [B] bool."""
        store, started, whole = self.tokens, time.perf_counter(), self.whole
        tokens = store.body_tokens()
        scores, low = self._ranked(tokens), self.config.low
        planned = plan_tiers(scores, tokens.rows, budgets, slots=tokens.slots, tiers=tokens.tiers, low_tier=low)
        tiers = self._reviewed(due, 0, tokens, planned.tiers.long(), scores)
        self.whole = False
        demote(store, tiers)
        self.whole = whole
        self._moved(started)

    def _moved(self, started: float) -> None:
        """Tell of a move that began at ``started``."""
        if self.memory is not None:
            self.memory.note(self.index, *self.tokens.body_size())
        if self.observer is not None:
            self.observer(self, 1e3 * (time.perf_counter() - started))
            self.last_plan = None

    def _reviewed(self, due: Tensor, new: int, tokens: BodyTokens, tiers: Tensor, scores: Tensor | None) -> Tensor:
        """Planned tiers [T] of body tokens in due rows, after the guard has seen what is to be evicted."""
        tiers = torch.where(due[tokens.rows // self.tokens.heads], tiers, tokens.tiers)
        if self.hooks is not None:
            tiers = self.hooks.review(self, new, tokens, tiers)
        if self.observer is not None:
            self.last_plan = scores, tokens.tiers, tiers
        return tiers

    def take_in(self, mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Learn from the call which of the newest columns are tokens, and where.

        Args:
            mask: of the call, as :meth:`Sequences.extended` takes it. position_ids: [B or 1, Q], or None.
        """
        store, kept = self.tokens, self.positions.kept
        before = store.sequences
        new, ids = store.seen - before.seen, position_ids if kept else None
        step = functools.partial(before.extended, new, mask, ids, keep_positions=kept, window=self.setup.window)
        store.set_sequences(self.shared.step(before, new, step, mask, ids, kind=self.kind))
        if kept:
            self.positions.take(store)

    def materialise(self) -> tuple[Tensor, Tensor]:
        """All keys and values [B, H, S, D] in the model's dtype, for a foreign attention function; nothing is kept.

        Raises:
            FadeError: something was evicted; a foreign attention function could not skip it.
        """
        store = self.tokens
        if not store.compressed:
            return self.positions.full_key(store), store.full.value
        store = store.whole()
        if self.setup.window is None and store.evicted > sum(map(len, store.back)):  # a mask hides what left a window
            raise FadeError(
                f"attention implementation {self.setup.model_config()._attn_implementation!r} cannot skip evicted "
                "tokens; call cache.attach(), or use FadeConfig.safe()"
            )
        return dense(store, self.positions)

    @property
    def kind(self) -> int | None:
        """Layers of one kind get the same masks: those with the same window."""
        return self.setup.window

    @property
    def is_sliding(self) -> bool:
        """Whether the mask of the model's calls hides what has left a window."""
        return self.setup.window is not None

    # -- what it is made of --------------------------------------------------------------------------------------

    @property
    def config(self) -> FadeConfig:
        """Options of the cache."""
        return self.setup.config

    @property
    def policy(self) -> Policy:
        """Whose scores decide."""
        return self.setup.policy

    @property
    def index(self) -> int:
        """Of the layer in the model."""
        return self.setup.index

    @property
    def kv_sharers(self) -> int:
        """Later layers that read this layer's tokens after it, in each call."""
        return self.setup.kv_sharers

    @property
    def text(self) -> SeenText | None:
        """What the cache knows of the words, or None."""
        return self.setup.text

    @property
    def allocation(self) -> GlobalAllocation | None:
        """Shares one budget out over the layers, if it is global."""
        return self.setup.allocation

    @property
    def memory(self) -> MemoryController | None:
        """Gives the budget, if the target is bytes."""
        return self.setup.memory
