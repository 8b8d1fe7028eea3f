"""Networks that forecast the next attention over blocks from its history.

Shapes: R rows (one document, layer, kv head each), W history steps, N blocks, L steps of a timeline, P of them to
forecast, K moving averages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from predictor import scores
from predictor.batches import block_mass
from predictor.errors import FadeError
from predictor.features import FLOOR
from predictor.scorenet import MIN_SPREAD, BlockNet

MIN_MASS = 1e-6  # block mass below which float16 traces tell nothing apart; the image is cut there
SOFTPLUS_BETA = 4.0  # of the softplus, in units of an even spread: it changes only what is near nothing
DECAYS = (0.0, 0.5, 0.7, 0.85, 0.95, 0.99)
OWN_SCALE = 3.0  # learning rate of a head's own numbers, relative to weights that every row trains


class BlockCNN(BlockNet):
    """Convolutions over attention history as a two-dimensional time series, one forecast per block of tokens.

    The published stack (3x3, 3x3, mean over time, 1x1), as a residual on the log of the moving average of each
    block's mass. It sees three planes: the log of the mass, the same against the moving average, and the time, which
    the mean would otherwise forget. A block's forecast is spread over its tokens in proportion to their averages.

    Args:
        window: history steps W.
        channels: of the two 3x3 convolutions.
        block: tokens in a block.
        ema_decay: of the moving average.

    Source: AttentionPredictor (arXiv 2502.04077), section 4.2, figure 4.

    Example:
        >>> net = BlockCNN(window=4)
        >>> history = torch.rand(3, 4, 6)
        >>> torch.allclose(net(history), scores.ema(history).log())  # untrained, it is the moving average
        True
    """

    kind = "cnn"

    def __init__(
        self, window: int = 64, channels: tuple[int, int] = (16, 32), block: int = 16, ema_decay: float = 0.95
    ) -> None:
        super().__init__()
        self.window, self.channels, self.block, self.ema_decay = window, tuple(channels), block, ema_decay
        self.first = nn.Conv2d(3, channels[0], 3, padding=1)
        self.second = nn.Conv2d(channels[0], channels[1], 3, padding=1)
        self.head = nn.Conv1d(channels[1], 1, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))

    def config(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "channels": list(self.channels),
            "block": self.block,
            "ema_decay": self.ema_decay,
        }

    @torch.no_grad()
    def calibrate(self, batch: Mapping[str, Tensor]) -> None:
        """Standardise the log of block mass [R, W, N] over the real blocks."""
        log = block_mass(batch).clamp(min=MIN_MASS).log()
        self._standardise(log.transpose(1, 2)[batch["block_mask"]].reshape(-1, 1))

    def forward(self, history: Tensor, mask: Tensor | None = None, heads: Tensor | None = None) -> Tensor:
        """As :meth:`BlockNet.forward`, [R, N] from a history [R, W, N]."""
        real = torch.ones_like(history[:, 0]) if mask is None else mask.to(history)
        real = real[:, None, None]  # [R, 1, 1, N]
        base = scores.ema(history, self.ema_decay).clamp(min=FLOOR).log()  # [R, N]
        log = history.clamp(min=MIN_MASS).log()
        time = torch.linspace(-1, 1, history.shape[1], device=log.device)[:, None].expand_as(log)
        against = log - base.clamp(min=math.log(MIN_MASS))[:, None]
        image = torch.stack(((log - self.shift) / self.scale, against, time), dim=1) * real  # [R, 3, W, N]
        image = torch.relu(self.first(image)) * real
        pooled = torch.relu(self.second(image)).mean(2)  # [R, C, N]
        return base + self.head(pooled).squeeze(1)


class PublishedCNN(BlockNet):
    """AttentionPredictor's network as published: mass in, mass out, no residual; train it with ``mse_share``.

    It stands beside :class:`BlockCNN` for comparison. Mass is in units of its mean, or it would train for ever. A
    sharp softplus, the identity but for mass near nothing, keeps a forecast positive, so that it has a logarithm.

    Args:
        window: history steps W.
        channels: of the two 3x3 convolutions.
        block: tokens in a block.

    Source: AttentionPredictor (arXiv 2502.04077), section 4.2, figure 4.

    Example:
        >>> PublishedCNN()(torch.rand(3, 64, 6)).shape
        torch.Size([3, 6])
    """

    kind = "cnn_published"

    def __init__(self, window: int = 64, channels: tuple[int, int] = (16, 32), block: int = 16) -> None:
        super().__init__()
        self.window, self.channels, self.block = window, tuple(channels), block
        self.first = nn.Conv2d(1, channels[0], 3, padding=1)
        self.second = nn.Conv2d(channels[0], channels[1], 3, padding=1)
        self.head = nn.Conv1d(channels[1], 1, 1)
        self.register_buffer("scale", torch.tensor(0.01))

    def config(self) -> dict[str, Any]:
        return {"window": self.window, "channels": list(self.channels), "block": self.block}

    @torch.no_grad()
    def calibrate(self, batch: Mapping[str, Tensor]) -> None:
        """Set the unit of mass, its mean over the real blocks of [R, W, N]."""
        self.scale.copy_(block_mass(batch).transpose(1, 2)[batch["block_mask"]].mean())

    def forward(self, history: Tensor, mask: Tensor | None = None, heads: Tensor | None = None) -> Tensor:
        """As :meth:`BlockNet.forward`, [R, N] from a history [R, W, N]."""
        real = torch.ones_like(history[:, 0]) if mask is None else mask.to(history)
        real = real[:, None, None]  # [R, 1, 1, N]
        image = torch.relu(self.first(history[:, None] / self.scale * real)) * real
        pooled = torch.relu(self.second(image)).mean(2)  # [R, C, N]
        mass = softplus(self.head(pooled).squeeze(1), beta=SOFTPLUS_BETA) * self.scale
        return mass.clamp(min=FLOOR).log()


def average_weights(at: Tensor, steps: int, decays: Sequence[float]) -> Tensor:
    """Weights of moving averages over the rows before each place in a timeline.

    Args:
        at: [P] places; the average at place p covers rows 0 .. p - 1, of which the newest weighs most.
        steps: rows L in the timeline.
        decays: of the K averages; 0 is the newest row alone.

    Returns:
        [P, K, L]; each average's weights sum to 1.

    Example:
        >>> average_weights(torch.tensor([1, 2]), steps=3, decays=[0.5])
        tensor([[[1.0000, 0.0000, 0.0000]],
        <BLANKLINE>
                [[0.3333, 0.6667, 0.0000]]])
    """
    age = at[:, None] - 1 - torch.arange(steps, device=at.device)  # [P, L]
    decay = torch.tensor(decays, dtype=torch.float32, device=at.device)[:, None]
    weights = (decay ** age.clamp(min=0)[:, None]) * (age >= 0)[:, None]
    return weights / weights.sum(-1, keepdim=True)


def advance(bank: Tensor, row: Tensor, seen: int, decays: Sequence[float]) -> Tensor:
    """Bring moving averages up to date with one more row: all that a decode step has to keep and to do.

    Args:
        bank: [..., K, N] averages over ``seen`` rows. row: [..., N'] mass of each block now, N' >= N.
        seen: rows averaged so far. decays: of the K averages, all below 1.

    Returns:
        [..., K, N'].

    Example:
        >>> rows = torch.rand(5, 3)
        >>> whole = average_weights(torch.tensor([4, 5]), 5, DECAYS) @ rows
        >>> torch.allclose(advance(whole[0], rows[4], seen=4, decays=DECAYS), whole[1])
        True
    """
    count = [(1 - decay ** (seen + 1)) / (1 - decay) for decay in decays]  # rows, each by its weight
    pace = 1 / torch.tensor(count, device=bank.device)[:, None]
    bank = pad(bank, (0, row.shape[-1] - bank.shape[-1]))
    return bank + (row[..., None, :] - bank) * pace


def modulated(channels: Tensor, own: Tensor) -> Tensor:
    """Channels [R, C, N] scaled by 1 plus the first of two numbers, and shifted by the second, [R, 2, C].

    Source: Perez et al. 2018, FiLM (arXiv 1709.07871), section 2.

    Example:
        >>> modulated(torch.ones(1, 1, 2), torch.tensor([[[1.0], [0.5]]]))
        tensor([[[2.5000, 2.5000]]])
    """
    scale, shift = own[..., None].unbind(1)
    return channels * (1 + scale) + shift


class EmaBank(BlockNet):
    """Convolutions along the blocks over a bank of moving averages; a residual on the best one of them.

    It keeps no history: :func:`advance` updates the bank with each row, and :meth:`forecast` reads it, so that it can
    re-select blocks while decoding. It sees each average against the base, the base itself, the base relative to the
    row's mean and spread, and the block's age. Where it knows the layers and kv heads of the language model, each
    head scales and shifts the channels of both convolutions by numbers of its own: one follows the last row, another
    what it has attended to for long.

    Args:
        decays: of the averages.
        base: the decay, one of ``decays``, whose average the untrained network is.
        hidden: channels.
        block: tokens in a block.
        layers, kv_heads: of the language model whose heads have numbers of their own; 0 for one network for all.

    Example:
        >>> net, history = EmaBank(base=0.95), torch.rand(3, 64, 6)
        >>> torch.allclose(net(history), scores.ema(history).log(), atol=1e-4)  # untrained, it is one average
        True
    """

    kind = "ema_bank"

    def __init__(
        self,
        decays: Sequence[float] = DECAYS,
        base: float = 0.7,
        hidden: int = 40,
        block: int = 16,
        layers: int = 0,
        kv_heads: int = 0,
    ) -> None:
        super().__init__()
        self.decays, self.base, self.hidden, self.block = tuple(decays), base, hidden, block
        self.layers, self.kv_heads = layers, kv_heads
        if base not in self.decays:
            raise FadeError(f"base {base} is not one of the decays {list(self.decays)}; add it to them")
        self.index = self.decays.index(base)
        inputs = len(self.decays) + 4
        self.first = nn.Conv1d(inputs, hidden, 3, padding=1)
        self.second = nn.Conv1d(hidden, hidden, 3, padding=1)
        self.head = nn.Conv1d(hidden, 1, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]
        if bool(layers) != bool(kv_heads):
            raise FadeError(f"layers {layers}, kv_heads {kv_heads} name no head; set both, or neither")
        if layers:
            self.own = nn.Parameter(torch.zeros(layers, kv_heads, 2, 2, hidden))  # convolution; scale, shift
        self.register_buffer("shift", torch.zeros(inputs))
        self.register_buffer("scale", torch.ones(inputs))

    def config(self) -> dict[str, Any]:
        common = {"decays": list(self.decays), "base": self.base, "hidden": self.hidden, "block": self.block}
        return {**common, "layers": self.layers, "kv_heads": self.kv_heads}

    @torch.no_grad()
    def calibrate(self, batch: Mapping[str, Tensor]) -> None:
        """Standardise each input channel [R, C, N] over the real blocks."""
        history, mask = block_mass(batch), batch["block_mask"]
        inputs = self._inputs(self.bank(history), mask)
        self._standardise(inputs.transpose(1, 2)[mask])

    def bank(self, history: Tensor) -> Tensor:
        """Return the moving averages [..., K, N] over all rows of a history [..., L, N]."""
        steps = history.shape[-2]
        weights = average_weights(torch.tensor([steps], device=history.device), steps, self.decays)
        return weights[0] @ history

    def forward(self, history: Tensor, mask: Tensor | None = None, heads: Tensor | None = None) -> Tensor:
        """As :meth:`BlockNet.forward`, [R, N] from a history [R, W, N]."""
        return self.forecast(self.bank(history), mask, heads)

    def forecasts(self, timeline: Tensor, at: Tensor, mask: Tensor, heads: Tensor | None = None) -> Tensor:
        """As :meth:`BlockNet.forecasts`, [R, P, N], but over all rows [R, L, N] before a step and not only W."""
        weights = average_weights(at, timeline.shape[1], self.decays)
        banks = torch.einsum("pkl,rln->rpkn", weights, timeline)
        each = None if heads is None else heads.repeat_interleave(len(at), 0)
        return self.forecast(banks.flatten(0, 1), mask.flatten(0, 1), each).unflatten(0, mask.shape[:2])

    def forecast(self, bank: Tensor, mask: Tensor | None = None, heads: Tensor | None = None) -> Tensor:
        """Forecast the log of each block's mass.

        Args:
            bank: [R, K, N] averages. mask: [R, N], False where a row is padded. heads: [R, 2] layer and kv head.

        Returns:
            [R, N], unnormalised.

        Raises:
            FadeError: it knows the heads apart and ``heads`` is None, or they are of another model.
        """
        mask = torch.ones_like(bank[:, 0], dtype=torch.bool) if mask is None else mask
        real = mask[:, None].to(bank)
        inputs = (self._inputs(bank, mask) - self.shift[:, None]) / self.scale[:, None] * real
        first, second = self._own(heads).unbind(1)
        hidden = silu(modulated(self.first(inputs), first)) * real
        hidden = silu(modulated(self.second(hidden), second)) * real
        return bank[:, self.index].clamp(min=FLOOR).log() + self.head(hidden).squeeze(1)

    def _own(self, heads: Tensor | None) -> Tensor:
        """What scales and shifts the channels of either convolution, [R, 2, 2, C]; zeros [1, 2, 2, C] if shared."""
        if not self.layers:
            return self.head.weight.new_zeros(1, 2, 2, self.hidden)
        built_for = f"{type(self).__name__} is for {self.layers} layers of {self.kv_heads} kv heads"
        if heads is None:
            raise FadeError(f"{built_for} and is not told whose rows these are; give it heads, [R, 2]")
        layer, head = heads.unbind(-1)
        found = int(layer.max()) + 1, int(head.max()) + 1
        if found[0] > self.layers or found[1] > self.kv_heads:
            raise FadeError(f"{built_for}, and meets {found[0]} and {found[1]}; set them to those of the model")
        return OWN_SCALE * self.own[layer, head]

    def _inputs(self, bank: Tensor, mask: Tensor) -> Tensor:
        """What the convolutions see, [R, C, N]."""
        real = mask[:, None].to(bank)
        count = real.sum(-1, keepdim=True).clamp(min=1)
        log = (bank + MIN_MASS).log()
        base = log[:, self.index : self.index + 1]
        mean = (base * real).sum(-1, keepdim=True) / count
        spread = (((base - mean) * real).square().sum(-1, keepdim=True) / count).sqrt()
        place = torch.arange(mask.shape[-1], device=bank.device)
        age = (count - 1 - place).clamp(min=0).log1p()  # blocks since
        against = torch.cat((log[:, : self.index], log[:, self.index + 1 :]), dim=1) - base
        row = torch.cat((mean, spread), dim=1).expand(-1, -1, mask.shape[-1])
        return torch.cat((against, base, (base - mean) / (spread + MIN_SPREAD), age, row), dim=1)
