"""How sure a mean over a few examples is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import binomtest, t

RESAMPLES = 4000
SMALLEST = 1e-6  # losses below this are all the same


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % score interval of a proportion.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22(158).

    Example:
        >>> tuple(round(bound, 3) for bound in wilson(8, 10))
        (0.49, 0.943)
    """
    interval = binomtest(successes, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """95 % percentile interval of a mean, by resampling; always the same for the same values.

    With few values it is too narrow: it cannot know of what it has not seen.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3.

    Example:
        >>> low, high = bootstrap([1.0, 2.0, 3.0, 4.0, 5.0])
        >>> 1.5 < low < 2.3, 3.7 < high < 4.5
        (True, True)
    """
    data = np.asarray(values, float)
    resampled = np.random.default_rng(0).integers(len(data), size=(RESAMPLES, len(data)))
    low, high = np.percentile(data[resampled].mean(1), [2.5, 97.5])
    return float(low), float(high)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean: Wilson's where each value is 0 or 1, the bootstrap's otherwise.

    Example:
        >>> interval([1.0, 0.0]) == wilson(1, 2), interval([0.5, 0.5])
        (True, (0.5, 0.5))
    """
    if set(values) <= {0.0, 1.0}:
        return wilson(int(sum(values)), len(values))
    return bootstrap(values)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """How many times larger their values are than ours on the same examples, and its 95 % interval.

    The geometric mean of the ratios; Student's interval of the mean of their logarithms. One example has no interval.

    Source: Bland and Altman 1996, "Transformations, means, and confidence intervals", BMJ 312:1079.

    Example:
        >>> times, (low, high) = paired_ratio([0.1, 0.2, 0.4], [0.2, 0.5, 0.7])
        >>> round(times, 2), round(low, 2), round(high, 2)
        (2.06, 1.32, 3.22)
    """
    logs = np.log(np.maximum(theirs, SMALLEST)) - np.log(np.maximum(ours, SMALLEST))
    mean, n = float(logs.mean()), len(logs)
    half = float(t.ppf(0.975, n - 1) * logs.std(ddof=1) / np.sqrt(n)) if n > 1 else np.inf
    return float(np.exp(mean)), (float(np.exp(mean - half)), float(np.exp(mean + half)))
