"""Transformers' cache contract over a store of tokens: length, masks, crop, rows of the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from fade_runtime.layer.held import HeldCalls
from fade_runtime.layer.sequences import Shared
from fade_runtime.layer.store import TokenStore
from predictor.errors import FadeError


class StoredLayer(CacheLayerMixin):
    """A layer of a cache whose tokens are in a :class:`TokenStore`; when they move is for its subclass to say.

    Attributes:
        store: the tokens by tier; None until the first keys come.
        prompts: tokens of each row's first prompt.
        held: calls that may still be taken back. final: columns that may not.
        whole: False while tokens are on their way from one place to another, where an interrupt would lose them.
        shared: what the layers of a cache compute once together.
        record_past: hold every call until a crop, or until as many tokens as the window has have come after it.
    """

    is_croppable = True

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    @property
    def kind(self) -> int | None:
        """Layers of one kind get the same masks, and share their rows."""
        return None

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.store: TokenStore | None = None
        self.prompts: list[int] = []
        self.held = HeldCalls()
        self.record_past = False
        self.final, self.whole = 0, True
        self.is_initialized = False
        for name in ("device", "dtype"):  # of the first keys
            self.__dict__.pop(name, None)

    def count_held(self, number: int | None = None) -> None:
        """Let the oldest of the held calls, all by default, be final."""
        raise NotImplementedError

    def get_seq_length(self) -> int:
        """Logical tokens seen, never tokens kept."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are over logical slots."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def activate_past_recording(self) -> None:
        """Hold what comes from now on until a crop, as transformers does before it verifies drafts."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest ``-tokens_to_remove`` tokens: what is left is what it would be had they never come.

        Raises:
            FadeError: some of them have entered statistics or left full precision already.
        """
        self.check_crop(tokens_to_remove)
        if self.store is not None:
            self.take_back(-tokens_to_remove)
            if self.record_past:  # what is left was found good
                self.count_held()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what :meth:`crop` would."""
        if tokens_to_remove > 0:
            raise FadeError(f"crop({tokens_to_remove}): give a negative number, the tokens to take back")
        count, free = -tokens_to_remove, self.seen - self.final
        if self.store is not None and count > free:
            raise FadeError(
                f"cannot take back {count} tokens: only the newest {free} have not entered statistics or left full "
                "precision; call cache.activate_past_recording() before what may be taken back, or keep a copy"
            )

    def take_back(self, count: int) -> None:
        """Forget the newest ``count`` columns, none of which are final."""
        if count:
            self.tokens.take_back(count)
            self.held.cut(self.seen)
            self.prompts = [min(prompt, length) for prompt, length in zip(self.prompts, self.tokens.sequences.counts)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch by row numbers [B] (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows of the batch by number [n] or mask [B], in that order, as often as named."""
        if self.store is None:
            return
        store, every = self.store, torch.arange(self.store.batch, device=self.device)
        index = every[indices.to(self.device)]  # bool masks too
        if torch.equal(index, every):
            return
        before = store.sequences
        store.select(index, self.shared.step(before, 0, lambda: before.selected(index), indices, kind=self.kind))
        self.held.select(index)
        same = len(set(self.prompts)) == 1
        self.prompts = self.prompts[:1] * len(index) if same else [self.prompts[row] for row in index.tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.store is not None:
            rows = torch.arange(self.store.batch, device=self.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def offload(self) -> None:
        """Refuse: packed tokens stay on their device."""
        raise FadeError("the tiered cache does not offload layers; use an offloaded DynamicCache or a smaller budget")

    prefetch = offload

    @property
    def tokens(self) -> TokenStore:
        """The store of a layer that has begun."""
        assert self.store is not None
        return self.store

    @property
    def prompt(self) -> int:
        """Tokens of the longest row's first prompt."""
        return max(self.prompts, default=0)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor `[...]` that the layer holds alone, by its name."""
        return self.held.tensors() if self.store is None else {**self.store.tensors(), **self.held.tensors()}

    def resident(self) -> dict[str, Tensor]:
        """The same `[...]`, with what a kernel derived from them and keeps."""
        derived = {} if self.store is None else self.store.packed.derived
        kept = {f"packed.{name}": tensor for name, tensor in derived.items() if isinstance(tensor, Tensor)}
        return {**self.tensors(), **kept}

    @property
    def seen(self) -> int:
        """Columns, padding included."""
        return 0 if self.store is None else self.store.seen
