"""`python -m pipelines.bench profile`: what FastGen's profile of a prompt costs beside the generation it serves."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from pipelines import cli
from pipelines.benchmarks.ledger import quantiles

STAGES = ("classes", "attention", "profile", "choice")


def profile(
    model: str = "artefacts/models/smollm2-135m-instruct",
    context: int = 2048,
    steps: int = 512,
    threads: int = 1,
    out: str | None = None,
    ledger: str | None = None,
) -> None:
    """Generate after a prompt with eviction_policy "fastgen", and time its parts within that one run.

    The parts: noting the classes of the tokens, attention of the prompt's last queries, the profile of the kv heads,
    and the choice of tokens at the end of the prompt and while decoding.

    Args:
        model: directory or hub id of a causal language model with its tokenizer, loaded in float32.
        context: tokens of the prompt, from the built-in corpus.
        steps: tokens generated.
        threads: of torch.
        out: JSON lines file to add the row to.
        ledger: CSV file to add the row to, for `pipelines.bench compare`.
    """
    import torch

    from data.lm import encode, load_lm
    from fade_runtime import FadeConfig, create_tiered_cache
    from fade_runtime.transformers_api import forward_kwargs
    from pipelines.evaluation.report import keep
    from pipelines.generate import builtin_prompt

    cli.at_least_one(("context", context), ("steps", steps), ("threads", threads))
    torch.set_num_threads(threads)
    lm, tokenizer = load_lm(model, "float32")
    prompt = torch.tensor([encode(tokenizer, builtin_prompt(tokenizer, context))[:context]])
    cache = create_tiered_cache(lm, FadeConfig(eviction_policy="fastgen", tokenizer=tokenizer))
    assert cache.text is not None
    policy: Any = cache.policy
    seconds: defaultdict[str, float] = defaultdict(float)
    for owner, method, stage in (
        (cache.text, "note", STAGES[0]),
        (policy, "start", STAGES[1]),
        (policy, "profile", STAGES[2]),
        (policy, "narrow", STAGES[3]),
    ):
        setattr(owner, method, _timed(getattr(owner, method), seconds, stage))
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
    total = time.perf_counter() - started
    found = Counter(int(one) for layer in cache.tiered for one in layer.tokens.profiles.flatten())  # type: ignore[union-attr]
    row = {
        "bench": "profile",
        "context": context,
        "steps": steps,
        "seconds": total,
        "profiling_share": sum(seconds.values()) / total,
        "method": "fastgen",
        "unit": "ms",
        **quantiles([1e3 * sum(seconds.values())]),
        "baseline": "generation",
        "ratio": sum(seconds.values()) / total,
        **{f"{stage}_ms": 1e3 * seconds[stage] for stage in STAGES},
        "policies": named(found),
        "compression": cache.memory_report()["compression"],
    }
    keep([row], model, out, ledger)
    print(f"prompt of {context:,} tokens and {steps} more: {total:.1f} s")
    for stage in STAGES:
        print(f"{stage:<10} {1e3 * seconds[stage]:>8.1f} ms {seconds[stage] / total:>8.3%}")
    print(f"{'all':<10} {1e3 * sum(seconds.values()):>8.1f} ms {row['profiling_share']:>8.3%}")
    print(f"kv heads: {', '.join(f'{count} {name}' for name, count in row['policies'].items())}")


def named(counts: Counter[int]) -> dict[str, int]:
    """Kv heads by the policy that they got, cheapest first.

    Example:
        >>> named(Counter([4, 2, 2]))
        {'frequent': 2, 'full': 1}
    """
    from fade_runtime.policies.fastgen import Keeps

    return {Keeps(policy).name.lower(): counts[policy] for policy in sorted(counts)}


def _timed(call: Callable[..., Any], seconds: dict[str, float], stage: str) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        started = time.perf_counter()
        result = call(*args)
        seconds[stage] += time.perf_counter() - started
        return result

    return timed
