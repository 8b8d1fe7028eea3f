"""`python -m pipelines.bench profile`: what FastGen's profile of a prompt costs beside the generation it serves."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.policies.fastgen import Keeps
from fade_runtime.transformers_api import forward_kwargs
from pipelines.benchmarks.settings import BenchSettings
from pipelines.benchmarks.timing import add_time, quantiles
from pipelines.cli import at_least_one
from pipelines.evaluation.held_out import choose_texts

STAGES = ("classes", "attention", "profile", "choice")


@dataclass(frozen=True)
class ProfileSettings(BenchSettings):
    """Options of `pipelines.bench profile`.

    Args:
        context: tokens of the prompt, from the built-in corpus.
        steps: tokens generated.
    """

    context: int = 2048
    steps: int = 512


def profile(settings: ProfileSettings) -> None:
    """Generate after a prompt with eviction_policy "fastgen", and time its parts within that one run.

    The parts: noting the classes of the tokens, attention of the prompt's last queries, the profile of the kv heads,
    and the choice of tokens at the end of the prompt and while decoding.
    """
    context, steps = settings.context, settings.steps
    at_least_one(("context", context), ("steps", steps), ("threads", settings.threads))
    lm, tokenizer = settings.load()
    (text,) = choose_texts(None, ["builtin"], 1, context, 0, tokenizer)
    row = _row(lm, tokenizer, text.tokens, steps)
    settings.keep([row])
    seconds = row["seconds"]
    print(f"prompt of {context:,} tokens and {steps} more: {seconds:.1f} s")
    for stage in STAGES:
        print(f"{stage:<10} {row[f'{stage}_ms']:>8.1f} ms {row[f'{stage}_ms'] / 1e3 / seconds:>8.3%}")
    print(f"{'all':<10} {row['p50']:>8.1f} ms {row['profiling_share']:>8.3%}")
    print(f"kv heads: {', '.join(f'{count} {name}' for name, count in row['policies'].items())}")


def _row(lm: Any, tokenizer: Any, prompt: torch.Tensor, steps: int) -> dict[str, Any]:
    """Generate after a prompt [1, S] with a clock on each stage of the policy."""
    cache = create_tiered_cache(lm, FadeConfig(eviction_policy="fastgen", tokenizer=tokenizer))
    seconds = _clocked(cache)
    started = time.perf_counter()
    lm.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        pad_token_id=0,
        **forward_kwargs(cache, lm),
    )
    total, profiling = time.perf_counter() - started, sum(seconds.values())
    policies = Counter(int(one) for layer in cache.tiered for one in layer.tokens.profiles.flatten())  # type: ignore[union-attr]
    return {
        "bench": "profile",
        "context": prompt.shape[1],
        "steps": steps,
        "seconds": total,
        "profiling_share": profiling / total,
        "method": "fastgen",
        "unit": "ms",
        **quantiles([1e3 * profiling]),
        "baseline": "generation",
        "ratio": profiling / total,
        **{f"{stage}_ms": 1e3 * seconds[stage] for stage in STAGES},
        "policies": named(policies),
        "compression": cache.memory_report()["compression"],
    }


def _clocked(cache: Any) -> dict[str, float]:
    """Put a clock on each stage; returns stage -> seconds, which grow as the cache is used."""
    seconds: dict[str, float] = defaultdict(float)
    methods = ((cache.text, "note"), (cache.policy, "start"), (cache.policy, "profile"), (cache.policy, "narrow"))
    for stage, (owner, method) in zip(STAGES, methods):
        setattr(owner, method, add_time(getattr(owner, method), seconds, stage))
    return seconds


def named(counts: Counter[int]) -> dict[str, int]:
    """Kv heads by the policy that they got, cheapest first.

    Example:
        >>> named(Counter([4, 2, 2]))
        {'frequent': 2, 'full': 1}
    """
    return {Keeps(policy).name.lower(): counts[policy] for policy in sorted(counts)}
