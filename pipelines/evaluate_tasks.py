"""Ask compressed caches what the full cache is asked: retrieval, copying, reasoning, code, chats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import cli
from pipelines.evaluation.methods import Skipped, check_methods, possible, with_those_able
from predictor.errors import FadeError

if TYPE_CHECKING:
    from pipelines.evaluation.measure import Method
    from pipelines.evaluation.task_runner import Asking
    from pipelines.evaluation.tasks.task import Task, Wish

GENERATED = ("copy", "needle", "many keys", "lines", "key-value", "topics", "probes")  # need no file


def evaluate_tasks(
    model: str = "artefacts/models/smollm2-135m-instruct",
    tasks: list[str] = list(GENERATED),  # noqa: B006
    methods: list[str] = ["safe", "h2o"],  # noqa: B006
    configs: dict[str, dict[str, Any]] | None = None,
    predictors: dict[str, str] | None = None,
    budget: float = 0.43,
    n: int = 8,
    length: int = 2048,
    lengths: dict[str, int | list[int]] | None = None,
    data: str | None = None,
    files: dict[str, str] | None = None,
    compress: str = "prompt",
    run_code: bool = False,
    seed: int = 0,
    out: str = "artefacts/eval/tasks",
    tracking_uri: str | None = None,
) -> int:
    """Ask each cache the same tasks, and hold its answers against the full cache's.

    Writes results.jsonl, a plot, report.md and report.html, all of them or none, and prints the tables. What cannot be
    run (a task file that is not there or is malformed, a package that is not installed, a context too long for the
    model) is named and skipped: the other rows are written all the same, and the exit status is 2.

    Args:
        model: directory or hub id of a causal language model, loaded in float32.
        tasks: of copy, needle, many keys, lines, key-value, topics, probes, which need no file; and of wikitext, books,
            gsm8k, multi_news, passage_retrieval, altqa, paperqa, senhallu, private_eval, humaneval, mt_bench.
        methods: of safe, position, h2o, ema, adaptive, learned (each predictor), and names of configs; the full cache
            is always asked.
        configs: name -> options of FadeConfig, or a `peer` and its options, as for `pipelines.evaluate`.
        predictors: name in the table -> `models:/NAME@alias`, `models:/NAME/3`, bundle directory or hub id.
        budget: share of the context that evicting methods keep per kv head.
        n: prompts of each task.
        length: tokens of a prompt at most; generated ones are about as long.
        lengths: task -> another length, or several, at each of which it is asked ``n`` times.
        data: folder with the files of tasks.
        files: task -> another file or text source, or `hf:NAME:CONFIG:SPLIT`.
        compress: what a cache has read when it first compresses: the "prompt" less its last token, as generate() has,
            or only the "context", as when many questions are asked about one document.
        run_code: run the functions that the model writes for humaneval, each in a process with little time and memory,
            which is no sandbox; without it humaneval has no score.
        seed: of what is generated.
        out: folder to write; one that is there is replaced at the end.
        tracking_uri: where names are looked up; default MLFLOW_TRACKING_URI, then the demo's store.
    """
    from pipelines.evaluation.tasks import TASKS

    configs, predictors, lengths, files = configs or {}, predictors or {}, lengths or {}, files or {}
    check_methods(methods, configs, predictors, budget)
    check_tasks(tasks, TASKS, n, {"length": length, **lengths}, {"lengths": lengths, "files": files}, compress)

    from tqdm import tqdm

    from data.lm import load_lm
    from pipelines.evaluation.task_runner import Asking
    from pipelines.evaluation.tasks.task import Wish
    from pipelines.plots.quality import pyplot
    from pipelines.reporting.html import renderer
    from pipelines.reporting.machine import machine
    from predictor.provenance import model_provenance
    from predictor.registry import load_predictor

    pyplot(), renderer()  # before the time is spent
    loaded = {name: load_predictor(ref, tracking_uri) for name, ref in predictors.items()}
    lm, tokenizer = load_lm(model, "float32")
    for predictor in loaded.values():
        predictor.check(lm)
    skipped = Skipped()
    asked = possible(methods, configs, loaded, budget, skipped)
    asking, rows = Asking(lm, tokenizer, compress, run_code), []
    wishes = [
        (TASKS[name], Wish(tokenizer, n, tokens, seed, files.get(name) or in_folder(TASKS[name].source, data)))
        for name in tasks
        for tokens in several(lengths.get(name, length))
    ]
    with tqdm(total=len(wishes) * n * len(asked), unit="answer", desc="Asking", mininterval=1) as bar:
        for task, wish in wishes:
            bar.set_postfix_str(task.name)
            rows += ask(asking, task, wish, asked, skipped, bar.update)

    run = {
        "kind": "run",
        "command": " ".join(["python -m pipelines.evaluate_tasks", *sys.argv[1:]]),
        "settings": {
            "model": model, "tasks": tasks, "methods": methods, "configs": configs, "predictors": predictors,
            "budget": budget, "n": n, "length": length, "lengths": lengths, "data": data, "files": files,
            "compress": compress, "run_code": run_code, "seed": seed,
        },
        "skipped": skipped.lines,
        "failed": skipped.failed,
        "machine": machine(),
        "model": model_provenance(lm, tokenizer),
    }  # fmt: skip
    if not rows:
        raise FadeError("nothing could be asked; see above")
    write_results(Path(out), run, rows, {name: TASKS[name].metric for name in tasks})
    return skipped.status


def check_tasks(
    tasks: Sequence[str],
    known: Mapping[str, Task],
    n: int,
    lengths: Mapping[str, int | Sequence[int]],
    by_task: Mapping[str, Mapping[str, Any]],
    compress: str,
) -> None:
    """Refuse options that cannot work, before anything is loaded.

    Raises:
        FadeError: names the option.
    """
    from pipelines.evaluation.task_runner import COMPRESS

    if not tasks:
        raise FadeError(f"tasks is empty; choose from {', '.join(known)}")
    for option, names in (("task", tasks), *((f"{option}:", each) for option, each in by_task.items())):
        if unknown := [name for name in names if name not in known]:
            raise FadeError(f"{option} {unknown[0]!r} is not known; choose from {', '.join(known)}")
    if n < 1:
        raise FadeError(f"n {n} is too small; use at least 1")
    for name, given in lengths.items():
        for length in several(given):
            if length < 100:
                raise FadeError(f"length {length} of {name} is too short for a task; use at least 100")
    if compress not in COMPRESS:
        raise FadeError(f"compress {compress!r} is not one of {', '.join(COMPRESS)}")


def several(lengths: int | Sequence[int]) -> Sequence[int]:
    """One length, or those that were given.

    Example:
        >>> several(512), several([512, 1024])
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


def ask(
    asking: Asking,
    task: Task,
    wish: Wish,
    methods: list[Method],
    skipped: Skipped,
    on_method: Callable[[], None],
) -> list[dict[str, Any]]:
    """Ask the examples of one task; rows of :func:`pipelines.evaluation.task_report.answer_rows`."""
    from data.lm import positions_of
    from pipelines.evaluation.task_report import answer_rows

    room = positions_of(asking.model)
    try:
        examples = task.take(wish)
    except FadeError as error:
        skipped.add(str(error))
        return []
    answer = lambda turn: max(task.new, len(turn.answer or ()))  # each cache reads the wanted one too
    longest = max(len(one.context) + sum(len(turn.question) + answer(turn) for turn in one.turns) for one in examples)
    if room is not None and longest > room:
        skipped.add(f"task {task.name}: {longest} tokens, and the model reads {room}; lower its length")
        return []
    rows: list[dict[str, Any]] = []
    able = list(methods)

    def failed(method: Method, error: FadeError) -> None:
        rows[:] = [row for row in rows if row["method"] != method.name]
        skipped.add(f"{method.name} on task {task.name}: {error}", task.name, method.name)

    for index, example in enumerate(examples):
        answers = with_those_able(able, lambda able: asking.ask(task, example, able, on_method), failed)  # noqa: B023
        rows += answer_rows(task, wish.length, index, example, [method.name for method in able], answers)
    return rows


def write_results(out: Path, run: dict[str, Any], answers: list[dict[str, Any]], metrics: Mapping[str, str]) -> None:
    """Write the folder of results, whole or not at all, and print the tables.

    Raises:
        FadeError: there is a folder that is no evaluation's.
    """
    from pipelines.evaluation.task_report import over_all, report, tables, task_rows
    from pipelines.plots import needle_map
    from pipelines.plots.quality import losses_by_task
    from pipelines.reporting.html import page
    from pipelines.reporting.rows import write_jsonl
    from predictor.files import write_aside

    if out.is_dir() and any(out.iterdir()) and not (out / "results.jsonl").is_file():
        raise FadeError(f"out {out} is there and holds other files; name another folder")
    tasks = task_rows(answers, metrics)
    with write_aside(out) as aside:
        aside.mkdir()
        write_jsonl(aside / "results.jsonl", [run, *answers, *tasks, *over_all(tasks)])
        losses_by_task(aside / "tasks.png", tasks)
        mapped = needle_map.draw(aside / "depths.png", answers)
        text = report(run, tasks, "depths.png" if mapped else None)
        (aside / "report.md").write_text(text, encoding="utf-8")
        (aside / "report.html").write_text(page(text, aside), encoding="utf-8")
    print(f"\n{tables(tasks, run['failed'])}\n\nReport: {out}/report.html")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(evaluate_tasks, argv)


if __name__ == "__main__":
    sys.exit(main())
