"""How fragile each layer is: what a language model loses when one layer alone forgets.

Lost attention says which token of a head to keep, and not how much the output depends on the layer: the layer that
copies may lose little attention and all of the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.lm import load_tokenizer
from data.plan import CollectSettings, prepare
from fade_runtime import FadeConfig
from pipelines.evaluation.certificate import copy_of
from pipelines.evaluation.measure import compare
from pipelines.evaluation.runs import Method
from pipelines.reporting.rows import FULL, mean
from predictor.budgets import HeadBudgets
from predictor.bundle import Predictor

SHARES = (0.25, 0.5)  # of the context, that a layer keeps while the others keep all
FEW = 8  # caches that are measured at once
ALL = "all"  # the cache in which no layer forgets
FLOOR = 0.01  # of the mean: the least that a layer weighs, so that it is not given up


@dataclass(frozen=True)
class OneLayer(HeadBudgets):
    """Head budgets under which one layer forgets and the others keep all.

    Attributes:
        layer: its index in the model.

    Example:
        >>> table = torch.tensor([[[1.0, 0.0]], [[0.5, 0.0]]])
        >>> OneLayer(table, fractions=(0.0, 1.0), layers=(5, 11), layer=11).allocate(0.25)
        {5: (1.0,), 11: (0.25,)}
    """

    layer: int = 0

    def allocate(self, fraction: float) -> dict[int, tuple[float, ...]]:
        """The fraction for that layer, shared out among its kv heads; all for the others."""
        return {**self.uniform(1.0), self.layer: self.of_layer(self.layer).allocate(fraction)[self.layer]}

    __hash__ = HeadBudgets.__hash__


def layer_weights(model: Any, predictor: Predictor, texts: Sequence[Tensor], steps: int) -> tuple[float, ...]:
    """How much a language model loses for each bit of attention that a layer loses, their mean being 1.

    Each layer in turn keeps :data:`SHARES` of the context while the others keep all of it, on each text as it is and
    with an end that repeats its beginning. What is lost is the square root of the KL that this adds: KL grows with the
    square of a small change, lost attention with the change itself.

    Args:
        model: the language model, float32. predictor: with its head budgets.
        texts: [1, context + steps] token ids each. steps: tokens decoded, teacher-forced.
    """
    budgets = predictor.budgets
    assert budgets is not None
    cuts = [(layer, share) for layer in budgets.layers for share in SHARES]
    methods = [Method(ALL, FadeConfig.safe())]
    for layer, share in cuts:
        config = FadeConfig(int4_budget=share, eviction_policy="learned", predictor=_only(predictor, layer))
        methods.append(Method(f"{layer} {share}", config))
    read = [text for tokens in texts for text in (tokens, copy_of(tokens, steps))]
    kl: dict[str, list[float]] = {method.name: [] for method in methods}
    for tokens in tqdm(read, desc="Each layer by itself", unit="text"):
        for at in range(0, len(methods), FEW):
            group = [Method(FULL, None), *methods[at : at + FEW]]
            for row in compare(model, group, tokens, steps, timed=False)[1:]:
                kl[row.name].append(mean(row.kl))
    weights = []
    for layer in budgets.layers:
        lost = mean([_lost(budgets.of_layer(layer), share) for share in SHARES])
        cut = [pair for share in SHARES for pair in zip(kl[f"{layer} {share}"], kl[ALL])]
        harm = mean([math.sqrt(max(loss - kept, 0.0)) for loss, kept in cut])
        weights.append(harm / max(lost, 1e-6))
    largest = max(mean(weights), 1e-12)
    return tuple(max(weight / largest, FLOOR) for weight in weights)


def validation_texts(model: str, collected: dict[str, Any], documents: int, length: int) -> list[Tensor]:
    """Token ids [1, length] of validation documents of a collection, read again from its sources, less short ones.

    Args:
        model: directory or hub id, for its tokenizer. collected: settings of the collection, from its manifest.
        documents, length: how many at most, and their tokens.

    Raises:
        FadeError: the text is no longer there.
    """
    settings = CollectSettings(**{**CollectSettings().content(), **collected})
    tasks = [task for task in prepare(settings, load_tokenizer(model)) if task.document.split == "validation"]
    return [task.tokens[None, :length] for task in tasks if len(task.tokens) >= length][:documents]


def _only(predictor: Predictor, layer: int) -> Predictor:
    """The predictor, under whose budgets one layer forgets."""
    budgets = predictor.budgets
    assert budgets is not None
    table = OneLayer(budgets.lost, budgets.fractions, budgets.layers, layer=layer)
    facts = predictor.provenance, predictor.metrics, predictor.manifest
    return Predictor(predictor.net, predictor.spec, *facts, predictor.name, table)


def _lost(budgets: HeadBudgets, share: float) -> float:
    """Attention that the kv heads of a one-layer table lose together when they keep a share in the mean."""
    (kept,) = budgets.allocate(share).values()
    return sum(float(_at(budgets.fractions, curve, each)) for curve, each in zip(budgets.lost[0], kept))


def _at(fractions: Sequence[float], curve: Tensor, kept: float) -> Tensor:
    """A curve [K] of losses read between its points."""
    above = min(next(i for i, each in enumerate(fractions) if each >= kept), len(fractions) - 1)
    below = max(above - 1, 0)
    width = fractions[above] - fractions[below]
    return torch.lerp(curve[below], curve[above], (kept - fractions[below]) / width if width else 0.0)
