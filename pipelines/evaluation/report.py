"""Rows and tables of an evaluation, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pipelines.evaluation.measure import Measured
from pipelines.reporting.rows import FULL, by_layers, layer_cells, layer_columns, mean
from pipelines.reporting.tables import listed_options, machine_line, markdown_table

MIB = 2**20
COLUMNS = ("cache", "KL, mean", "KL, worst text", "top-1", "MiB", "compression", "decode speed")
SPEED = "- **decode speed** is that of the median step, relative to the full cache; the caches take turns in each step."
UNTIMED = "- Decode speed was not measured."
SOURCE_COLUMNS = ("cache", "source", *COLUMNS[1:4], "compression")


def document_rows(texts: Sequence[Mapping[str, Any]], measured: Sequence[Sequence[Measured]]) -> list[dict[str, Any]]:
    """One JSON-able row for each text and method.

    Args:
        texts: what identifies each text.
        measured: for each text, the methods in order, the full cache first.
    """
    rows = []
    for text, methods in zip(texts, measured):
        for one in methods:
            seconds = median(one.seconds) if one.seconds else None
            rows.append(
                {
                    "kind": "document",
                    "method": one.name,
                    **text,
                    "kl": mean(one.kl),
                    "kl_steps": [round(value, 6) for value in one.kl],
                    "top1": mean(one.agree),
                    "resident_bytes": one.resident_bytes,
                    "full_bytes": one.full_bytes,
                    "others_bytes": one.others_bytes,
                    "others_full_bytes": one.others_full_bytes,
                    "tokens_per_second": seconds and 1 / seconds,
                    "speed": seconds and median(methods[0].seconds) / seconds,
                }
            )
    return rows


def method_rows(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method: means over texts, and the worst text's KL.

    Example:
        >>> one = {"method": "ema", "kl": 0.1, "top1": 1.0, "resident_bytes": 10, "full_bytes": 40,
        ...        "tokens_per_second": 8.0, "speed": 0.5}
        >>> row, = method_rows([one, {**one, "kl": 0.3}])
        >>> row["kl"], row["kl_worst"], row["compression"]
        (0.2, 0.3, 4.0)
    """
    rows = []
    for name in dict.fromkeys(row["method"] for row in documents):
        rows_of = [row for row in documents if row["method"] == name]
        resident, full = (mean([row[key] for row in rows_of]) for key in ("resident_bytes", "full_bytes"))
        rows.append(
            {
                "kind": "method",
                "method": name,
                "documents": len(rows_of),
                "kl": mean([row["kl"] for row in rows_of]),
                "kl_worst": max(row["kl"] for row in rows_of),
                "top1": mean([row["top1"] for row in rows_of]),
                "resident_bytes": resident,
                "full_bytes": full,
                "compression": full / resident,
                **by_layers(rows_of),
                **{key: _mean_or_none([row[key] for row in rows_of]) for key in ("tokens_per_second", "speed")},
            }
        )
    return rows


def source_rows(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method and source, as :func:`method_rows`; none if all texts are of one source."""
    sources = list(dict.fromkeys(row["source"] for row in documents))
    if len(sources) < 2:
        return []
    by_source = {source: method_rows([row for row in documents if row["source"] == source]) for source in sources}
    rows = [{**row, "kind": "source", "source": source} for source, each in by_source.items() for row in each]
    order = list(dict.fromkeys(row["method"] for row in documents))
    return sorted(rows, key=lambda row: order.index(row["method"]))


def tables(documents: Sequence[Mapping[str, Any]], failed: Sequence[Sequence[str]] = ()) -> str:
    """The caches over all texts, those that ``failed`` last, then each by source where there are several."""
    by_source = source_rows(documents)
    over_all = table(method_rows(documents), failed)
    return f"{over_all}\n\nBy source:\n\n{source_table(by_source)}" if by_source else over_all


def table(methods: Sequence[Mapping[str, Any]], failed: Sequence[Sequence[str]] = ()) -> str:
    """The methods as a Markdown table, for the terminal and for the report; no speed if none was measured."""
    by_kind = layer_columns(methods)
    lines = [
        (
            row["method"],
            f"{row['kl']:.4f}",
            f"{row['kl_worst']:.4f}",
            f"{row['top1']:.1%}",
            f"{row['resident_bytes'] / MIB:.2f}",
            f"{row['compression']:.2f}x",
            *layer_cells(row, by_kind),
            *([f"{row['speed']:.2f}x ({row['tokens_per_second']:.1f}/s)"] if row["speed"] else []),
        )
        for row in methods
    ]
    columns = (*COLUMNS[:6], *by_kind, *COLUMNS[6:])[: len(lines[0])]
    return markdown_table(
        columns, [*lines, *((*one, "failed", *("-" for _ in columns[2:])) for one in failed)], words=1
    )


def source_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of :func:`source_rows` as a Markdown table, less the full cache."""
    lines = [
        (
            row["method"],
            row["source"],
            f"{row['kl']:.4f}",
            f"{row['kl_worst']:.4f}",
            f"{row['top1']:.1%}",
            f"{row['compression']:.2f}x",
        )
        for row in rows
        if row["method"] != FULL
    ]
    return markdown_table(SOURCE_COLUMNS, lines, words=2)


def report(run: Mapping[str, Any], documents: Sequence[Mapping[str, Any]], plots: Mapping[str, str]) -> str:
    """The report, in Markdown.

    Args:
        run: the settings, machine and model of the run, as in the first line of results.jsonl.
        documents: rows of :func:`document_rows`.
        plots: file name -> caption.
    """
    settings = run["settings"]
    texts = "\n".join(f"- {text['source']}: `{text['document']}`" for text in run["texts"])
    pictures = "\n\n".join(f"![{caption}]({name})\n\n{caption}" for name, caption in plots.items())
    predictors = "\n".join(f"- {name}: `{ref}`" for name, ref in settings["predictors"].items()) or "- none"
    unseen = "" if settings["text"] else " that no predictor was trained on"
    skipped = "".join(f"Left out: {line}\n\n" for line in run.get("skipped", ()))
    return f"""# Compressed caches against the full cache

{settings["model"]}: {settings["context"]:,} tokens of prompt, then {settings["steps"]} tokens of the text,
the same to every cache; {len(run["texts"])} texts{unseen}.

{tables(documents, run.get("failed", ()))}

- **KL** is KL(full cache || this cache) of the next-token distribution, in nats, mean over steps, from a
  float32 model. **top-1** is how often the most likely next token is the full cache's.
- **MiB** is what the whole cache really held at the last step, metadata and buffers included; **compression** is a
  full cache divided by it. Both are those of a model with two-byte floats. Where a model has layers that evict nothing
  (sliding windows, recurrent states), **other layers** is the same of those, **compressed layers** of the rest.
{SPEED if settings["speed"] else UNTIMED}
- Evicting caches that are no configuration of their own keep {settings["budget"]:.0%} of the context per kv head,
  in 4 bits, besides the first and the newest tokens, which stay exact.

{pictures}

## How it was measured

{machine_line(run["machine"])}

Texts:

{texts}

Configurations:

{listed_options(settings["configs"]) or "- none"}

Predictors:

{predictors}

{skipped}Again: `{run["command"]}`. Every number, per text and per step, is in `results.jsonl`.
"""


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return mean(numbers) if numbers else None
