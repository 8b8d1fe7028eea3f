"""Scores of answers against slow oracles, and intervals against scipy."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from pipelines.evaluation.intervals import bootstrap, interval, wilson
from pipelines.evaluation.tasks import scores
from pipelines.evaluation.tasks.run_code import passes

WORDS = st.lists(st.sampled_from("abc"), max_size=7)


@given(WORDS, WORDS)
def test_rouge_l_is_that_of_the_longest_common_subsequence(output: list[str], reference: list[str]) -> None:
    @cache
    def common(i: int, j: int) -> int:
        if i == len(output) or j == len(reference):
            return 0
        if output[i] == reference[j]:
            return 1 + common(i + 1, j + 1)
        return max(common(i + 1, j), common(i, j + 1))

    longest, expected = common(0, 0), 0.0
    if longest:
        precision, recall = longest / len(output), longest / len(reference)
        expected = (1 + 1.44) * precision * recall / (recall + 1.44 * precision)
    assert scores.rouge_l(" ".join(output), [" ".join(reference)]) == pytest.approx(expected)
    assert scores.rouge_l(" ".join(output), ["zzz", " ".join(reference)]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (scores.number("so 18 eggs", "18"), 1),
        (scores.number("so 17, no, 18 eggs", "18"), 0),
        (scores.number("so 17, no, $1,018.00 for eggs.", "1018", last=True), 1),
        (scores.number("nothing", "18"), 0),
        (scores.fraction_of_numbers("段落27", 27), 1),
        (scores.fraction_of_numbers("27 or 2 or 7", 27), 1 / 3),
        (scores.contains("the number is 12345.", ["2345"]), 1),
        (scores.contains("Walrus", ["walrus", "seal"]), 0.5),
        (scores.same_words("x =  1\ny", "x = 1"), 1),
        (scores.same_words("x = 2", "x = 1"), 0),
    ],
)
def test_answers_are_worth_what_they_should_be(score: float, expected: float) -> None:
    assert score == pytest.approx(expected)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 9), (4, 9), (50, 51), (51, 51)])
def test_wilson_is_its_formula(successes: int, n: int) -> None:
    p, z = successes / n, scipy.stats.norm.ppf(0.975)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    assert wilson(successes, n) == pytest.approx((max(0, middle - half), min(1, middle + half)), abs=1e-12)
    assert interval([1.0] * successes + [0.0] * (n - successes)) == wilson(successes, n)


def test_the_bootstrap_is_scipys() -> None:
    values = np.random.default_rng(1).gamma(2.0, size=23)
    expected = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(2)
    ).confidence_interval
    assert bootstrap(list(values)) == pytest.approx((expected.low, expected.high), rel=0.05)
    assert interval(list(values)) == bootstrap(list(values))


def test_code_is_run_apart_and_only_for_a_while(tmp_path: object) -> None:
    assert passes("import math\nassert math.sqrt(4) == 2")
    assert not passes("def f(:")
    assert not passes("raise SystemExit(3)")
    assert not passes("import time\ntime.sleep(60)", seconds=0.3)
    assert not passes("x = bytearray(1 << 31)")  # more memory than it may have
    assert not passes("open('big', 'wb').write(bytes(1 << 22))")  # a bigger file than it may write
    assert not passes("import os\nassert os.environ.get('HOME')")  # it knows nothing of this process
