"""Evaluate caches against the full one: loss, memory and speed of every policy at the same budget."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import cli
from predictor.errors import FadeError

if TYPE_CHECKING:
    from torch import Tensor

    from pipelines.measure import Method
    from predictor.bundle import Predictor

POLICIES = ("position", "h2o", "ema")
METHODS = ("full", "safe", *POLICIES, "learned")


def evaluate(
    model: str = "artefacts/models/smollm2-135m-instruct",
    methods: list[str] = list(METHODS),  # noqa: B006
    predictors: dict[str, str] | None = None,
    budget: float = 0.25,
    traces: str | None = "artefacts/traces/demo",
    text: list[str] | None = None,
    documents: int = 3,
    context: int = 1024,
    steps: int = 64,
    heatmap_layer: int = 10,
    heatmap_head: int = 0,
    out: str = "artefacts/eval/demo",
    tracking_uri: str | None = None,
) -> None:
    """Measure what each cache loses against the full one, what it takes and how fast it decodes.

    Writes results.jsonl, two plots and report.md, all of them or none, and prints the table.

    Args:
        model: directory or hub id of a causal language model, loaded in float32.
        methods: of full, safe (4 bits, nothing evicted), position, h2o, ema and learned (each predictor).
        predictors: name in the table -> `models:/NAME@alias`, `models:/NAME/3`, bundle directory or hub id.
        budget: share of the context that evicting methods keep per kv head.
        traces: collection whose validation documents are read, and whose attention is drawn.
        text: files or folders to read instead of the traces' validation documents.
        documents: number of documents.
        context: tokens of each document before decoding starts.
        steps: tokens decoded after it, teacher-forced.
        heatmap_layer: layer of the attention heat map.
        heatmap_head: kv head of the attention heat map.
        out: folder to write; one that is there is replaced at the end.
        tracking_uri: where names are looked up; default MLFLOW_TRACKING_URI, then the demo's store.
    """
    check_options(methods, predictors or {}, budget, documents, context, steps)
    if traces is None and not text:
        raise FadeError("traces and text are both null; name traces, or files to read as text")

    from tqdm import tqdm

    from data.lm import load_lm
    from data.trace import Traces
    from pipelines import heatmap
    from pipelines.measure import compare
    from pipelines.report import document_rows, machine, method_rows, table
    from predictor.provenance import model_provenance
    from predictor.registry import load_predictor

    loaded = {name: load_predictor(ref, tracking_uri) for name, ref in (predictors or {}).items()}
    opened = None if traces is None else Traces(traces)
    lm, tokenizer = load_lm(model, "float32")
    for predictor in loaded.values():
        predictor.check(lm)
    texts = choose_texts(opened if not text else None, text or [], documents, context + steps, tokenizer)
    chosen = make_methods(methods, loaded, budget)
    total = len(texts) * (len(chosen) + steps)  # each prefill, and each step of all caches
    with tqdm(total=total, unit="step", desc="Evaluating", mininterval=1) as bar:
        measured = []
        for one in texts:
            bar.set_postfix_str(one.source)
            measured.append(compare(lm, chosen, one.tokens, steps, bar.update))

    run: dict[str, Any] = {
        "kind": "run",
        "command": " ".join(["python -m pipelines.evaluate", *sys.argv[1:]]),
        "settings": {
            "model": model,
            "methods": methods,
            "predictors": predictors or {},
            "budget": budget,
            "traces": traces,
            "text": text,
            "context": context,
            "steps": steps,
        },
        "texts": [{"document": one.id, "source": one.source} for one in texts],
        "machine": machine(),
        "model": model_provenance(lm, tokenizer),
    }
    rows = document_rows(run["texts"], measured)
    picture = None if opened is None else heatmap.head_map(opened, loaded, heatmap_layer, heatmap_head)
    write_results(Path(out), run, rows, picture)
    print(f"\n{table(method_rows(rows))}\n\nReport: {out}/report.md")


@dataclass
class HeldOut:
    """A text to measure on: its id, its source, and its first tokens [1, context + steps]."""

    id: str
    source: str
    tokens: Tensor


def check_options(
    methods: Sequence[str],
    predictors: Mapping[str, str],
    budget: float,
    documents: int,
    context: int,
    steps: int,
) -> None:
    """Refuse options that cannot work, before anything is loaded.

    Raises:
        FadeError: names the option.
    """
    if unknown := [name for name in methods if name not in METHODS]:
        raise FadeError(f"method {unknown[0]!r} is not known; choose from {', '.join(METHODS)}")
    if "learned" in methods and not predictors:
        raise FadeError("method 'learned' needs predictors; name one, or leave 'learned' out of methods")
    if clash := sorted(set(predictors) & set(METHODS)):
        raise FadeError(f"predictor name {clash[0]!r} is a method's; give it another name")
    if not 0 < budget <= 1:
        raise FadeError(f"budget {budget} is not a share of the context; use a float in (0, 1]")
    for name, value, least in (("documents", documents, 1), ("context", context, 1), ("steps", steps, 2)):
        if value < least:
            raise FadeError(f"{name} {value} is too small; use at least {least}")


def make_methods(methods: Sequence[str], predictors: Mapping[str, Predictor], budget: float) -> list[Method]:
    """The full cache first, whether asked for or not, then one entry for each method and predictor."""
    from fade_runtime import FadeConfig
    from pipelines.measure import FULL, Method

    made = [Method(FULL, None)]
    for name in dict.fromkeys(methods):
        if name == "safe":
            made.append(Method(name, FadeConfig.safe()))
        elif name in POLICIES:
            made.append(Method(name, FadeConfig(int4_budget=budget, eviction_policy=name)))
        elif name == "learned":
            made += [
                Method(label, FadeConfig(int4_budget=budget, eviction_policy="learned", predictor=predictor))
                for label, predictor in predictors.items()
            ]
    return made


def choose_texts(
    traces: Any, sources: Sequence[str], documents: int, length: int, tokenizer: Any
) -> list[HeldOut]:
    """Validation documents of a trace collection, or documents made from other text.

    Raises:
        FadeError: too few or too short documents, or text that is not what the traces were collected from.
    """
    import torch

    from data.lm import encode
    from data.plan import CollectSettings, prepare
    from data.text import load_documents

    if traces is None:
        found = load_documents(
            sources,
            train=0,
            validation=documents,
            length=length,
            measure=lambda words: len(encode(tokenizer, words)),
        )
    else:
        tasks = prepare(CollectSettings(**traces.manifest["settings"]), tokenizer)
        found = [task.document for task in tasks if task.document.split == "validation"]
        known = [one["id"] for one in traces.manifest["documents"] if one["split"] == "validation"]
        if [document.id for document in found] != known:
            raise FadeError(
                f"the text that the traces in {traces.folder} were collected from has changed since "
                "(another Python, or edited files); collect them again, or give text"
            )
    if len(found) < documents:
        raise FadeError(f"documents {documents} is more than the {len(found)} validation documents of the traces")
    chosen = []
    for document in found[:documents]:
        tokens = torch.tensor(encode(tokenizer, document.text)[:length])[None]
        if tokens.shape[1] < length:
            raise FadeError(
                f"document {document.id} has {tokens.shape[1]} tokens, context + steps is {length}; "
                "lower context or steps"
            )
        chosen.append(HeldOut(document.id, document.source, tokens))
    return chosen


def write_results(out: Path, run: dict[str, Any], documents: list[dict[str, Any]], picture: Any) -> None:
    """Write the folder of results, whole or not at all.

    Raises:
        FadeError: there is a folder that is no evaluation's.
    """
    from pipelines import heatmap
    from pipelines.plots import quality_against_bytes
    from pipelines.report import method_rows, report, write_jsonl
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
            f"{Path(settings['model']).name}, {settings['context']:,} tokens, budget {settings['budget']:.0%}",
        )
        if picture is not None:
            plots["attention.png"] = "Recorded attention, its forecast, and the mean of both over the steps."
            heatmap.draw(aside / "attention.png", picture)
        write_jsonl(aside / "results.jsonl", [run, *documents, *methods])
        (aside / "report.md").write_text(report(run, methods, plots), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(evaluate, argv)


if __name__ == "__main__":
    sys.exit(main())
