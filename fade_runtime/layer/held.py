"""Calls of the model that are in a layer's tokens already and not yet in its statistics: they may be taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from fade_runtime.layer.attention import AttentionCall
from fade_runtime.layer.sequences import Sequences
from fade_runtime.layer.store import TokenStore


@dataclass(frozen=True)
class HeldCall:
    """One call: its queries, and the rows of the batch after it."""

    call: AttentionCall
    sequences: Sequences


@dataclass
class HeldCalls:
    """Those of a layer, oldest first; their keys and values are its newest ones."""

    calls: list[HeldCall] = field(default_factory=list)

    def older_than(self, columns: int) -> int:
        """How many of them ended before so many columns had been seen."""
        return sum(held.sequences.seen < columns for held in self.calls)

    def cut(self, seen: int) -> None:
        """Take back what is beyond the first ``seen`` columns."""
        while self.calls and self.calls[-1].sequences.seen > seen:
            last = self.calls.pop()
            count = last.sequences.seen - seen
            if count < last.sequences.new:
                self.calls.append(HeldCall(last.call.without(count), last.sequences.cropped(count)))

    def replayed(self, store: TokenStore, number: int) -> Iterator[HeldCall]:
        """The oldest ``number`` calls, each as it was when it came: ``store`` holds no later tokens then.

        They are held no longer; the others are, and their tokens are in ``store`` again at the end.
        """
        calls = self.calls
        later = [store.take_back(held.sequences.new) for held in calls[:0:-1]][::-1]
        self.calls = []
        for at, held in enumerate(calls):
            if at:
                store.append(*later[at - 1])
            store.set_sequences(held.sequences)
            if at < number:
                yield held
            else:
                self.calls.append(held)

    def select(self, index: Tensor) -> None:
        """Keep rows [n] of the batch."""
        self.calls = [HeldCall(held.call.selected(index), held.sequences.selected(index)) for held in self.calls]

    def join(self) -> None:
        """Make one call of all: the chunks of a prompt."""
        while len(self.calls) > 1:
            first, second, *rest = self.calls
            columns = first.sequences.seen
            new = first.sequences.new + second.sequences.new
            plain = first.sequences.plain and second.sequences.plain
            both = replace(second.sequences, new=new, plain=plain)
            self.calls = [HeldCall(first.call.joined(second.call, columns), both), *rest]

    def tensors(self) -> dict[str, Tensor]:
        """Their queries [B, Hq, Q, D], masks [B or 1, 1 or Hq, Q, S] and learned sinks [Hq] by name."""
        named: dict[str, Tensor] = {}
        for number, held in enumerate(self.calls):
            named[f"held.{number}.queries"] = held.call.query
            optional = {"mask": held.call.mask, "sinks": held.call.sinks}
            named |= {f"held.{number}.{name}": each for name, each in optional.items() if each is not None}
        return named
