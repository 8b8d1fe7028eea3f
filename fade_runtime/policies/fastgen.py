"""FastGen: at the end of a prompt each kv head gets the cheapest policy that recovers its attention.

Source: Ge et al. 2023, Model Tells You What to Discard (arXiv 2310.01801), sections 3.2 and 3.3, algorithm 1. Here the
attention that a policy must recover is that of the prompt's last queries, sinks and recent window are kept by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from fade_runtime.policies.base import WINDOW, Policy, ProfiledTokens, Prompt
from fade_runtime.policies.learned import Learned
from fade_runtime.policies.text import PUNCTUATION, SPECIAL
from fade_runtime.storage.tiers import rank_in_row
from predictor import scores
from predictor.features import attention_rows


class Keeps(IntEnum):
    """What a kv head keeps of the body; each holds what the one before it holds, and costs more."""

    SPECIAL = 0
    PUNCTUATION = 1
    FREQUENT = 2
    LOCAL = 3
    FULL = 4


@dataclass(frozen=True)
class Shares:
    """What the policies hold.

    Attributes:
        recover: share T of a head's attention that its policy must recover.
        frequent: share r_f of the context that counts as frequent. local: share r_l that counts as local.
    """

    recover: float = 0.95
    frequent: float = 0.3
    local: float = 0.3


def kept(
    policy: Tensor | int, classes: Tensor, rank: Tensor, age: Tensor, length: Tensor | int, shares: Shares
) -> Tensor:
    """Which body tokens a policy keeps; all arguments broadcast against each other.

    Args:
        policy: values of :class:`Keeps`.
        classes: of tokens (``text.OTHER``, ``SPECIAL``, ``PUNCTUATION``).
        rank: place of each token among its row's body tokens, by attention received, 0 = most.
        age: tokens that came after it.
        length: of the row's text.
        shares: r_f and r_l.

    Returns:
        bool.

    Example:
        >>> classes, rank, age = torch.tensor([1, 0, 2, 0]), torch.tensor([3, 0, 2, 1]), torch.tensor([3, 2, 1, 0])
        >>> sizes = Shares(frequent=0.25, local=0.5)
        >>> [kept(policy, classes, rank, age, 4, sizes).int().tolist() for policy in Keeps]
        [[1, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    length = torch.as_tensor(length, device=classes.device)
    policy = torch.as_tensor(policy, device=classes.device)
    frequent, local = ((length * share).long() for share in (shares.frequent, shares.local))
    return (
        (classes == SPECIAL)
        | ((policy >= Keeps.PUNCTUATION) & (classes == PUNCTUATION))
        | ((policy >= Keeps.FREQUENT) & (rank < frequent))
        | ((policy >= Keeps.LOCAL) & (age < local))
        | (policy == Keeps.FULL)
    )


def profile(mass: Tensor, classes: Tensor, shares: Shares, n_sink: int, recent_window: int) -> Tensor:
    """The cheapest policy of each kv head that recovers enough.

    Args:
        mass: [H, S] attention that each token of the prompt receives. classes: [S].
        shares: what must be recovered, r_f and r_l.
        n_sink, recent_window: tokens that every policy keeps besides.

    Returns:
        [H] int8, values of :class:`Keeps`.

    Example:
        >>> mass, special = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.1, 0.9, 0.0, 0.0]]), torch.tensor([1, 0, 0, 0])
        >>> chosen = profile(mass, special, Shares(recover=0.9), n_sink=0, recent_window=1)
        >>> [Keeps(policy).name for policy in chosen.tolist()]
        ['SPECIAL', 'FREQUENT']
    """
    length = mass.shape[1]
    slots = torch.arange(length, device=mass.device)
    body = (slots >= n_sink) & (slots < length - recent_window)
    rank = mass.masked_fill(~body, -1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    total = mass.sum(1).clamp(min=torch.finfo(mass.dtype).tiny)
    choice = torch.full_like(mass[:, 0], Keeps.FULL, dtype=torch.int8)
    for policy in sorted(Keeps, reverse=True):
        held = kept(policy, classes, rank, length - 1 - slots, length, shares)
        lost = mass.masked_fill(held | ~body, 0).sum(1)
        choice[lost <= (1 - shares.recover) * total] = policy
    return choice


class FastGen(Policy):
    """A policy for each kv head, found per text; tokens are ranked by accumulated attention, or by a predictor.

    With a predictor this is the combined policy: the head's learned budget is the least that it keeps, the profile,
    made of the predicted attention, may raise it for a text, and the predictor's scores choose the tokens.
    """

    name = "fastgen"
    reads_text = True

    def __init__(self, shares: Shares, n_sink: int, recent_window: int, learned: Learned | None = None) -> None:
        self.shares, self.n_sink, self.recent_window = shares, n_sink, recent_window
        self.ranking: Policy = learned or Accumulated()
        self.decay, self.gain = self.ranking.decay, self.ranking.gain
        self.predictor = self.ranking.predictor
        self.profile_is_floor = learned is not None

    def start(self, prompt: Prompt) -> Tensor | None:
        """As whatever ranks the tokens: [H, S]."""
        return self.ranking.start(prompt)

    def check(self, layers: Sequence[int], kv_heads: int) -> None:
        """As whatever ranks the tokens."""
        self.ranking.check(layers, kv_heads)

    def head_shares(self, layer: int, share: float) -> tuple[float, ...] | None:
        """The learned ones, with a predictor."""
        return self.ranking.head_shares(layer, share)

    def score(self, attention_stats: Tensor, slots: Tensor, seen: int | Tensor, prompt: int | Tensor) -> Tensor:
        """As whatever ranks the tokens: [T]."""
        return self.ranking.score(attention_stats, slots, seen, prompt)

    def profile(self, attention_stats: Tensor, classes: Tensor) -> Tensor:
        """The cheapest sufficient :class:`Keeps` of each kv head, [H] int8, from statistics [H, S] after the prompt."""
        return profile(attention_stats, classes, self.shares, self.n_sink, self.recent_window)

    def narrow(self, scores: Tensor, tokens: ProfiledTokens) -> tuple[Tensor, Tensor]:
        """Tokens that their head keeps come first, special ones before all; not if the profile is a floor.

        Args:
            scores: [T] shares of attention. tokens: of the same order; their profiles are values of :class:`Keeps`.

        Returns:
            scores [T]; how many tokens each row asks for, [R].
        """
        rows = tokens.rows
        order = (2 * rows - scores.double().clamp(max=1)).argsort(stable=True)  # by row, then by share of attention
        rank = torch.empty_like(rows)
        rank[order] = rank_in_row(rows[order])
        keeps, lengths = tokens.profiles[rows], tokens.lengths[rows]
        held = kept(keeps, tokens.classes, rank, tokens.age, lengths, self.shares)
        wanted = torch.bincount(rows[held], minlength=len(tokens.profiles))
        if self.profile_is_floor:
            return scores, wanted
        return (scores + (tokens.classes == SPECIAL)).masked_fill(~held, -1), wanted


class Accumulated(Policy):
    """Attention received from the prompt's last queries and from every step since, per query that could see it."""

    decay = 1.0

    def start(self, prompt: Prompt) -> Tensor:
        """Sum [H, S] over the last :data:`WINDOW` queries of the prompt."""
        last = prompt.query[:, -WINDOW:]
        first = prompt.key.shape[1] - last.shape[1]
        return attention_rows(last, prompt.key, prompt.scaling, first, prompt.sinks).sum(1)

    def score(self, attention_stats: Tensor, slots: Tensor, seen: int | Tensor, prompt: int | Tensor) -> Tensor:
        """Sum divided by the number of counted queries that could see the token: [T]."""
        counted = seen - prompt + torch.as_tensor(prompt, device=attention_stats.device).clamp(max=WINDOW)
        return scores.h2o(attention_stats, torch.minimum(seen - slots, counted))
