"""How failed forecasts of attention are noticed, and what is done then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fade_runtime.config.validation import check_choice, check_whole, is_whole
from predictor.errors import FadeError


@dataclass(frozen=True)
class GuardOptions:
    """How failed forecasts of attention are noticed, and what is done then.

    Attributes:
        guard: "off"; "warn" when attention goes to evicted tokens that the scores did not expect it on; "rollback":
            also bring them back, head by head, then layer by layer, then all, until the forecast holds again.
        spill: where evicted tokens go for that: "none", "host" memory, or "disk".
        spill_dir: for "disk": a folder, which may be shared; what is written there goes with the cache, and after a
            crash at the next start. Of a process that was forked, a cache of its parent is refused there.
        spill_limit: most bytes of spilled tokens; then the oldest are dropped for good. None: no limit.
        monitor_every: decode steps in which the guard probes each layer once.
        kl_target: a kv head whose KL(true attention over blocks || forecast) stays below goes back to its budget.
        kl_alarm: one above it has failed.
        prefetch: bring back evicted tokens while decoding that are attended as much as kept ones are, at the probe that
            finds it; they compete for the budget again, and what is weaker leaves instead.
        shadow_every: decode steps between two runs of the whole text in full precision, with which the guard compares
            next-token distributions; each costs as much as a prompt of that length. None: never.
        on_rollback: "continue" with the text as it is, or "redecode": drop the tokens generated since all layers were
            last found in order, and decode them again (:mod:`fade_runtime.cache.redecode`); until they are found in
            order they stay in full precision and out of the statistics, about ``monitor_every`` tokens.
    """

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

    def check_guard(self) -> None:
        """Refuse a value out of its range, and options of the guard that contradict each other.

        Raises:
            FadeError: names the option, its value and the remedy.
        """
        check_choice("guard", self.guard, ("off", "warn", "rollback"))
        check_choice("spill", self.spill, ("none", "host", "disk"))
        check_choice("on_rollback", self.on_rollback, ("continue", "redecode"))
        check_whole("monitor_every", self.monitor_every, 1)
        if not 0 < self.kl_target <= self.kl_alarm:
            raise FadeError(f"kl_target {self.kl_target!r} is not in (0, kl_alarm {self.kl_alarm!r}]; lower it")
        self._check_spill()
        if self.prefetch and self.spill == "none":
            raise FadeError("prefetch brings spilled tokens back; set guard and spill='host' or 'disk'")
        if self.shadow_every is not None and (not is_whole(self.shadow_every) or self.shadow_every < 1):
            raise FadeError(f"shadow_every {self.shadow_every!r} is neither None nor a whole number of at least 1")
        if self.shadow_every is not None and self.guard == "off":
            raise FadeError("shadow_every is the guard's; set guard='warn' or 'rollback'")
        if self.on_rollback == "redecode" and (self.guard != "rollback" or self.spill == "none"):
            raise FadeError("on_rollback 'redecode' needs what was evicted; set guard='rollback' and a spill store")

    def _check_spill(self) -> None:
        if self.spill != "none" and self.guard == "off":
            raise FadeError(f"spill {self.spill!r} stores what a guard would restore; set guard='rollback' or 'warn'")
        if (self.spill == "disk") != (self.spill_dir is not None):
            raise FadeError("spill 'disk' and spill_dir go together; give both, or neither")
        if self.spill_limit is not None and (not is_whole(self.spill_limit) or self.spill_limit < 1):
            raise FadeError(f"spill_limit {self.spill_limit!r} is not a whole number of bytes")
        if self.spill_limit is not None and self.spill == "none":
            raise FadeError("spill_limit is given but nothing is spilled; set spill='host' or 'disk'")
