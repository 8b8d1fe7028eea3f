"""The test that the Triton kernels must pass on a GPU before they are used there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fade_runtime.kernels import reference
from fade_runtime.kernels.reference import Part
from fade_runtime.kernels.triton import attention as triton
from fade_runtime.kernels.triton.pack_kernel import dequantise, quantise
from fade_runtime.storage import packed
from fade_runtime.storage.packed import Bits, PackedTokens, pack_tokens
from predictor.errors import FadeError

DIFFERENCE = 0.01  # largest relative error; the kernels compute in half precision
CASES = ((64, Bits(), None), (128, Bits(8, 4, 4, 2), 2.0))  # head dim, bits, cap


def self_test(device: torch.device) -> None:
    """Compare packing and attention with plain torch on ragged rows of both tiers, as a model in half precision has.

    Raises:
        FadeError: a kernel cannot be compiled, or its results differ.
    """
    for dim, bits, cap in CASES:
        try:
            pairs = _results(device, dim, bits, cap)
            errors = {name: _error(mine, other) for name, (mine, other) in pairs.items()}
        except Exception as problem:  # whatever a compiler or a driver may raise
            what = f"{type(problem).__name__}: {problem}".splitlines()[0]
            raise FadeError(f"the Triton kernels do not run on {device}: {what}") from problem
        for name, error in errors.items():
            if not error < DIFFERENCE:
                raise FadeError(f"the Triton kernels disagree with the reference in their {name}, by {error:.1%}")


def _results(device: torch.device, dim: int, bits: Bits, cap: float | None) -> dict[str, Sequence[Any]]:
    """What the kernels compute on a device and plain torch on the CPU, by name."""
    generator = torch.Generator().manual_seed(0)
    rows, slots = torch.tensor([0] * 130 + [2] * 5), torch.arange(135)
    body_key, body_value = torch.randn(2, 135, dim, generator=generator)
    low = torch.rand(135, generator=generator) < 0.4
    key, value = torch.randn(2, 3, 70, dim, generator=generator)
    query, weights = torch.randn(3, 5, dim, generator=generator), torch.rand(5, generator=generator)
    bias, part_bias = torch.randn(3, 5, 70, generator=generator), torch.randn(135, 5, generator=generator)
    stored = pack_tokens(body_key, body_value, rows, slots, None, low=low, bits=bits)
    part, here = Part(stored), Part(moved(stored, device))
    if cap:  # with all that a kernel can do
        part, here = replace(part, bias=part_bias), replace(here, bias=part_bias.to(device))
    full_bias, sinks = (bias, 2 * torch.randn(3, 5, generator=generator)) if cap else (None, None)
    theirs = reference.attend(query, key, value, [part], weights, full_bias, cap, sinks)
    half_query, half_key, half_value = (each.to(device, torch.float16) for each in (query, key, value))
    full_bias, sinks = (None if each is None else each.to(device) for each in (full_bias, sinks))
    ours = triton.attend(half_query, half_key, half_value, [here], weights.to(device), full_bias, cap, sinks)
    unpacked = zip(dequantise(moved(stored, device), torch.float32), reference.dequantise(stored, torch.float32))
    again = quantise(body_key.to(device), body_value.to(device), stored.page_len.to(device), bits)
    plain = packed.quantise(body_key, body_value, stored.page_len, bits)
    quantised = {name.replace("_", " "): pair for name, *pair in zip(plain._fields, again, plain)}
    return {
        "attention": (ours[0], theirs[0]),
        "statistics": (ours[1], theirs[1]),
        "packed statistics": (ours[2][0], theirs[2][0]),
        **dict(zip(("keys", "values"), unpacked)),
        **quantised,
    }


def moved(stored: PackedTokens, device: torch.device) -> PackedTokens:
    """The same tokens on another device."""
    tensors: dict[str, Any] = {name: tensor.to(device) for name, tensor in stored.tensors().items()}
    return replace(stored, **tensors)


def _error(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Relative root mean square error."""
    return float((mine.float().cpu() - other.float()).norm() / other.float().norm())
