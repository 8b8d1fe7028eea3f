"""What an answer is worth: pure functions on texts, in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def contains(output: str, references: Sequence[str]) -> float:
    """Fraction of the reference texts that occur in the output, whatever their case.

    Source: Hsieh et al. 2024, RULER (arXiv 2404.06654), section 3.

    Example:
        >>> contains("It is 41 and Blue.", ["41", "blue", "red", "7"])
        0.5
    """
    return sum(one.lower() in output.lower() for one in references) / len(references)


def number(output: str, reference: str, last: bool = False) -> float:
    """Whether the first (or last) number of the output is the reference; thousands may have commas.

    Example:
        >>> number("It is 1,200 or 5.", "1200"), number("1 + 2 = 3.0", "3", last=True), number("none", "3")
        (1.0, 1.0, 0.0)
    """
    found = [float(one.replace(",", "")) for one in _NUMBER.findall(output)]
    return float(bool(found) and found[-1 if last else 0] == float(reference.replace(",", "")))


def same_words(output: str, reference: str) -> float:
    """Whether the output opens with the reference, spaces and case aside.

    Example:
        >>> same_words(" The  end. And more", "the end")
        1.0
    """
    plain, want = (" ".join(text.lower().split()) for text in (output, reference))
    return float(plain.startswith(want))


def rouge_l(output: str, references: Sequence[str], beta: float = 1.2) -> float:
    """Best F-score, over references, of the longest common subsequence of words; recall counts ``beta`` squared times.

    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", section 3.1; beta as in LongBench's.

    Example:
        >>> round(rouge_l("the cat sat", ["the cat ran", "a dog"]), 3)
        0.667
    """
    return max(_rouge_l(output.split(), reference.split(), beta) for reference in references)


def _rouge_l(output: Sequence[str], reference: Sequence[str], beta: float) -> float:
    before = [0] * (len(reference) + 1)  # lengths of the common subsequence with each prefix of the reference
    for word in output:
        now = [0]
        for at, other in enumerate(reference):
            now.append(before[at] + 1 if word == other else max(before[at + 1], now[-1]))
        before = now
    if not before[-1]:
        return 0.0
    precision, recall = before[-1] / len(output), before[-1] / len(reference)
    return (1 + beta**2) * precision * recall / (recall + beta**2 * precision)


def fraction_of_numbers(output: str, reference: int) -> float:
    """Fraction of all whole numbers in the output that are the reference.

    Source: Bai et al. 2023, LongBench (arXiv 2308.14508), appendix; passage retrieval and counting.

    Example:
        >>> fraction_of_numbers("Paragraph 7, perhaps 12", 7), fraction_of_numbers("none", 7)
        (0.5, 0.0)
    """
    found = [int(one) for one in re.findall(r"\d+", output)]
    return found.count(reference) / len(found) if found else 0.0
