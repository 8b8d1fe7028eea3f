"""Docstrings as the reference of the site shows them (a griffe extension, named in mkdocs.yml).

In the source, arguments that belong together share a line (``key, value: [T, D]. rows: [T].``) and names of code are
Sphinx roles. Here each argument gets a line of its own, and roles become code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")
SECTION = re.compile(r"^(?P<title>Args|Attributes):\n(?P<body>(?:[ \t]+\S.*(?:\n|$)|\n)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring, and defaults, as they are read."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Write a default that a dataclass's field makes (``field(default_factory=lambda: [...])``) as what it is."""
        for argument in getattr(attr.value, "arguments", ()):
            if getattr(argument, "name", None) == "default_factory" and isinstance(argument.value, griffe.ExprLambda):
                attr.value = argument.value.body

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Separate arguments and attributes that share a line; write roles as code."""
        if obj.docstring is None:
            return
        text = ROLE.sub(lambda found: f"`{found[1]}`", obj.docstring.value)
        text = re.sub(r"^Example:\n", "Examples:\n", text, flags=re.MULTILINE)  # Google's name of the section
        text = re.sub(r"\]\[(?=[A-Z]\])", r"]\[", text)  # [L][H] are shapes and no link
        names = {parameter.name for parameter in getattr(obj, "parameters", ())}
        if obj.is_class:
            names |= {*obj.members, *(p.name for p in getattr(obj.members.get("__init__"), "parameters", ()))}
        obj.docstring.value = SECTION.sub(lambda found: f"{found['title']}:\n{separate(found['body'], names)}", text)


def separate(body: str, names: set[str]) -> str:
    r"""Give each of the known names in a section a line of its own, with the text that it shares with others.

    Example:
        >>> print(separate("    key, value: [T, D]. rows: [T].\n        More.", {"key", "value", "rows"}), end="")
            key: [T, D].
            value: [T, D].
            rows: [T]. More.
    """
    lines: list[str] = []
    for line in body.splitlines():
        deeper = lines and re.match(r" {8}", line)
        if deeper and line.strip() and not line.strip().startswith("-"):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    out: list[str] = []
    for line in lines:
        starts = [
            found for found in re.finditer(r"(?:^ {4}|(?<=[.;] ))((?:\w+, )*\w+): ", line)
            if {name.strip() for name in found[1].split(",")} <= names
        ]  # fmt: skip
        if not starts:
            out.append(line)
        for found, end in zip(starts, [*(each.start() for each in starts[1:]), len(line)]):
            out += [f"    {name.strip()}: {line[found.end() : end].strip()}" for name in found[1].split(",")]
    return "\n".join(out) + "\n"
