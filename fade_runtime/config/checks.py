"""Options of FadeConfig that contradict each other, or are out of their range."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from fade_runtime.config.memory_target import parsed
from fade_runtime.storage.quant import PAGE
from predictor.errors import FadeError

if TYPE_CHECKING:
    from fade_runtime.config.config import FadeConfig

TOP_K = "topk"


def check_together(config: FadeConfig) -> None:
    """Refuse options by name.

    Raises:
        FadeError: names the option, its value and the remedy.
    """
    check_bits(config)
    check_budgets(config)
    check_parts(config)
    check_guard(config)


def check_bits(config: FadeConfig) -> None:
    """Bits of codes."""
    for name in ("middle_k_bits", "middle_v_bits", "low_k_bits", "low_v_bits"):
        value = getattr(config, name)
        if value not in (2, 4, 8) and (name, value) != ("low_k_bits", None):
            raise FadeError(f"{name} {value!r} is not 2, 4 or 8")
    if not whole(config.page_tokens) or not 8 <= config.page_tokens <= PAGE:
        raise FadeError(f"page_tokens {config.page_tokens!r} is not a whole number from 8 to {PAGE}")
    bits = config.bits
    for low, middle, name in ((bits.low_key, bits.key, "k"), (bits.low_value, bits.value, "v")):
        if config.has_low_tier and low > middle:
            raise FadeError(
                f"low_{name}_bits {low} is more than middle_{name}_bits {middle}; demotion only takes bits away"
            )
    if bits.key == 2 or (config.has_low_tier and config.low_tier == "int2" and bits.low_key == 2):
        warnings.warn(
            "2-bit keys cost much quality: K2V2 measured KL .02 to .22 on SmolLM2-135M where K4V2 has .009; "
            "use 4-bit keys (the default)",
            stacklevel=5,
        )


def check_budgets(config: FadeConfig) -> None:
    """Budgets, and the shares that limit them."""
    _check_budget("int4_budget", config.int4_budget, TOP_K)
    _check_budget("low_budget", config.low_budget)
    if isinstance(config.int4_budget, int) and isinstance(config.low_budget, int):
        total = config.int4_budget + config.low_budget
        if 0 < total < config.n_sink:
            raise FadeError(
                f"a budget of {total} tokens is smaller than n_sink {config.n_sink}; raise it, or lower n_sink"
            )
    if config.int4_budget is None and config.low_budget != 0:
        raise FadeError(
            "int4_budget None takes every token, so low_budget has nothing to hold; give int4_budget (0 for none)"
        )
    check_memory(config)
    if config.phase in ("1a", "1b") and config.ranks:
        raise FadeError(
            f"phase {config.phase!r} evicts nothing; leave int4_budget and memory at None, and fastgen out, or set "
            "phase='2'"
        )
    for name in ("tau", "low_tau"):
        value = getattr(config, name)
        if value is not None and not 0 < value <= 1:
            raise FadeError(f"{name} {value!r} is not a share in (0, 1]")
        if value is not None and value < 1 and config.int4_budget is None and config.memory is None:
            raise FadeError(f"{name} {value!r} needs int4_budget, the most that a kv head may keep; try 1.0")
        if value is not None and value < 1 and config.eviction_policy == "position":
            raise FadeError(f"{name} {value!r} needs scores that are shares; eviction_policy 'position' has none")


def check_memory(config: FadeConfig) -> None:
    """A target in bytes."""
    if config.memory is None:
        return
    if isinstance(config.memory, str):
        parsed(config.memory)
    elif not (whole(config.memory) and config.memory > 0) and not (
        isinstance(config.memory, float) and 0 < config.memory <= 1
    ):
        raise FadeError(
            f"memory {config.memory!r} is neither a number of bytes (above 0), nor a text such as '512MiB', nor a "
            "share of the free device memory (a float in (0, 1])"
        )
    if config.int4_budget is not None or config.low_budget != 0:
        raise FadeError("memory sets the budget itself; leave int4_budget and low_budget out, or leave memory out")


def check_parts(config: FadeConfig) -> None:
    """Policy, predictor, tokenizer, assistant and codebook."""
    if config.eviction_policy == "learned" and config.predictor is None:
        raise FadeError("eviction_policy 'learned' needs a predictor; give predictor='models:/NAME@champion' or a path")
    if config.eviction_policy not in ("learned", "fastgen") and config.predictor is not None:
        raise FadeError(
            f"predictor is given but eviction_policy is {config.eviction_policy!r}; set eviction_policy='learned'"
        )
    fastgen = config.eviction_policy == "fastgen"
    if fastgen and config.predictor is not None and not (config.int4_budget or config.memory):
        raise FadeError("fastgen with a predictor raises learned budgets; set int4_budget, their mean (or memory)")
    if fastgen and min(config.shares) < 1:
        raise FadeError("tau and low_tau share out scores by head, as fastgen does itself; leave them at None")
    if config.assistant is not None and (config.eviction_policy == "position" or not config.ranks):
        raise FadeError(
            "assistant has a part in scores, and none decides here; set int4_budget, and not policy 'position'"
        )
    if isinstance(config.assistant, bool):
        raise FadeError(f"assistant {config.assistant!r} is neither a model nor a number of layers")
    if not 0.6 <= config.assist_weight <= 0.8:
        raise FadeError(f"assist_weight {config.assist_weight!r} is not from 0.6 to 0.8")
    if config.eviction_policy != "fastgen" and config.assistant is None and config.tokenizer is not None:
        raise FadeError(
            f"tokenizer is given but eviction_policy is {config.eviction_policy!r}, which reads no text; leave it out"
        )
    pq = config.has_low_tier and config.low_tier == "pq"
    if pq and config.codebook is None:
        raise FadeError("low_tier 'pq' needs a codebook; train one with `python -m pipelines.train_codebook`")
    if not pq and config.codebook is not None:
        raise FadeError("codebook is given but no low tier uses it; set low_tier='pq' and low_budget")


def check_guard(config: FadeConfig) -> None:
    """Guard and spill store."""
    if not 0 < config.kl_target <= config.kl_alarm:
        raise FadeError(f"kl_target {config.kl_target!r} is not in (0, kl_alarm {config.kl_alarm!r}]; lower it")
    if config.spill != "none" and config.guard == "off":
        raise FadeError(f"spill {config.spill!r} stores what a guard would restore; set guard='rollback' or 'warn'")
    if (config.spill == "disk") != (config.spill_dir is not None):
        raise FadeError("spill 'disk' and spill_dir go together; give both, or neither")
    if config.spill_limit is not None and (not whole(config.spill_limit) or config.spill_limit < 1):
        raise FadeError(f"spill_limit {config.spill_limit!r} is not a whole number of bytes")
    if config.spill_limit is not None and config.spill == "none":
        raise FadeError("spill_limit is given but nothing is spilled; set spill='host' or 'disk'")
    if config.prefetch and config.spill == "none":
        raise FadeError("prefetch brings spilled tokens back; set guard and spill='host' or 'disk'")
    if config.shadow_every is not None and (not whole(config.shadow_every) or config.shadow_every < 1):
        raise FadeError(f"shadow_every {config.shadow_every!r} is neither None nor a whole number of at least 1")
    if config.shadow_every is not None and config.guard == "off":
        raise FadeError("shadow_every is the guard's; set guard='warn' or 'rollback'")
    if config.on_rollback == "redecode":
        if config.guard != "rollback" or config.spill == "none":
            raise FadeError("on_rollback 'redecode' needs what was evicted; set guard='rollback' and a spill store")
        if config.recent_window < 2 * config.monitor_every:
            raise FadeError(
                f"on_rollback 'redecode' drops up to 2 x monitor_every {config.monitor_every} tokens, which must be in "
                f"the recent_window {config.recent_window}; lower monitor_every to {config.recent_window // 2} or less"
            )


def whole(value: Any) -> bool:
    """Whether a value is a whole number, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_budget(name: str, budget: Any, *words: str) -> None:
    if budget is None or budget in words:
        return
    if (whole(budget) and budget >= 0) or (isinstance(budget, float) and 0 < budget <= 1):
        return
    raise FadeError(
        f"{name} {budget!r} is neither a whole number of tokens (at least 0), nor a share of the context "
        f"(a float in (0, 1]), nor {' nor '.join([*map(repr, words), 'None'])}"
    )
