"""What a bundle can answer for: `python -m pipelines.certify --bundle DIR` measures KL at a ladder of budgets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pipelines.cli import run
from pipelines.evaluation.certificate import HeldOutTexts
from pipelines.models import model_of
from pipelines.reporting.rows import mean
from predictor.bundle import load_bundle
from predictor.certificate import QUANTILE, Rung, upper_bound
from predictor.errors import FadeError


@dataclass(frozen=True)
class CertifySettings:
    """Options of `pipelines.certify`.

    Args:
        bundle: directory of the bundle.
        model: directory, GGUF file or hub id of the language model that it was trained for, if that is not where the
            bundle says.
        text: what is measured on, none of it trained on (as for collect_traces).
        documents: how many texts; 14 answer for a share .8 with a confidence of .95, 24 do so with one text to spare.
        context: tokens of each text before decoding starts.
        steps: tokens decoded after it, teacher-forced.
        confidence: of what is printed.
        share: of texts, of what is printed.
    """

    OLD_NAMES: ClassVar[dict[str, str]] = {"held_out": "text"}

    bundle: str
    model: str | None = None
    text: list[str] = field(default_factory=lambda: ["builtin:readmes"])
    documents: int = 24
    context: int = 1024
    steps: int = 64
    confidence: float = 0.95
    share: float = QUANTILE

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            FadeError: names those that cannot be.
        """
        if self.documents < 1 or self.context < 1 or self.steps < 2:
            raise FadeError(
                f"documents {self.documents}, context {self.context}, steps {self.steps}: use at least 1, 1 and 2"
            )


def certify_bundle(settings: CertifySettings) -> None:
    """Measure KL on held-out texts at a ladder of budgets and write it into a bundle's certificate.

    `FadeConfig.risk(kl=...)` then picks the strongest compression that the certificate answers for. Weights, budgets of
    heads and provenance stay as they are; the bundle is replaced as a whole or not at all. Prints the ladder with what
    the given share of such texts stays below at the given confidence.
    """
    predictor = load_bundle(settings.bundle)
    model = model_of(settings.model, [predictor])
    held_out = HeldOutTexts(model, settings.text, settings.documents, settings.context, settings.steps)
    measured = held_out.load(predictor, held_out.read(predictor.manifest)).ladder(predictor)
    predictor.save(settings.bundle, certificate={**(predictor.certificate or {}), "ladder": measured})
    print(ladder_table([Rung(**each) for each in measured["rungs"]], settings.share, settings.confidence))


def ladder_table(rungs: Sequence[Rung], quantile: float, confidence: float) -> str:
    """Lay out the rungs of a ladder for a terminal, with what a quantile of texts stays below.

    Example:
        >>> print(ladder_table([Rung(None, 3.2, (0.01,) * 14), Rung(0.3, 9.0, (0.1, 0.3))], 0.8, 0.95))
          budget  compression  KL, mean    worst   0.8 of texts
             all        3.20x    0.0100   0.0100       < 0.0100
             30%        9.00x    0.2000   0.3000        unknown
    """
    lines = [f"{'budget':>8} {'compression':>12} {'KL, mean':>9} {'worst':>8} {f'{quantile:g} of texts':>14}"]
    for rung in rungs:
        bound = upper_bound(rung.kl, quantile, confidence)
        budget = "all" if rung.int4_budget is None else f"{rung.int4_budget:.0%}"
        below = f"< {bound:.4f}" if bound < float("inf") else "unknown"
        lines.append(f"{budget:>8} {rung.compression:>11.2f}x {mean(rung.kl):>9.4f} {max(rung.kl):>8.4f} {below:>14}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(certify_bundle))
