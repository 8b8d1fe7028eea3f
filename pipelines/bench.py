"""Benchmarks: `python -m pipelines.bench decode`. Every number is a ratio to a baseline of the same run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pipelines import cli
from pipelines.reporting.commit import this_commit

BENCHMARKS = ("collect", "select", "decode", "prefill", "memory", "profile", "gpu", "tune", "guard", "compare")


def benchmark(name: str) -> Callable[..., Any]:
    """The function of a benchmark, imported only now: a bare GPU machine lacks what others of them need.

    Example:
        >>> benchmark("compare").__module__
        'pipelines.benchmarks.compare'
    """
    return getattr(import_module(f"pipelines.benchmarks.{name}"), name)


def main(argv: list[str] | None = None) -> int:
    """Entry point: the first argument names the benchmark."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] not in BENCHMARKS:
        print(f"usage: python -m pipelines.bench {{{','.join(BENCHMARKS)}}} [options]; --help after a name lists them")
        return 0 if args[:1] in (["--help"], ["-h"]) else 2
    name, *options = args
    command, positional = benchmark(name), name == "compare"
    this_commit()
    if not options and not positional:  # as it is on a machine without the option parser
        return cli.guarded(lambda _: cli.call(command, {}), [])
    return cli.run(command, options, positional, prog=f"python -m pipelines.bench {name}")


if __name__ == "__main__":
    sys.exit(main())
