"""From budgets and scores to the tiers of a layer's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fade_runtime.config import FadeConfig
from fade_runtime.layer.allocation import Contenders
from fade_runtime.layer.setup import LayerSetup
from fade_runtime.layer.store import BodyTokens, TokenStore
from fade_runtime.policies import Policy, ProfiledTokens
from fade_runtime.policies.comparison import comparable
from fade_runtime.storage.tiers import Budgets, Tier, plan_tiers


def row_budgets(
    config: FadeConfig,
    policy: Policy,
    layer: int,
    lengths: Tensor,
    heads: int,
    wanted: Tensor | None = None,
    fraction: float | None = None,
) -> Budgets:
    """What each row (batch x kv head) of a layer may keep.

    Args:
        config: the budgets per kv head.
        policy: may give each kv head of the layer its own share of their sum.
        layer: its index.
        lengths: [B] int64 tokens of each sequence so far, padding left out.
        heads: kv heads.
        wanted: [R] tokens that the profiles of the text ask for, or None. They lower a budget, or, if the policy says
            so and no size of the cache is the target, raise it.
        fraction: budget of a kv head as a fraction of the context, in place of the config's
            (:mod:`fade_runtime.config.memory_target`).

    Example:
        >>> config = FadeConfig(int4_budget=0.25, low_budget=8, n_sink=0)
        >>> budgets = row_budgets(config, Policy(), 0, torch.tensor([100, 40]), heads=2)
        >>> budgets.high.tolist(), budgets.low.tolist()
        ([25, 25, 10, 10], [8, 8, 8, 8])
    """
    high_counts: list[int] = []
    low_counts: list[int] = []
    by_row = None if wanted is None else wanted.view(-1, heads).tolist()
    bound = min if not policy.profile_is_floor else max if fraction is None else lambda budget, _: budget
    for row, length in enumerate(lengths.tolist()):
        high, low = (config.budgets(length) or (length, 0)) if fraction is None else (int(fraction * length), 0)
        total = high + low
        shares = policy.head_shares(layer, min(total, length) / max(length, 1))
        if shares is None and by_row is None:
            high_counts += [high] * heads
            low_counts += [low] * heads
            continue
        totals = [total] * heads if shares is None else [round(share * length) for share in shares]
        if by_row is not None:
            totals = [bound(each, ask) for each, ask in zip(totals, by_row[row])]
        first = [round(each * high / max(total, 1)) for each in totals]
        high_counts += first
        low_counts += [each - some for each, some in zip(totals, first)]
    tau, low_tau = config.shares
    device = lengths.device
    return Budgets(torch.tensor(high_counts, device=device), torch.tensor(low_counts, device=device), tau, low_tau)


def plan(
    setup: LayerSetup, store: TokenStore, tokens: BodyTokens, scores: Tensor | None, reads: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Where a layer's policy and budgets want its body tokens.

    Args:
        setup: gives policy, budgets and what is known of the text.
        store: holds the tokens. tokens: T of them, those that leave full precision included.
        scores: [T] the policy's, higher = keep; None if nothing is ranked.
        reads: [B] bool, sequences at the end of a prompt, if one budget is shared out over all layers.

    Returns:
        [T] int64 tiers; [T] scores that decided, or None if everything goes to one tier.
    """
    config, policy = setup.config, setup.policy
    if setup.window is not None:
        lengths = store.sequences.lengths.repeat_interleave(store.heads)
        left = tokens.slots <= lengths[tokens.rows] - setup.window  # no later query attends to it
        return torch.where(left, int(Tier.EVICTED), int(Tier.HIGH)), None
    if scores is None:
        return tokens.tiers if config.int4_budget is None else torch.full_like(tokens.tiers, int(config.low)), None
    lengths, heads = store.sequences.lengths, store.heads
    wanted: Tensor | None = None
    if store.profiles is not None and setup.text is not None:
        batch = tokens.rows // heads
        classes = store.sequences.by_slot(setup.text.classes(store.seen))[batch, tokens.slots]
        age = lengths[batch] - 1 - tokens.slots
        profiled = ProfiledTokens(tokens.rows, classes, age, store.profiles.flatten(), lengths.repeat_interleave(heads))
        scores, wanted = policy.narrow(scores, profiled)
    fraction = None if setup.memory is None else setup.memory.share(lengths)
    budgets = row_budgets(config, policy, setup.index, lengths, heads, wanted, fraction)
    if setup.allocation is not None and store.extra is not None:
        own, (high, low) = attainable(config, lengths, budgets), store.extra.flatten(0, 1).unbind(1)
        budgets = Budgets((own.high + high).clamp(min=0), (own.low + low).clamp(min=0))
        if reads is not None:
            given = setup.allocation.read(setup.index, contenders(setup, store, tokens, scores, lengths, own))
            first = reads.repeat_interleave(heads)
            high, low = torch.where(first, given.high, budgets.high), torch.where(first, given.low, budgets.low)
            budgets = Budgets(high, low)
    planned = plan_tiers(scores, tokens.rows, budgets, slots=tokens.slots, tiers=tokens.tiers, low_tier=config.low)
    return planned.tiers.long(), scores


def contenders(
    setup: LayerSetup, store: TokenStore, tokens: BodyTokens, scores: Tensor, lengths: Tensor, budgets: Budgets
) -> Contenders:
    """A layer's body tokens as they compete with those of others.

    Args:
        setup: gives the options. store: holds the tokens. tokens: T of them. scores: [T] the policy's.
        lengths: [B] tokens of each sequence. budgets: what each row would have by itself.
    """
    config = setup.config
    if store.comparisons is not None:
        scores = comparable(scores, store.comparisons.flatten(0, 1)[tokens.rows])
    own = attainable(config, lengths, budgets)
    return Contenders(scores, tokens.rows, tokens.slots, tokens.tiers, own, lengths, config.low)


def attainable(config: FadeConfig, lengths: Tensor, budgets: Budgets) -> Budgets:
    """Budgets of rows, less what is beyond the tokens between sinks and window; ``lengths`` [B].

    Example:
        >>> given = Budgets(torch.tensor([50, 90]), torch.tensor([50, 9]))
        >>> bounded = attainable(FadeConfig(n_sink=4, recent_window=16), torch.tensor([100]), given)
        >>> bounded.high.tolist(), bounded.low.tolist()
        ([50, 80], [30, 0])
    """
    heads = len(budgets.high) // len(lengths)
    most = (lengths - config.recent_window - config.n_sink).clamp(min=0).repeat_interleave(heads)
    high = torch.minimum(budgets.high, most)
    return Budgets(high, torch.minimum(budgets.low, most - high))
