"""The model card of a bundle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from predictor.budgets import ALLOCATIONS, HeadBudgets, lost_curves
from predictor.certificate import QUANTILE, Rung, ladder, smallest_budget, upper_bound

RECOVERY = re.compile(r"(?:(?:heuristic/)?(?P<who>\w+)/)?recovery_at_(?P<budget>[\d.]+)")

PREDICTS = {
    "mlp": "A small perceptron scores each cached token by what the prompt's attention shows of it",
    "hidden": "A small perceptron scores each cached token by its key, its value and what attention shows of it",
    "cnn": "A small convolutional network forecasts blocks of tokens from the last queries' attention",
    "cnn_published": "AttentionPredictor's network, as published, forecasts blocks of tokens from recent attention",
    "ema_bank": "A small convolutional network forecasts blocks of tokens from moving averages of their attention",
}


def model_card(facts: Mapping[str, Any], parameters: int) -> str:
    """Write the model card, for people.

    Args:
        facts: what ``bundle.json`` holds. parameters: of the network.
    """
    model, manifest, metrics = (facts[key] for key in ("provenance", "manifest", "metrics"))
    geometry = ", ".join(str(model.get(key)) for key in ("layers", "kv_heads", "query_heads", "head_dim"))
    plain = {k: v for k, v in manifest.items() if isinstance(v, str | int | float)}
    return f"""---
library_name: fade-predictor
tags: [kv-cache, attention-prediction]
---

# Which cached tokens a language model will look at again

{PREDICTS[facts["kind"]]}.
A higher score means: keep this token. A cache uses the scores to decide which keys and values stay in memory.

## Made for

One language model only; using it with another is refused.

| | |
|---|---|
| architecture | {model.get("model_type")} |
| layers, kv heads, query heads, head size | {geometry} |
| weights fingerprint | `{str(model.get("weights"))[:16]}` |

## Trained on

{_learned_from(facts)}

| | |
|---|---|
{_rows(plain)}
{_recoveries(metrics)}{_certified(facts.get("certificate"))}## Budgets of heads

{_spread(facts["budgets"])}{_lost(metrics)}

## Use

```python
from fade_runtime import FadeConfig, create_tiered_cache

cache = create_tiered_cache(model, config=FadeConfig.balanced(predictor="path/to/this/directory"))
model.generate(**inputs, **cache.kwargs)
```

{parameters:,} parameters, {facts["kind"]}, `{json.dumps(facts["config"])}`; bundle format {facts["version"]}.
The weights are safetensors; nothing here is executed when it is loaded.

## Limits

{_limits(facts)}It was trained on the texts counted above: measure it on your own before you trust it.
"""


def _learned_from(facts: Mapping[str, Any]) -> str:
    """What was learned from, in a sentence."""
    if facts.get("offsets"):
        return (
            "The output of that model: how far it moves when tokens of the prompt count by their gates. Scores of all\n"
            "kv heads are comparable, by an offset of each head, so that one threshold can decide over all of them."
        )
    window = facts["spec"]["window"]
    return f"Attention recorded from that model: the last {window} queries of each prompt, and what followed."


def _limits(facts: Mapping[str, Any]) -> str:
    """What a ranking by attention does not know."""
    if facts.get("offsets"):
        return ""
    return (
        "It ranks tokens by how much attention they will get, which is not the same as how much the output changes\n"
        "without them. "
    )


def _recoveries(metrics: Mapping[str, float]) -> str:
    """Lay ``[WHO/]recovery_at_BUDGET`` out as a section, whoever recovers most first."""
    found = [(match, value) for key, value in metrics.items() if (match := RECOVERY.fullmatch(key))]
    budgets = sorted({match["budget"] for match, _ in found}, key=float, reverse=True)
    table: dict[str, dict[str, float]] = {}
    for match, value in found:
        table.setdefault(match["who"] or "**this predictor**", {})[match["budget"]] = value
    if not table:
        return ""
    head = """## Measured on documents it never saw

Recovery is the share of the attention of the following steps that falls on the kept tokens, when the given share of
the prompt is kept. The oracle knows the future; the rest are built-in heuristics.

"""
    lines = [["kept share", *budgets], ["---"] * (len(budgets) + 1)]
    for who, row in sorted(table.items(), key=lambda item: -item[1].get(budgets[0], 0.0)):
        lines.append([who, *(f"{row[b]:.4f}" if b in row else "" for b in budgets)])
    return head + _table(lines) + "\n"


def _table(lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _certified(certificate: Mapping[str, Any] | None) -> str:
    """What it cost the language model, as a section."""
    if certificate is None or "figures" not in certificate:
        return _ladder(certificate)
    head = f"""## Measured in the cache

KL to the full cache per token, in nats, on {certificate["documents"]} texts of {certificate["sources"]}, which it was
not trained on: {certificate["context"]:,} tokens, {certificate["steps"]} decoded, {certificate["budget"]:.0%} of
the context kept in the body, in 4 bits. Copy: the end of the text repeats its beginning.

"""
    figures = certificate["figures"]
    titles = ["", "KL, mean", "KL, worst", "top-1", "KL, copy", *_sizes(figures.values())]
    lines = [
        [name, f"{f['kl']:.4f}", f"{f['worst_kl']:.4f}", f"{f['top1']:.1%}", f"{f['copy_kl']:.4f}", *_times(f, titles)]
        for name, f in sorted(figures.items(), key=lambda one: one[1]["kl"])
    ]
    return head + _table([titles, ["---"] * len(titles), *lines]) + "\n" + _ladder(certificate)


def _ladder(certificate: Mapping[str, Any] | None) -> str:
    """KL at several budgets, as a section."""
    if not certificate or "ladder" not in certificate:
        return ""
    measured, rungs = certificate["ladder"], ladder(certificate)
    head = f"""## Certified at several budgets

The same on {len(rungs[0].kl)} texts of {", ".join(sorted(set(measured["texts"])))}:
{measured["context"]:,} tokens, {measured["steps"]} decoded. `FadeConfig.risk(kl=...)` picks a budget from this table:
with a confidence of .95, {QUANTILE:.0%} of texts like these stay below the bound.

"""
    titles = ["kept in the body", "KL, mean", "KL, worst", "bound", *_sizes([rung.to_dict() for rung in rungs])]
    lines = []
    target = certificate.get("target_kl")
    met = None if target is None else smallest_budget(rungs, target)
    for rung in rungs:
        bound = upper_bound(rung.kl, QUANTILE, 0.95)
        stated = f"{bound:.4f}" if bound < float("inf") else "too few texts"
        mean = sum(rung.kl) / len(rung.kl)
        lines.append([_kept(rung), f"{mean:.4f}", f"{max(rung.kl):.4f}", stated, *_times(rung.to_dict(), titles)])
    least = f"\nThe smallest budget that loses on average at most KL {target:g} is {_kept(met)}.\n" if met else ""
    return head + _table([titles, ["---"] * len(titles), *lines]) + least + "\n"


SIZES = {"compression": "compression", "compressed layers": "compressed_layers", "other layers": "other_layers"}


def _sizes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Columns of compression: of the whole cache, and by kind of layer where some evict nothing."""
    return list(SIZES) if any(row.get("other_layers") for row in rows) else ["compression"]


def _times(row: Mapping[str, Any], titles: Sequence[str]) -> list[str]:
    return [f"{row[SIZES[title]]:.2f}x" for title in titles if title in SIZES]


def _kept(rung: Rung) -> str:
    return "all" if rung.int4_budget is None else f"{rung.int4_budget:.0%}"


def _spread(stored: dict[str, Any] | None) -> str:
    """How unequal the heads are, in a sentence."""
    if stored is None:
        return "None: all kv heads get the same."
    kept = sorted(fraction for heads in HeadBudgets.from_dict(stored).allocate(0.25).values() for fraction in heads)
    above_half, below_quarter = sum(one > 0.5 for one in kept), sum(one < 0.25 for one in kept)
    return (
        f"When a quarter of the context may stay, {above_half} of {len(kept)} kv heads get more than half of it, "
        f"{below_quarter} less than a quarter; the median is {kept[len(kept) // 2]:.0%}."
    )


def _lost(metrics: Mapping[str, float]) -> str:
    """What budgets by head save, as a table below the sentence."""
    found = lost_curves(metrics)
    if not found:
        return ""
    budgets = sorted({budget for lost in found.values() for budget in lost}, reverse=True)
    lines = [["kept share", *map(str, budgets)], ["---"] * (len(budgets) + 1)]
    for kind in found:
        lines.append([ALLOCATIONS[kind], *(f"{found[kind][b]:.4f}" if b in found[kind] else "" for b in budgets)])
    return f"""

Attention that the dropped tokens would have received at their worst coming step, on documents that were not learned
from, mean of all heads:

{_table(lines).rstrip()}"""


def _rows(table: Mapping[str, Any]) -> str:
    return "".join(f"| {key} | {value} |\n" for key, value in table.items())
