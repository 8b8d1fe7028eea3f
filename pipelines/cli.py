"""The command line that all pipelines share: a function becomes a command, a mistake becomes one line."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
import signal
import sys
import threading
import warnings
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from predictor.errors import FadeError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

MISTAKES = (FadeError, OSError, argparse.ArgumentError)
DEBUG = "--debug"
AGAIN = "run the same command again"
_CHATTY = (
    "lightning",
    "lightning.pytorch",
    "lightning.pytorch.utilities.rank_zero",  # its parents' levels are set again when lightning is imported later
    "lightning.fabric",
    "mlflow",
    "alembic",
    "datasets",
)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does: what is done is kept, what is half done is cleared away."""


def run(
    command: Callable[..., Any],
    argv: Sequence[str] | None = None,
    positional: bool = False,
    again: str = AGAIN,
    prog: str | None = None,
) -> int:
    """Run ``command`` with its parameters as options, or as keys of a flat YAML file given by ``--config``.

    Types, defaults and help come from the signature and its Google docstring; for a command whose only parameter is a
    dataclass of settings, from the fields of that and its docstring.

    Args:
        command: the function; a returned int is the exit status.
        argv: the arguments, by default those of the process.
        positional: parameters without a default are given by place, not by name.
        again: what to do after an interruption.
        prog: the command in the usage line, by default `python -m` and the function's module.

    Returns:
        The exit status: 0, 2 after bad input, 130 after Ctrl-C, 143 after SIGTERM, 1 after any other error.
    """
    parser = parser_of(command, positional, prog)

    def body(args: list[str]) -> Any:
        options = parser.parse_args(args).as_dict()
        options.pop("config", None)
        return call(command, with_new_names(options, old_names(command)))

    return guarded(body, argv, lambda: options_of(parser), again)


def call(command: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Call ``command`` with options by name, which become its settings where it takes settings.

    Example:
        >>> call(dict, {"steps": 3})
        {'steps': 3}
    """
    settings = settings_of(command)
    return command(**options) if settings is None else command(settings(**options))


def old_names(command: Callable[..., Any]) -> dict[str, str]:
    """Old name -> name of options that earlier releases called otherwise: ``OLD_NAMES`` of the command's settings."""
    return getattr(settings_of(command), "OLD_NAMES", {})


def with_new_names(options: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Options by their names of today; an old one that was used is said on standard error.

    Example:
        >>> with_new_names({"text": ["a"], "held_out": None}, {"held_out": "text"})
        {'text': ['a']}
    """
    left = {name: value for name, value in options.items() if name not in renamed}
    for old, name in renamed.items():
        if options.get(old) is not None:
            print(f"option '{old}' is now called '{name}'; the old name will go", file=sys.stderr)
            left[name] = options[old]
    return left


def settings_of(command: Callable[..., Any]) -> type | None:
    """The dataclass that is the only parameter of ``command``; None where its parameters are the options."""
    kinds: list[type] = [kind for name, kind in get_type_hints(command).items() if name != "return"]
    return kinds[0] if len(kinds) == 1 and is_dataclass(kinds[0]) else None


def parser_of(command: Callable[..., Any], positional: bool = False, prog: str | None = None) -> ArgumentParser:
    """The argument parser of ``command``: `--config FILE`, then one option for each parameter or setting."""
    from jsonargparse import ArgumentParser  # not on a bare GPU machine, where `bench gpu` runs without options

    module = command.__module__
    if module == "__main__" and (spec := getattr(sys.modules[module], "__spec__", None)):
        module = spec.name
    summary = (command.__doc__ or "").split("Args:")[0].strip()
    parser = ArgumentParser(
        prog=prog or f"python -m {module}",
        description=re.sub(r"\n\s+", "\n", summary),
        epilog=f"{DEBUG} shows the traceback of an error.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="flat YAML file with any of the options below")
    if (settings := settings_of(command)) is not None:
        parser.add_class_arguments(settings, as_group=False)
        kinds = get_type_hints(settings)
        for old, name in old_names(command).items():
            parser.add_argument(f"--{old}", type=kinds[name] | None, default=SUPPRESS, help=SUPPRESS)
    else:
        parser.add_function_arguments(command, as_group=False, as_positional=positional)
    return parser


def guarded(
    body: Callable[[list[str]], Any],
    argv: Sequence[str] | None = None,
    known: Callable[[], list[str]] = list,
    again: str = AGAIN,
) -> int:
    """Call ``body`` with the arguments less `--debug`; turn an error or a signal into one line and an exit status.

    Commands built on LightningCLI use it too, with ``parser_kwargs={"exit_on_error": False}``.

    Args:
        body: gets the arguments; a returned int is the exit status.
        argv: the arguments, by default those of the process.
        known: names of all valid options, to suggest the nearest to one that is not.
        again: what to do after an interruption.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = DEBUG in args
    if not debug:
        quiet()
    try:
        with sigterm_interrupts():
            status = body([arg for arg in args if arg != DEBUG])
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, SystemExit) as stop:
        cause = stop.__context__ if isinstance(stop, SystemExit) else stop  # a library's answer to either is to exit
        if isinstance(cause, Terminated):
            return _fail(f"terminated; {again}", 128 + signal.SIGTERM)
        if isinstance(cause, KeyboardInterrupt):
            return _fail(f"interrupted; {again}", 128 + signal.SIGINT)
        raise
    except MISTAKES as error:
        if debug:
            raise
        return _fail(one_line(error, known()), 2)
    except Exception as error:
        if debug:
            raise
        what = f"{type(error).__name__}: {_flat(str(error))}"
        return _fail(f"{what[:300]} (not foreseen; {DEBUG} shows the traceback)", 1)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM raise :class:`Terminated` in the block; where somebody else handles or ignores it, that stays so."""

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not free or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def one_line(error: BaseException, known: Sequence[str] = ()) -> str:
    """The message of ``error`` in one line; for an unknown option, with the nearest valid one."""
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename} is not there; check the path, or run the step that writes it"
    message = _flat(str(error))
    if unknown := re.search(r"unrecognized arguments: (\S+)|Option '(\S+)' is not accepted", message):
        name = (unknown[1] or unknown[2]).split("=")[0].lstrip("-")
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
        remedy = f"did you mean '{near[0]}'?" if near else "--help lists them"
        return f"option '{name}' is not known; {remedy}"
    if isinstance(error, argparse.ArgumentError):
        return re.sub(r"Parser key \"(\S+)\":", r"option '\1':", message)
    return message


def command_line(module: str) -> str:
    """The command of this process, to be run again."""
    return " ".join([f"python -m {module}", *sys.argv[1:]])


def options_of(parser: ArgumentParser) -> list[str]:
    """Names of all options of ``parser``, as they stand in a YAML file."""
    return [action.dest for action in parser._actions if action.dest not in ("help", "==SUPPRESS==")]


def quiet() -> None:
    """Silence warnings and log lines of libraries; those of this project stay."""
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"(data|fade_runtime|pipelines|predictor)\b")
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


def _flat(message: str) -> str:
    return " ".join(message.split()) or "no message"


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def at_least_one(*options: tuple[str, int]) -> None:
    """Refuse numbers below 1.

    Args:
        options: name and value of each.

    Raises:
        FadeError: names the option.

    Example:
        >>> at_least_one(("steps", 3), ("threads", 0))
        Traceback (most recent call last):
            ...
        predictor.errors.FadeError: threads 0 is too small; use at least 1
    """
    for name, value in options:
        if value < 1:
            raise FadeError(f"{name} {value} is too small; use at least 1")
