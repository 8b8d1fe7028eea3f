"""Kernels that know where a sliding window begins: tokens before it are not read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fade_runtime.kernels import reference
from fade_runtime.kernels.cpu import attention as cpu
from fade_runtime.kernels.reference import Part
from fade_runtime.storage.packed import pack_tokens
from tests import rounding
from tests.runtime.compiled import compiled, mixed  # noqa: F401  a fixture


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kernel", [cpu.attend, reference.attend], ids=["compiled", "reference"])
@pytest.mark.parametrize("spread", [1, 9, 5000], ids="{} slots apart".format)
def test_tokens_before_the_first_slot_that_is_read_are_as_if_they_were_not_there(
    kernel: Callable[..., Any], spread: int
) -> None:
    """Whatever integers the offsets are, in pages of both tiers with gaps, whose tokens are not in order."""
    slots, rows = torch.cat((torch.arange(150), torch.arange(90))) * spread, torch.tensor([0] * 150 + [2] * 90)
    packed = mixed(pack_tokens(*torch.randn(2, 240, 32), rows, slots, None))
    assert packed.offset.dtype == {1: torch.uint8, 9: torch.int16, 5000: torch.int32}[spread]
    query, (key, value) = torch.randn(3, 2, 32), torch.randn(2, 3, 6, 32)
    since = spread * torch.tensor([[70, 70], [0, 0], [200, 200]], dtype=torch.int32)
    out, mass, (body_mass,) = kernel(query, key, value, [Part(packed, since=since)], torch.ones(2))
    there = packed.slots() >= since[packed.token_row(), 0]
    assert 0 < int(there.sum()) < len(packed)
    seen = rounding.Call(query, key, value, [Part(packed.keep(there))], torch.ones(2))
    rounding.attention(*seen).check((out, mass, body_mass[there]))
    assert not bool(body_mass[~there].any())
