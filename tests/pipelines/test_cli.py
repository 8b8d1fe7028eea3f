"""The shared command line: options from a signature, flat YAML, and one line for every mistake."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipelines import cli
from predictor.errors import FadeError

SEEN: dict[str, Any] = {}


def command(budget: float = 0.25, methods: list[str] | None = None, out: Path = Path("there")) -> int | None:
    """Do something.

    Args:
        budget: share of the context.
        methods: names of methods.
        out: where to write.
    """
    SEEN.update(budget=budget, methods=methods, out=out)
    if budget > 1:
        raise FadeError(f"budget {budget} is not a share;\n  use a float in (0, 1]")
    if budget == 0:
        raise RuntimeError("boom")
    if budget < 0:
        Path(out).read_text()
    return 3 if budget == 1 else None


@dataclass(frozen=True)
class Settings:
    """Options of a command.

    Args:
        steps: how many.
        names: which.
    """

    steps: int = 2
    names: list[str] = field(default_factory=lambda: ["one"])

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise FadeError(f"steps {self.steps} is too small")


def with_settings(settings: Settings) -> int:
    """Do something else."""
    SEEN.update(settings=settings)
    return settings.steps


@pytest.fixture
def yaml(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "options.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_yaml_then_flags(yaml: Any) -> None:
    config = yaml("budget: 0.5\nmethods: [a, b]\nout: here\n")
    assert cli.run(command, ["--config", config, "--out", "x/y"]) == 0
    assert SEEN == {"budget": 0.5, "methods": ["a", "b"], "out": Path("x/y")}


def test_a_dataclass_of_settings_is_as_flat_as_parameters(yaml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml("steps: 5\n")
    assert cli.run(with_settings, ["--config", config, "--names", "[a, b]"]) == 5
    assert SEEN["settings"] == Settings(5, ["a", "b"])
    assert cli.run(with_settings, []) == 2
    assert SEEN["settings"] == Settings()
    assert cli.run(with_settings, ["--steps", "0"]) == 2
    assert capsys.readouterr().err == "error: steps 0 is too small\n"
    assert cli.run(with_settings, ["--stops", "3"]) == 2
    assert capsys.readouterr().err == "error: option 'stops' is not known; did you mean 'steps'?\n"
    with pytest.raises(SystemExit):
        cli.run(with_settings, ["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Do something else." in printed
    assert "how many." in printed


def test_a_returned_int_is_the_status() -> None:
    assert cli.run(command, ["--budget", "1"]) == 3


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--budget", "2"], 2, ["budget 2.0 is not a share", "use a float"]),
        (["--budget", "x"], 2, ["budget", "x", "float"]),
        (["--bugdet", "0.5"], 2, ["'bugdet'", "did you mean 'budget'"]),
        (["--zzz"], 2, ["'zzz'", "--help"]),
        (["--config", "no/such.yaml"], 2, ["no/such.yaml"]),
        (["--budget", "-1", "--out", "no/such/file"], 2, ["no/such/file is not there", "check the path"]),
        (["--budget", "0"], 1, ["RuntimeError", "boom", "--debug"]),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], status: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(command, args) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_unknown_yaml_key_is_named_with_the_nearest(yaml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(command, ["--config", yaml("metods: [a]\n")]) == 2
    assert capsys.readouterr().err == "error: option 'metods' is not known; did you mean 'methods'?\n"


def test_broken_yaml_is_one_line(yaml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(command, ["--config", yaml("methods: [a\n")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_debug_raises() -> None:
    with pytest.raises(FadeError):
        cli.run(command, ["--debug", "--budget", "2"])
    with pytest.raises(RuntimeError):
        cli.run(command, ["--budget", "0", "--debug"])


def test_interrupt_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(_: list[str]) -> None:
        raise KeyboardInterrupt

    assert cli.guarded(stopped, []) == 130
    assert "again" in capsys.readouterr().err


def test_help_comes_from_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(command, ["--help"])
    assert ended.value.code == 0
    assert "share of the context" in capsys.readouterr().out


def test_sigterm_ends_a_command_as_ctrl_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    cleared: list[bool] = []

    def stopped(_: list[str]) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleared.append(True)

    before = signal.getsignal(signal.SIGTERM)
    assert cli.guarded(stopped, [], again="go on") == 143
    assert cleared == [True]
    assert capsys.readouterr().err == "error: terminated; go on\n"
    assert signal.getsignal(signal.SIGTERM) is before is signal.SIG_DFL


def test_a_library_that_exits_after_a_signal_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    def exits(error: type[BaseException]) -> Any:
        def body(_: list[str]) -> None:
            try:
                raise error
            except BaseException:
                sys.exit(1)

        return body

    assert cli.guarded(exits(KeyboardInterrupt), []) == 130
    assert cli.guarded(exits(cli.Terminated), []) == 143
    with pytest.raises(SystemExit):
        cli.guarded(exits(ValueError), [])
    assert capsys.readouterr().err.count("\n") == 2


def test_who_handles_sigterm_already_goes_on_to_do_so() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        assert cli.guarded(lambda _: os.kill(os.getpid(), signal.SIGTERM), []) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    thread = threading.Thread(target=lambda: seen.append(cli.guarded(lambda _: 5, [])))
    thread.start()
    thread.join()
    assert seen[1:] == [5]  # signals belong to the main thread
