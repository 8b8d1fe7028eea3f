"""A predictor measured where it will work: in the cache, on text of a source that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.chat import chat_renderer
from data.encoding import encode
from data.leaks import refuse_trained_on
from data.lm import load_config, load_lm, load_tokenizer, refuse_too_long
from data.text import load_documents
from fade_runtime import FadeConfig
from pipelines.evaluation.measure import Measured, compare
from pipelines.evaluation.runs import Method
from pipelines.evaluation.tasks.texts import LEAD
from pipelines.reporting.rows import FULL, by_layers, compression, mean
from predictor.bundle import Predictor
from predictor.certificate import Rung
from predictor.errors import FadeError

HEURISTICS = ("position", "h2o", "ema")  # policies whose figures a certificate holds
THIS, CLOSED_FORM = "this", "closed form"
TIE = 0.2  # relative difference of two KLs that a handful of documents cannot tell apart
TIE_KL, TIE_TOP1 = 0.001, 0.01  # and absolute ones, of KLs in nats and of top-1 agreements
FIGURES = ("kl", "worst_kl", "copy_kl", "top1")  # that decide
LADDER = (None, 0.6, 0.43, 0.3, 0.2, 0.15, 0.1)  # budgets of the ladder; None: everything, in 4 bits


@dataclass
class Figures:
    """One way to evict, on all texts.

    Attributes:
        kl, worst_kl: KL(full || evicting) of the next token, nats: mean over texts, and of the worst text.
        top1: fraction of steps whose most likely token is the full cache's.
        copy_kl: KL where the text is a copy of what came before; NaN without such texts.
        compression: of the whole cache at the end, as a 16-bit model has it.
        compressed_layers, other_layers: the same of the layers that evict and of the others; 0 without others.
    """

    kl: float
    worst_kl: float
    top1: float
    copy_kl: float
    compression: float
    compressed_layers: float = 0.0
    other_layers: float = 0.0


def certify(
    model: Any,
    predictor: Predictor,
    closed_form: Predictor,
    texts: Sequence[Tensor],
    *,
    budget: float,
    steps: int,
    on_text: Callable[[], Any] = lambda: None,
) -> dict[str, Figures]:
    """Compare a predictor with the heuristics, and with the closed form under head budgets of its own, at equal bytes.

    Args:
        model: the language model, float32.
        predictor: with its head budgets. closed_form: the untrained network with budgets learned for it.
        texts: [1, context + steps] token ids each. Every text is measured as it is, and once as the source of a copy.
        budget: fraction of the context that is kept in the body. steps: tokens decoded, teacher-forced.
        on_text: called after each of the ``2 * len(texts)`` comparisons.

    Returns:
        Figures of :data:`THIS`, :data:`CLOSED_FORM` and each heuristic.
    """
    learned = {THIS: predictor, CLOSED_FORM: closed_form}
    configs = {
        **{name: FadeConfig(eviction_policy="learned", predictor=each) for name, each in learned.items()},
        **{name: FadeConfig(eviction_policy=name) for name in HEURISTICS},
    }
    evicting = [Method(name, config.with_options(int4_budget=budget)) for name, config in configs.items()]
    methods = [Method(FULL, None), *evicting]
    plain: list[list[Measured]] = []
    copied: list[list[Measured]] = []
    for tokens in texts:
        for rows, each in ((plain, tokens), (copied, copy_of(tokens, steps))):
            rows.append(compare(model, methods, each, steps))
            on_text()
    return {
        method.name: _figures([rows[index] for rows in plain], [rows[index] for rows in copied])
        for index, method in enumerate(methods)
        if method.name != FULL
    }


def measure_ladder(
    model: Any,
    predictor: Predictor,
    texts: Sequence[Tensor],
    *,
    steps: int,
    budgets: Sequence[float | None] = LADDER,
    on_text: Callable[[], Any] = lambda: None,
) -> list[Rung]:
    """KL of each text at each budget.

    Args:
        model: the language model, float32. predictor: with its head budgets.
        texts: [1, context + steps] token ids each. steps: tokens decoded, teacher-forced.
        budgets: fractions of the context that are kept in the body; None: all of it.
        on_text: called after each text.
    """
    evicting = FadeConfig(eviction_policy="learned", predictor=predictor)
    configs = [FadeConfig.safe() if b is None else evicting.with_options(int4_budget=b) for b in budgets]
    methods = [Method(FULL, None), *(Method(str(b), config) for b, config in zip(budgets, configs))]
    rows: list[list[Measured]] = []
    for tokens in texts:
        rows.append(compare(model, methods, tokens, steps, timed=False)[1:])
        on_text()
    return [
        Rung(budget, kl=tuple(mean(one.kl) for one in column), **_compression(column))
        for budget, column in zip(budgets, map(list, zip(*rows)))
    ]


def copy_of(tokens: Tensor, steps: int) -> Tensor:
    """A text [1, S] of the same length whose end repeats its beginning: what a cache must not have forgotten.

    Raises:
        FadeError: the text is too short for so many steps to be a copy of what came before.

    Example:
        >>> copy_of(torch.arange(100)[None], steps=4)[0, -22:].tolist()  # the lead is part of the prompt
        [78, 79, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    """
    again = LEAD + steps
    if tokens.shape[1] < 2 * again:
        raise FadeError(
            f"context {tokens.shape[1] - steps} is too short for a copy of {steps} steps; "
            f"use at least {steps + 2 * LEAD}, or fewer steps"
        )
    return torch.cat((tokens[:, : tokens.shape[1] - again], tokens[:, :again]), dim=1)


def verdict(figures: Mapping[str, Figures]) -> tuple[bool, str]:
    """Whether a predictor may be promoted, and why.

    It must not be worse than any other way in any figure, and better than every heuristic in at least one; differences
    under :data:`TIE` (and tiny ones) are ties.

    Example:
        >>> good, poor = Figures(0.01, 0.02, 0.98, 0.03, 9.0), Figures(0.05, 0.08, 0.93, 1.2, 9.0)
        >>> verdict({"this": good, "closed form": good, "h2o": poor})
        (True, 'KL 0.0100 against 0.0500 of h2o, the best heuristic')
        >>> verdict({"this": poor, "closed form": good, "h2o": poor})
        (False, 'kl 0.0500 is worse than 0.0100 of closed form')
    """
    ours = figures[THIS]
    for name, other in figures.items():
        if name == THIS:
            continue
        for figure in FIGURES:
            value, other_value = getattr(ours, figure), getattr(other, figure)
            if _worse(figure, value, other_value):
                return False, f"{figure} {value:.4f} is worse than {other_value:.4f} of {name}"
    heuristics = {name: each for name, each in figures.items() if name not in (THIS, CLOSED_FORM)}
    name = min(heuristics, key=lambda name: heuristics[name].kl)
    best = heuristics[name]
    comparison = f"KL {ours.kl:.4f} against {best.kl:.4f} of {name}, the best heuristic"
    better = any(_worse(figure, getattr(best, figure), getattr(ours, figure)) for figure in FIGURES)
    return better, comparison if better else f"{comparison}: nowhere better"


@dataclass
class HeldOutTexts:
    """Text to measure on, and the language model that reads it.

    Attributes:
        model: directory, GGUF file or hub id. sources: as for ``collect_traces``. documents: how many.
        context, steps: tokens of each before decoding starts, and decoded.
    """

    model: str
    sources: list[str]
    documents: int
    context: int
    steps: int

    def read(self, trained: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """Source and token ids [1, context + steps] of each text, before the model is loaded.

        Args:
            trained: the manifest of the bundle, or what it is going to be (``pipelines.checkpoints.trace_facts``).

        Raises:
            FadeError: too little text, text that was trained on, or a model that was not made for texts this long.
        """
        length = self.context + self.steps
        passing = f"context {self.context} and steps {self.steps} pass"
        refuse_too_long(load_config(self.model), length, passing, "lower context")
        tokenizer = load_tokenizer(self.model)
        found = load_documents(
            self.sources,
            train=0,
            validation=self.documents,
            length=length,
            measure=lambda text: len(encode(tokenizer, text)),
            render=chat_renderer(tokenizer),
        )
        refuse_trained_on(found, trained)
        return [(one.source, torch.tensor(encode(tokenizer, one.text)[:length])[None]) for one in found]

    def load(self, predictor: Predictor, texts: Sequence[tuple[str, Tensor]]) -> Measuring:
        """Load the language model, to measure on texts that were read.

        Raises:
            FadeError: it is not the predictor's.
        """
        lm, _ = load_lm(self.model, "float32")
        predictor.check(lm)
        return Measuring(lm, [source for source, _ in texts], [tokens for _, tokens in texts], self.context, self.steps)


@dataclass
class Measuring:
    """A language model and the texts that predictors are measured on in its cache.

    Attributes:
        lm: in float32. sources, texts: of each text its source and its token ids [1, context + steps].
        context, steps: tokens of each before decoding starts, and decoded.
    """

    lm: Any
    sources: list[str]
    texts: list[Tensor]
    context: int
    steps: int

    def certificate(self, predictor: Predictor, closed_form: Predictor, budget: float) -> dict[str, Any]:
        """Certify, with a progress bar; returns ``figures`` and what they were measured on."""
        with tqdm(total=2 * len(self.texts), desc="In the cache", unit="text") as bar:
            figures = certify(
                self.lm, predictor, closed_form, self.texts, budget=budget, steps=self.steps, on_text=bar.update
            )
        return {
            "figures": figures,
            "documents": len(self.texts),
            "sources": ", ".join(sorted(set(self.sources))),
            "context": self.context,
            "steps": self.steps,
            "budget": budget,
        }

    def ladder(self, predictor: Predictor) -> dict[str, Any]:
        """Measure the ladder, with a progress bar; returns it as a certificate holds it."""
        with tqdm(total=len(self.texts), desc="Ladder of budgets", unit="text") as bar:
            rungs = measure_ladder(self.lm, predictor, self.texts, steps=self.steps, on_text=bar.update)
        about = {"context": self.context, "steps": self.steps, "texts": self.sources}
        return {**about, "rungs": [rung.to_dict() for rung in rungs]}


def as_facts(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """The certificate as JSON."""
    figures = {
        name: {key: round(v, 6) for key, v in asdict(one).items()} for name, one in certificate["figures"].items()
    }
    return {**certificate, "figures": figures}


def _worse(figure: str, value: float, other: float) -> bool:
    if figure == "top1":
        return value < other - TIE_TOP1
    return value > other * (1 + TIE) + TIE_KL  # false for NaN


def _figures(plain: Sequence[Measured], copied: Sequence[Measured]) -> Figures:
    kls = [mean(row.kl) for row in plain]
    return Figures(
        kl=mean(kls),
        worst_kl=max(kls),
        top1=mean([mean(row.agree) for row in plain]),
        copy_kl=mean([mean(row.kl) for row in copied]),
        **_compression(plain),
    )


def _compression(measured: Sequence[Measured]) -> dict[str, float]:
    rows = [vars(row) for row in measured]
    return {"compression": compression(rows), **by_layers(rows)}
