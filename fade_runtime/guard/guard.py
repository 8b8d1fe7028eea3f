"""The guard of a cache: it looks at true attention while decoding, and takes evictions back when the forecast failed.

Levels: a kv head whose divergence stays high gets everything back and keeps it ("raised"); so does its whole layer once
half of its heads are raised, and the whole cache ("full") once a fifth of all heads are. A raised head is watched on
as if it evicted what its policy would evict, and is put back to its budget when that has been harmless for a while.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fade_runtime.cache.shadow import ShadowEvent
from fade_runtime.config.config import FadeConfig
from fade_runtime.config.memory_target import LEAST, STEPS, MemoryController
from fade_runtime.guard.prefetch import fetch
from fade_runtime.guard.probe import QUERIES, Look, measure, true_attention, worst
from fade_runtime.layer.attention import AttentionCall
from fade_runtime.storage.spill import Spill
from fade_runtime.storage.tiers import Tier

if TYPE_CHECKING:
    from fade_runtime.cache.tiered_cache import TieredCache
    from fade_runtime.layer.layer import TieredLayer

GAIN = 0.5  # weight of one query's divergence in the running average
CALM = 4  # looks below the target after which a raised head goes back to its budget
TOGETHER = 4  # queries of a later call whose attention is averaged
LAYER, CACHE = 0.5, 0.2  # shares of raised heads from which the layer, and the cache, are raised


@dataclass(frozen=True)
class GuardEvent:
    """One look of the guard at one layer.

    Attributes:
        time: when it ended, seconds since 1970. layer: its index. seen: logical tokens so far.
        action: "look", "raise" (heads were raised) or "lower" (heads are back at their budgets).
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


class Guard:
    """What the layers' watches share.

    Args:
        config: options of the cache. layers: number of layers that are watched.
        memory: sets budgets from a target in bytes, or None; the guard bounds its compression.

    Attributes:
        spill: where evicted tokens are, or None.
        rollbacks: times that heads, a layer or everything was raised. restored: tokens that came back.
        fetched: tokens that came back because they were expected to be needed (``prefetch``).
        looks: at layers. ms: milliseconds that they took.
        redecode_from: tokens that are beyond doubt, once a rollback has been; None: nothing is to be decoded again.
        shadowed: the last comparison with full precision (``shadow_every``), or None.
        observer: is told of each look, or None.
        cache: gives the cache that was last asked for its monitor.
    """

    def __init__(self, config: FadeConfig, layers: int, memory: MemoryController | None = None) -> None:
        self.config, self.layers, self.memory = config, layers, memory
        self.spill = None if config.spill == "none" else Spill(config.spill, config.spill_dir, config.spill_limit)
        self.watches: list[Watch] = []
        self.cache: Callable[[], TieredCache | None] | None = None
        self.observer: Callable[[GuardEvent | ShadowEvent], None] | None = None
        self.redecodes = False  # whether somebody acts on what is in doubt
        self.reset()
        if config.guard == "rollback" and self.spill is None:
            warnings.warn(
                "guard 'rollback' without a spill store cannot bring evicted tokens back, it can only stop evicting; "
                "give spill='host' or spill='disk'",
                RuntimeWarning,
                stacklevel=3,
            )

    def reset(self) -> None:
        """Forget what was seen and done; the watches are reset by their layers."""
        self._bounded = 0  # tokens seen when the compression was last bounded
        self.shadowed: ShadowEvent | None = None
        self.rollbacks = self.restored = self.fetched = self.looks = 0
        self.ms = 0.0
        self._told = False
        self.redecode_from: int | None = None

    STORED: ClassVar = (
        "_bounded", "rollbacks", "restored", "fetched", "looks", "ms", "_told", "redecode_from",
    )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """What a session stores of it."""
        shadowed = None if self.shadowed is None else asdict(self.shadowed)
        return {**{name: getattr(self, name) for name in self.STORED}, "shadowed": shadowed}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on from :meth:`facts`."""
        for name in self.STORED:
            setattr(self, name, facts[name])
        self.shadowed = None if facts["shadowed"] is None else ShadowEvent(**facts["shadowed"])

    def watch(self, index: int) -> Watch:
        """The watch of one more layer."""
        self.watches.append(Watch(self, index))
        return self.watches[-1]

    def escalate(self) -> None:
        """Raise everything once a fifth of the heads is raised."""
        heads = [head for watch in self.watches for head in watch.raised]
        if sum(heads) >= CACHE * max(len(heads), 1) and all(watch.raised for watch in self.watches):
            self.rollbacks += 1
            for watch in self.watches:
                watch.behind = not all(watch.raised)

    def bound(self, seen: int) -> None:
        """After a rollback allow one step of compression less, once in ``monitor_every`` tokens."""
        if self.memory is None or 0 < self._bounded > seen - self.config.monitor_every:
            return
        self._bounded = seen
        self.memory.limit(max((step for step in STEPS if step < self.memory.compression), default=LEAST))

    def calm(self) -> None:
        """When no head is raised any more, allow all compression again."""
        if self.memory is not None and not any(head for watch in self.watches for head in watch.raised):
            self.memory.limit(None)

    def doubt(self, seen: int) -> None:
        """Note from where on tokens are to be decoded again, if that was asked for."""
        good = min(watch.good for watch in self.watches)
        if self.config.on_rollback == "redecode" and good < seen and self.redecode_from is None:
            self.redecode_from = good
            if not self.redecodes:
                warnings.warn(
                    "tokens are in doubt and nothing decodes them again; make the cache first, and then call "
                    "`model.generate`",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def warn(self, layer: int, seen: int, kl: float) -> None:
        """Say once that predictions fail."""
        if self._told:
            return
        self._told = True
        done = "evicted tokens come back" if self.spill is not None else "nothing more is evicted there"
        warnings.warn(
            f"after {seen:,} tokens layer {layer} looks at evicted tokens more than was forecast (KL {kl:.2f}, alarm "
            f"at {self.config.kl_alarm}); {done if self.config.guard == 'rollback' else 'guard=rollback would act'}",
            RuntimeWarning,
            stacklevel=2,
        )

    def report(self) -> dict[str, Any]:
        """State, divergence by layer and head, and what was done.

        Returns:
            state: "compressed", "raised" (some heads keep everything) or "full"; kl: of the worst head now, NaN before
            the first look; kl_by_layer: [L][H] running averages; recovery, recall: least of the last looks; raised:
            heads that keep everything, of ``heads``; resident: bytes held, as a share of those of a full cache;
            rollbacks, restored, fetched, looks, ms: counted; shadow: the last comparison of next tokens, if any;
            spilled: tokens and bytes in the spill store; tokens that its limit dropped; tokens that it lost, and why
            (why_lost), because what was read was not what was written; why it takes no more (broken), or None.
        """
        watches = [watch for watch in self.watches if watch.kl]
        raised = [head for watch in watches for head in watch.raised]
        found: dict[str, Any] = {
            "state": "full" if raised and all(raised) else "raised" if any(raised) else "compressed",
            "kl": max((max(watch.kl) for watch in watches), default=math.nan),
            "kl_by_layer": {watch.index: list(watch.kl) for watch in watches},
            "recovery": min((watch.recovery for watch in watches), default=1.0),
            "recall": min((watch.recall for watch in watches), default=1.0),
            "raised": sum(raised),
            "heads": len(raised),
        }
        found |= {name: getattr(self, name) for name in ("rollbacks", "restored", "fetched", "looks", "ms")}
        cache = None if self.cache is None else self.cache()
        if cache is not None:
            found["resident"] = 1 / cache.memory_report()["compression"]
        if self.shadowed is not None:
            found["shadow"] = {name: getattr(self.shadowed, name) for name in ("seen", "kl", "top1")}
        if self.spill is not None:
            found["spilled"] = self.spill.report()
        return found


class Watch:
    """The guard's eye on one layer.

    Attributes:
        kl: [H] running average of the divergence of each kv head; empty before the first look.
        raised: [H] whether a head keeps everything. calm: [H] looks since it was last above the target.
        recovery, recall: least of the last look.
        good: tokens seen when the layer last had no head above the alarm.
        behind: the cache was raised and this layer has not followed yet.
    """

    STORED: ClassVar = ("kl", "raised", "calm", "recovery", "recall", "good", "behind", "_looked")

    def __init__(self, guard: Guard, index: int) -> None:
        self.guard, self.index = guard, index
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.kl: list[float] = []
        self.raised: list[bool] = []
        self.calm: list[int] = []
        self.recovery = self.recall = 1.0
        self.good = 0
        self.behind = False
        self.asked: AttentionCall | None = None
        self._looked = 0
        self._reviewing = False  # a plan is being made: what is raised comes back after it was carried out

    def begin(self, layer: TieredLayer, asked: AttentionCall) -> None:
        """Follow the cache to the level "full", and remember the newest queries until the end of the call."""
        self.asked = asked.newest(min(QUERIES, layer.config.recent_window))
        if not self.raised:
            self.kl = []
            self.raised, self.calm = [False] * layer.tokens.heads, [0] * layer.tokens.heads
        if self.behind:
            self._raise(layer, range(len(self.raised)))

    def end(self, layer: TieredLayer, new: int) -> None:
        """Look, if it is time: in turn with the other layers while decoding, and in each call of several tokens."""
        if self._reviewing:
            self._reviewing = False
            self._restore(layer)
        every = self.guard.config.monitor_every
        turn = (layer.seen + self.index * every // max(self.guard.layers, 1)) % every == 0
        fresh = self._looked != layer.seen and self.asked is not None and layer.tokens.compressed
        if fresh and (new > 1 or turn) and (self.guard.spill is not None or any(self.raised)):
            self._look(layer, layer.seen)
        self.asked = None

    def review(
        self, layer: TieredLayer, new: int, upto: int, rows: Tensor, slots: Tensor, now: Tensor, tiers: Tensor
    ) -> Tensor:
        """Look at a plan before it is carried out; what raised heads evict stays in the tier where it is now.

        Args:
            new: tokens of the call. upto: tokens that count as seen. rows, slots, now, tiers: [T] as in a plan.
        """
        if self.asked is not None and (new > 1 or self.guard.spill is None):
            self._reviewing = True
            self._look(layer, upto, (rows, slots, tiers))
        if any(self.raised):
            keeps = torch.tensor(self.raised, device=rows.device)[rows % len(self.raised)]
            return torch.where(keeps & (tiers == Tier.EVICTED), now, tiers)
        return tiers

    def _look(self, layer: TieredLayer, upto: int, plan: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        started = time.perf_counter()
        assert self.asked is not None
        together = QUERIES if plan is not None else TOGETHER  # a question's few words, but a prompt's end as a whole
        attentions, scores, gone = true_attention(layer, self.asked, together)
        if plan is None and any(self.raised):
            plan = layer.virtual_plan()
        if plan is not None:
            rows, slots, tiers = plan
            gone[rows, slots] = tiers == Tier.EVICTED
        look = worst([measure(attention, gone, scores, layer.tokens.heads) for attention in attentions])
        restored, action = self._follow(layer, look, self.asked.query.shape[2])
        if self.guard.config.prefetch and plan is None and action == "look":
            self.guard.fetched += fetch(layer, attentions, gone)
        guard, ms = self.guard, 1e3 * (time.perf_counter() - started)
        self._looked = layer.seen
        guard.looks += 1
        guard.ms += ms
        if guard.observer is not None:
            kl, mean = max(self.kl), sum(self.kl) / len(self.kl)
            seen, raised = layer.seen, sum(self.raised)
            guard.observer(
                GuardEvent(
                    time.time(), self.index, seen, action, kl, mean, self.recovery, self.recall, raised, restored, ms
                )
            )

    def _follow(self, layer: TieredLayer, look: Look, queries: int) -> tuple[int, str]:
        """Take in a look, and act: tokens restored, and what was done."""
        config, keep = self.guard.config, (1 - GAIN) ** queries
        before = self.kl or [0.0] * len(self.raised)
        self.kl = [keep * old + (1 - keep) * new for old, new in zip(before, look.kl.tolist())]
        self.recovery, self.recall = float(look.recovery.min()), float(look.recall.min())
        self.calm = [count + 1 if kl < config.kl_target else 0 for count, kl in zip(self.calm, self.kl)]
        alarmed = [head for head, kl in enumerate(self.kl) if kl > config.kl_alarm and not self.raised[head]]
        if not any(kl > config.kl_alarm for kl in self.kl):
            self.good = layer.seen
        if alarmed:
            self.guard.warn(self.index, layer.seen, max(self.kl))
        if config.guard != "rollback":
            return 0, "look"
        if alarmed:
            self.guard.rollbacks += 1
            self.guard.doubt(layer.seen)
            self.guard.bound(layer.seen)
            heads = {*alarmed, *(head for head, raised in enumerate(self.raised) if raised)}
            whole = len(heads) >= LAYER * len(self.raised)
            restored = self._raise(layer, range(len(self.raised)) if whole else sorted(heads))
            self.guard.escalate()
            if self.behind:
                restored += self._raise(layer, range(len(self.raised)))
            return restored, "raise"
        calmed = [head for head, raised in enumerate(self.raised) if raised and self.calm[head] >= CALM]
        for head in calmed:
            self.raised[head] = False
        if calmed:
            self.guard.calm()
        return 0, "lower" if calmed else "look"

    def facts(self) -> dict[str, Any]:
        """What a session stores of it."""
        return {name: getattr(self, name) for name in self.STORED}

    def restored(self, facts: dict[str, Any]) -> Watch:
        """A watch that goes on from :meth:`facts`."""
        other = copy.copy(self)
        other.reset()
        for name in self.STORED:
            setattr(other, name, facts.get(name, getattr(other, name)))
        return other

    def _raise(self, layer: TieredLayer, heads: Any) -> int:
        """Bring back what heads evicted; they keep everything from now on."""
        self.behind = False
        for head in heads:
            if not self.raised[head]:
                self.raised[head], self.calm[head] = True, 0
        return 0 if self._reviewing else self._restore(layer)

    def _restore(self, layer: TieredLayer) -> int:
        """Bring back what raised heads have evicted."""
        store = layer.tokens
        if not any(self.raised):
            return 0
        chosen = torch.tensor(self.raised, device=store.full.key.device).repeat(store.batch)  # [R]
        restored = store.restore(lambda tokens: chosen[tokens.token_row()])
        self.guard.restored += restored
        return restored
