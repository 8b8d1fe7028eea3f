"""One report of what is claimed: loss at equal bytes, retrieval at six times smaller, decoding at 8,192 tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.reading import json_lines
from pipelines import cli
from pipelines.evaluation.pairwise import pairwise_rows, pairwise_table, size_table, sizes, summary, unreached
from pipelines.plots import pareto
from pipelines.reporting.html import write_report
from pipelines.reporting.rows import FULL, Row, results_folder, write_jsonl
from pipelines.reporting.tables import listed_options, machine_line, markdown_table
from predictor.errors import FadeError

POINTS = 2  # of a score out of 100: retrieval may lose as many


def proof(
    kl: str = "artefacts/proof/kl",
    tasks: str = "artefacts/proof/tasks",
    decode: str = "artefacts/proof/decode.jsonl",
    ours: str = "ours",
    out: str = "artefacts/proof/report",
) -> int:
    """Put what `make proof` measured into one report.

    Writes proof.md, proof.html, proof.png and proof.jsonl (every cell with each text's losses), all of them or none.

    Args:
        kl: folder of `pipelines.evaluate` with ratios. tasks: folder of `pipelines.evaluate_tasks`.
        decode: lines of `pipelines.bench decode`. ours: name of our configuration in the first.
        out: folder to write; one that is there is replaced.
    """
    evaluated, answered = read(Path(kl) / "results.jsonl"), read(Path(tasks) / "results.jsonl")
    timed = read(Path(decode))
    run, methods = evaluated[0], [row for row in evaluated if row["kind"] == "method"]
    if ours not in {one["config"] for one in run["sized"]}:
        raise FadeError(f"{kl} has no configuration {ours!r} at several sizes; run it with ratios, or name another")
    compared = pairwise_rows(run, [row for row in evaluated if row["kind"] == "document"], methods, ours)
    with results_folder(Path(out), "proof.jsonl") as folder:
        model, context = Path(run["settings"]["model"]).name, run["settings"]["context"]
        pareto.draw(folder / "proof.png", run, methods, f"{model}, {context:,} tokens, {len(run['texts'])} texts")
        of_tasks = [row for row in answered if row["kind"] != "answer"]
        write_jsonl(folder / "proof.jsonl", [run, *methods, *compared, *of_tasks, *timed])
        write_report(folder, report(run, methods, compared, answered, timed), "proof")
    print(f"{summary(compared)}\n\nReport: {out}/proof.html")
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines.

    Raises:
        FadeError: it is not there, empty, or not JSON; names the line.
    """
    if not path.is_file():
        raise FadeError(f"{path} is not there; run make proof, which writes it")
    rows = [row for _, row in json_lines(path, "results", "run make proof again")]
    if not rows:
        raise FadeError(f"{path} is empty; run make proof again")
    return rows


def report(
    run: Row, methods: Sequence[Row], compared: Sequence[Row], answered: Sequence[Row], timed: Sequence[Row]
) -> str:
    """The report, in Markdown.

    Args:
        run, methods: of the evaluation. compared: rows of :func:`pipelines.evaluation.pairwise.pairwise_rows`.
        answered: rows of tasks, the run first. timed: rows of the decode bench.
    """
    settings = run["settings"]
    kinds = dict.fromkeys(text["source"] for text in run["texts"])
    by_size = "\n\n".join(f"### {ratio:g}x\n\n{size_table(compared, ratio)}" for ratio in sizes(run))
    larger = "; ".join(unreached(run, methods))
    skipped = "".join(f"Left out: {line}\n\n" for line in [*run["skipped"], *answered[0]["skipped"]])
    texts = "\n".join(
        f"- {kind}: {', '.join(one['document'] for one in run['texts'] if one['source'] == kind)}" for kind in kinds
    )
    return f"""# Proof: ours beside other projects' caches

{Path(settings["model"]).name} in float32; {settings["context"]:,} tokens of prompt, then {settings["steps"]} tokens
of the text, the same to every cache; {len(run["texts"])} texts of {len(kinds)} kinds ({", ".join(kinds)}).
Again: `make proof`.

## KL at equal true bytes

{summary(compared)}

{f"Of no smaller size: {larger}. They stand at the size that they reach." if larger else ""}

Each cell: mean KL(full cache || this cache) in nats per token; how many times ours it is, as the geometric mean over
texts; and the result by the 95 % interval of that, paired by text (win: all of it above 1). Compression is that of true
bytes: every tensor that can be reached from the cache at the last step, as a model of two-byte floats has them. Options
were set on the first text so that other caches have no fewer bytes than ours.

{by_size}

![KL against true bytes, and what a cache that knows the future would lose](proof.png)

`oracle` keeps the tokens that the text is going to look at most, the same number in each kv head, `oracle + heads` by
the learned budgets of heads; both in 4 bits, as ours. What lies between them and ours is all that a better forecast of
attention could gain.

## Retrieval at six times smaller

{tasks_part(answered)}

## Decoding

{decode_part(timed)}

## Every cell

{pairwise_table(compared)}

## How it was measured

{machine_line(run["machine"], run["peers"])}

{texts}

Configurations, with what was set:

{listed_options(settings["configs"])}

{skipped}`{run["command"]}`

`{answered[0]["command"]}`
"""


def tasks_part(answered: Sequence[Row]) -> str:
    """Scores of tasks beside the full cache's, and whether they are within :data:`POINTS`."""
    lines = [_task_line(row) for row in answered if row["kind"] == "task" and row["method"] != FULL]
    within = f"within {POINTS}"
    columns = ("task", "cache", "n", "full cache", "score", "points lost", "95 %", "KL", "compression", within)
    over_all = [
        f"{row['method']} loses {100 * row['lost']:.1f} points on the mean of {row['tasks']} tasks"
        for row in answered
        if row["kind"] == "all tasks" and row["method"] != FULL
    ]
    return f"{markdown_table(columns, lines, words=2)}\n\n{'; '.join(over_all)}."


def _task_line(row: Row) -> tuple[str, ...]:
    low, high = (100 * end for end in row["lost_interval"])
    return (
        row["task"],
        row["method"],
        str(row["n"]),
        f"{100 * row['full_score']:.1f}",
        f"{100 * row['score']:.1f}",
        f"{100 * row['lost']:.1f}",
        f"{low:.1f} - {high:.1f}",
        f"{row['kl']:.4f}",
        f"{row['compression']:.2f}x",
        "yes" if 100 * row["lost"] <= POINTS else "no",
    )


def decode_part(timed: Sequence[Row]) -> str:
    """Time of a decode step beside transformers' own caches."""
    lines = [
        (
            f"{row['context']:,}",
            row["method"],
            f"{row['p50']:.1f}",
            f"{row['of_stock']:.2f}x",
            f"{row['of_static']:.2f}x",
            f"{row['bytes'] / 2**20:.1f}",
        )
        for row in timed
    ]
    columns = ("context", "cache", "ms a step", "of DynamicCache", "of StaticCache", "MiB (float32 model)")
    where = f"{timed[0]['processor']}, {timed[0]['threads']} thread"
    return f"{markdown_table(columns, lines, words=2)}\n\n{where}; steps of all caches take turns."


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(proof, argv)


if __name__ == "__main__":
    sys.exit(main())
