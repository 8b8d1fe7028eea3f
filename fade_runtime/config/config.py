"""What the user may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fade_runtime.config.checks import TOP_K, check_together, whole
from fade_runtime.policies.base import POLICIES
from fade_runtime.storage.packed import Bits
from fade_runtime.storage.quant import PAGE_TOKENS
from fade_runtime.storage.tiers import Tier
from predictor.certificate import SHARE, choose_rung
from predictor.errors import FadeError

if TYPE_CHECKING:
    from fade_runtime.storage.pq import CodebookSet
    from predictor.bundle import Predictor

PRESETS = ("safe", "balanced", "aggressive")
CHOICES = {
    "phase": (None, "1a", "1b", "2"),
    "low_tier": ("int2", "pq"),
    "positions": ("original", "streaming"),
    "guard": ("off", "warn", "rollback"),
    "spill": ("none", "host", "disk"),
    "on_rollback": ("continue", "redecode"),
    "compression": ("on", "off"),
}


@dataclass(frozen=True)
class FadeConfig:
    """How a tiered cache spends its memory.

    Body tokens, those between the sinks and the recent window, go to the high tier while its budget lasts, then to
    the low tier, then out.

    Attributes:
        n_sink: first tokens of a sequence that stay in full precision (attention sinks).
        recent_window: newest tokens that stay in full precision.
        int4_budget: body tokens per kv head in the high tier: a whole number, a share of the context (a float in
            (0, 1]), "topk" for max(128, 5 % of the context), or None for all of them.
        low_budget: body tokens per kv head in the low tier, a whole number or a share; 0: no low tier; None: all that
            the high tier does not take, so that nothing is evicted.
        memory: bytes that the cache may take, in place of a budget: a number, a text such as "512MiB", or a share of
            the device memory that is free when the cache is made (a float in (0, 1]). Compression of the body rises in
            steps from 4x to 16x as tokens come. Layers that are not compressed (sliding windows) are not counted.
        low_tier: "int2" (few bits, by default 4 for keys and 2 for values) or "pq" (product quantisation: a few bytes
            a token, but a quarter in 4 bits and the rest so lost KL .056 on SmolLM2-135M where int2 lost .002, no more
            than evicting it).
        middle_k_bits, middle_v_bits: bits of keys and values in the high tier: 2, 4 or 8.
        low_k_bits, low_v_bits: bits of keys and values in the low tier, no more than in the high tier.
        page_tokens: kept tokens of a kv head that share the scales of their keys, 8 to 64. Fewer are more exact and
            take more bytes, more are faster to read.
        codebook: for "pq": a directory written by `python -m pipelines.train_codebook`, or a loaded codebook.
        tau, low_tau: shares of a kv head's score, in (0, 1]: the high tier takes no more of the best tokens than hold
            ``tau`` of it, both tiers together no more than hold ``low_tau``. 1: the budgets alone decide.
        eviction_policy: "position", "h2o", "ema", "adaptive", "learned", "fastgen": whose score decides. "adaptive" is
            "ema" that lets the scores fill the tiers: tau .9 and low_tau .99 unless given. "fastgen" finds for each kv
            head, at the end of the prompt, how little of its attention must be kept; int4_budget then is the most that
            a head may keep. With a predictor learned budgets are the least, and the profile may raise them.
        predictor: for "learned", possible for "fastgen": `models:/NAME@alias`, `models:/NAME/3`, a bundle directory, a
            hub id, or a loaded predictor.
        head_budgets: with a predictor: give each kv head the budget that the predictor learned for it (their mean is
            the budget given); with False, or a predictor without budgets, all heads get the same.
        recover: for "fastgen": share of a kv head's attention that its policy must recover, in (0, 1]. The policies:
            special tokens; and punctuation; and frequent tokens; and local ones; everything.
        frequent_share, local_share: for "fastgen": shares of the context that count as frequent and as local.
        tokenizer: for "fastgen", which must know special tokens and punctuation, and to compare an assistant's: a
            tokenizer, its directory, or None for the one that lies where the model was loaded from. Nothing is
            downloaded.
        assistant: a smaller model that reads the end of each prompt too, and has a part in the scores: a model of the
            same tokenizer, its directory, or a number: so many first layers of the model itself.
        assist_weight: the main model's part in the scores, from .6 to .8.
        assist_tail: tokens at the end of a prompt that the assistant reads.
        positions: "original": keys keep the rotation of their place in the text. "streaming": kept tokens are
            rotated to contiguous positions when they are read, so generation may run past the trained context.
        reassign_every: tokens that gather beyond the window before they move into the body, while decoding.
        chunked_prefill: the prompt comes in several calls: compress when the first single token comes, so that chunks
            give exactly what one call gives. False: compress after each call of ``reassign_every`` tokens or more.
        ema_decay: decay per step of the "ema" policy's moving average.
        guard: "off"; "warn" when attention goes to evicted tokens that the scores did not expect it on; "rollback":
            also bring them back, head by head, then layer by layer, then all, until the forecast holds again.
        spill: where evicted tokens go for that: "none", "host" memory, or "disk".
        spill_dir: for "disk": a folder, which may be shared; what is written there goes with the cache, and after a
            crash at the next start. Of a process that was forked, a cache of its parent is refused there.
        spill_limit: most bytes of spilled tokens; then the oldest are dropped for good. None: no limit.
        monitor_every: decode steps in which the guard looks at each layer once.
        kl_target: a kv head whose KL(true attention over blocks || forecast) stays below goes back to its budget.
        kl_alarm: one above it has failed.
        prefetch: bring back evicted tokens while decoding that are looked at as much as kept ones are, at the look that
            finds it; they compete for the budget again, and what is weaker leaves instead.
        shadow_every: decode steps between two runs of the whole text in full precision, with which the guard compares
            next-token distributions; each costs as much as a prompt of that length. None: never.
        on_rollback: "continue" with the text as it is, or "redecode": drop the tokens generated since all layers were
            last found in order, and decode them again (:mod:`fade_runtime.cache.redecode`); until they are found in
            order they stay in full precision and out of the statistics, about ``monitor_every`` tokens.
        compression: "off": this cache keeps everything exact, for requests that must not be risked.
        strict: refuse a predictor or codebook that was trained for another model; with False, warn.
        phase: FADE's name for a stage: "1a" and "1b" evict nothing, "2" evicts; None: the budgets say it.

    Raises:
        FadeError: an option out of its range, or options that contradict each other.

    Example:
        >>> FadeConfig(int4_budget=0.25, low_budget=100, eviction_policy="ema").budgets(seen=1000)
        (250, 100)
        >>> FadeConfig(eviction_policy="best")
        Traceback (most recent call last):
            ...
        predictor.errors.FadeError: eviction_policy 'best' is not one of position, h2o, ema, adaptive, learned, fastgen
    """

    n_sink: int = 4
    recent_window: int = 64
    int4_budget: int | float | str | None = None
    low_budget: int | float | None = 0
    memory: int | float | str | None = None
    low_tier: str = "int2"
    middle_k_bits: int = 4
    middle_v_bits: int = 4
    low_k_bits: int | None = None
    low_v_bits: int = 2
    page_tokens: int = PAGE_TOKENS
    codebook: str | Path | CodebookSet | None = None
    tau: float | None = None
    low_tau: float | None = None
    eviction_policy: str = "h2o"
    predictor: str | Path | Predictor | None = None
    head_budgets: bool = True
    recover: float = 0.95
    frequent_share: float = 0.3
    local_share: float = 0.3
    tokenizer: Any = None
    assistant: Any = None
    assist_weight: float = 0.7
    assist_tail: int = 1024
    positions: str = "original"
    reassign_every: int = 64
    chunked_prefill: bool = False
    ema_decay: float = 0.95
    guard: str = "off"
    spill: str = "none"
    spill_dir: str | Path | None = None
    spill_limit: int | None = None
    monitor_every: int = 64
    kl_target: float = 0.05
    kl_alarm: float = 0.1
    prefetch: bool = False
    shadow_every: int | None = None
    on_rollback: str = "continue"
    compression: str = "on"
    strict: bool = True
    phase: str | None = None

    def __post_init__(self) -> None:
        """Check every option by itself, then together; numbers of numpy become Python's."""
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), np.generic):
                object.__setattr__(self, field.name, value.item())
        wholes = ("n_sink", 0), ("recent_window", 1), ("reassign_every", 1), ("assist_tail", 1), ("monitor_every", 1)
        for name, least in wholes:
            value = getattr(self, name)
            if not whole(value) or value < least:
                raise FadeError(f"{name} {value!r} is not a whole number of at least {least}")
        for name, choices in (*CHOICES.items(), ("eviction_policy", tuple(POLICIES))):
            if getattr(self, name) not in choices:
                allowed = ", ".join(str(choice) for choice in choices)
                raise FadeError(f"{name} {getattr(self, name)!r} is not one of {allowed}")
        if not 0 < self.ema_decay < 1:
            raise FadeError(f"ema_decay {self.ema_decay!r} is not between 0 and 1")
        for name in ("recover", "frequent_share", "local_share"):
            if not 0 < getattr(self, name) <= 1:
                raise FadeError(f"{name} {getattr(self, name)!r} is not a share in (0, 1]")
        check_together(self)

    @property
    def bits(self) -> Bits:
        """Bits of both tiers; keys of the low tier have those of the high tier, at most 4, unless told otherwise."""
        low_key = min(self.middle_k_bits, 4) if self.low_k_bits is None else self.low_k_bits
        return Bits(self.middle_k_bits, self.middle_v_bits, low_key, self.low_v_bits)

    @property
    def has_low_tier(self) -> bool:
        """Whether tokens can be demoted below the high tier."""
        return self.low_budget != 0

    @property
    def low(self) -> Tier:
        """What the low tier is."""
        return Tier.PQ if self.low_tier == "pq" else Tier.LOW

    @property
    def ranks(self) -> bool:
        """Whether scores decide anything: not when all tokens go to one tier."""
        if self.int4_budget is None:
            return self.eviction_policy == "fastgen" or self.memory is not None
        return not (self.int4_budget == 0 and self.low_budget is None)

    @property
    def shares(self) -> tuple[float, float]:
        """``tau`` and ``low_tau`` with their defaults."""
        tau, low_tau = (0.9, 0.99) if self.eviction_policy == "adaptive" else (1.0, 1.0)
        return tau if self.tau is None else self.tau, low_tau if self.low_tau is None else self.low_tau

    def budgets(self, seen: int) -> tuple[int, int] | None:
        """Body tokens that a kv head may keep in both tiers after ``seen`` tokens, or None: all in the high tier."""
        if self.int4_budget is None:
            return None
        return _tokens(self.int4_budget, seen), _tokens(self.low_budget, seen)

    def with_options(self, **options: Any) -> FadeConfig:
        """Return a copy with some options changed; an unknown name is refused."""
        known = {field.name for field in fields(self)}
        if unknown := sorted(set(options) - known):
            raise FadeError(f"unknown option {', '.join(unknown)}; FadeConfig has {', '.join(sorted(known))}")
        return replace(self, **options)

    @classmethod
    def of(cls, given: FadeConfig | Mapping[str, Any] | str | None) -> FadeConfig:
        """The config that is meant by one, by its options, by a preset's name, or by None ("safe").

        Raises:
            FadeError: no such preset or option.

        Example:
            >>> FadeConfig.of("safe") == FadeConfig.of({}) == FadeConfig()
            True
        """
        if isinstance(given, FadeConfig):
            return given
        if given is None or isinstance(given, Mapping):
            return cls().with_options(**(given or {}))
        if given not in PRESETS:
            raise FadeError(f"config {given!r} is not a FadeConfig, a dict of its options, or {', '.join(PRESETS)}")
        made: FadeConfig = getattr(cls, given)()
        return made

    @classmethod
    def safe(cls, **options: Any) -> FadeConfig:
        """Everything kept, the body in 4 bits: about 3.2 times smaller at 2,048 tokens."""
        return cls().with_options(**options)

    @classmethod
    def balanced(cls, predictor: str | Path | Predictor | None = None, **options: Any) -> FadeConfig:
        """About 6 times smaller at 2,048 tokens: 43 % of the context kept, by the predictor or else by h2o."""
        return cls._evicting(0.43, predictor, options)

    @classmethod
    def aggressive(cls, predictor: str | Path | Predictor | None = None, **options: Any) -> FadeConfig:
        """About 10 times smaller at 2,048 tokens: a fifth of the context kept, by the predictor or else by h2o."""
        return cls._evicting(0.2, predictor, options)

    @classmethod
    def risk(
        cls,
        kl: float = 0.01,
        confidence: float = 0.95,
        predictor: str | Path | Predictor | None = None,
        share: float = SHARE,
        **options: Any,
    ) -> FadeConfig:
        """The strongest compression that the predictor's certificate answers for.

        With the given confidence, at least a share of texts like those it was certified on loses no more than ``kl``
        per token; the certificate says on which texts, of which length. Nothing is assumed of how losses are spread.

        Args:
            kl: target, KL(full || compressed) per token in nats.
            confidence: of the promise. share: of texts that it is made for.
            predictor: reference or loaded predictor, certified by `python -m pipelines.certify`.
            options: other options; they are not certified.

        Raises:
            FadeError: no predictor, no certificate, too few texts, or a target that no compression meets.

        Example:
            >>> FadeConfig.risk(kl=0.01, predictor="smollm2-135m-instruct").eviction_policy
            'learned'
        """
        from predictor.registry import load_predictor

        if not kl > 0 or not 0 < confidence < 1 or not 0 < share < 1:
            raise FadeError(
                f"kl {kl!r}, confidence {confidence!r}, share {share!r}: use more than 0, and shares between 0 and 1"
            )
        if predictor is None:
            raise FadeError("risk reads a predictor's certificate; give predictor='models:/NAME@champion' or a path")
        loaded = load_predictor(predictor)
        rung = choose_rung(loaded.certificate, kl, confidence, share, loaded.name)
        if rung.int4_budget is None:
            return cls.safe(**options)
        return cls._evicting(rung.int4_budget, loaded, options)

    @classmethod
    def _evicting(cls, budget: float, predictor: Any, options: dict[str, Any]) -> FadeConfig:
        policy = "h2o" if predictor is None else "learned"
        return cls(int4_budget=budget, eviction_policy=policy, predictor=predictor).with_options(**options)


def _tokens(budget: int | float | str | None, seen: int) -> int:
    if budget is None:
        return seen
    if budget == TOP_K:
        return max(128, int(0.05 * seen))
    return int(budget * seen) if isinstance(budget, float) else int(budget)
