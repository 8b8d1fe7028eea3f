"""Which kernel a device gets, and what is said when it is not the fast one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fade_runtime import packed
from fade_runtime.kernels import reference
from fade_runtime.kernels.pick import pick_kernel, pick_quantiser

CUDA, META = torch.device("cuda"), torch.device("meta")


@pytest.fixture(autouse=True)
def _undecided() -> Iterator[None]:
    pick_kernel.cache_clear()
    yield
    pick_kernel.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a GPU that does not work")
def test_a_gpu_whose_kernels_fail_their_test_gets_plain_torch_and_says_why() -> None:
    said = "slow attention over packed tokens: the Triton kernels do not run on cuda: "
    with pytest.warns(RuntimeWarning, match=said):
        assert pick_kernel(CUDA) is reference.attend
    assert pick_quantiser(CUDA) is packed.quantise  # decided, and said, once


@pytest.mark.kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_triton() -> None:
    assert pick_kernel(torch.device("cuda", 0)).__module__ == "fade_runtime.kernels.triton"
    assert pick_quantiser(torch.device("cuda", 0)).__module__ == "fade_runtime.kernels.triton_pack"


@pytest.mark.parametrize("device", [CUDA, META], ids=str)
def test_plain_torch_for_other_devices_and_on_request(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == CUDA:
        monkeypatch.setenv("FADE_KERNEL", "reference")
    assert pick_kernel(device) is reference.attend
    assert pick_quantiser(device) is packed.quantise
