"""The tasks that `python -m pipelines.evaluate_tasks` knows. To add one: a file for its kind, and a line here."""

from __future__ import annotations

from pipelines.evaluation.tasks import bamboo, dialogue, longbench, retrieval, shots, texts
from pipelines.evaluation.tasks.task import Task

PROSE = "builtin:topics"  # any Python carries it

TASKS = {
    task.name: task
    for task in (
        Task("wikitext", "wikitext2-test.txt", texts.continuation, texts.perplexity, "perplexity", new=0),
        Task("books", "books", texts.continuation, texts.perplexity, "perplexity", new=0),
        Task("copy", PROSE, texts.copy, texts.copied, "share copied", new=texts.ANSWER),
        Task("needle", PROSE, retrieval.needles(1), retrieval.found, "number found", new=8),
        Task("many keys", PROSE, retrieval.needles(8), retrieval.found, "number found", new=8),
        Task("lines", "generated", retrieval.lines, retrieval.found, "number found", new=8),
        Task("key-value", "generated", retrieval.key_value, retrieval.found, "number found", new=8),
        Task("topics", PROSE, retrieval.topics, retrieval.found, "topic found", new=12, stop="\n"),
        Task("gsm8k", "gsm8k-test.jsonl", shots.gsm8k, shots.right_result, "result", new=128, stop="\n\n"),
        Task("multi_news", "longbench/multi_news.jsonl", longbench.multi_news, longbench.summary, "ROUGE-L", new=128),
        Task(
            "passage_retrieval", "longbench/passage_retrieval_zh.jsonl", longbench.passage_retrieval,
            longbench.right_paragraph, "right numbers", new=8,
        ),
        Task("altqa", "bamboo/altqa_4k.jsonl", bamboo.altqa, bamboo.right_number, "right number", new=12),
        Task("paperqa", "bamboo/paperqa_4k.jsonl", bamboo.paperqa, bamboo.right_choice, "right choice", new=1),
        Task("senhallu", "bamboo/senhallu_4k.jsonl", bamboo.senhallu, bamboo.right_choice, "right choice", new=1),
        Task(
            "private_eval", "bamboo/private_eval_4k.jsonl", bamboo.private_eval, bamboo.same_line, "first line",
            new=48, stop="\n",
        ),
        Task(
            "humaneval", "humaneval.jsonl", shots.humaneval, shots.pass_at_1, "pass@1",
            new=128, stop="\n\n\n", runs_code=True,
        ),
        Task("mt_bench", "mtbench/question.jsonl", dialogue.mt_bench, None, "drift", new=64),
        Task("probes", PROSE, dialogue.probes, dialogue.obeyed, "obeyed", new=24),
    )
}  # fmt: skip
