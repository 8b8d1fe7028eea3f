"""The guard of a cache: it probes true attention while decoding, and takes evictions back when the forecast failed.

Levels: a kv head whose divergence stays high gets everything back and keeps it ("raised"); so does its whole layer once
half of its heads are raised, and the whole cache ("full") once a fifth of all heads are. A raised head is watched on
as if it evicted what its policy would evict, and is put back to its budget when that has been harmless for a while.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor

from fade_runtime.config import FadeConfig, MemoryController
from fade_runtime.config.memory_target import LEAST, STEPS
from fade_runtime.events import GuardEvent, ShadowEvent
from fade_runtime.guard.prefetch import fetch
from fade_runtime.guard.probe import QUERIES, Probe, measure, true_attention, worst
from fade_runtime.layer import AttentionCall, BodyTokens, CompressedLayer
from fade_runtime.storage.spill import Spill
from fade_runtime.storage.tiers import Tier

GAIN = 0.5  # weight of one query's divergence in the running average
CALM_PROBES = 4  # probes below the target after which a raised head goes back to its budget
TOGETHER = 4  # queries of a later call whose attention is averaged
LAYER, CACHE = 0.5, 0.2  # shares of raised heads from which the layer, and the cache, are raised


class Guard:
    """What the layers' watches share.

    Args:
        config: options of the cache. layers: number of layers that are watched.
        memory: sets budgets from a target in bytes, or None; the guard bounds its compression.

    Attributes:
        spill: where evicted tokens are, or None.
        rollbacks: times that heads, a layer or everything was raised. restored: tokens that came back.
        fetched: tokens that came back because they were expected to be needed (``prefetch``).
        probes: of true attention, at layers. ms: milliseconds that they took.
        redecode_from: tokens that are beyond doubt, once a rollback has been; None: nothing is to be decoded again.
        shadowed: the last comparison with full precision (``shadow_every``), or None.
        observer: is told of each probe, or None.
        resident: gives the bytes that the cache holds, as a fraction of those of a full one; None: nobody knows.
    """

    def __init__(self, config: FadeConfig, layers: int, memory: MemoryController | None = None) -> None:
        self.config, self.layers, self.memory = config, layers, memory
        self.spill = None if config.spill == "none" else Spill(config.spill, config.spill_dir, config.spill_limit)
        self.watches: list[Watch] = []
        self.resident: Callable[[], float | None] = lambda: None
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
        self.rollbacks = self.restored = self.fetched = self.probes = 0
        self.ms = 0.0
        self._warned = False
        self.redecode_from: int | None = None

    # attribute -> its name in sessions
    STORED: ClassVar = {
        name: name for name in ("_bounded", "rollbacks", "restored", "fetched", "ms", "redecode_from")
    } | {"probes": "looks", "_warned": "_told"}

    def facts(self) -> dict[str, Any]:
        """What a session stores of it."""
        shadowed = None if self.shadowed is None else asdict(self.shadowed)
        return {**{stored: getattr(self, name) for name, stored in self.STORED.items()}, "shadowed": shadowed}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on from :meth:`facts`."""
        for name, stored in self.STORED.items():
            setattr(self, name, facts[stored])
        self.shadowed = None if facts["shadowed"] is None else ShadowEvent(**facts["shadowed"])

    def watch(self, index: int) -> Watch:
        """The watch of one more layer."""
        self.watches.append(Watch(self, index))
        return self.watches[-1]

    def bystander(self) -> Bystander:
        """Hooks of a layer that evicts nothing and is not watched, but waits for the others."""
        return Bystander(self)

    @property
    def settled(self) -> int:
        """Columns up to which every layer of the cache has been found in order."""
        return min((watch.good for watch in self.watches), default=0)

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

    def unbound(self) -> None:
        """When no head is raised any more, allow all compression again."""
        if self.memory is not None and not any(head for watch in self.watches for head in watch.raised):
            self.memory.limit(None)

    def doubt(self, seen: int) -> None:
        """Note from where on tokens are to be decoded again, if ``on_rollback`` says so."""
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
        if self._warned:
            return
        self._warned = True
        done = "evicted tokens come back" if self.spill is not None else "nothing more is evicted there"
        warnings.warn(
            f"after {seen:,} tokens layer {layer} looks at evicted tokens more than was forecast (KL {kl:.2f}, alarm "
            f"at {self.config.kl_alarm}); {done if self.config.guard == 'rollback' else 'guard=rollback would act'}",
            RuntimeWarning,
            stacklevel=2,
        )

    def note_shadow(self, event: ShadowEvent) -> None:
        """Take in a comparison with full precision, and tell of it."""
        self.shadowed = event
        if self.observer is not None:
            self.observer(event)

    def report(self) -> dict[str, Any]:
        """State, divergence by layer and head, and what was done.

        Returns:
            state: "compressed", "raised" (some heads keep everything) or "full"; kl: of the worst head now, NaN before
            the first probe; kl_by_layer: [L][H] running averages; recovery, recall: least of the last probes; raised:
            heads that keep everything, of ``heads``; resident: bytes held, as a fraction of those of a full cache;
            rollbacks, restored, fetched, probes, ms: counted; shadow: the last comparison of next tokens, if any;
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
        found |= {name: getattr(self, name) for name in ("rollbacks", "restored", "fetched", "probes", "ms")}
        resident = self.resident()
        if resident is not None:
            found["resident"] = resident
        if self.shadowed is not None:
            found["shadow"] = {name: getattr(self.shadowed, name) for name in ("seen", "kl", "top1")}
        if self.spill is not None:
            found["spilled"] = self.spill.report()
        return found


class Bystander:
    """Hooks of a layer that the guard does not watch: it knows how far the others are in order."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    @property
    def settled(self) -> int:
        """Columns up to which every watched layer has been found in order."""
        return self.guard.settled

    def reset(self) -> None:
        """Nothing is kept."""

    def facts(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def from_facts(self, facts: Mapping[str, Any]) -> Bystander:
        """The same."""
        return self

    def begin(self, layer: CompressedLayer, call: AttentionCall) -> None:
        """Nothing."""

    def review(self, layer: CompressedLayer, new: int, tokens: BodyTokens, tiers: Tensor) -> Tensor:
        """The planned tiers [T]."""
        return tiers

    def end(self, layer: CompressedLayer, new: int) -> None:
        """Nothing."""


class Watch:
    """The guard's eye on one layer.

    Attributes:
        kl: [H] running average of the divergence of each kv head; empty before the first probe.
        raised: [H] whether a head keeps everything. calm_for: [H] probes since it was last above the target.
        recovery, recall: least of the last probe.
        good: tokens seen when the layer last had no head above the alarm.
        behind: the cache was raised and this layer has not followed yet.
    """

    # attribute -> its name in sessions
    STORED: ClassVar = {name: name for name in ("kl", "raised", "recovery", "recall", "good", "behind")} | {
        "calm_for": "calm",
        "_probed": "_looked",
    }

    def __init__(self, guard: Guard, index: int) -> None:
        self.guard, self.index = guard, index
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.kl: list[float] = []
        self.raised: list[bool] = []
        self.calm_for: list[int] = []
        self.recovery = self.recall = 1.0
        self.good = 0
        self.behind = False
        self.call: AttentionCall | None = None  # the newest queries of the running call
        self._probed = 0  # columns at the last probe
        self._reviewing = False  # a plan is being made: what is raised comes back after it was carried out

    @property
    def settled(self) -> int:
        """Columns up to which every layer of the cache has been found in order."""
        return self.guard.settled

    def begin(self, layer: CompressedLayer, call: AttentionCall) -> None:
        """Follow the cache to the level "full", and remember the newest queries until the end of the call."""
        self.call = call.newest(min(QUERIES, layer.config.recent_window))
        if not self.raised:
            self.kl = []
            self.raised, self.calm_for = [False] * layer.tokens.heads, [0] * layer.tokens.heads
        if self.behind:
            self._raise(layer, range(len(self.raised)))

    def end(self, layer: CompressedLayer, new: int) -> None:
        """Probe, if it is time: in turn with the other layers while decoding, and in each call of several tokens."""
        if self._reviewing:
            self._reviewing = False
            self._restore(layer)
        every = self.guard.config.monitor_every
        its_turn = (layer.seen + self.index * every // max(self.guard.layers, 1)) % every == 0
        fresh = self._probed != layer.seen and self.call is not None and layer.tokens.compressed
        if fresh and (new > 1 or its_turn) and (self.guard.spill is not None or any(self.raised)):
            self._probe(layer)
        self.call = None

    def review(self, layer: CompressedLayer, new: int, tokens: BodyTokens, tiers: Tensor) -> Tensor:
        """Probe a plan before it is carried out; what raised heads evict stays in the tier where it is now.

        Args:
            new: columns of the call. tokens: T of the body. tiers: [T] int64, where the plan wants them.

        Returns:
            [T] int64.
        """
        if self.call is not None and (new > 1 or self.guard.spill is None):
            self._reviewing = True
            self._probe(layer, (tokens, tiers))
        if any(self.raised):
            keeps = torch.tensor(self.raised, device=tiers.device)[tokens.rows % len(self.raised)]
            return torch.where(keeps & (tiers == Tier.EVICTED), tokens.tiers, tiers)
        return tiers

    def _probe(self, layer: CompressedLayer, plan: tuple[BodyTokens, Tensor] | None = None) -> None:
        """Measure true attention over what is spilled, or over what a plan would evict, and act on it."""
        started = time.perf_counter()
        assert self.call is not None
        together = QUERIES if plan is not None else TOGETHER  # a question's few words, but a prompt's end as a whole
        attentions, scores, gone = true_attention(layer, self.call, together)
        if plan is None and any(self.raised):
            plan = layer.virtual_plan()
        if plan is not None:
            tokens, tiers = plan
            gone[tokens.rows, tokens.slots] = tiers == Tier.EVICTED
        probe = worst([measure(attention, gone, scores, layer.tokens.heads) for attention in attentions])
        restored, action = self.follow(layer, probe, self.call.query.shape[2])
        if self.guard.config.prefetch and plan is None and action == "look":
            self.guard.fetched += fetch(layer, attentions, gone)
        guard, ms = self.guard, 1e3 * (time.perf_counter() - started)
        self._probed = layer.seen
        guard.probes += 1
        guard.ms += ms
        if guard.observer is not None:
            kl, mean = max(self.kl), sum(self.kl) / len(self.kl)
            seen, raised = layer.seen, sum(self.raised)
            guard.observer(
                GuardEvent(
                    time.time(), self.index, seen, action, kl, mean, self.recovery, self.recall, raised, restored, ms
                )
            )

    def follow(self, layer: CompressedLayer, probe: Probe, queries: int) -> tuple[int, str]:
        """Take in a probe of the newest ``queries``, and act on it.

        Returns:
            tokens restored; what was done: "look" (nothing), "raise" or "lower".
        """
        config, keep = self.guard.config, (1 - GAIN) ** queries
        before = self.kl or [0.0] * len(self.raised)
        self.kl = [keep * old + (1 - keep) * new for old, new in zip(before, probe.kl.tolist())]
        self.recovery, self.recall = float(probe.recovery.min()), float(probe.recall.min())
        self.calm_for = [count + 1 if kl < config.kl_target else 0 for count, kl in zip(self.calm_for, self.kl)]
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
        calmed = [head for head, raised in enumerate(self.raised) if raised and self.calm_for[head] >= CALM_PROBES]
        for head in calmed:
            self.raised[head] = False
        if calmed:
            self.guard.unbound()
        return 0, "lower" if calmed else "look"

    def facts(self) -> dict[str, Any]:
        """What a session stores of it."""
        return {stored: getattr(self, name) for name, stored in self.STORED.items()}

    def from_facts(self, facts: Mapping[str, Any]) -> Watch:
        """A watch that goes on from :meth:`facts`."""
        other = copy.copy(self)
        other.reset()
        for name, stored in self.STORED.items():
            setattr(other, name, facts.get(stored, getattr(other, name)))
        return other

    def _raise(self, layer: CompressedLayer, heads: Iterable[int]) -> int:
        """Bring back what heads evicted; they keep everything from now on."""
        self.behind = False
        for head in heads:
            if not self.raised[head]:
                self.raised[head], self.calm_for[head] = True, 0
        return 0 if self._reviewing else self._restore(layer)

    def _restore(self, layer: CompressedLayer) -> int:
        """Bring back what raised heads have evicted."""
        store = layer.tokens
        if not any(self.raised):
            return 0
        chosen = torch.tensor(self.raised, device=store.full.key.device).repeat(store.batch)  # [R]
        restored = store.restore(lambda tokens: chosen[tokens.token_row()])
        self.guard.restored += restored
        return restored
