"""Run compressed caches on the tasks that the full cache runs on: retrieval, copying, reasoning, code, chats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.lm import load_lm, positions_of
from pipelines import cli
from pipelines.evaluation.methods import (
    Skipped,
    available_methods,
    check_methods,
    load_predictors,
    run_without_failing,
)
from pipelines.evaluation.peer import PeerError
from pipelines.evaluation.runs import Method
from pipelines.evaluation.task_report import answer_rows, over_all, report, tables, task_rows
from pipelines.evaluation.task_runner import COMPRESS, TaskRunner
from pipelines.evaluation.tasks import TASKS
from pipelines.evaluation.tasks.task import Example, PromptBuilder, Task
from pipelines.models import model_of
from pipelines.plots import needle_map
from pipelines.plots.quality import losses_by_task, pyplot
from pipelines.reporting.html import renderer, write_report
from pipelines.reporting.machine import machine
from pipelines.reporting.rows import results_folder, write_jsonl
from predictor.errors import FadeError
from predictor.provenance import model_provenance

GENERATED = ("copy", "needle", "many keys", "lines", "key-value", "topics", "probes")  # need no file
SHORTEST = 100  # tokens of a prompt


@dataclass(frozen=True)
class TaskSettings:
    """Options of `pipelines.evaluate_tasks`.

    Args:
        model: directory, GGUF file or hub id of a causal language model, loaded in float32; by default the one that the
            first predictor was made with.
        tasks: of copy, needle, many keys, lines, key-value, topics, probes, which need no file; and of wikitext, books,
            gsm8k, multi_news, passage_retrieval, altqa, paperqa, senhallu, private_eval, humaneval, mt_bench.
        methods: of safe, position, h2o, ema, adaptive, learned (each predictor), and names of configs; the full cache
            always runs.
        configs: name -> options of FadeConfig, or a `peer` and its options, as for `pipelines.evaluate`.
        predictors: name in the table -> `models:/NAME@alias`, `models:/NAME/3`, bundle directory or hub id.
        budget: share of the context that evicting methods keep per kv head.
        n: prompts of each task.
        length: tokens of a prompt at most; generated ones are about as long.
        lengths: task -> another length, or several, at each of which it runs ``n`` times.
        data: folder with the files of tasks.
        files: task -> another file or text source, or `hf:NAME:CONFIG:SPLIT`.
        compress: what a cache has read when it first compresses: the "prompt" less its last token, as generate() has,
            or only the "context", as when many questions follow one document.
        run_code: run the functions that the model writes for humaneval, each in a process with little time and memory,
            which is no sandbox; without it humaneval has no score.
        seed: of what is generated.
        out: folder to write; one that is there is replaced at the end.
        tracking_uri: where names are looked up; default MLFLOW_TRACKING_URI, then the demo's store.
    """

    model: str | None = None
    tasks: list[str] = field(default_factory=lambda: list(GENERATED))
    methods: list[str] = field(default_factory=lambda: ["safe", "h2o"])
    configs: dict[str, dict[str, Any]] | None = None
    predictors: dict[str, str] | None = None
    budget: float = 0.43
    n: int = 8
    length: int = 2048
    lengths: dict[str, int | list[int]] | None = None
    data: str | None = None
    files: dict[str, str] | None = None
    compress: str = "prompt"
    run_code: bool = False
    seed: int = 0
    out: str = "artefacts/eval/tasks"
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        """Check the options, before anything is loaded.

        Raises:
            FadeError: names the one that cannot be.
        """
        check_methods(self.methods, self.configs or {}, self.predictors or {}, self.budget)
        known = ", ".join(TASKS)
        if not self.tasks:
            raise FadeError(f"tasks is empty; choose from {known}")
        for option, names in (("task", self.tasks), ("lengths:", self.lengths or {}), ("files:", self.files or {})):
            if unknown := [name for name in names if name not in TASKS]:
                raise FadeError(f"{option} {unknown[0]!r} is not known; choose from {known}")
        if self.n < 1:
            raise FadeError(f"n {self.n} is too small; use at least 1")
        for name, lengths in {"length": self.length, **(self.lengths or {})}.items():
            for length in as_list(lengths):
                if length < SHORTEST:
                    raise FadeError(f"length {length} of {name} is too short for a task; use at least {SHORTEST}")
        if self.compress not in COMPRESS:
            raise FadeError(f"compress {self.compress!r} is not one of {', '.join(COMPRESS)}")

    def prompt_builders(self, tokenizer: Any) -> list[tuple[Task, PromptBuilder]]:
        """Each task at each of its lengths."""
        lengths, files = self.lengths or {}, self.files or {}
        return [
            (task, PromptBuilder(tokenizer, self.n, length, self.seed, source))
            for name in self.tasks
            for task in [TASKS[name]]
            for source in [files.get(name) or in_folder(task.source, self.data)]
            for length in as_list(lengths.get(name, self.length))
        ]


def as_list(lengths: int | Sequence[int]) -> Sequence[int]:
    """One length or several as a list.

    Example:
        >>> as_list(512), as_list([512, 1024])
        ([512], [512, 1024])
    """
    return [lengths] if isinstance(lengths, int) else lengths


def in_folder(source: str, data: str | None) -> str:
    """Where a task's file lies; what is generated or comes with Python has none.

    Example:
        >>> in_folder("bamboo/altqa_4k.jsonl", "tasks"), in_folder("builtin:topics", "tasks")
        ('tasks/bamboo/altqa_4k.jsonl', 'builtin:topics')
    """
    if source == "generated" or source.startswith("builtin"):
        return source
    return str(Path(data or ".") / source)


def evaluate_tasks(settings: TaskSettings) -> int:
    """Run each cache on the same tasks, and compare its answers with the full cache's.

    Writes results.jsonl, a plot, report.md and report.html, all of them or none, and prints the tables. What cannot be
    run (a task file that is not there or is malformed, a package that is not installed, a context too long for the
    model) is named and skipped: the other rows are written all the same, and the exit status is 2.
    """
    pyplot(), renderer()  # before the time is spent
    predictors = load_predictors(settings.predictors, settings.tracking_uri)
    settings = replace(settings, model=model_of(settings.model, predictors.values()))
    lm, tokenizer = load_lm(str(settings.model), "float32")
    for predictor in predictors.values():
        predictor.check(lm)
    skipped = Skipped()
    methods = available_methods(settings.methods, settings.configs or {}, predictors, settings.budget, skipped)
    runner = TaskRunner(lm, tokenizer, settings.compress, settings.run_code)
    answers = run_tasks(runner, settings.prompt_builders(tokenizer), methods, skipped)
    run = {**run_row(settings, skipped), "model": model_provenance(lm, tokenizer)}
    if not answers:
        raise FadeError("nothing could be asked; see above")
    write_results(Path(settings.out), run, answers, {name: TASKS[name].metric for name in settings.tasks})
    return skipped.status


def run_tasks(
    runner: TaskRunner, tasks: Sequence[tuple[Task, PromptBuilder]], methods: list[Method], skipped: Skipped
) -> list[dict[str, Any]]:
    """Run all tasks, with a progress bar; rows of :func:`pipelines.evaluation.task_report.answer_rows`."""
    rows = []
    total = sum(builder.n for _, builder in tasks) * len(methods)
    with tqdm(total=total, unit="answer", desc="Answering", mininterval=1) as bar:
        for task, builder in tasks:
            bar.set_postfix_str(task.name)
            rows += run_task(runner, task, builder, methods, skipped, bar.update)
    return rows


def run_task(
    runner: TaskRunner,
    task: Task,
    builder: PromptBuilder,
    methods: Sequence[Method],
    skipped: Skipped,
    on_method: Callable[[], Any],
) -> list[dict[str, Any]]:
    """Run the examples of one task; a method that fails on one has no row of the task."""
    try:
        examples = task.take(builder)
        refuse_too_long(task, examples, positions_of(runner.model))
    except FadeError as error:
        skipped.add(str(error))
        return []
    rows: list[dict[str, Any]] = []
    running = list(methods)

    def failed(method: Method, error: PeerError) -> None:
        rows[:] = [row for row in rows if row["method"] != method.name]
        skipped.add(f"{method.name} on task {task.name}: {error}", task.name, method.name)

    for index, example in enumerate(examples):
        run = partial(runner.run, task, example, on_method=on_method)
        answers = run_without_failing(running, run, failed)
        rows += answer_rows(task, builder.length, index, example, [method.name for method in running], answers)
    return rows


def refuse_too_long(task: Task, examples: Sequence[Example], positions: int | None) -> None:
    """Refuse examples that are longer than what a model reads; the reference answers count, for each cache reads them.

    Raises:
        FadeError: names the task.
    """
    answer = lambda turn: max(task.new, len(turn.answer or ()))
    longest = max(len(one.context) + sum(len(turn.question) + answer(turn) for turn in one.turns) for one in examples)
    if positions is not None and longest > positions:
        raise FadeError(f"task {task.name}: {longest} tokens, and the model reads {positions}; lower its length")


def run_row(settings: TaskSettings, skipped: Skipped) -> dict[str, Any]:
    """The first row of the results: settings, what was skipped, machine."""
    names = (
        "model", "tasks", "methods", "configs", "predictors", "budget", "n", "length", "lengths", "data", "files",
        "compress", "run_code", "seed",
    )  # fmt: skip
    empty: dict[str, Any] = {
        name: {} for name in ("configs", "predictors", "lengths", "files") if getattr(settings, name) is None
    }
    return {
        "kind": "run",
        "command": cli.command_line("pipelines.evaluate_tasks"),
        "settings": {name: getattr(settings, name) for name in names} | empty,
        "skipped": skipped.lines,
        "failed": skipped.failed,
        "machine": machine(),
    }


def write_results(out: Path, run: dict[str, Any], answers: list[dict[str, Any]], metrics: Mapping[str, str]) -> None:
    """Write the folder of results, whole or not at all, and print the tables.

    Raises:
        FadeError: there is a folder that is no evaluation's.
    """
    tasks = task_rows(answers, metrics)
    with results_folder(out) as folder:
        write_jsonl(folder / "results.jsonl", [run, *answers, *tasks, *over_all(tasks)])
        losses_by_task(folder / "tasks.png", tasks)
        mapped = needle_map.draw(folder / "depths.png", answers)
        write_report(folder, report(run, tasks, "depths.png" if mapped else None))
    print(f"\n{tables(tasks, run['failed'])}\n\nReport: {out}/report.html")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(evaluate_tasks, argv)


if __name__ == "__main__":
    sys.exit(main())
