"""One report of what this project is worth on a model: loss, size, tasks and speed, at several lengths."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pipelines import cli
from pipelines.evaluation import task_report
from pipelines.evaluation.pairwise import pairwise_rows
from pipelines.evaluation.report import tables
from pipelines.proof import decode_part, read
from pipelines.reporting.html import write_report
from pipelines.reporting.rows import Row, mean, results_folder, write_jsonl
from pipelines.reporting.tables import listed_options, machine_line, markdown_table
from predictor.errors import FadeError


def model_report(
    quality: list[str],
    tasks: list[str] | None = None,
    decode: str | None = None,
    ours: str = "heads",
    out: str = "artefacts/model/report",
) -> None:
    """Put what was measured on a model into one report.

    Writes report.md, report.html, report.jsonl (all rows) and the plots, all of them or none.

    Args:
        quality: folders of `pipelines.evaluate`, one for each length; with ratios, caches of one size are compared.
        tasks: folders of `pipelines.evaluate_tasks`. decode: lines of `pipelines.bench decode`.
        ours: name of the configuration that the others are held against.
        out: folder to write; one that is there is replaced.
    """
    if not quality:
        raise FadeError("quality is empty; name folders that pipelines.evaluate wrote")
    evaluated = [read(Path(folder) / "results.jsonl") for folder in quality]
    answered = [read(Path(folder) / "results.jsonl") for folder in tasks or []]
    timed = read(Path(decode)) if decode else []
    with results_folder(Path(out), "report.jsonl") as folder:
        plots = []
        for path, rows in zip(quality, evaluated):
            plots.append(f"quality-{rows[0]['settings']['context']}.png")
            shutil.copyfile(Path(path) / "quality.png", folder / plots[-1])
        write_jsonl(folder / "report.jsonl", [row for rows in (*evaluated, *answered, timed) for row in rows])
        write_report(folder, report(evaluated, answered, timed, plots, ours), "report")
    print(f"Report: {out}/report.html")


def report(
    evaluated: Sequence[Sequence[Row]],
    answered: Sequence[Sequence[Row]],
    timed: Sequence[Row],
    plots: Sequence[str],
    ours: str,
) -> str:
    """The report, in Markdown.

    Args:
        evaluated, answered: lines of each evaluation, on text and on tasks. timed: of the decode bench.
        plots: file of each evaluation on text. ours: the configuration that others of its size are held against.
    """
    run = evaluated[0][0]
    parts = [_quality(rows, plot, ours) for rows, plot in zip(evaluated, plots)]
    parts += [_tasks(rows) for rows in answered]
    parts += [f"## Decoding\n\n{decode_part(timed)}"] if timed else []
    texts = "\n".join(f"- {text['source']}: `{text['document']}`" for text in run["texts"])
    commands = "\n\n".join(f"`{rows[0]['command']}`" for rows in (*evaluated, *answered))
    return f"""# {Path(run["settings"]["model"]).name}: what a smaller cache costs

KL is KL(full cache || this cache) of the next-token distribution, in nats per token, from a float32 model; top-1 how
often the most likely next token is the full cache's. MiB and compression are those of a model with two-byte floats, of
the whole cache, every byte that can be reached; where a model has layers that evict nothing (sliding windows, recurrent
states), the last columns tell them apart.

{chr(10).join(part + chr(10) for part in parts)}
## How it was measured

{machine_line(run["machine"])}

Texts of {run["settings"]["context"]:,} tokens:

{texts}

Configurations:

{listed_options(run["settings"]["configs"])}

{commands}
"""


def _quality(rows: Sequence[Row], plot: str, ours: str) -> str:
    """Loss and size at one length, and caches of one size beside each other."""
    run, documents = rows[0], [row for row in rows if row["kind"] == "document"]
    context, steps = run["settings"]["context"], run["settings"]["steps"]
    part = (
        f"## {context:,} tokens of prompt, {steps} decoded, {len(run['texts'])} texts\n\n"
        f"{tables(documents, run['failed'])}\n\n![KL against bytes at {context:,} tokens]({plot})"
    )
    if ours not in {one["config"] for one in run["sized"]}:
        return part
    compared = pairwise_rows(run, documents, [row for row in rows if row["kind"] == "method"], ours)
    return f"{part}\n\n### `{ours}` beside others of its size, text by text\n\n{_text_by_text(compared)}"


def _text_by_text(compared: Sequence[Row]) -> str:
    """On how many texts ours loses less than each other cache of its size, and by which factor.

    Example:
        >>> cell = {"ratio": 4.0, "against": "h2o", "ours_kl": [0.01, 0.02], "theirs_kl": [0.04, 0.02]}
        >>> print(_text_by_text([cell, {**cell, "ours_kl": [0.01], "theirs_kl": [0.02]}]))
        | size | against | texts | better on | KL, ours | KL, theirs | least factor | mean factor |
        | ---- | ------- | ----: | --------: | -------: | ---------: | -----------: | ----------: |
        | 4x   | h2o     |     3 |         2 |   0.0133 |     0.0267 |        1.00x |       2.00x |
    """
    lines = []
    for ratio, against in dict.fromkeys((row["ratio"], row["against"]) for row in compared):
        cells = [row for row in compared if (row["ratio"], row["against"]) == (ratio, against)]
        ours, theirs = ([kl for row in cells for kl in row[name]] for name in ("ours_kl", "theirs_kl"))
        factors = [other / max(one, 1e-12) for one, other in zip(ours, theirs)]
        better = str(sum(factor > 1 for factor in factors))
        means = f"{mean(ours):.4f}", f"{mean(theirs):.4f}", f"{min(factors):.2f}x", f"{geometric_mean(factors):.2f}x"
        lines.append((f"{ratio:g}x", against, str(len(factors)), better, *means))
    columns = ("size", "against", "texts", "better on", "KL, ours", "KL, theirs", "least factor", "mean factor")
    return markdown_table(columns, lines, words=2)


def _tasks(rows: Sequence[Row]) -> str:
    tasks: list[dict[str, Any]] = [dict(row) for row in rows if row["kind"] == "task"]
    return f"## Tasks, prompts of {rows[0]['settings']['length']:,} tokens\n\n{task_report.tables(tasks)}"


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(model_report, argv)


if __name__ == "__main__":
    sys.exit(main())
