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


def _difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    """Relative root mean square error."""
    assert ours is not None
    assert theirs is not None
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("lengths", [[1], [17, 63], [64, 0, 200], [129, 1, 0, 65]], ids=str)
def test_compiled_kernel_equals_the_reference(dim: int, queries: int, lengths: list[int]) -> None:
    packed = _ragged(lengths, dim)
    gaps = packed.keep((torch.rand(len(packed)) < 0.7) | (torch.arange(len(packed)) == 0))  # pages with gaps
    query = torch.randn(len(lengths), queries, dim) * dim**-0.5 * 4
    for tokens, full in ((packed, 68), (gaps, 1), (gaps, 129)):
        key, value = torch.randn(2, len(lengths), full, dim)
        for weights in (None, torch.rand(queries)):
            ours = cpu.attend(query, key, value, tokens, weights)
            theirs = reference.attend(query, key, value, tokens, weights)
            assert _difference(ours[0], theirs[0]) < 1e-5
            if weights is None:
                assert ours[1:] == theirs[1:] == (None, None)
            else:
                assert _difference(ours[1], theirs[1]) < 1e-5
                assert _difference(ours[2], theirs[2]) < 1e-5


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
def test_extreme_scores_neither_overflow_nor_vanish() -> None:
    packed = _ragged([130, 70], 64)
    query, (key, value) = torch.randn(2, 3, 64) * 300, torch.randn(2, 2, 5, 64)
    ours = cpu.attend(query, key, value, packed, torch.ones(3))
    for mine, other in zip(ours, reference.attend(query, key, value, packed, torch.ones(3))):
        assert mine is not None
        assert bool(mine.isfinite().all())
        assert _difference(mine, other) < 1e-3


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries_keep_their_type(dtype: torch.dtype) -> None:
    packed = _ragged([90, 5], 64)
    query, (key, value) = torch.randn(2, 3, 64), torch.randn(2, 2, 7, 64)
    out, _, _ = cpu.attend(query.to(dtype), key.to(dtype), value.to(dtype), packed)
    assert out.dtype == dtype
    assert _difference(out.float(), reference.attend(query, key, value, packed)[0]) < 0.01


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
    wrong = lambda *given: (reference.attend(*given)[0] + 1, *reference.attend(*given)[1:])
    monkeypatch.setattr(cpu, "attend", wrong)
    pick_kernel.cache_clear()
    with pytest.warns(RuntimeWarning, match="disagrees with the reference in its output"):
        assert pick_kernel(CPU) is reference.attend
    monkeypatch.undo()
    pick_kernel.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pick_kernel(CPU)


def test_environment_asks_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FADE_KERNEL", "reference")
    pick_kernel.cache_clear()
    assert pick_kernel(CPU) is reference.attend
    pick_kernel.cache_clear()


def test_hidden_tokens_carry_nothing_in_the_reference() -> None:
    packed = _ragged([40, 8], 32)
    query, (key, value) = torch.randn(2, 2, 32), torch.randn(2, 2, 6, 32)
    hidden, body_hidden = torch.zeros(2, 2, 6), torch.zeros(48, 2)
    hidden[:, :, 4:] = -torch.inf
    body_hidden[10:] = -torch.inf  # the whole second row
    out, mass, body_mass = reference.attend(query, key, value, packed, torch.ones(2), hidden, body_hidden)
    few = packed.keep(torch.arange(48) < 10)
    expected, full_mass, few_mass = reference.attend(query, key[:, :4], value[:, :4], few, torch.ones(2))
    torch.testing.assert_close(out, expected)
    assert mass is not None
    assert body_mass is not None
    torch.testing.assert_close(mass[:, :4], full_mass)
    torch.testing.assert_close(body_mass[:10], few_mass)
    assert bool((body_mass[10:] == 0).all())
    nothing, _, _ = reference.attend(
        query, key, value, packed, None, torch.full_like(hidden, -torch.inf), torch.full_like(body_hidden, -torch.inf)
    )
    assert bool((nothing == 0).all())  # a padding query
