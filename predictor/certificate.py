"""What a bundle promises: KL of held-out texts at a ladder of budgets, and the most compression it answers for.

No distribution is assumed, and few texts are enough, because what is promised is a quantile and not a mean: with the
chosen confidence, at least that fraction of texts like the held-out ones stays below the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from predictor.errors import FadeError

QUANTILE = 0.8  # of texts; 14 texts are enough to answer for it with a confidence of .95


@dataclass(frozen=True)
class Rung:
    """One budget of the ladder.

    Attributes:
        int4_budget: fraction of the context kept in the body; None for all of it, in 4 bits.
        compression: of the whole cache, all texts together, as a 16-bit model has it.
        kl: KL(full || compressed) per token of each text, nats.
        compressed_layers, other_layers: compression of the layers that evict and of the others; 0 without others.
    """

    int4_budget: float | None
    compression: float
    kl: tuple[float, ...]
    compressed_layers: float = 0.0
    other_layers: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        times = {name: round(getattr(self, name), 4) for name in ("compression", "compressed_layers", "other_layers")}
        return {**asdict(self), **times, "kl": [round(one, 7) for one in self.kl]}


def confidence_below(texts: int, rank: int, quantile: float) -> float:
    """Confidence that the ``rank``-th smallest of so many draws is above a quantile of the population.

    Source: Wilks 1941, Determination of Sample Sizes for Setting Tolerance Limits (Annals of Mathematical Statistics
    12), section 2: the number of draws below the quantile is binomial.

    Example:
        >>> round(confidence_below(texts=14, rank=14, quantile=0.8), 3)  # 1 - .8 ** 14
        0.956
    """
    return sum(math.comb(texts, k) * quantile**k * (1 - quantile) ** (texts - k) for k in range(rank))


def upper_bound(kl: Sequence[float], quantile: float, confidence: float) -> float:
    """Upper confidence bound on a quantile of KL: the smallest observed KL that so many of such texts stay below.

    Args:
        kl: one number for each text, exchangeable with those that are to come.
        quantile: fraction of texts that stays below. confidence: of the bound.

    Returns:
        The bound, or infinity where so few texts say nothing of that quantile.

    Example:
        >>> upper_bound([0.001 * n for n in range(1, 25)], quantile=0.8, confidence=0.95)
        0.023
        >>> upper_bound([0.001] * 8, quantile=0.8, confidence=0.95)
        inf
    """
    for rank, bound in enumerate(sorted(kl), start=1):
        if confidence_below(len(kl), rank, quantile) >= confidence:
            return bound
    return math.inf


def choose_rung(
    certificate: Mapping[str, Any] | None, kl: float, confidence: float, quantile: float, name: str = "predictor"
) -> Rung:
    """Choose the strongest compression that a certificate answers for.

    The ladder is climbed from the least compression until a bound is above the target. Testing in an order that is
    fixed beforehand, up to the first failure, keeps the confidence for the rung that is chosen.

    Args:
        certificate: of a bundle. kl: target, nats per token. confidence, quantile: of what is promised.
        name: how messages call the bundle.

    Raises:
        FadeError: no ladder, too few texts, or a target that the first rung misses.

    Source: Bauer 1991, Multiple Testing in Clinical Trials (Statistics in Medicine 10), tests in an order of their own;
    Angelopoulos et al. 2021, Learn then Test (arXiv 2110.01052), fixed sequence testing.
    """
    rungs = ladder(certificate, name)
    texts = len(rungs[0].kl)
    if confidence_below(texts, texts, quantile) < confidence:
        needed = math.ceil(math.log(1 - confidence) / math.log(quantile))
        raise FadeError(
            f"the certificate of {name} has {texts} texts, too few for confidence {confidence} on a share {quantile} "
            f"of texts, which takes {needed}; certify it on more (python -m pipelines.certify), or ask for less"
        )
    bounds = [upper_bound(rung.kl, quantile, confidence) for rung in rungs]
    passed = 0
    while passed < len(rungs) and bounds[passed] <= kl:
        passed += 1
    if not passed:
        raise FadeError(
            f"no compression of {name} is certified for KL {kl}: with confidence {confidence} the least of them, "
            f"{rungs[0].compression:.1f}x, stays below {bounds[0]:.4f} on a share {quantile} of texts; ask for that, "
            "or use a full cache"
        )
    return rungs[passed - 1]


def smallest_budget(rungs: Sequence[Rung], kl: float) -> Rung | None:
    """The strongest compression that loses no more than a target on average, nor does a weaker one; None: all do.

    Args:
        rungs: of a ladder, largest budget first. kl: target, nats per token, of the mean over texts.

    Example:
        >>> rungs = [Rung(None, 3.2, (0.001, 0.002)), Rung(0.3, 5.0, (0.006, 0.012)), Rung(0.2, 7.0, (0.02, 0.03))]
        >>> smallest_budget(rungs, kl=0.01).int4_budget
        0.3
    """
    met = list(takewhile(lambda rung: sum(rung.kl) <= kl * len(rung.kl), rungs))
    return met[-1] if met else None


def ladder(certificate: Mapping[str, Any] | None, name: str = "predictor") -> list[Rung]:
    """The rungs of a certificate, largest budget first.

    Raises:
        FadeError: it has none, or they are damaged.
    """
    stored = (certificate or {}).get("ladder")
    if not stored:
        raise FadeError(f"{name} has no certificate of KL at several budgets; make it with python -m pipelines.certify")
    try:
        rungs = [
            Rung(
                each["int4_budget"],
                float(each["compression"]),
                tuple(map(float, each["kl"])),
                *(float(each.get(name, 0)) for name in ("compressed_layers", "other_layers")),
            )
            for each in stored["rungs"]
        ]
        whole = bool(rungs) and len({len(rung.kl) for rung in rungs}) == 1 and all(map(_possible, rungs))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(name) from error
    if not whole:
        raise _damaged(name)
    return sorted(rungs, key=lambda rung: -2.0 if rung.int4_budget is None else -rung.int4_budget)


def refuse_damaged(certificate: Any, name: str) -> None:
    """Refuse a certificate whose numbers cannot be; one without a ladder promises nothing, and None is none.

    Raises:
        FadeError: names the bundle.
    """
    if certificate is not None and not isinstance(certificate, Mapping):
        raise _damaged(name)
    if certificate and certificate.get("ladder"):
        ladder(certificate, name)


def _possible(rung: Rung) -> bool:
    budget = rung.int4_budget is None or 0 < rung.int4_budget <= 1
    return budget and rung.compression > 0 and bool(rung.kl) and all(map(math.isfinite, rung.kl))


def _damaged(name: str) -> FadeError:
    return FadeError(f"the certificate of {name} is damaged; make it again (pipelines.certify)")
