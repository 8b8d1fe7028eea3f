"""How many documents head budgets need, how stable they are, and what their target is worth.

`python -m pipelines.budget_study --traces artefacts/traces/full`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor
from tqdm import tqdm

from pipelines.cli import run
from predictor.budgets import FRACTIONS, HeadBudgets, learn_budgets
from predictor.errors import FadeError
from predictor.files import write_aside
from predictor.nets import TokenMLP
from predictor.registry import load_predictor
from predictor.scorenet import ScoreNet, token_scores


@dataclass(frozen=True)
class StudySettings:
    """Options of `pipelines.budget_study`.

    Args:
        traces: folder of a collection.
        predictor: bundle, reference or shipped name whose scores rank the tokens; null for the closed form.
        sizes: numbers of training documents; those above what the collection has become all of it.
        budgets: kept shares of the context, besides sinks and window.
        parts: disjoint sets of training documents that are compared with each other.
        out: Markdown file to write the tables to.
    """

    traces: str = "artefacts/traces/full"
    predictor: str | None = None
    sizes: list[int] = field(default_factory=lambda: [3, 10, 30, 100])
    budgets: list[float] = field(default_factory=lambda: [0.25, 0.125])
    parts: int = 3
    out: str | None = None


def budget_study(settings: StudySettings) -> None:
    """Learn head budgets from more and more training documents and see what they lose on validation documents.

    Prints for each number of documents the attention that the validation documents would lose, head budgets learned
    for the worst step (max), for the sum over steps, and the same budget for all heads (uniform); then how much the
    budgets of disjoint sets of training documents agree.
    """
    from data.datamodule import TraceDataModule  # lightning: five seconds

    parts = settings.parts
    net = TokenMLP() if settings.predictor is None else load_predictor(settings.predictor).net
    module = TraceDataModule(settings.traces)
    module.setup("fit")
    documents = module.traces.manifest["documents"]
    train = [index for index, document in enumerate(documents) if document["split"] == "train"]
    if len(train) < parts or parts < 2:
        raise FadeError(f"parts {parts} cannot be made of {len(train)} training documents; use 2 or more, up to those")
    rows = _Rows(module, net)
    shuffled = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    order = [train[index] for index in shuffled]
    sizes = size_table(rows, order, rows.read("validation"), settings.sizes, settings.budgets)
    agreement = stability(rows, [order[part::parts] for part in range(parts)], settings.budgets)
    text = "\n".join([f"# Head budgets of {settings.traces}", "", *sizes, "", *agreement])
    print(text)
    if settings.out is not None:
        with write_aside(Path(settings.out)) as aside:
            aside.write_text(f"{text}\n", encoding="utf-8")


class _Rows:
    """Batches of a collection with their scores, computed once."""

    def __init__(self, module: Any, net: ScoreNet) -> None:
        self.module, self.net = module, net
        self._train = self.read("train")

    def train(self, documents: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """Rows of these training documents: batches of R rows, scores [R, S]."""
        chosen_documents = torch.tensor(documents)
        for batch in self._train:
            chosen = torch.isin(batch["doc"], chosen_documents)
            if bool(chosen.any()):
                yield {name: tensor[chosen] for name, tensor in batch.items()}

    def read(self, split: str) -> list[dict[str, Tensor]]:
        """All batches of a split, R rows each, with their scores [R, S]."""
        loader = self.module.train_dataloader() if split == "train" else self.module.val_dataloader()
        return [self._slim(batch) for batch in tqdm(loader, desc=f"Reading {split} rows", unit="batch")]

    def _slim(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        names = ("target_max", "target_sum", "eligible", "length", "layer", "head", "doc")
        half = {name: batch[name].half() if name.startswith("target") else batch[name] for name in names}
        return {**half, "scores": token_scores(self.net, batch, in_cache=True)}


def learned(rows: Iterator[dict[str, Tensor]], target: str = "target_max") -> HeadBudgets:
    """Head budgets from batches of R rows that bring their scores [R, S]."""
    full = ({**batch, target: batch[target].float()} for batch in rows)
    return learn_budgets(lambda batch: batch["scores"], full, target)


def expected_loss(fractions: Mapping[int, Sequence[float]], batches: Sequence[dict[str, Tensor]]) -> float:
    """Attention lost at the worst step, averaged over rows, when each kv head keeps its fraction.

    Args:
        fractions: layer -> one fraction of the context for each kv head.
        batches: rows with ``scores``, ``target_max``, ``eligible``, ``length``, ``layer`` and ``head``.

    Example:
        >>> yes, target = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0.1, 0.4, 0.2, 0.3]])
        >>> row = {"scores": target, "target_max": target, "eligible": yes, "length": torch.tensor([4]),
        ...        "layer": torch.tensor([0]), "head": torch.tensor([0])}
        >>> round(expected_loss({0: [0.5]}, [row]), 4)
        0.3
    """
    from predictor.head_metrics import lost_when_kept  # torchmetrics: three seconds

    lost = torch.cat([lost_when_kept([fractions], batch["scores"], batch) for batch in batches])
    return float(lost.double().mean())


def size_table(
    rows: _Rows,
    order: Sequence[int],
    validation: Sequence[dict[str, Tensor]],
    sizes: Sequence[int],
    budgets: Sequence[float],
) -> list[str]:
    """Expected loss on validation documents, batches of R rows, by number of training documents, as Markdown."""
    lines = ["Attention lost at the worst step on validation documents, mean of all heads:", ""]
    heads = [f"{kind} {budget}" for budget in budgets for kind in ("uniform", "sum", "max")]
    lines += ["| documents | " + " | ".join(heads) + " |", "|---:" * (len(heads) + 1) + "|"]
    for size in sorted({min(size, len(order)) for size in sizes}):
        tables = {kind: learned(rows.train(order[:size]), f"target_{kind}") for kind in ("sum", "max")}
        losses: list[float] = []
        for budget in budgets:
            losses.append(expected_loss(tables["max"].uniform(budget), validation))
            losses += [expected_loss(tables[kind].allocate(budget), validation) for kind in ("sum", "max")]
        lines.append(f"| {size} | " + " | ".join(f"{loss:.4f}" for loss in losses) + " |")
    return lines


def stability(rows: _Rows, sets: Sequence[Sequence[int]], budgets: Sequence[float]) -> list[str]:
    """Agreement of the budgets that disjoint sets of documents give, as Markdown.

    Source: Spearman 1904, rank correlation, by scipy.
    """
    tables = [learned(rows.train(documents)) for documents in sets]
    lines = [
        f"Smallest rank correlation between any two of {len(sets)} disjoint sets of {min(map(len, sets))} documents:",
        "",
    ]
    at = FRACTIONS.index(0.11)
    lines.append(f"- attention lost when 11 % is kept: {_least_agreement([table.lost[..., at] for table in tables])}")
    for budget in budgets:
        shares = [torch.tensor(list(table.allocate(budget).values())) for table in tables]
        lines.append(f"- share of each kv head when {budget} is kept: {_least_agreement(shares)}")
    return lines


def _least_agreement(tables: Sequence[Tensor]) -> str:
    """The smallest rank correlation between any two tables [L, H] of the same kv heads, in words.

    Example:
        >>> _least_agreement([torch.tensor([[0.1], [0.2]]), torch.tensor([[0.3], [0.9]])])
        '1.000'
        >>> _least_agreement([torch.tensor([[0.1], [0.2]]), torch.tensor([[0.5], [0.5]])])
        'undefined, one set has all heads alike'
    """
    flat = [table.flatten() for table in tables]
    if any(len(each.unique()) < 2 for each in flat):
        return "undefined, one set has all heads alike"
    pairs = ((a, b) for i, a in enumerate(flat) for b in flat[i + 1 :])
    return f"{min(float(spearmanr(a, b).statistic) for a, b in pairs):.3f}"


if __name__ == "__main__":
    sys.exit(run(budget_study))
