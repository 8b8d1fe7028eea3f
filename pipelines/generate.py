"""Generate text with a compressed cache: plain `model.generate`, then its memory and its speed."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TextStreamer

from data.encoding import encode
from data.lm import load_config, load_model, load_tokenizer, refuse_dtype, refuse_too_long
from data.reading import proper, read_text
from data.text import load_documents
from fade_runtime import FadeConfig, JsonlExporter, attach_telemetry, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines import cli
from pipelines.evaluation.methods import check_preset, from_preset
from pipelines.integrations.guard_progress import Exporters, MlflowMetrics, ProgressLine, report_line
from pipelines.models import model_of
from predictor.bundle import Predictor
from predictor.errors import FadeError
from predictor.registry import load_predictor

BUILTIN_TOKENS = 1024  # of the built-in text
QUESTION = "\n\nIn two sentences: what is the text above about?"


@dataclass(frozen=True)
class GenerateSettings:
    """Options of `pipelines.generate`.

    Args:
        model: directory, GGUF file or hub id of a causal language model; by default the one that the predictor was made
            with.
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
        prompt: the text to answer. By default a long text of the built-in corpus, and a question about it.
        prompt_file: file to read the prompt from.
        prompt_tokens: length of the built-in text, 1024 by default; a longer text of your own is cut to so many tokens.
        max_new_tokens: at most this many tokens are generated, greedily.
        dtype: of the model: float32, bfloat16 or float16.
        tracking_uri: where names are looked up and figures logged; default MLFLOW_TRACKING_URI, then the demo's store.
        telemetry: file that gets a line of JSON for each reassignment of each layer: tokens per tier, bytes, time.
    """

    model: str | None = None
    predictor: str | None = None
    preset: str | None = None
    policy: str | None = None
    budget: int | float | None = None
    memory: str | float | None = None
    max_kl: float | None = None
    guard: str = "off"
    spill: str = "none"
    spill_dir: Path | None = None
    monitor_every: int | None = None
    log_guard: bool = False
    prompt: str | None = None
    prompt_file: Path | None = None
    prompt_tokens: int | None = None
    max_new_tokens: int = 64
    dtype: str = "bfloat16"
    tracking_uri: str | None = None
    telemetry: Path | None = None

    def load_predictor(self) -> Predictor | None:
        """The predictor, if one is named."""
        return None if self.predictor is None else load_predictor(self.predictor, tracking_uri=self.tracking_uri)


def generate(settings: GenerateSettings) -> None:
    """Generate text with a tiered cache and report what it saved."""
    if settings.max_new_tokens < 1:
        raise FadeError(f"max_new_tokens {settings.max_new_tokens} generates nothing; give at least 1")
    if settings.prompt_tokens is not None and settings.prompt_tokens < 1:
        raise FadeError(f"prompt_tokens {settings.prompt_tokens} is no length; give at least 1")
    predictor = settings.load_predictor()  # before the model: a wrong name costs no time
    config = with_guard(choose_config(settings, predictor), settings)
    if settings.log_guard and settings.guard == "off":
        raise FadeError("log_guard has nothing to log; add --guard rollback or --guard warn")
    text = read_prompt(settings.prompt, settings.prompt_file)
    events = None if settings.telemetry is None else JsonlExporter(settings.telemetry)
    named = model_of(settings.model, [] if predictor is None else [predictor])
    refuse_dtype(settings.dtype)
    tokenizer = load_tokenizer(named)
    inputs = read_inputs(text, tokenizer, named, settings)  # before the weights are read
    lm = load_model(named, settings.dtype)
    cache = create_tiered_cache(lm, config=config)
    line, metrics = ProgressLine() if settings.guard != "off" else None, guard_metrics(settings, config)
    if exporters := [each for each in (events, line, metrics) if each is not None]:
        attach_telemetry(cache, Exporters(exporters))
    print(f"prompt: {inputs['input_ids'].shape[1]:,} tokens; cache: {describe(config)}\n", flush=True)
    streamer = TimedStreamer(tokenizer)
    lm.generate(
        **inputs,
        **forward_kwargs(cache, lm),
        max_new_tokens=settings.max_new_tokens,
        do_sample=False,
        streamer=streamer,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    print(f"\n{summary(cache.memory_report(), settings.dtype)}\n{streamer.summary()}")
    if settings.guard != "off":
        print(report_line(cache.monitor.report()))
    if metrics is not None:
        metrics.close()


def guard_metrics(settings: GenerateSettings, config: FadeConfig) -> MlflowMetrics | None:
    """A run in MLflow for the guard's figures, if they are to be logged."""
    if not settings.log_guard:
        return None
    return MlflowMetrics(settings.tracking_uri, config.monitor_every, {"cache": describe(config)})


def choose_config(settings: GenerateSettings, predictor: Predictor | str | None) -> FadeConfig:
    """The FadeConfig that the options ask for, without its guard.

    Args:
        settings: of which preset, policy, budget, memory and max_kl count. predictor: a loaded one.

    Raises:
        FadeError: options that contradict each other, or are not known.
    """
    policy, budget = settings.policy, settings.budget
    sizes = [name for name in ("preset", "budget", "memory", "max_kl") if getattr(settings, name) is not None]
    if len(sizes) > 1 and sizes != ["preset", "budget"]:
        raise FadeError(f"{' and '.join(sizes)} exclude each other; drop all but one")
    if settings.max_kl is not None:
        if policy not in (None, "learned"):
            raise FadeError(f"max_kl is certified for policy 'learned'; drop policy {policy!r}")
        return FadeConfig.risk(kl=settings.max_kl, predictor=predictor)
    plain = predictor is None and policy is None and budget is None and settings.memory is None
    preset = settings.preset or ("safe" if plain else "balanced")
    check_policy(preset, policy, predictor)
    options: dict[str, Any] = {} if budget is None else {"int4_budget": budget}
    if preset == "safe":
        return FadeConfig.safe(**options)
    if settings.memory is not None:
        options = {"memory": settings.memory, "int4_budget": None}
    if policy not in (None, "learned"):
        options["eviction_policy"] = policy
    return from_preset(preset, {"predictor": predictor, **options})


def check_policy(preset: str, policy: str | None, predictor: Predictor | str | None) -> None:
    """Refuse a preset, a policy and a predictor that do not go together.

    Raises:
        FadeError: names them.
    """
    check_preset(preset)
    if policy == "learned" and predictor is None:
        raise FadeError("policy 'learned' needs a predictor; add --predictor models:/NAME@champion")
    if predictor is not None and policy not in (None, "learned", "fastgen"):
        raise FadeError(f"policy {policy!r} and a predictor exclude each other; drop one of them")
    evicting = [name for name, value in {"predictor": predictor, "policy": policy}.items() if value]
    if preset == "safe" and evicting:
        raise FadeError(f"preset 'safe' evicts nothing, so {evicting[0]} has no use; take preset 'balanced'")


def with_guard(config: FadeConfig, settings: GenerateSettings) -> FadeConfig:
    """The same FadeConfig with the guard of the settings.

    Raises:
        FadeError: options that FadeConfig refuses.
    """
    every = {} if settings.monitor_every is None else {"monitor_every": settings.monitor_every}
    return config.with_options(guard=settings.guard, spill=settings.spill, spill_dir=settings.spill_dir, **every)


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


def read_inputs(text: str | None, tokenizer: Any, model: str, settings: GenerateSettings) -> dict[str, Any]:
    """Token ids [1, S] and mask [1, S] of what is asked, in the model's chat format if it has one.

    Args:
        text: of the user; without one, a text of the built-in corpus and a question about it.
        tokenizer, model: of what is asked, and its name.
        settings: of which prompt_tokens and max_new_tokens count.

    Raises:
        FadeError: more tokens than the model was made for.
    """
    tokens = settings.prompt_tokens
    if text is None:
        text = builtin_prompt(tokenizer, tokens or BUILTIN_TOKENS)
    elif tokens is not None:
        text = first_tokens(tokenizer, text, tokens)
    inputs = chat_inputs(tokenizer, text)
    length, new = inputs["input_ids"].shape[1], settings.max_new_tokens
    refuse_too_long(
        load_config(model),
        length + new - 1,  # the last new token is not read
        f"prompt of {length:,} tokens and max_new_tokens {new} pass",
        "cut the prompt with prompt_tokens, or take a model that reads more",
    )
    return inputs


def first_tokens(tokenizer: Any, text: str, tokens: int) -> str:
    """The beginning of a text, so many tokens long at most."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return text if len(ids) <= tokens else tokenizer.decode(ids[:tokens])


def builtin_prompt(tokenizer: Any, tokens: int) -> str:
    """A text of the built-in corpus of about ``tokens`` tokens, and a question about it."""
    document = load_documents(
        ["builtin"], train=0, validation=1, length=tokens, measure=lambda text: len(encode(tokenizer, text))
    )[0]
    return first_tokens(tokenizer, document.text, tokens) + QUESTION


def chat_inputs(tokenizer: Any, text: str) -> dict[str, Any]:
    """Token ids [1, S] and mask [1, S] of a prompt, in the model's chat format if it has one."""
    if tokenizer.chat_template is None:
        return dict(tokenizer(text, return_tensors="pt", verbose=False))
    return dict(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
    )


def describe(config: FadeConfig) -> str:
    """What a FadeConfig does, in some words.

    Example:
        >>> describe(FadeConfig(int4_budget=0.25))
        "first 4 and last 64 tokens exact, of the others 25% of the context kept in 4 bits, chosen by policy 'h2o'"
    """
    exact = f"first {config.n_sink} and last {config.recent_window} tokens exact, "
    budget = config.int4_budget
    if config.memory is not None:
        room = f"{config.memory:.0%} of the free memory" if isinstance(config.memory, float) else config.memory
        kept = f"what fits {room}"
    elif config.target_compression is not None:
        kept = f"what a {config.target_compression:g} times smaller cache holds"
    elif budget is None:
        return exact + "all others in 4 bits, nothing evicted"
    else:
        kept = f"{budget:.0%} of the context" if isinstance(budget, float) else f"{budget:,} tokens"
    return f"{exact}of the others {kept} kept in 4 bits, chosen by policy {config.eviction_policy!r}"


def summary(report: dict[str, Any], dtype: str) -> str:
    """One line on memory from a memory report: the whole cache, and by kind where not all layers are compressed alike.

    Example:
        >>> layers = {"compressed": {"compression": 5.8}, "others": {"compression": 2.7, "full_bytes": 2**20}}
        >>> whole = {"resident_bytes": 2**19, "full_bytes": 2**21, "compression": 4.0, "reachable": None}
        >>> print(summary({**whole, "layers": layers, "tiers": {"spilled": 0}}, "bfloat16"))
        cache: 0.50 MiB resident, 2.00 MiB if full in bfloat16: 4.00x smaller (compressed layers 5.80x, others 2.70x)
    """
    resident, full = report["resident_bytes"] / 2**20, report["full_bytes"] / 2**20
    spilled, layers, reachable = report["tiers"]["spilled"] / 2**20, report["layers"], report["reachable"]
    waits = f" ({spilled:.2f} of them evicted tokens that wait in the same memory)" if spilled else ""
    kinds = f"compressed layers {layers['compressed']['compression']:.2f}x, "
    kinds += f"others {layers['others']['compression']:.2f}x" if layers["others"]["full_bytes"] else "no others"
    out_of_reach = "" if reachable is None else f"; {reachable:.1f}x was reachable when tokens last moved"
    times = f"{report['compression']:.2f}x smaller ({kinds}){out_of_reach}"
    return f"cache: {resident:.2f} MiB resident{waits}, {full:.2f} MiB if full in {dtype}: {times}"


class TimedStreamer(TextStreamer):
    """A streamer that prints tokens as they come and knows when they came."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Take in the prompt, then one token at a time."""
        self.times.append(time.perf_counter())
        super().put(value)

    def summary(self) -> str:
        """When the first token came, and how many a second after it."""
        start, *rest = self.times
        line = f"first token after {rest[0] - start:.2f} s"
        if len(rest) < 2:
            return line
        return f"{line}, then {(len(rest) - 1) / (rest[-1] - rest[0]):.1f} tokens/s ({len(rest)} tokens)"


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(generate, argv)


if __name__ == "__main__":
    sys.exit(main())
