"""One attention layer of the tiered cache: transformers' cache contract, attention, and when tokens change tier."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from fade_runtime import gradients, hf
from fade_runtime.attention import tiered_attention
from fade_runtime.checks import check_tokens
from fade_runtime.config import FadeConfig
from fade_runtime.fastgen import FastGen
from fade_runtime.monitor import Asked
from fade_runtime.planner import plan
from fade_runtime.policy import Policy
from fade_runtime.positions import Positions
from fade_runtime.prompt import begin, note_padding
from fade_runtime.store import TokenStore
from fade_runtime.trim import give_back
from predictor import rope
from predictor.errors import FadeError

if TYPE_CHECKING:
    from fade_runtime.guard import Watch
    from fade_runtime.memory import MemoryController
    from fade_runtime.pq import LayerCodebook
    from fade_runtime.text import SeenText

Observer = Callable[
    ["TieredLayer", float], None
]  # called with a layer and the milliseconds its compression took


NO_DROPOUT = (
    "attention dropout is not applied to packed tokens; call model.eval(), set the model's attention dropout to 0, or "
    "use FadeConfig(compression='off')"
)


class TieredLayer(CacheLayerMixin):
    """Sinks and the newest tokens in full precision, the body packed, the rest evicted.

    Attributes:
        store: the tokens by tier; None until the first keys come.
        prompt: logical tokens of the first prompt.
        index: of the layer in the model.
        sharers: later layers that read this layer's tokens after it, in each call (Gemma 4, Gemma 3n).
        text: what the cache knows of the words, if its policy asks for it.
        memory: gives the budget, if the target is bytes; shared by the layers.
        watch: the guard's, or None.
        observer: told of each compression, or None.
        last_plan: [T] scores or None, tiers before and tiers after the last plan; kept only for an observer.
    """

    is_sliding = False
    is_croppable = True

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
    ) -> None:
        super().__init__()
        self.config, self.policy, self.index, self.sharers = config, policy, index, sharers
        self.text, self.memory, self.watch = text, memory, watch
        self._config: Callable[[], Any] = weakref.ref(model_config)
        self._rotary, self._codebook = rotary, codebook
        self.observer: Observer | None = None
        self.reset()

    # -- the Cache contract of transformers ----------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.store: TokenStore | None = None
        self.prompt = self._new = self._attended = 0
        self._held: list[Tensor] = []  # queries [B, Hq, Q, D] of a prompt that comes in chunks
        self.positions = Positions(
            self._rotary,
            self.index,
            streaming=self.config.positions == "streaming",
            plain=self._codebook is not None,
        )
        self._waiting = False  # tokens of several calls wait for the first single token
        self.last_plan: tuple[Tensor | None, Tensor, Tensor] | None = None
        self.is_initialized = False
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
            profiled=isinstance(self.policy, FastGen),
            spill=None if self.watch is None else self.watch.guard.spill,
        )
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
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
        self.tokens.append(key, value)
        self._new, self._attended = key_states.shape[2], 0
        call = kwargs.get("kwargs")
        if hf.is_attached(self._config()):
            return hf.hand_over(self, key_states, call), value_states
        self.positions.take(self.tokens, self._new, (call or {}).get("position_ids"))
        self.positions.newest = None
        key, value = self.materialise()
        if gradients.needed(key_states, value_states):
            key, value = gradients.joined(self, key, value, key_states, value_states)
        self._compress_if_due()
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
        if tokens_to_remove == 0 or self.store is None:
            return
        self.store.take_back(-tokens_to_remove)
        self.prompt = min(self.prompt, self.seen)
        if self._held:
            self._held = [torch.cat(self._held, dim=2)[:, :, :tokens_to_remove]]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows of the batch, in the given order, as often as named."""
        if self.store is None:
            return
        every = torch.arange(len(self.store.pad), device=self.device)
        index = every[indices.to(self.device)]  # bool masks too
        if not torch.equal(index, every):
            self.store.select(index)
            self._held = [query[index] for query in self._held]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.store is not None:
            rows = torch.arange(len(self.store.pad), device=self.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def offload(self) -> None:
        """Refuse: packed tokens stay on their device."""
        raise FadeError(
            "the tiered cache does not offload layers; use an offloaded DynamicCache or a smaller budget"
        )

    prefetch = offload

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
        first_call = self._attended == 1  # the layer's own; the others come from layers that share its tokens
        if first_call:
            if not store.compressed and (store.seen == self._new or self._held or self._waiting):
                note_padding(store, mask, position_ids)
            self.positions.take(store, self._new, position_ids)
            if self.watch is not None:
                self.watch.begin(self, Asked(query, mask, scaling, softcap))
            if self._waiting and self._new == 1:
                self._end_prompt(scaling)
        weights = self.policy.weights(self._new, self.device) if self._keeps_state and first_call else None
        starts = store.seen == self._new
        if first_call and (starts or self._held) and self._new > 1 and self.config.chunked_prefill:
            self._held.append(query if self._keeps_state else query[:, :, :0])
        begins = starts and first_call and not self._held
        out = self._begin(query, scaling, self.seen, softcap is None, mask) if begins else None
        if out is None and not store.compressed:
            key = self.positions.full_key(store)
            out = hf.dense_attention(module, query, key, store.full.value, mask, scaling, softcap, dropout)
        elif dropout:
            raise FadeError(NO_DROPOUT)
        if not begins and (out is None or (weights is not None and not self._held)):
            tiered = self._tiered(query, mask, scaling, softcap, weights)
            out = tiered.transpose(1, 2) if out is None else out
        if self._attended == 1 + self.sharers:
            self._compress_if_due()
            if self.watch is not None:
                self.watch.end(self, self._new)
            self.positions.newest = None
        assert out is not None
        return out

    def _tiered(
        self,
        query: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
        weights: Tensor | None,
    ) -> Tensor:
        """Attention over all tiers; with weights the statistics decay by the new steps and gain what came with them."""
        store = self.tokens
        query, full, parts = self.positions.read(store, query)
        bodies: list[Any] = [part.tokens for part in parts]
        states = [] if weights is None else [store.full.state, *(tokens.state for tokens in bodies)]
        return tiered_attention(
            query,
            full,
            parts,
            scaling=scaling,
            first=store.seen - query.shape[2],
            mask=mask,
            weights=weights,
            softcap=softcap,
            into=states,
            decay=(self.policy.decay or 1.0) ** self._new,
        )[0]

    def _begin(
        self, query: Tensor, scaling: float, upto: int, plain: bool = False, mask: Tensor | None = None
    ) -> Tensor | None:
        """First statistics, and with them the attention [B, Q, Hq, D] where it costs nothing more."""
        self.prompt = upto
        if self.tokens.full.state is None:
            return None
        key = self.positions.full_key(self.tokens)[:, :, :upto]
        given = self.policy, self.tokens, key, query, scaling, self._table, self.text
        return begin(*given, layer=self.index, plain=plain, mask=mask)

    def _table(self, count: int) -> rope.Table | None:
        """Rotary table of the first positions, for a policy."""
        return None if self._rotary is None else self._rotary.table(torch.arange(count, device=self.device), self.index)

    def _end_prompt(self, scaling: float) -> None:
        """Do what waited for the first single token: compress all that came before it."""
        upto = self.seen - 1
        if self._held:
            self._begin(torch.cat(self._held, dim=2), scaling, upto)
            self._held = []
        self._waiting = False
        if self._beyond(upto) >= 1:
            self.compress(upto)

    # -- tiers ---------------------------------------------------------------------------------------------------

    def _beyond(self, upto: int) -> int:
        """Tokens in full precision that are neither sinks nor in the window."""
        return len(self.tokens.full) - (self.seen - upto) - self.config.n_sink - self.config.recent_window

    def _compress_if_due(self) -> None:
        """At the end of a prompt at once; while decoding when enough tokens have left the window."""
        if self.config.compression == "off":
            return
        prompt = self._new == self.seen or self._new >= self.config.reassign_every
        if self.config.chunked_prefill and self._new > 1:
            self._waiting = True
        elif self._beyond(self.seen) >= (1 if prompt else self.config.reassign_every):
            self.compress()

    def compress(self, upto: int | None = None) -> None:
        """Move what has left the window into the body, within the budgets; evict the rest.

        Args:
            upto: logical tokens that count as seen; all by default.
        """
        upto = self.seen if upto is None else upto
        started = time.perf_counter()
        self.tokens.compress(upto, functools.partial(self._reviewed_plan, upto))
        if self.memory is not None:
            self.memory.note(self.index, *self.tokens.body_size())
        if self._new > 1 and self.index % 4 == 3:  # a prompt; in each layer it would cost 4 % of the time
            give_back(self.device)
        if self.observer is not None:
            self.observer(self, 1e3 * (time.perf_counter() - started))
            self.last_plan = None

    def _reviewed_plan(self, upto: int, rows: Tensor, slots: Tensor, state: Tensor | None, now: Tensor) -> Tensor:
        """Tiers [T] of body tokens by score and budget, after the guard has seen what is to be evicted."""
        tiers, scores = plan(self, upto, rows, slots, state, now)
        if self.watch is not None:
            tiers = self.watch.review(self, self._new, upto, rows, slots, now, tiers)
        if self.observer is not None:
            self.last_plan = scores, now, tiers
        return tiers

    def virtual_plan(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, slot and tier [T] of each body token, as the policy alone would have it now."""
        rows, slots, state, now = self.tokens.body_tokens()
        return rows, slots, plan(self, self.seen, rows, slots, state, now)[0]

    def materialise(self) -> tuple[Tensor, Tensor]:
        """All keys and values [B, H, S, D] in the model's dtype, for a foreign attention function; nothing is kept.

        Raises:
            FadeError: something was evicted; a foreign attention function could not skip it.
        """
        store = self.tokens
        key = self.positions.full_key(store)
        if not store.compressed:
            return key, store.full.value
        store = store.whole()
        if store.evicted > sum(map(len, store.back)):
            raise FadeError(
                f"attention implementation {self._config()._attn_implementation!r} cannot skip evicted tokens; "
                "call cache.attach(), or use FadeConfig.safe()"
            )
        return store.dense(key, self.positions.original)

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> TokenStore:
        """The store of a layer that has begun."""
        assert self.store is not None
        return self.store

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that the layer holds, by its name."""
        held = {f"{index}.queries": query for index, query in enumerate(self._held)}
        return held if self.store is None else {**self.store.tensors(), **held}

    def resident(self) -> dict[str, Tensor]:
        """The same, with what a kernel derived from them and keeps."""
        derived = {} if self.store is None else self.store.packed.derived
        return {**self.tensors(), **{f"packed.{name}": tensor for name, tensor in derived.items()}}

    @property
    def seen(self) -> int:
        """Logical tokens, padding included."""
        return 0 if self.store is None else self.store.seen

    @property
    def _keeps_state(self) -> bool:
        return self.config.ranks and self.policy.decay is not None
