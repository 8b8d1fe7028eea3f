"""Evaluate caches against the full one: loss, memory and speed of every policy at the same budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import cli
from pipelines.methods import METHODS, Skipped, check_methods, possible, with_those_able
from predictor.errors import FadeError

if TYPE_CHECKING:
    from torch import Tensor

    from data.text import Document
    from pipelines.measure import Measured, Method


def evaluate(
    model: str = "artefacts/models/smollm2-135m-instruct",
    methods: list[str] = list(METHODS),  # noqa: B006
    configs: dict[str, dict[str, Any]] | None = None,
    predictors: dict[str, str] | None = None,
    budget: float = 0.25,
    traces: str | None = "artefacts/traces/demo",
    text: list[str] | dict[str, list[str]] | None = None,
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
            compression_ratio: 0.8}}`.
        predictors: name in the table -> `models:/NAME@alias`, `models:/NAME/3`, bundle directory or hub id.
        budget: share of the context that evicting methods keep per kv head.
        traces: collection whose validation documents are read, and whose attention is drawn.
        text: files or folders to read instead of the traces' validation documents; or, by name of the source,
            text files, code, folders, FILE.jsonl (chats too) or FILE.jsonl:FIELD+FIELD, as in
            `{prose: [books], maths: ["gsm8k.jsonl:question+answer"], chat: [dialogues.jsonl]}`.
        documents: number of documents; of each source where text names sources.
        context: tokens of each document before decoding starts.
        steps: tokens decoded after it, teacher-forced.
        speed: decode one token at a time and time it; with false, several times faster, the table has no speed.
        heatmap_layer: layer of the attention heat map.
        heatmap_head: kv head of the attention heat map.
        out: folder to write; one that is there is replaced at the end.
        tracking_uri: where names are looked up; default MLFLOW_TRACKING_URI, then the demo's store.
    """
    check_methods(methods, configs or {}, predictors or {}, budget)
    for option, value, least in (("documents", documents, 1), ("context", context, 1), ("steps", steps, 2)):
        if value < least:
            raise FadeError(f"{option} {value} is too small; use at least {least}")
    if traces is None and not text:
        raise FadeError("traces and text are both null; name traces, or files to read as text")

    from tqdm import tqdm

    from data.lm import load_lm
    from data.trace import Traces
    from pipelines import heatmap
    from pipelines.report import document_rows, machine, tables
    from predictor.provenance import model_provenance
    from predictor.registry import load_predictor

    loaded = {name: load_predictor(ref, tracking_uri) for name, ref in (predictors or {}).items()}
    opened = None if traces is None else Traces(traces)
    lm, tokenizer = load_lm(model, "float32")
    for predictor in loaded.values():
        predictor.check(lm)
    skipped = Skipped()
    chosen = possible(methods, configs or {}, loaded, budget, skipped)
    texts = choose_texts(opened if not text else None, text or [], documents, context + steps, tokenizer)
    total = len(texts) * len(chosen) * (1 + steps)
    with tqdm(total=total, unit="step", desc="Evaluating", mininterval=1) as bar:
        measured = []
        for one in texts:
            bar.set_postfix_str(one.source)
            measured.append(measure(lm, chosen, one, steps, speed, skipped, bar.update))
    left = {method.name for method in chosen}
    measured = [[row for row in rows if row.name in left] for rows in measured]

    run: dict[str, Any] = {
        "kind": "run",
        "command": " ".join(["python -m pipelines.evaluate", *sys.argv[1:]]),
        "settings": {
            "model": model,
            "methods": methods,
            "configs": configs or {},
            "predictors": predictors or {},
            "budget": budget,
            "traces": traces,
            "text": text,
            "context": context,
            "steps": steps,
            "speed": speed,
        },
        "skipped": skipped.lines,
        "failed": skipped.failed,
        "texts": [{"document": one.id, "source": one.source} for one in texts],
        "machine": machine(),
        "model": model_provenance(lm, tokenizer),
    }
    rows = document_rows(run["texts"], measured)
    picture = None if opened is None else heatmap.head_map(opened, loaded, heatmap_layer, heatmap_head)
    write_results(Path(out), run, rows, picture)
    print(f"\n{tables(rows, skipped.failed)}\n\nReport: {out}/report.html")
    return skipped.status


def measure(
    lm: Any,
    able: list[Method],
    text: HeldOut,
    steps: int,
    speed: bool,
    skipped: Skipped,
    on_step: Callable[[], None],
) -> list[Measured]:
    """Compare methods on one text; other projects' that fail on it leave ``able`` and are skipped."""
    from pipelines.measure import compare

    return with_those_able(
        able,
        lambda able: compare(lm, able, text.tokens, steps, on_step, timed=speed),
        lambda one, error: skipped.add(f"{one.name} on {text.id}: {error}", one.name),
    )


@dataclass
class HeldOut:
    """A text to measure on: its id, its source, and its first tokens [1, context + steps]."""

    id: str
    source: str
    tokens: Tensor


def choose_texts(
    traces: Any,
    sources: Sequence[str] | Mapping[str, Sequence[str]],
    documents: int,
    length: int,
    tokenizer: Any,
) -> list[HeldOut]:
    """Validation documents of a trace collection, or texts from elsewhere; from named sources so many of each.

    Raises:
        FadeError: too few or too short documents, or text that is not what the traces were collected from.
    """
    import torch

    from data.lm import encode

    if traces is not None:
        found = _validation_documents(traces, documents, tokenizer)
    elif isinstance(sources, Mapping):
        found = [
            replace(document, source=name)
            for name, places in sources.items()
            for document in _read(_files(places), documents, length, tokenizer)
        ]
    else:
        found = _read(sources, documents, length, tokenizer)
    chosen = []
    for document in found:
        tokens = torch.tensor(encode(tokenizer, document.text)[:length])[None]
        if tokens.shape[1] < length:
            raise FadeError(
                f"document {document.id} has {tokens.shape[1]} tokens, context + steps is {length}; "
                "lower context or steps"
            )
        chosen.append(HeldOut(document.id, document.source, tokens))
    return chosen


def _validation_documents(traces: Any, documents: int, tokenizer: Any) -> list[Document]:
    from data.plan import CollectSettings, prepare

    tasks = prepare(CollectSettings(**traces.manifest["settings"]), tokenizer)
    found = [task.document for task in tasks if task.document.split == "validation"]
    known = [one["id"] for one in traces.manifest["documents"] if one["split"] == "validation"]
    if [document.id for document in found] != known:
        raise FadeError(
            f"the text that the traces in {traces.folder} were collected from has changed since "
            "(another Python, or edited files); collect them again, or give text"
        )
    if len(found) < documents:
        raise FadeError(
            f"documents {documents} is more than the {len(found)} validation documents of the traces"
        )
    return found[:documents]


def _read(sources: Sequence[str], documents: int, length: int, tokenizer: Any) -> list[Document]:
    from data.chat import chat_renderer
    from data.lm import encode
    from data.text import load_documents

    return load_documents(
        sources,
        train=0,
        validation=documents,
        length=length,
        measure=lambda words: len(encode(tokenizer, words)),
        render=chat_renderer(tokenizer),
    )


def _files(places: Sequence[str]) -> list[str]:
    """The files of a named source; those of a folder one by one, so that documents come from each in turn."""
    from data.records import text_files

    folders = {place: text_files(Path(place)) for place in places if Path(place).is_dir()}
    return [str(file) for place in places for file in folders.get(place, [place])]


def write_results(out: Path, run: dict[str, Any], documents: list[dict[str, Any]], picture: Any) -> None:
    """Write the folder of results, whole or not at all.

    Raises:
        FadeError: there is a folder that is no evaluation's.
    """
    from pipelines import heatmap
    from pipelines.html import page
    from pipelines.plots import quality_against_bytes
    from pipelines.report import method_rows, report, source_rows, write_jsonl
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
        write_jsonl(aside / "results.jsonl", [run, *documents, *methods, *source_rows(documents)])
        text = report(run, documents, plots)
        (aside / "report.md").write_text(text, encoding="utf-8")
        (aside / "report.html").write_text(page(text, aside), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(evaluate, argv)


if __name__ == "__main__":
    sys.exit(main())
