"""The guard while it generates: seen on the screen, and in MLflow."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import pytest
from mlflow import MlflowClient

from fade_runtime.events import GuardEvent
from pipelines import generate
from pipelines.integrations.guard_progress import EXPERIMENT, ProgressLine

PROMPT = " ".join(f"{i} sheep jump over the {i * 7 % 13}th fence." for i in range(12))
ASKED = ("--prompt", PROMPT, "--policy", "position", "--budget", 20, "--max_new_tokens", 40, "--dtype", "float32")
GUARD = ("--guard", "rollback", "--spill", "host", "--monitor_every", 8)


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    status = generate.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.filterwarnings("ignore:after:RuntimeWarning")
def test_what_the_guard_does_is_said(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--model", tiny_model_dir, *ASKED, *GUARD)
    assert status == 0
    assert "layer 0: KL" in err
    assert "heads keep everything" in err
    assert "guard: full after" in out


@pytest.mark.parametrize("spill", ["host", "disk"])
def test_memory_says_what_waits_in_it(
    spill: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ("--spill_dir", tmp_path) if spill == "disk" else ()
    asked = [*ASKED, "--guard", "warn", "--spill", spill, *folder]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status, out, _ = run(capsys, "--model", tiny_model_dir, *asked)
    assert status == 0
    assert ("evicted tokens that wait in the same memory" in out) == (spill == "host")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:after:RuntimeWarning")
def test_its_figures_are_logged(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    status, _, _ = run(capsys, "--model", tiny_model_dir, *ASKED, *GUARD, "--log_guard", "true", "--tracking_uri", uri)
    assert status == 0
    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["cache"].startswith("first 4 and last 64 tokens exact")
    for name in ("guard/kl", "guard/recovery", "guard/raised_heads"):
        history = client.get_metric_history(found.info.run_id, name)
        steps = [each.step for each in history]
        assert len(steps) >= 4
        assert steps == sorted(set(steps))
    assert history[-1].value == 4


def test_a_terminal_gets_one_line_that_is_written_over() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    look = GuardEvent(0, 0, 64, "look", 0.04, 0.02, 0.9, 0.95, 1, 10, 0.5)
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        line = ProgressLine(stream)
        line.export(look)
        line.export(look)
    assert terminal.getvalue().count("\r") == 2
    assert "\n" not in terminal.getvalue()
    assert file.getvalue() == ""


def test_a_guard_that_is_off_has_nothing_to_log(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "--model", tiny_model_dir, "--prompt", PROMPT, "--log_guard", "true")
    assert status == 2
    assert "log_guard has nothing to log; add --guard rollback" in err
