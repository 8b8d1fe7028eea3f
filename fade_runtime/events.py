"""What a cache tells of itself while it works: three kinds of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Reassignment:
    """One reassignment of one layer.

    Attributes:
        time: when it ended, seconds since 1970.
        layer: index of the layer. seen: logical tokens so far, padding included.
        policy: whose score decided.
        path: what computes this layer's attention from now on: "dense" (transformers' own, while nothing is
            compressed), the kernel's name ("cpu", "reference", ...), or "materialised for NAME" under another
            attention implementation.
        tokens: by tier, summed over the rows (batch x kv head); EVICTED counts those of earlier times too.
        demoted, evicted: tokens that this reassignment put into the low tier, and those that it evicted.
        scores: count, min, mean, max and quantiles of the scores that decided; empty if no score did.
        resident_bytes: what the layer holds. full_bytes: the same tokens in an uncompressed cache.
        ms: milliseconds that it took.
    """

    time: float
    layer: int
    seen: int
    policy: str
    path: str
    tokens: dict[str, int]
    demoted: int
    evicted: int
    scores: dict[str, float | None]
    resident_bytes: int
    full_bytes: int
    ms: float


@dataclass(frozen=True)
class GuardEvent:
    """One probe of the guard at one layer.

    Attributes:
        time: when it ended, seconds since 1970. layer: its index. seen: logical tokens so far.
        action: "look" (nothing was done), "raise" (heads were raised) or "lower" (heads are back at their budgets).
        kl: running average of KL(true attention || forecast) of the layer's worst head, nats; kl_mean: of all heads.
        recovery: share of true attention on kept tokens, of the worst head.
        recall: share of the 64 most attended tokens that are kept, of the worst head.
        raised: heads that keep everything. restored: tokens that came back.
        ms: milliseconds that it took.
    """

    time: float
    layer: int
    seen: int
    action: str
    kl: float
    kl_mean: float
    recovery: float
    recall: float
    raised: int
    restored: int
    ms: float


@dataclass(frozen=True)
class ShadowEvent:
    """One comparison of next-token distributions with those of full precision.

    Attributes:
        time: when it ended, seconds since 1970. seen: logical tokens.
        kl: KL(full precision || cache), nats, of the worst sequence. top1: share of sequences with the same best token.
        ms: milliseconds that it took.
    """

    time: float
    seen: int
    kl: float
    top1: float
    ms: float


Event: TypeAlias = Reassignment | GuardEvent | ShadowEvent
