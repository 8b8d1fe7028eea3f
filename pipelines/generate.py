"""Generate text with a compressed cache: plain `model.generate`, then its memory and its speed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from data.reading import proper, read_text
from pipelines import cli
from predictor.errors import FadeError

PRESETS = ("safe", "balanced", "aggressive")
QUESTION = "\n\nIn two sentences: what is the text above about?"


def generate(
    model: str = "artefacts/models/smollm2-135m-instruct",
    predictor: str | None = None,
    preset: str | None = None,
    policy: str | None = None,
    budget: int | float | None = None,
    memory: str | float | None = None,
    max_kl: float | None = None,
    guard: str = "off",
    spill: str = "none",
    spill_dir: Path | None = None,
    monitor_every: int | None = None,
    log_guard: bool = False,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    prompt_tokens: int = 1024,
    max_new_tokens: int = 64,
    dtype: str = "bfloat16",
    tracking_uri: str | None = None,
    telemetry: Path | None = None,
) -> None:
    """Generate text with a tiered cache and report what it saved.

    Args:
        model: directory or hub id of a causal language model.
        predictor: `models:/NAME@alias`, `models:/NAME/3`, a bundle directory or a hub id; its score then
            decides what is evicted.
        preset: safe, balanced or aggressive; by default balanced with a predictor or policy, else safe.
        policy: what decides without a predictor: position, h2o or ema; or fastgen, with one or without.
        budget: body tokens kept per kv head, in place of the preset's: a share (0.25) or a number (512).
        memory: what the cache may take, in place of preset and budget: 512MiB, or a share of the free memory (0.5).
        max_kl: loss that the predictor's certificate must answer for, in place of preset and budget: KL per token.
        guard: off, warn or rollback: look at true attention while decoding; rollback brings evicted tokens back when
            the forecast fails. Its looks are shown on standard error.
        spill: where evicted tokens go for that: none, host or disk (with spill_dir).
        spill_dir: folder for spill disk.
        monitor_every: tokens in which the guard looks at each layer once.
        log_guard: log its figures to MLflow, experiment "fade-guard", under tracking_uri.
        prompt: the text to answer. By default a long text of the built-in corpus is asked about.
        prompt_file: file to read the prompt from.
        prompt_tokens: length of the built-in text.
        max_new_tokens: at most this many tokens are generated, greedily.
        dtype: of the model: float32, bfloat16 or float16.
        tracking_uri: where names are looked up and figures logged; default MLFLOW_TRACKING_URI, then the demo's store.
        telemetry: file that gets a line of JSON for each reassignment of each layer: tokens per tier, bytes, time.
    """
    from data.lm import load_lm
    from fade_runtime import JsonlExporter, attach_telemetry, create_tiered_cache
    from fade_runtime.transformers_api import forward_kwargs
    from pipelines.integrations import guard_progress as live

    if max_new_tokens < 1:
        raise FadeError(f"max_new_tokens {max_new_tokens} generates nothing; give at least 1")
    resolved = _resolve(predictor, tracking_uri)
    config = choose_config(resolved, preset, policy, budget, memory=memory, max_kl=max_kl)
    config = guarded(config, guard, spill, spill_dir, monitor_every)
    if log_guard and guard == "off":
        raise FadeError("log_guard has nothing to log; add --guard rollback or --guard warn")
    given = read_prompt(prompt, prompt_file)
    exporters: list[Any] = [] if telemetry is None else [JsonlExporter(telemetry)]
    lm, tokenizer = load_lm(model, dtype)
    text = given or builtin_prompt(tokenizer, prompt_tokens)
    inputs = chat_inputs(tokenizer, text)

    cache = create_tiered_cache(lm, config=config)
    if guard != "off":
        exporters.append(live.LiveLine())
    metrics = None
    if log_guard:
        metrics = live.MlflowMetrics(tracking_uri, config.monitor_every, {"cache": describe(config)})
        exporters.append(metrics)
    if exporters:
        attach_telemetry(cache, live.Several(exporters))
    streamer = timed_streamer(tokenizer)
    length = inputs["input_ids"].shape[1]
    print(f"prompt: {length:,} tokens; cache: {describe(config)}\n", flush=True)
    lm.generate(
        **inputs,
        **forward_kwargs(cache, lm),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=streamer,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    print(f"\n{summary(cache.memory_report(), dtype)}\n{streamer.summary()}")
    if guard != "off":
        print(live.report_line(cache.monitor.report()))
    if metrics is not None:
        metrics.close()


def choose_config(
    predictor: Any,
    preset: str | None,
    policy: str | None,
    budget: int | float | None,
    *,
    memory: str | float | None = None,
    max_kl: float | None = None,
) -> Any:
    """The FadeConfig that the options of `generate` ask for.

    Raises:
        FadeError: options that contradict each other, or are not known.
    """
    from fade_runtime import FadeConfig

    sizes = {"preset": preset, "budget": budget, "memory": memory, "max_kl": max_kl}
    if len(given := [name for name, value in sizes.items() if value is not None]) > 1 and given != ["preset", "budget"]:
        raise FadeError(f"{' and '.join(given)} exclude each other; drop all but one")
    if max_kl is not None:
        if policy not in (None, "learned"):
            raise FadeError(f"max_kl is certified for policy 'learned'; drop policy {policy!r}")
        return FadeConfig.risk(kl=max_kl, predictor=predictor)
    plain = predictor is None and policy is None and budget is None and memory is None
    preset = preset or ("safe" if plain else "balanced")
    if preset not in PRESETS:
        raise FadeError(f"preset {preset!r} is not one of {', '.join(PRESETS)}")
    if policy == "learned" and predictor is None:
        raise FadeError("policy 'learned' needs a predictor; add --predictor models:/NAME@champion")
    if predictor is not None and policy not in (None, "learned", "fastgen"):
        raise FadeError(f"policy {policy!r} and a predictor exclude each other; drop one of them")
    if preset == "safe":
        if given := [name for name, value in {"predictor": predictor, "policy": policy}.items() if value]:
            raise FadeError(f"preset 'safe' evicts nothing, so {given[0]} has no use; take preset 'balanced'")
        return FadeConfig.safe(**({} if budget is None else {"int4_budget": budget}))
    options: dict[str, Any] = {} if budget is None else {"int4_budget": budget}
    if memory is not None:
        options = {"memory": memory, "int4_budget": None}
    if policy not in (None, "learned"):
        options["eviction_policy"] = policy
    return getattr(FadeConfig, preset)(predictor=predictor, **options)


def guarded(config: Any, guard: str, spill: str, spill_dir: Path | None, monitor_every: int | None) -> Any:
    """The same FadeConfig with a guard.

    Raises:
        FadeError: options that FadeConfig refuses.
    """
    every = {} if monitor_every is None else {"monitor_every": monitor_every}
    return config.with_options(guard=guard, spill=spill, spill_dir=spill_dir, **every)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    """The text that the user gave, if any.

    Raises:
        FadeError: both options, an empty text, or one that is no text.
    """
    if prompt is not None and prompt_file is not None:
        raise FadeError("prompt and prompt_file are both given; drop one of them")
    text = prompt if prompt is None else proper(prompt, "prompt")
    text = text if prompt_file is None else read_text(prompt_file, "prompt_file")
    if text is not None and not text.strip():
        raise FadeError(f"prompt {prompt_file or ''} is empty; give some text".replace("  ", " "))
    return text


def builtin_prompt(tokenizer: Any, tokens: int) -> str:
    """A text of the built-in corpus of about ``tokens`` tokens, and a question about it."""
    from data.lm import encode
    from data.text import load_documents

    if tokens < 1:
        raise FadeError(f"prompt_tokens {tokens} is no length; give at least 1")
    document = load_documents(
        ["builtin"], train=0, validation=1, length=tokens, measure=lambda text: len(encode(tokenizer, text))
    )[0]
    return tokenizer.decode(encode(tokenizer, document.text)[:tokens]) + QUESTION


def chat_inputs(tokenizer: Any, text: str) -> dict[str, Any]:
    """Token ids and mask of a prompt, in the model's chat format if it has one."""
    if tokenizer.chat_template is None:
        return dict(tokenizer(text, return_tensors="pt"))
    return dict(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
    )


def describe(config: Any) -> str:
    """What a FadeConfig does, in a few words."""
    exact = f"first {config.n_sink} and last {config.recent_window} tokens exact, "
    if config.memory is not None:
        room = f"{config.memory:.0%} of the free memory" if isinstance(config.memory, float) else config.memory
        return f"{exact}of the others what fits {room} kept in 4 bits, chosen by policy {config.eviction_policy!r}"
    if config.int4_budget is None:
        return exact + "all others in 4 bits, nothing evicted"
    share = config.int4_budget
    kept = f"{share:.0%} of the context" if isinstance(share, float) else f"{share:,} tokens"
    return f"{exact}of the others {kept} kept in 4 bits, chosen by policy {config.eviction_policy!r}"


def summary(report: dict[str, Any], dtype: str) -> str:
    """One line on memory from a memory report."""
    resident, full = report["resident_bytes"] / 2**20, report["full_bytes"] / 2**20
    times = f"{report['compression']:.2f}x smaller"
    spilled = report["tiers"]["spilled"] / 2**20
    waits = f" ({spilled:.2f} of them evicted tokens that wait in the same memory)" if spilled else ""
    return f"cache: {resident:.2f} MiB resident{waits}, {full:.2f} MiB if full in {dtype}: {times}"


def timed_streamer(tokenizer: Any) -> Any:
    """A streamer that prints tokens as they come and knows when they came."""
    from transformers import TextStreamer

    class TimedStreamer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())  # first the prompt, then one token at a time
            super().put(value)

        def summary(self) -> str:
            start, *rest = self.times
            line = f"first token after {rest[0] - start:.2f} s"
            if len(rest) < 2:
                return line
            return f"{line}, then {(len(rest) - 1) / (rest[-1] - rest[0]):.1f} tokens/s ({len(rest)} tokens)"

    return TimedStreamer()


def _resolve(predictor: str | None, tracking_uri: str | None) -> Any:
    """Load the predictor up front, so that a wrong name is told before the model is loaded."""
    if predictor is None:
        return None
    from predictor.registry import load_predictor

    return load_predictor(predictor, tracking_uri=tracking_uri)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(generate, argv)


if __name__ == "__main__":
    sys.exit(main())
