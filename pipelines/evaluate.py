"""Evaluate caches against the full one: loss, memory and speed of every policy at the same budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.lm import load_lm, refuse_too_long
from data.trace import Traces
from fade_runtime.cache.telemetry import ListExporter
from fade_runtime.events import Reassignment
from fade_runtime.transformers_api import can_tier, geometry, stock_layers, text_config
from pipelines import cli
from pipelines.evaluation.held_out import HeldOut, choose_texts
from pipelines.evaluation.measure import Measured, compare
from pipelines.evaluation.methods import (
    METHODS,
    Skipped,
    available_methods,
    check_methods,
    load_predictors,
    run_without_failing,
)
from pipelines.evaluation.peer import Peer
from pipelines.evaluation.peers import versions
from pipelines.evaluation.report import document_rows, method_rows, report, source_rows, tables
from pipelines.evaluation.runs import Method
from pipelines.evaluation.sizing import Sized, equally_sized, to_fit, with_fitted
from pipelines.models import model_of
from pipelines.plots import heatmap, occupancy
from pipelines.plots.heatmap import HeadMap
from pipelines.plots.quality import quality_against_bytes
from pipelines.reporting.html import write_report
from pipelines.reporting.machine import machine
from pipelines.reporting.rows import results_folder, write_jsonl
from predictor.bundle import Predictor
from predictor.errors import FadeError
from predictor.provenance import model_provenance


@dataclass(frozen=True)
class EvaluateSettings:
    """Options of `pipelines.evaluate`.

    Args:
        model: directory, GGUF file or hub id of a causal language model, loaded in float32; by default the one that the
            first predictor, or else the traces, were made with.
        methods: of full, safe (4 bits, nothing evicted), position, h2o, ema, adaptive, learned (each predictor),
            fastgen (at most the budget), and names of configs.
        configs: name -> options of FadeConfig, `{k4v2: {int4_budget: 0, low_budget: null}}`; the option
            `predictor` may name one of predictors, `preset` names safe, balanced or aggressive to start from; or
            `peer`: quanto, hqq, kvpress or fade-kv, and its options, `{snapkv: {peer: kvpress, press: SnapKVPress,
            compression_ratio: 0.8}}`. One option may have the value "fit": the configuration is then measured at each
            of ratios, that option set for it. `oracle: true` gives a configuration scores that no cache can have: the
            attention that tokens are going to receive.
        predictors: name in the table -> `models:/NAME@alias`, `models:/NAME/3`, bundle directory or hub id.
        budget: share of the context that evicting methods keep per kv head.
        traces: collection whose validation documents are read, and whose attention is drawn.
        text: files or folders to read instead of the traces' validation documents; or, by name of the source,
            text files, code, folders, FILE.jsonl (chats too) or FILE.jsonl:FIELD+FIELD, as in
            `{prose: [books], maths: ["gsm8k.jsonl:question+answer"], chat: [dialogues.jsonl]}`; also
            generated:lines, key-value, needles, multi-key, chat-facts and copies, whose end asks for what came before.
        ratios: sizes for configurations with an option to fit, as many times smaller than the full cache, in bytes
            measured on the first text. Other projects' caches get no fewer bytes than that, ours no more, and no more
            than another cache of about that size.
        documents: number of documents; of each source where text names sources.
        context: tokens of each document before decoding starts.
        steps: tokens decoded after it, teacher-forced.
        speed: decode one token at a time and time it; with false, several times faster, the table has no speed.
        heatmap_layer: layer of the attention heat map; by default the middle one of those in the traces.
        heatmap_head: kv head of the attention heat map.
        out: folder to write; one that is there is replaced at the end.
        tracking_uri: where names are looked up; default MLFLOW_TRACKING_URI, then the demo's store.
    """

    model: str | None = None
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    configs: dict[str, dict[str, Any]] | None = None
    predictors: dict[str, str] | None = None
    budget: float = 0.25
    traces: str | None = "artefacts/traces/demo"
    text: list[str] | dict[str, list[str]] | None = None
    ratios: list[float] = field(default_factory=list)
    documents: int = 3
    context: int = 1024
    steps: int = 64
    speed: bool = True
    heatmap_layer: int | None = None
    heatmap_head: int = 0
    out: str = "artefacts/eval/demo"
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        """Check the options, before anything is loaded.

        Raises:
            FadeError: names the one that cannot be.
        """
        check_methods(self.methods, self.configs or {}, self.predictors or {}, self.budget)
        to_fit(self.configs or {}, self.ratios)
        for name, least in (("documents", 1), ("context", 1), ("steps", 2)):
            if getattr(self, name) < least:
                raise FadeError(f"{name} {getattr(self, name)} is too small; use at least {least}")
        if self.traces is None and not self.text:
            raise FadeError("traces and text are both null; name traces, or files to read as text")


def evaluate(settings: EvaluateSettings) -> int:
    """Measure what each cache loses against the full one, what it takes and how fast it decodes.

    Writes results.jsonl, two plots, report.md and report.html, all of them or none, and prints the table: each cache
    over all texts, then source by source. A method whose package is not installed, or that fails on a text, is named
    and left out; the exit status is then 2.
    """
    predictors = load_predictors(settings.predictors, settings.tracking_uri)
    traces = None if settings.traces is None else Traces(settings.traces)
    settings = replace(settings, model=model_of(settings.model, predictors.values(), traces))
    lm, tokenizer = load_lm(str(settings.model), "float32")
    check_model(lm, predictors, settings)
    texts = read_texts(settings, traces, tokenizer, predictors)
    skipped = Skipped()
    plan = plan_methods(settings, lm, predictors, texts[0], skipped)
    measured, telemetry = measure_texts(lm, plan.methods, texts, settings, skipped)
    run = run_row(settings, plan, texts, skipped)
    run["model"] = model_provenance(lm, tokenizer)
    documents = document_rows(run["texts"], measured)
    occupied = occupancy_of(lm, telemetry, settings.steps)
    head = (
        None if traces is None else heatmap.head_map(traces, predictors, settings.heatmap_layer, settings.heatmap_head)
    )
    write_results(Path(settings.out), run, documents, head, occupied)
    print(f"\n{tables(documents, skipped.failed)}\n\nReport: {settings.out}/report.html")
    return skipped.status


def check_model(lm: Any, predictors: Mapping[str, Predictor], settings: EvaluateSettings) -> None:
    """Refuse texts that are too long for the model, and predictors of another one.

    Raises:
        FadeError: names the options, or the predictor.
    """
    context, steps = settings.context, settings.steps
    refuse_too_long(lm, context + steps, f"context {context} and steps {steps} pass", "lower context")
    for predictor in predictors.values():
        predictor.check(lm)


def read_texts(
    settings: EvaluateSettings, traces: Traces | None, tokenizer: Any, predictors: Mapping[str, Predictor]
) -> list[HeldOut]:
    """The texts that are named, none of which a predictor was trained on, or the validation documents of the traces."""
    source, trained = None if settings.text else traces, [each.manifest for each in predictors.values()]
    return choose_texts(
        source, settings.text or [], settings.documents, settings.context, settings.steps, tokenizer, trained
    )


@dataclass
class Plan:
    """What is going to be measured.

    Attributes:
        names, configs: as in the settings, with each fitted configuration in place of its pattern.
        sized: what was fitted. methods: those that can run; one that fails later leaves the list.
    """

    names: list[str]
    configs: dict[str, dict[str, Any]]
    sized: list[Sized]
    methods: list[Method]


def plan_methods(
    settings: EvaluateSettings, lm: Any, predictors: Mapping[str, Predictor], text: HeldOut, skipped: Skipped
) -> Plan:
    """Set what is to be of equal size, on one text, and make the methods that can run here."""
    names, configs = settings.methods, settings.configs or {}
    sized: list[Sized] = []
    if targets := to_fit(configs, settings.ratios):
        print("Setting what is to be of equal size", file=sys.stderr)
        names, sized = equally_sized(lm, names, configs, predictors, targets, text.tokens, settings.steps, skipped)
        names, configs = with_fitted(names, configs, sized)
    methods = available_methods(names, configs, predictors, settings.budget, skipped)
    return Plan(names, configs, sized, methods)


def measure_texts(
    lm: Any, methods: list[Method], texts: Sequence[HeldOut], settings: EvaluateSettings, skipped: Skipped
) -> tuple[list[list[Measured]], dict[str, ListExporter]]:
    """Compare methods on every text, with a progress bar; those that fail on one are left out of all.

    Returns:
        For each text the methods in order; the telemetry of each tiered cache on the first text, if nothing is timed.
    """
    telemetry: dict[str, ListExporter] = {}
    measured = []
    total = len(texts) * len(methods) * (1 + settings.steps)
    with tqdm(total=total, unit="step", desc="Evaluating", mininterval=1) as bar:
        for text in texts:
            bar.set_postfix_str(text.source)
            exported = telemetry if text is texts[0] and not settings.speed else None  # telemetry takes time
            measured.append(measure(lm, methods, text, settings, skipped, bar.update, exported))
    left = {method.name for method in methods}
    return [[row for row in rows if row.name in left] for rows in measured], telemetry


def measure(
    lm: Any,
    methods: list[Method],
    text: HeldOut,
    settings: EvaluateSettings,
    skipped: Skipped,
    on_step: Callable[[], Any] = lambda: None,
    telemetry: dict[str, ListExporter] | None = None,
) -> list[Measured]:
    """Compare methods on one text; other projects' that fail on it leave ``methods`` and are skipped."""
    return run_without_failing(
        methods,
        lambda methods: compare(
            lm, methods, text.tokens, settings.steps, on_step, timed=settings.speed, telemetry=telemetry
        ),
        lambda method, error: skipped.add(f"{method.name} on {text.id}: {error}", method.name),
    )


def run_row(settings: EvaluateSettings, plan: Plan, texts: Sequence[HeldOut], skipped: Skipped) -> dict[str, Any]:
    """The first row of the results: settings, what was fitted and skipped, texts, machine."""
    names = ("model", "methods", "configs", "predictors", "budget", "traces", "text", "context", "steps", "speed")
    fitted = {"methods": plan.names, "configs": plan.configs, "predictors": settings.predictors or {}}
    return {
        "kind": "run",
        "command": cli.command_line("pipelines.evaluate"),
        "settings": {name: getattr(settings, name) for name in names} | fitted,
        "skipped": skipped.lines,
        "failed": skipped.failed,
        "sized": [asdict(one) for one in plan.sized],
        "texts": [{"document": text.id, "source": text.source} for text in texts],
        "machine": machine(),
        "peers": versions(method.config for method in plan.methods if isinstance(method.config, Peer)),
    }


def occupancy_of(lm: Any, telemetry: Mapping[str, ListExporter], steps: int) -> list[dict[str, Any]]:
    """Rows of :func:`pipelines.plots.occupancy.occupancy_rows` for each tiered cache: of layers whose tokens can go."""
    config = text_config(lm)
    (heads, dim), chosen = geometry(config), [can_tier(layer) for layer in stock_layers(config)]
    full = 2 * 2 * heads * dim * sum(chosen)  # bytes of a token in 16 bits, keys and values of these layers
    rows: list[dict[str, Any]] = []
    for name, exporter in telemetry.items():
        events = [event for event in exporter.events if isinstance(event, Reassignment) and chosen[event.layer]]
        rows += occupancy.occupancy_rows(name, events, heads, full, steps)
    return rows


def write_results(
    out: Path,
    run: dict[str, Any],
    documents: list[dict[str, Any]],
    head: HeadMap | None,
    occupied: Sequence[dict[str, Any]] = (),
) -> None:
    """Write the folder of results, whole or not at all.

    Raises:
        FadeError: there is a folder that is no evaluation's.
    """
    methods, settings = method_rows(documents), run["settings"]
    with results_folder(out) as folder:
        title = f"{Path(settings['model']).name}, {settings['context']:,} tokens"
        quality_against_bytes(folder / "quality.png", methods, title)
        plots = {"quality.png": "KL to the full cache against resident bytes; lines go up to the worst text."}
        if head is not None:
            plots["attention.png"] = "Recorded attention, its forecast, and the mean of both over the steps."
            heatmap.draw(folder / "attention.png", head)
        if occupied:
            first = run["texts"][0]["document"]
            plots["occupancy.png"] = f"Tokens of a kv head in each tier while {first} is decoded, and bytes."
            occupancy.draw(folder / "occupancy.png", occupied, "Where the tokens are")
        write_jsonl(folder / "results.jsonl", [run, *documents, *methods, *source_rows(documents), *occupied])
        write_report(folder, report(run, documents, plots))


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(evaluate, argv)


if __name__ == "__main__":
    sys.exit(main())
