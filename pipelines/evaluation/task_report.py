"""Rows and tables of tasks: each cache's answers beside those of the full cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.evaluation.intervals import bootstrap, interval
from pipelines.evaluation.task_runner import Answer
from pipelines.evaluation.tasks.task import Example, Task
from pipelines.reporting.rows import FULL, by_layers, compression, layer_cells, layer_columns, mean
from pipelines.reporting.tables import listed_options, machine_line, markdown_table

COLUMNS = ("task", "cache", "score", "95 %", "full cache", "KL", "top-1", "same answer", "compression")
ALL_COLUMNS = ("cache", "tasks", "score lost", "KL", "top-1", "same answer", "compression")
DEPTHS = "Found, in per cent, by depth in the context and its length."
WORDS = 200  # characters of an answer that are kept


def answer_rows(
    task: Task, length: int, index: int, example: Example, methods: Sequence[str], answers: Sequence[Answer]
) -> list[dict[str, Any]]:
    """One JSON-able row for each method that ran one example of a length."""
    return [
        {
            "kind": "answer",
            "task": task.name,
            "method": name,
            "length": length,
            "example": index,
            "tokens": example.tokens,
            "cut": example.cut,
            "score": one.score,
            "same": one.same,
            "kl": mean(one.measured.kl),
            "top1": mean(one.measured.agree),
            "resident_bytes": one.measured.resident_bytes,
            "others_bytes": one.measured.others_bytes,
            "others_full_bytes": one.measured.others_full_bytes,
            "full_bytes": one.measured.full_bytes,
            "said": [text[:WORDS] for text in one.output.texts],
            "depth": example.facts.get("depth"),
        }
        for name, one in zip(methods, answers)
    ]


def task_rows(answers: Sequence[Mapping[str, Any]], metrics: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row for each task and method: means over examples with their intervals, beside the full cache's.

    Args:
        answers: rows of :func:`answer_rows`. metrics: task -> what its score is.

    Example:
        >>> one = {"task": "t", "method": "full", "length": 9, "example": 0, "tokens": 9, "cut": False, "score": 1.0,
        ...        "same": True, "kl": 0.0, "top1": 1.0, "resident_bytes": 40, "full_bytes": 40}
        >>> safe = {**one, "method": "safe", "score": 0.0, "same": False, "resident_bytes": 10}
        >>> rows = task_rows([one, safe], {"t": "right"})
        >>> rows[1]["score"], rows[1]["full_score"], rows[1]["lost"], rows[1]["compression"]
        (0.0, 1.0, 1.0, 4.0)
    """
    rows = []
    for task, metric in metrics.items():
        of_task = [row for row in answers if row["task"] == task]
        full = {(row["length"], row["example"]): row for row in of_task if row["method"] == FULL}
        for method in dict.fromkeys(row["method"] for row in of_task):
            these = [row for row in of_task if row["method"] == method]
            scores = [row["score"] for row in these]
            scored = bool(scores) and None not in scores
            full_scores = [full[row["length"], row["example"]]["score"] for row in these]
            lost = [best - score for best, score in zip(full_scores, scores)] if scored else []
            rows.append(
                {
                    "kind": "task",
                    "task": task,
                    "metric": metric,
                    "method": method,
                    "n": len(these),
                    "tokens": round(mean([row["tokens"] for row in these])),
                    "cut": sum(row["cut"] for row in these),
                    "score": mean(scores) if scored else None,
                    "interval": interval(scores) if scored else None,
                    "full_score": mean(full_scores) if scored else None,
                    "lost": mean(lost) if scored else None,
                    "lost_interval": bootstrap(lost) if scored else None,
                    **{key: mean([row[key] for row in these]) for key in ("kl", "top1", "same")},
                    "compression": compression(these),
                    **by_layers(these),
                }
            )
    return rows


def over_all(tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method: means over its tasks, each counting the same; perplexities are no score that is lost."""
    rows = []
    for method in dict.fromkeys(row["method"] for row in tasks):
        of_method = [row for row in tasks if row["method"] == method]
        lost = [row["lost"] for row in of_method if row["lost"] is not None and row["metric"] != "perplexity"]
        kinds = [key for key in ("compressed_layers", "other_layers") if all(key in row for row in of_method)]
        rows.append(
            {
                "kind": "all tasks",
                "method": method,
                "tasks": len(of_method),
                "lost": mean(lost) if lost else None,
                **{key: mean([row[key] for row in of_method]) for key in ("kl", "top1", "same", "compression", *kinds)},
            }
        )
    return rows


def tables(tasks: Sequence[Mapping[str, Any]], failed: Sequence[Sequence[str]] = ()) -> str:
    """All tasks together by cache, then task by task, in Markdown; ``failed`` are tasks and caches that did."""
    means = over_all(tasks)
    by_kind = layer_columns(means)
    total = [
        (
            row["method"],
            str(row["tasks"]),
            "-" if row["lost"] is None else f"{100 * row['lost']:.1f}",
            f"{row['kl']:.4f}",
            f"{row['top1']:.1%}",
            f"{row['same']:.0%}",
            f"{row['compression']:.2f}x",
            *layer_cells(row, by_kind),
        )
        for row in means
    ]
    lines: list[tuple[str, ...]] = [
        (
            row["task"],
            row["method"],
            _score(row["metric"], row["score"]),
            "-" if row["interval"] is None else " - ".join(_score(row["metric"], end) for end in row["interval"]),
            _score(row["metric"], row["full_score"]),
            f"{row['kl']:.4f}",
            f"{row['top1']:.1%}",
            f"{row['same']:.0%}",
            f"{row['compression']:.2f}x",
        )
        for row in tasks
        if row["method"] != FULL
    ]
    lines += [(task, cache, "failed", *("-" for _ in COLUMNS[3:])) for task, cache in failed]
    return f"{markdown_table((*ALL_COLUMNS, *by_kind), total, words=1)}\n\n{markdown_table(COLUMNS, lines, words=2)}"


def report(run: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]], depths: str | None = None) -> str:
    """The report, in Markdown.

    Args:
        run: the settings, machine, model and what was skipped, as in the first line of results.jsonl.
        tasks: rows of :func:`task_rows`. depths: file of the needle map, if there is one.
    """
    settings = run["settings"]
    by_task = [row for row in tasks if row["method"] == FULL]
    what = "\n".join(
        f"- {row['task']}: {row['metric']}; {row['n']} prompts of {row['tokens']:,} tokens"
        + (f", {row['cut']} of them cut to fit" if row["cut"] else "")
        for row in by_task
    )
    skipped = "\n".join(f"- {line}" for line in run["skipped"])
    mapped = f"\n![{DEPTHS}]({depths})\n\n{DEPTHS}\n" if depths else ""
    return f"""# Tasks: each cache beside the full cache

{settings["model"]}; {COMPRESSED[settings["compress"]]}

{tables(tasks, run.get("failed", ()))}

![KL to the full cache, and below it compression, of every cache on every task](tasks.png)
{mapped}
- **score** is the mean over prompts, in per cent, or a perplexity; **95 %** its interval: Wilson's where a prompt is
  right or wrong, the bootstrap's otherwise. **full cache** is the full cache's score on the same prompts; **score
  lost** is what is missing to it, in points, mean over the tasks that have a right answer.
- **KL** is KL(full cache || this cache) at each token of the wanted answer (the full cache's own, where none is known),
  in nats, from a float32 model; **top-1** is how often the most likely token there is the full cache's.
- **same answer** is how often the cache, answering by itself, says word for word what the full cache says.
- **compression** is a full cache divided by what the cache really held after the answer, metadata and buffers
  included, both as a model of two-byte floats has them. Other projects' caches are walked tensor by tensor.

## The tasks

{what}
{
        f'''
Skipped:

{skipped}
'''
        if skipped
        else ""
    }
## How it was measured

{machine_line(run["machine"])}

Configurations:

{listed_options(settings["configs"]) or "- none"}

Again: `{run["command"]}`. Every answer is in `results.jsonl`.
"""


COMPRESSED = {
    "prompt": "caches compress the whole prompt but its last token, as `generate()` does.",
    "context": "caches compress the context before they see the question.",
}


def _score(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if metric == "perplexity" else f"{100 * value:.1f}"
