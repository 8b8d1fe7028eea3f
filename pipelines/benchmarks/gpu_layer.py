"""A layer full of random packed tokens, for benchmarks of attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fade_runtime.kernels.reference import Part
from fade_runtime.kernels.triton.launch_table import Launch
from fade_runtime.storage import quant
from fade_runtime.storage.packed import Bits, PackedTokens


@dataclass(frozen=True)
class Layer:
    """One decode step's query and what it attends to.

    Attributes:
        query: [R, Q, D] float16, already scaled. key, value: [R, n, D] full-precision tokens. packed: the others.
        launch: how to start the fused kernel; None: as the launch table says.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    packed: PackedTokens
    launch: Launch | None = None

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.key.shape[1] + len(self.packed) // len(self.key)

    def fused(self) -> Tensor:
        """Attention [R, Q, D] by the fused kernel."""
        from fade_runtime.kernels.triton import attention as triton  # triton: Linux only

        part = Part(self.packed)
        launch = self.launch or triton.launch_of(self.query, part)
        return triton.fused(self.query, self.key, self.value, [part], None, None, None, None, [launch])[0]

    def dequantised(self) -> Tensor:
        """Attention [R, Q, D] by SDPA over the dequantised layer."""
        from fade_runtime.kernels.triton import attention as triton  # triton: Linux only

        return triton.dense(self.query, self.key, self.value, Part(self.packed), None)


def random_layer(
    device: torch.device, rows: int, tokens: int, full: int, queries: int, dim: int, *, low: bool = False
) -> Layer:
    """Rows of as many packed tokens each, with codes and scales as random keys and values would have.

    Args:
        device: where. rows: batch x kv heads. tokens: packed ones of a row. full: full-precision ones.
        queries: of a row. dim: head dim. low: every other token of a page is in the low tier.

    Example:
        >>> layer = random_layer(torch.device("cpu"), 2, 100, 4, 3, 64)
        >>> layer.length, layer.packed.page_len.tolist(), layer.packed.page_row.tolist()
        (104, [32, 32, 32, 4, 32, 32, 32, 4], [0, 0, 0, 0, 1, 1, 1, 1])
    """
    generator = torch.Generator(device).manual_seed(0)
    bits, groups, page = Bits(), quant.value_groups(dim), quant.PAGE_TOKENS
    whole, rest = divmod(tokens, page)
    lengths = torch.tensor([page] * whole + [rest] * (rest > 0), dtype=torch.int32, device=device).repeat(rows)
    pages, total, per_row = len(lengths), rows * tokens, len(lengths) // rows
    lows = lengths // 2 if low else torch.zeros_like(lengths)
    n_low = rows * (whole * (page // 2) + rest // 2) if low else 0

    def codes(count: int, width: int) -> Tensor:
        return torch.randint(256, (count, dim * width // 8), generator=generator, dtype=torch.uint8, device=device)

    def scales(count: int, width: int) -> tuple[Tensor, Tensor]:
        scale = 0.25 + 0.1 * torch.rand(count, width, generator=generator, device=device)
        return scale.to(quant.PARAMS), (-7.5 * scale).to(quant.PARAMS)

    def steps(least: int) -> Tensor:
        return torch.randint(least, 256, (pages, dim), generator=generator, device=device).to(torch.uint8)

    value_scale, value_zero = scales(total, groups)
    at = torch.arange(tokens, device=device)
    packed = PackedTokens(
        key_codes=codes(total - n_low, bits.key),
        value_codes=codes(total - n_low, bits.value),
        low_key_codes=codes(n_low, bits.low_key),
        low_value_codes=codes(n_low, bits.low_value),
        key_scale=steps(180),
        key_zero=steps(0),
        key_reach=torch.tensor([[0.35, -2.6, 0.75]], device=device).to(quant.PARAMS).repeat(pages, 1),
        value_scale=value_scale,
        value_zero=value_zero,
        page_len=lengths,
        page_low=lows,
        page_row=torch.arange(rows, dtype=torch.int32, device=device).repeat_interleave(per_row),
        page_slot=(torch.arange(pages, dtype=torch.int32, device=device) % per_row) * page,
        offset=(at % page).to(torch.uint8).repeat(rows),
        bits=bits,
        page_tokens=page,
    )
    query, key, value = (
        torch.randn(rows, n, dim, generator=generator, device=device).half() for n in (queries, full, full)
    )
    return Layer(query * dim**-0.5, key, value, packed)


def stored_bytes(layer: Layer) -> int:
    """Bytes that attention over a layer has to read."""
    unread = {"page_slot", "offset"}
    read = [t for name, t in layer.packed.tensors().items() if name not in unread]
    return sum(t.nbytes for t in (*read, layer.key, layer.value))
