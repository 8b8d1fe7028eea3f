"""Queries, keys and values of one layer -> what a predictor sees. Training and serving call the same code.

Everything here is for ONE sequence without padding and one layer; a kv head's query heads are averaged.
Shapes: H kv heads, Hq query heads, S prompt tokens, W history steps, N blocks, F token features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from predictor import learned_sinks, rope, scores
from predictor.errors import FadeError

FEATURES = (
    "log_ema", "log_ea", "log_mean", "log_max", "log_last", "log_snap", "key_norm", "value_norm", "age", "log_ahead",
)  # fmt: skip
FIRST_FEATURES = FEATURES[:9]  # of traces and bundles of earlier releases
MAX_SIZE = 1 << 20  # steps, tokens of a block
FLOOR = 1e-9  # smallest attention probability that a logarithm tells apart
LAST_ROWS = 8  # rows in the "log_last" feature
AHEAD_ROWS = 4  # rows in the "log_ahead" feature
EA_SINKS = 4  # queries of the attention sinks are left out of the moments: their norm is not typical


@dataclass(frozen=True)
class FeatureSpec:
    """What the featuriser computes; stored with every trace set and every bundle.

    Attributes:
        window: history steps W, in queries.
        block: consecutive tokens pooled together in attention history.
        ema_decay: decay of the moving average over the window.
        horizon: future steps that Expected Attention averages over.
        names: token features, in order.
        version: of the definitions in this file.
        hidden: whether keys before their rotation, and values, are recorded too.
    """

    window: int = 64
    block: int = 16
    ema_decay: float = 0.95
    horizon: int = 128
    names: tuple[str, ...] = FEATURES
    version: int = 1
    hidden: bool = False

    def __post_init__(self) -> None:
        """Refuse what no featuriser computes.

        Raises:
            FadeError: names the setting.
        """
        for name in ("window", "block", "horizon"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
                raise FadeError(f"feature spec has {name} {value!r}; use a whole number from 1 to {MAX_SIZE:,}")
        if not isinstance(self.ema_decay, int | float) or not 0 <= self.ema_decay < 1:
            raise FadeError(f"feature spec has ema_decay {self.ema_decay!r}; use a share in [0, 1)")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dictionary; ``hidden`` is named only when true, so that older releases read the rest."""
        stored = {**asdict(self), "names": list(self.names)}
        return stored if self.hidden else {name: value for name, value in stored.items() if name != "hidden"}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> FeatureSpec:
        """Rebuild a spec; refuse one whose features this code does not compute.

        Raises:
            FadeError: unknown version, unknown fields or unknown names.
        """
        version, names = stored.get("version"), tuple(stored.get("names", ()))
        if version != cls.version or names not in (FEATURES, FIRST_FEATURES):
            raise FadeError(
                f"feature spec version {version} with {len(names)} features is not version {cls.version} with "
                f"{len(FEATURES)}; collect the traces and train again with this release"
            )
        if unknown := set(stored) - set(cls.__dataclass_fields__):
            raise FadeError(f"feature spec has unknown fields {sorted(unknown)}; it was written by another release")
        return cls(**{**stored, "names": names})


@dataclass
class Hidden:
    """The vectors themselves, and whose they are: each kv head speaks a language of its own.

    Attributes:
        key: [H, S, D] float32, before the rotation. value: [H, S, D] float32.
        layer, head: [H] int64.
    """

    key: Tensor
    value: Tensor
    layer: Tensor
    head: Tensor


@dataclass
class PrefillFeatures:
    """What one layer's prefill shows of one sequence.

    Attributes:
        tokens: [H, S, F] float32 token features, in the order of ``FeatureSpec.names``.
        history_mean: [H, W, N] float32 attention rows of the last W queries, mean over each block's tokens.
        history_max: [H, W, N] float32, maximum over each block's tokens.
        hidden: keys and values, if the spec asks for them.
        heads: [H, 2] int64, the layer of each row and its kv head.
    """

    tokens: Tensor
    history_mean: Tensor
    history_max: Tensor
    hidden: Hidden | None = None
    heads: Tensor | None = None


def attention_rows(query: Tensor, key: Tensor, scaling: float, first: int, sinks: Tensor | None = None) -> Tensor:
    """Causal attention of some queries, averaged over the query heads of each kv head.

    Args:
        query: [Hq, Q, D]; row i is the query at slot ``first + i``.
        key: [H, S, D] with ``first + Q <= S``.
        scaling: factor on the scores.
        first: slot of the first query.
        sinks: [Hq] learned sinks of :mod:`predictor.learned_sinks`, or None.

    Returns:
        [H, Q, S] float32; each row sums to 1, to less where there are sinks.

    Example:
        >>> rows = attention_rows(torch.randn(4, 3, 8), torch.randn(2, 10, 8), 8**-0.5, first=7)
        >>> rows.shape, bool(torch.allclose(rows.sum(-1), torch.ones(2, 3))), float(rows[0, 0, 8:].sum())
        (torch.Size([2, 3, 10]), True, 0.0)
    """
    heads, groups = key.shape[0], query.shape[0] // key.shape[0]
    steps, slots = query.shape[1], key.shape[1]
    scored = torch.matmul(query.reshape(heads, groups * steps, -1), key.transpose(1, 2)).float() * scaling
    at = torch.arange(slots, device=key.device)
    hidden = at > (first + torch.arange(steps, device=key.device))[:, None]  # [Q, S]
    scored = scored.view(heads, groups, steps, slots).masked_fill(hidden, -math.inf)
    return learned_sinks.softmax(scored, _by_group(sinks, heads)).mean(1)


def _by_group(sinks: Tensor | None, heads: int) -> Tensor | None:
    """[Hq] as [H, G, 1] float32, for scores [H, G, Q, S]."""
    return None if sinks is None else sinks.float().view(heads, -1, 1)


def causal_probabilities(
    query: Tensor, key: Tensor, scaling: float, chunk: int = 64, sinks: Tensor | None = None
) -> Iterator[tuple[int, int, Tensor]]:
    """Causal attention of all queries of a prompt, a chunk at a time, in one buffer that is used again.

    Args:
        query: [Hq, S, D]. key: [H, S, D]. scaling: factor on the scores. chunk: queries at a time.
        sinks: [Hq] learned sinks, or None.

    Yields:
        first and last slot + 1 of the queries, and their attention [H, G x steps, last] float32, to be used at once.
    """
    heads, slots, dim = key.shape
    grouped = (query * scaling).view(heads, -1, slots, dim)
    groups = grouped.shape[1]
    room = torch.empty(heads * groups * min(chunk, slots) * slots, dtype=key.dtype, device=key.device)
    for first in range(0, slots, chunk):
        part = grouped[:, :, first : first + chunk]
        steps = part.shape[2]
        seen = first + steps
        scored = room[: heads * groups * steps * seen].view(heads, groups * steps, seen)
        torch.bmm(part.reshape(heads, groups * steps, dim), key[:, :seen].transpose(1, 2), out=scored)
        scored = scored.float()
        later = torch.ones(steps, steps, dtype=torch.bool, device=key.device).triu(1)
        # only the newest columns can be hidden
        by_group = scored.view(heads, groups, steps, seen)
        by_group[..., first:].masked_fill_(later, -math.inf)
        learned_sinks.softmax(by_group, _by_group(sinks, heads), out=by_group)
        yield first, seen, scored


@torch.no_grad()
def h2o_mass(query: Tensor, key: Tensor, scaling: float, chunk: int = 64, sinks: Tensor | None = None) -> Tensor:
    """Attention that each token received from all queries of the prompt, in chunks of queries.

    Args:
        query: [Hq, S, D]. key: [H, S, D]. scaling: factor on the scores. chunk: queries at a time.
        sinks: [Hq] learned sinks, or None.

    Returns:
        [H, S] float32, averaged over the query heads; slot j was visible to S - j queries.
    """
    mass = torch.zeros(key.shape[:2], dtype=torch.float32, device=key.device)
    for _, seen, probabilities in causal_probabilities(query, key, scaling, chunk, sinks):
        mass[:, :seen] += probabilities.sum(1)
    return mass * len(key) / len(query)


@torch.no_grad()
def attention_and_mass(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, chunk: int = 64, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of a whole prompt, and what :func:`h2o_mass` gives, in one pass.

    Args:
        query: [Hq, S, D]. key: [H, S, D]. value: [H, S, Dv]. scaling: factor on the scores. chunk: queries at a time.
        sinks: [Hq] learned sinks, or None.

    Returns:
        output [Hq, S, Dv] in the dtype of the values; mass [H, S] float32.

    Example:
        >>> query, key, value = torch.randn(4, 9, 8), torch.randn(2, 9, 8), torch.randn(2, 9, 8)
        >>> out, mass = attention_and_mass(query, key, value, 8**-0.5)
        >>> repeated = [t.repeat_interleave(2, 0) for t in (key, value)]
        >>> right = torch.nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True)
        >>> bool(torch.allclose(out, right, atol=1e-6)), bool(torch.equal(mass, h2o_mass(query, key, 8**-0.5)))
        (True, True)
    """
    heads, slots = key.shape[:2]
    out = value.new_empty(heads, len(query) // heads, slots, value.shape[2])
    mass = torch.zeros(heads, slots, dtype=torch.float32, device=key.device)
    for first, seen, probabilities in causal_probabilities(query, key, scaling, chunk, sinks):
        got = torch.bmm(probabilities.to(value.dtype), value[:, :seen])  # [H, G x steps, Dv]
        out[:, :, first:seen] = got.unflatten(1, (out.shape[1], -1))
        mass[:, :seen] += probabilities.sum(1)
    return out.flatten(0, 1), mass * heads / len(query)


def block_sizes(slots: int, block: int) -> Tensor:
    """Number of real tokens in each of the ``ceil(slots / block)`` blocks, as [N] integers.

    Example:
        >>> block_sizes(37, 16).tolist()
        [16, 16, 5]
    """
    count = math.ceil(slots / block)
    return (slots - block * torch.arange(count)).clamp(max=block)


def pool_blocks(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Pool non-negative rows [..., S] over blocks of consecutive tokens.

    Returns:
        mean and maximum over each block's real tokens, each [..., ceil(S / block)].

    Example:
        >>> pool_blocks(torch.tensor([1.0, 3.0, 5.0]), block=2)
        (tensor([2., 5.]), tensor([3., 5.]))
    """
    slots = rows.shape[-1]
    blocks = pad(rows, (0, -slots % block)).unflatten(-1, (-1, block))
    return blocks.sum(-1) / block_sizes(slots, block).to(rows), blocks.amax(-1)


def expected_attention(
    query: Tensor,
    key: Tensor,
    scaling: float,
    table: rope.Table | None,
    horizon: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention that queries of the next ``horizon`` steps are expected to give each token of the prompt.

    Un-rotated queries are taken as normal, with the prompt's mean and covariance; the rotation is averaged over
    the coming positions; the expectation of ``exp(score)`` is then closed-form, and is normalised over tokens and sink.

    Args:
        query: [Hq, S, D] rotated queries of the whole prompt. key: [H, S, D] rotated keys. scaling: score factor.
        table: rotary table of slots 0 .. S + horizon - 1, or None for models without rotation.
        sinks: [Hq] learned sinks, or None.

    Returns:
        log of the expected probability, [H, S] float32, averaged (as probabilities) over the query group.

    Source: Devoto et al. 2025, Expected Attention (arXiv 2510.00636), section 3, without the value norm.
    """
    heads, slots = key.shape[:2]
    queries = query.float()
    if table is not None:
        queries = rope.unrotate(queries, table[:slots])
    queries = queries[:, min(EA_SINKS, slots - 1) :]
    mean = queries.mean(1)  # [Hq, D]
    centred = queries - mean[:, None]
    cov = centred.transpose(1, 2) @ centred / centred.shape[1]  # [Hq, D, D]
    if table is not None:
        coming = table[slots : slots + horizon]
        future = rope.Table(coming.cos.mean(0), coming.sin.mean(0), table.interleaved)
        mean = rope.rotate(mean, future)
        cov = rope.rotate(rope.rotate(cov, future).transpose(1, 2), future)
    keys = key.float() * scaling
    mean, cov = mean.view(heads, -1, mean.shape[-1]), cov.view(heads, -1, *cov.shape[1:])
    spread = torch.matmul(keys[:, None], cov).mul_(keys[:, None]).sum(-1)  # [H, G, S]
    expected = torch.matmul(mean, keys.transpose(1, 2)) + spread / 2
    log_probability = expected.log_softmax(-1)
    if sinks is not None:
        share = expected.logsumexp(-1, keepdim=True) - sinks.float().view(heads, -1, 1)
        log_probability = log_probability + logsigmoid(share)
    return log_probability.logsumexp(1) - math.log(log_probability.shape[1])


def floored_log(probability: Tensor) -> Tensor:
    """Logarithm of attention probabilities [...], of which those below :data:`FLOOR` count as that; the same shape."""
    return probability.clamp(min=FLOOR).log()


def _log_norm(x: Tensor) -> Tensor:
    log = x.float().norm(dim=-1).clamp(min=FLOOR).log()
    return log - log.mean(-1, keepdim=True)


def prefill_features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    table: rope.Table | None,
    spec: FeatureSpec,
    layer: int = 0,
    sinks: Tensor | None = None,
) -> PrefillFeatures:
    """Compute what a predictor sees at the end of a prompt.

    Args:
        query: [Hq, S, D] rotated. key, value: [H, S, D]. scaling: factor on the scores.
        table: rotary table of slots 0 .. S + horizon - 1 (``rope.Rotary.table``), or None without rotation.
        spec: window, block, decay and horizon. A prompt shorter than the window repeats its first row.
        layer: index in the model. sinks: [Hq] learned sinks, or None.

    Returns:
        Features of S tokens; nothing in them depends on anything after the prompt.

    Example:
        >>> spec = FeatureSpec(window=4, block=4)
        >>> out = prefill_features(torch.randn(4, 9, 8), torch.randn(2, 9, 8), torch.randn(2, 9, 8),
        ...                        scaling=8**-0.5, table=None, spec=spec)
        >>> out.tokens.shape, out.history_mean.shape
        (torch.Size([2, 9, 10]), torch.Size([2, 4, 3]))
    """
    slots = key.shape[1]
    window = min(spec.window, slots)
    rows = attention_rows(query[:, -window:], key, scaling, slots - window, sinks)
    if window < spec.window:
        rows = torch.cat((rows[:, :1].expand(-1, spec.window - window, -1), rows), dim=1)
    age = torch.arange(slots, 0, -1, device=key.device, dtype=torch.float32)
    columns = {
        "log_ema": floored_log(scores.ema(rows, spec.ema_decay)),
        "log_ea": expected_attention(query, key, scaling, table, spec.horizon, sinks).clamp(min=math.log(FLOOR)),
        "log_mean": floored_log(rows.mean(1)),
        "log_max": floored_log(rows.amax(1)),
        "log_last": floored_log(rows[:, -LAST_ROWS:].mean(1)),
        "log_snap": floored_log(scores.snapkv(rows)),
        "key_norm": _log_norm(key),
        "value_norm": _log_norm(value),
        "age": (age.log() - math.log(1024)).expand(key.shape[0], -1),
    }
    if "log_ahead" in spec.names:
        columns["log_ahead"] = floored_log(
            scores.ahead(rows[:, -AHEAD_ROWS:], spec.horizon, skip=EA_SINKS) / spec.horizon
        )
    mean, peak = pool_blocks(rows, spec.block)
    tokens = torch.stack([columns[name] for name in spec.names], dim=-1)
    head = torch.arange(key.shape[0], device=key.device)
    heads = torch.stack((torch.full_like(head, layer), head), dim=-1)
    return PrefillFeatures(tokens, mean, peak, _hidden(key, value, table, heads) if spec.hidden else None, heads)


def _hidden(key: Tensor, value: Tensor, table: rope.Table | None, heads: Tensor) -> Hidden:
    """Keys [H, S, D] with their rotation undone, in float32, and values."""
    plain = key.float() if table is None else rope.unrotate(key.float(), table[: key.shape[1]])
    return Hidden(plain, value.float(), *heads.unbind(-1))
