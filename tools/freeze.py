"""Print constraints.txt: the installed version of every package that the project needs, transitively.

`make constraints` runs it in .venv after an upgrade whose tests pass. triton is left out, because torch's
CUDA wheels bring their own; a package that has dropped an older Python is constrained only where it runs.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

LEFT_OUT = {"triton", "fade-predictor"}


def closure(requirements: list[str]) -> dict[str, str]:
    """Names of all installed packages that `requirements` lead to, with their constraint lines."""
    lines: dict[str, str] = {}
    queue = [(Requirement(text), "") for text in requirements]
    done: set[tuple[str, str]] = set()
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"error: {name} is not installed; run `make install` first")
        python = SpecifierSet(found.metadata["Requires-Python"] or "")
        marker = "" if "3.10.99" in python else "; python_version >= '3.11'"
        lines[name] = f"{name}=={found.version.split('+')[0]}{marker}"
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in done:
                done.add((name, wanted))
                queue += [(Requirement(text), wanted) for text in found.requires or []]
    return lines


def main() -> None:
    """Follow the requirements of this project, extras included, through what is installed."""
    print("# The versions that the tests ran with (Python 3.11, Linux). Written by `make constraints`.")
    print("# torch from an index without CUDA builds is a CPU build of the same version.")
    for name, line in sorted(closure(["fade-predictor[demo,dev,docs]"]).items()):
        if name not in LEFT_OUT:
            print(line)


if __name__ == "__main__":
    main()
