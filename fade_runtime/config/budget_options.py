"""How many tokens are kept, and when that is decided."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fade_runtime.config.memory_target import parsed
from fade_runtime.config.validation import check_budget, check_choice, check_fraction, check_whole, is_whole
from predictor.errors import FadeError

TOP_K = "topk"
ALLOCATIONS = ("heads", "global")


@dataclass(frozen=True)
class BudgetOptions:
    """How many tokens are kept, and when that is decided.

    Attributes:
        int4_budget: body tokens per kv head in the high tier: a whole number, a share of the context (a float in
            (0, 1]), "topk" for max(128, 5 % of the context), or None for all of them.
        low_budget: body tokens per kv head in the low tier, a whole number or a share; 0: no low tier; None: all that
            the high tier does not take, so that nothing is evicted.
        target_compression: in place of a budget: how many times smaller the whole cache is than the model's full one
            at the length at hand, both counted with numbers of 16 bits. Sliding windows, recurrent states and exact
            tokens count too; what full-attention layers may keep is solved from it each time tokens move (between two
            moves up to ``reassign_every`` newer ones wait in full precision).
        min_budget: share of the context, in (0, 1], that a kv head keeps on average whatever target_compression asks;
            where it stands in the way, the cache says what it reaches.
        memory: bytes that the whole cache may take, in place of a budget: a number, a text such as "512MiB", or a
            share of the device memory that is free when the cache is made (a float in (0, 1]). Compression of the body
            rises in steps from 4x to 16x as tokens come.
        tau, low_tau: shares of a kv head's score, in (0, 1]: the high tier takes no more of the best tokens than hold
            ``tau`` of it, both tiers together no more than hold ``low_tau``. 1: the budgets alone decide.
        allocation: who shares a budget. "heads": each kv head has its own part of it, learned or alike, whatever the
            text. "global": all kv heads and layers of a sequence compete for the same total, so that it goes where the
            prompt at hand needs it, and again at each reassignment; a predictor needs head offsets for it.
        reassign_every: tokens that gather beyond the window before they move into the body, while decoding.
        chunked_prefill: the prompt comes in several calls: compress when the first single token comes, so that chunks
            give exactly what one call gives. False: compress after each call of ``reassign_every`` tokens or more.
        phase: FADE's name for a stage: "1a" and "1b" evict nothing, "2" evicts; None: the budgets say it.
    """

    int4_budget: int | float | str | None = None
    low_budget: int | float | None = 0
    target_compression: float | None = None
    min_budget: float = 0.1
    memory: int | float | str | None = None
    tau: float | None = None
    low_tau: float | None = None
    allocation: str = "heads"
    reassign_every: int = 64
    chunked_prefill: bool = False
    phase: str | None = None

    def check_budgets(self) -> None:
        """Refuse a value out of its range, and budgets that contradict each other.

        Raises:
            FadeError: names the option, its value and the remedy.
        """
        check_whole("reassign_every", self.reassign_every, 1)
        check_choice("allocation", self.allocation, ALLOCATIONS)
        check_choice("phase", self.phase, (None, "1a", "1b", "2"))
        check_budget("int4_budget", self.int4_budget, TOP_K)
        check_budget("low_budget", self.low_budget)
        if self.int4_budget is None and self.low_budget != 0 and not self.has_target:
            raise FadeError(
                "int4_budget None takes every token, so low_budget has nothing to hold; give int4_budget (0 for none)"
            )
        self._check_memory()
        self._check_target()
        for name in ("tau", "low_tau"):
            value = getattr(self, name)
            if value is None:
                continue
            check_fraction(name, value)
            if value < 1 and self.int4_budget is None and not self.has_target:
                raise FadeError(f"{name} {value!r} needs int4_budget, the most that a kv head may keep; try 1.0")

    def _check_memory(self) -> None:
        memory = self.memory
        if memory is None:
            return
        if isinstance(memory, str):
            parsed(memory)
        elif not (is_whole(memory) and memory > 0) and not (isinstance(memory, float) and 0 < memory <= 1):
            raise FadeError(
                f"memory {memory!r} is neither a number of bytes (above 0), nor a text such as '512MiB', nor a "
                "share of the free device memory (a float in (0, 1])"
            )
        if self.int4_budget is not None or self.low_budget != 0:
            raise FadeError("memory sets the budget itself; leave int4_budget and low_budget out, or leave memory out")

    def _check_target(self) -> None:
        target = self.target_compression
        check_fraction("min_budget", self.min_budget)
        if target is None:
            return
        if isinstance(target, bool) or not isinstance(target, int | float) or not 1 < target < math.inf:
            raise FadeError(f"target_compression {target!r} is no number above 1; give 6.0 for six times smaller")
        if self.int4_budget is not None or self.low_budget != 0 or self.memory is not None:
            raise FadeError(
                "target_compression sets the budget itself; leave int4_budget, low_budget and memory out, or leave "
                "target_compression out"
            )

    @property
    def has_target(self) -> bool:
        """Whether the size of the whole cache is given, and budgets follow from it."""
        return self.memory is not None or self.target_compression is not None

    @property
    def has_low_tier(self) -> bool:
        """Whether tokens can be demoted below the high tier."""
        return self.low_budget != 0

    def budgets(self, seen: int) -> tuple[int, int] | None:
        """Body tokens that a kv head may keep in both tiers after ``seen`` tokens, or None: all in the high tier."""
        if self.int4_budget is None:
            return None
        return _tokens(self.int4_budget, seen), _tokens(self.low_budget, seen)


def _tokens(budget: int | float | str | None, seen: int) -> int:
    if budget is None:
        return seen
    if budget == TOP_K:
        return max(128, int(0.05 * seen))
    return int(budget * seen) if isinstance(budget, float) else int(budget)
