"""Which kernel a device gets, and what is said when it is not the fast one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fade_runtime.kernels import reference
from fade_runtime.kernels.cpu import attention as cpu
from fade_runtime.kernels.dispatch import forget, kernel_name, pick_kernel, pick_quantiser
from fade_runtime.storage.packed import quantise
from predictor.errors import FadeError

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


@pytest.fixture(autouse=True)
def _undecided() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a GPU that does not work")
def test_a_gpu_whose_kernels_fail_their_test_gets_plain_torch_and_says_why() -> None:
    said = "slow attention over packed tokens: the Triton kernels do not run on cuda: "
    with pytest.warns(RuntimeWarning, match=said):
        assert pick_kernel(CUDA) is reference.attend
    assert pick_quantiser(CUDA) is quantise  # decided, and said, once


@pytest.mark.kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_triton() -> None:
    assert kernel_name(torch.device("cuda", 0)) == "triton"
    assert pick_kernel(torch.device("cuda", 0)).__module__ == "fade_runtime.kernels.triton.attention"
    assert pick_quantiser(torch.device("cuda", 0)).__module__ == "fade_runtime.kernels.triton.pack_kernel"


@pytest.mark.kernels
@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_cpu_gets_c() -> None:
    assert kernel_name(CPU) == "cpu"
    assert pick_kernel(CPU) is cpu.attend
    assert pick_quantiser(CPU) is quantise


@pytest.mark.parametrize("device", [CUDA, META], ids=str)
def test_plain_torch_for_other_devices_and_on_request(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == CUDA:
        monkeypatch.setenv("FADE_KERNEL", "reference")
    assert kernel_name(device) == "reference"
    assert pick_kernel(device) is reference.attend
    assert pick_quantiser(device) is quantise


@pytest.mark.slow
def test_without_a_compiler_the_reference_runs_and_says_so_once(tmp_path: Path) -> None:
    code = (
        "import torch, warnings, os; warnings.simplefilter('always')\n"
        "from fade_runtime.layer.attention import pick_kernel\n"
        "a = pick_kernel(torch.device('cpu')); b = pick_kernel(torch.device('cpu'))\n"
        "print(a.__module__, a is b)"
    )
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=Path.cwd())
    assert done.stdout.strip() == "fade_runtime.kernels.reference True", done.stderr
    assert done.stderr.count("no C compiler found; install gcc") == 1


@pytest.mark.slow
def test_importing_the_kernels_imports_no_triton_kernel() -> None:
    code = "import sys, fade_runtime.kernels; print(sorted(m for m in sys.modules if 'kernels.triton' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd())
    assert done.stdout.strip() == "[]", done.stderr


def test_a_kernel_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda *args, **options: (reference.attend(*args)[0] + 1, *reference.attend(*args, **options)[1:])
    monkeypatch.setattr(cpu, "attend", wrong)
    forget()
    with pytest.warns(RuntimeWarning, match="disagrees with the reference in its output"):
        assert pick_kernel(CPU) is reference.attend
    monkeypatch.undo()
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pick_kernel(CPU)


def test_environment_asks_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FADE_KERNEL", "reference")
    forget()
    assert pick_kernel(CPU) is reference.attend
    forget()


def test_threads_that_begin_together_get_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = []

    def fails() -> None:
        tested.append(time.sleep(0.05))
        raise FadeError("no")

    monkeypatch.setattr(cpu, "self_test", fails)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(pick_kernel, [CPU] * 8)) == {reference.attend}
    assert (len(tested), len(said)) == (1, 1)
