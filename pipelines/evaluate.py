"""Evaluate caches against the full one: loss, memory and speed of every policy at the same budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import cli
from pipelines.evaluation.held_out import choose_texts
from pipelines.evaluation.methods import METHODS, Skipped, check_methods, possible, with_those_able
from pipelines.evaluation.sizing import Sized, equally_sized, spread, to_fit
from predictor.errors import FadeError

if TYPE_CHECKING:
    from fade_runtime.cache.telemetry import ListExporter
    from pipelines.evaluation.held_out import HeldOut
    from pipelines.evaluation.measure import Measured, Method


def evaluate(
    model: str = "artefacts/models/smollm2-135m-instruct",
    methods: list[str] = list(METHODS),  # noqa: B006
    configs: dict[str, dict[str, Any]] | None = None,
    predictors: dict[str, str] | None = None,
    budget: float = 0.25,
    traces: str | None = "artefacts/traces/demo",
    text: list[str] | dict[str, list[str]] | None = None,
    ratios: list[float] = [],  # noqa: B006
    documents: int = 3,
    context: int = 1024,
    steps: int = 64,
    speed: bool = True,
    heatmap_layer: int = 10,
    heatmap_head: int = 0,
    out: str = "artefacts/eval/demo",
    tracking_uri: str | None = None,
) -> int:
    """Measure what each cache loses against the full one, what it takes and how fast it decodes.

    Writes results.jsonl, two plots, report.md and report.html, all of them or none, and prints the table: each cache
    over all texts, then source by source. A method whose package is not installed, or that fails on a text, is named
    and left out; the exit status is then 2.

    Args:
        model: directory or hub id of a causal language model, loaded in float32.
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
            `{prose: [books], maths: ["gsm8k.jsonl:question+answer"], chat: [dialogues.jsonl]}`; also generated:lines,
            generated:key-value and generated:needles, records of which parts come again at the end.
        ratios: sizes for configurations with an option to fit, as many times smaller than the full cache, in bytes
            measured on the first text. Other projects' caches get no fewer bytes than that, ours no more, and no more
            than another cache of about that size.
        documents: number of documents; of each source where text names sources.
        context: tokens of each document before decoding starts.
        steps: tokens decoded after it, teacher-forced.
        speed: decode one token at a time and time it; with false, several times faster, the table has no speed.
        heatmap_layer: layer of the attention heat map.
        heatmap_head: kv head of the attention heat map.
        out: folder to write; one that is there is replaced at the end.
        tracking_uri: where names are looked up; default MLFLOW_TRACKING_URI, then the demo's store.
    """
    configs, predictors = configs or {}, predictors or {}
    check_methods(methods, configs, predictors, budget)
    wanted = to_fit(configs, ratios)
    for option, value, least in (("documents", documents, 1), ("context", context, 1), ("steps", steps, 2)):
        if value < least:
            raise FadeError(f"{option} {value} is too small; use at least {least}")
    if traces is None and not text:
        raise FadeError("traces and text are both null; name traces, or files to read as text")

    from tqdm import tqdm

    from data.lm import load_lm, refuse_too_long
    from data.trace import Traces
    from pipelines.evaluation.peers import Peer, versions
    from pipelines.evaluation.report import document_rows, tables
    from pipelines.plots import heatmap
    from pipelines.reporting.machine import machine
    from predictor.provenance import model_provenance
    from predictor.registry import load_predictor

    loaded = {name: load_predictor(ref, tracking_uri) for name, ref in predictors.items()}
    opened = None if traces is None else Traces(traces)
    lm, tokenizer = load_lm(model, "float32")
    refuse_too_long(lm, context + steps, f"context {context} and steps {steps} pass", "lower context")
    for predictor in loaded.values():
        predictor.check(lm)
    skipped = Skipped()
    texts = choose_texts(opened if not text else None, text or [], documents, context, steps, tokenizer)
    sized: list[Sized] = []
    if wanted:
        print("Setting what is to be of equal size", file=sys.stderr)
        methods, sized = equally_sized(lm, methods, configs, loaded, wanted, texts[0].tokens, steps, skipped)
        methods, configs = spread(methods, configs, sized)
    chosen = possible(methods, configs, loaded, budget, skipped)
    total = len(texts) * len(chosen) * (1 + steps)
    with tqdm(total=total, unit="step", desc="Evaluating", mininterval=1) as bar:
        measured: list[list[Measured]] = []
        told: dict[str, ListExporter] = {}
        for one in texts:
            bar.set_postfix_str(one.source)
            first = told if one is texts[0] and not speed else None  # telemetry takes time
            measured.append(measure(lm, chosen, one, steps, speed, skipped, bar.update, first))
    left = {method.name for method in chosen}
    measured = [[row for row in rows if row.name in left] for rows in measured]

    run: dict[str, Any] = {
        "kind": "run",
        "command": " ".join(["python -m pipelines.evaluate", *sys.argv[1:]]),
        "settings": {
            "model": model,
            "methods": methods,
            "configs": configs,
            "predictors": predictors,
            "budget": budget,
            "traces": traces,
            "text": text,
            "context": context,
            "steps": steps,
            "speed": speed,
        },
        "skipped": skipped.lines,
        "failed": skipped.failed,
        "sized": [asdict(one) for one in sized],
        "texts": [{"document": one.id, "source": one.source} for one in texts],
        "machine": machine(),
        "peers": versions(method.config for method in chosen if isinstance(method.config, Peer)),
        "model": model_provenance(lm, tokenizer),
    }
    rows = document_rows(run["texts"], measured)
    held = occupied(lm, told, steps)
    picture = None if opened is None else heatmap.head_map(opened, loaded, heatmap_layer, heatmap_head)
    write_results(Path(out), run, rows, picture, held)
    print(f"\n{tables(rows, skipped.failed)}\n\nReport: {out}/report.html")
    return skipped.status


def measure(
    lm: Any,
    able: list[Method],
    text: HeldOut,
    steps: int,
    speed: bool,
    skipped: Skipped,
    on_step: Callable[[], None] = lambda: None,
    told: dict[str, ListExporter] | None = None,
) -> list[Measured]:
    """Compare methods on one text; other projects' that fail on it leave ``able`` and are skipped."""
    from pipelines.evaluation.measure import compare

    return with_those_able(
        able,
        lambda able: compare(lm, able, text.tokens, steps, on_step, timed=speed, told=told),
        lambda one, error: skipped.add(f"{one.name} on {text.id}: {error}", one.name),
    )


def occupied(lm: Any, told: Mapping[str, ListExporter], steps: int) -> list[dict[str, Any]]:
    """Rows of :func:`pipelines.plots.occupancy.occupancy_rows` for each tiered cache."""
    from fade_runtime.transformers_api import geometry, text_config
    from pipelines.plots.occupancy import occupancy_rows

    config = text_config(lm)
    heads, dim = geometry(config)
    full = 2 * 2 * config.num_hidden_layers * heads * dim
    return [row for name, each in told.items() for row in occupancy_rows(name, each.events, heads, full, steps)]


def write_results(
    out: Path, run: dict[str, Any], documents: list[dict[str, Any]], picture: Any, held: Sequence[dict[str, Any]] = ()
) -> None:
    """Write the folder of results, whole or not at all.

    Raises:
        FadeError: there is a folder that is no evaluation's.
    """
    from pipelines.evaluation.report import method_rows, report, source_rows
    from pipelines.plots import heatmap, occupancy
    from pipelines.plots.quality import quality_against_bytes
    from pipelines.reporting.html import page
    from pipelines.reporting.rows import write_jsonl
    from predictor.files import write_aside

    if out.is_dir() and any(out.iterdir()) and not (out / "results.jsonl").is_file():
        raise FadeError(f"out {out} is there and holds other files; name another folder")
    methods = method_rows(documents)
    plots = {"quality.png": "KL to the full cache against resident bytes; lines go up to the worst text."}
    with write_aside(out) as aside:
        aside.mkdir()
        settings = run["settings"]
        quality_against_bytes(
            aside / "quality.png",
            methods,
            f"{Path(settings['model']).name}, {settings['context']:,} tokens",
        )
        if picture is not None:
            plots["attention.png"] = "Recorded attention, its forecast, and the mean of both over the steps."
            heatmap.draw(aside / "attention.png", picture)
        if held:
            text = run["texts"][0]["document"]
            plots["occupancy.png"] = f"Tokens of a kv head in each tier while {text} is decoded, and bytes."
            occupancy.draw(aside / "occupancy.png", held, "Where the tokens are")
        write_jsonl(aside / "results.jsonl", [run, *documents, *methods, *source_rows(documents), *held])
        text = report(run, documents, plots)
        (aside / "report.md").write_text(text, encoding="utf-8")
        (aside / "report.html").write_text(page(text, aside), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(evaluate, argv)


if __name__ == "__main__":
    sys.exit(main())
