"""The compiled CPU kernel against the plain torch reference, and what happens without a compiler."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fade_runtime.attention import pick_kernel
from fade_runtime.kernels import cpu, reference
from fade_runtime.packed import PackedTokens, pack_tokens
from predictor.errors import FadeError

CPU = torch.device("cpu")


@pytest.fixture
def compiled() -> None:
    """Builds the kernel; a machine without any C compiler runs the reference alone."""
    try:
        cpu.build()
    except FadeError as problem:
        if "no C compiler" in str(problem):
            pytest.skip(str(problem))
        raise


def _ragged(lengths: list[int], dim: int) -> PackedTokens:
    torch.manual_seed(2)
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    slots = torch.cat([torch.arange(n) for n in lengths])
    return pack_tokens(torch.randn(len(rows), dim), torch.randn(len(rows), dim) * 5, rows, slots, None)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative root mean square error; rows without tokens (-inf, 0) must agree exactly."""
    finite = theirs.isfinite()
    assert torch.equal(ours[~finite], theirs[~finite])
    return float((ours - theirs)[finite].norm() / theirs[finite].norm())


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("lengths", [[1], [17, 63], [64, 0, 200], [129, 1, 0, 65]], ids=str)
def test_compiled_kernel_equals_the_reference(dim: int, queries: int, lengths: list[int]) -> None:
    packed = _ragged(lengths, dim)
    gaps = packed.keep((torch.rand(len(packed)) < 0.7) | (torch.arange(len(packed)) == 0))  # pages with gaps
    query = torch.randn(len(lengths), queries, dim) * dim**-0.5 * 4
    for tokens in (packed, gaps):
        for ours, theirs in zip(cpu.packed_attention(query, tokens), reference.packed_attention(query, tokens)):
            assert _difference(ours, theirs) < 1e-5


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_extreme_scores_neither_overflow_nor_vanish() -> None:
    packed = _ragged([130, 70], 64)
    query = torch.randn(2, 3, 64) * 300
    for ours, theirs in zip(cpu.packed_attention(query, packed), reference.packed_attention(query, packed)):
        assert bool(ours.isfinite().all())
        assert _difference(ours, theirs) < 1e-4


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries_keep_their_type(dtype: torch.dtype) -> None:
    packed = _ragged([90, 5], 64)
    query = torch.randn(2, 3, 64)
    out, lse, _ = cpu.packed_attention(query.to(dtype), packed)
    exact, exact_lse, _ = reference.packed_attention(query, packed)
    assert out.dtype == dtype
    assert float((out.float() - exact).norm() / exact.norm()) < 0.01
    torch.testing.assert_close(lse, exact_lse, atol=0.02, rtol=0.01)


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_process_keeps_denormal_numbers() -> None:
    """Loading a library built with -ffast-math would flush them to zero, everywhere."""
    cpu.self_test()
    tiny = torch.tensor(1e-40)
    assert float(tiny * 0.5) > 0


def test_without_a_compiler_the_reference_runs_and_says_so_once(tmp_path: Path) -> None:
    code = (
        "import torch, warnings, os; warnings.simplefilter('always')\n"
        "from fade_runtime.attention import pick_kernel\n"
        "a = pick_kernel(torch.device('cpu')); b = pick_kernel(torch.device('cpu'))\n"
        "print(a.__module__, a is b)"
    )
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=Path.cwd())
    assert done.stdout.strip() == "fade_runtime.kernels.reference True", done.stderr
    assert done.stderr.count("no C compiler found; install gcc") == 1


def test_a_kernel_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda query, packed, bias=None: [t + 1 for t in reference.packed_attention(query, packed, bias)]
    monkeypatch.setattr(cpu, "packed_attention", wrong)
    pick_kernel.cache_clear()
    with pytest.warns(RuntimeWarning, match="disagrees with the reference in out"):
        assert pick_kernel(CPU) is reference.packed_attention
    monkeypatch.undo()
    pick_kernel.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pick_kernel(CPU)


def test_environment_asks_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FADE_KERNEL", "reference")
    pick_kernel.cache_clear()
    assert pick_kernel(CPU) is reference.packed_attention
    pick_kernel.cache_clear()


def test_masked_tokens_carry_nothing_in_the_reference() -> None:
    packed = _ragged([40, 8], 32)
    query = torch.randn(2, 2, 32)
    hidden = torch.zeros(48, 2)
    hidden[10:] = -torch.inf  # the whole second row
    out, lse, _ = reference.packed_attention(query, packed, hidden)
    alone, alone_lse, _ = reference.packed_attention(query[:1], packed.keep(torch.arange(48) < 10))
    torch.testing.assert_close(out[0], alone[0])
    torch.testing.assert_close(lse[0], alone_lse[0])
    assert bool((out[1] == 0).all())
    assert bool((lse[1] < -1e30).all())
