"""The import graph of the project, deferred and type-only imports included: its figures and its circles.

`python -m tools.import_graph [FOLDER]` prints them and ends with status 1 if there is a circle.

An edge is an import of one of our modules, wherever the statement stands: at the top, in a function, under
TYPE_CHECKING. `from package import name` leads to the submodule of that name if there is one, else to the package's
`__init__`, whose own imports are edges too: what it re-exports is seen. That Python runs the `__init__` of every parent
of a module is no edge, or every package that re-exports anything would be a circle.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("predictor", "data", "fade_runtime", "pipelines")
LAYERED = ("fade_runtime", "pipelines")  # their sub-packages are packages of their own here; the other two are flat

Graph = Mapping[str, Collection[str]]  # the nodes that each node leads to


class Import(NamedTuple):
    """One import statement of one of our modules by another."""

    source: str
    target: str
    line: int
    kind: str  # "module": runs when `source` is imported; "deferred": in a function; "type": only for type checkers


def find_modules(root: Path) -> dict[str, Path]:
    """Names and files of the modules of the four packages under `root`; a package has the name of its `__init__`."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def find_imports(modules: Mapping[str, Path]) -> list[Import]:
    """Every import of one of `modules` by another."""
    found = []
    for source, file in modules.items():
        package = source if file.stem == "__init__" else source.rpartition(".")[0]
        for node, kind in _statements(ast.parse(file.read_text()), "module"):
            for target in _targets(node, package, modules):
                if target != source:
                    found.append(Import(source, target, node.lineno, kind))
    return found


def _statements(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """All import statements below `node`, each with its kind."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, kind
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _statements(child, "deferred")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _statements(child, "type")
        else:
            yield from _statements(child, kind)


def _targets(node: ast.Import | ast.ImportFrom, package: str, modules: Collection[str]) -> set[str]:
    """Those of `modules` that one statement in a module of `package` imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & set(modules)
    parents = package.split(".")
    relative = parents[: len(parents) - node.level + 1] if node.level else []
    base = ".".join([*relative, *([node.module] if node.module else [])])
    names = {f"{base}.{alias.name}" for alias in node.names}
    return {name if name in modules else base for name in names if name in modules or base in modules}


def package_of(module: str) -> str:
    """The package that a module is part of: `fade_runtime.cache.session` -> `fade_runtime.cache`.

    A module beside the sub-packages, such as a command, stands for itself.
    """
    top, *rest = module.split(".")
    return f"{top}.{rest[0]}" if rest and top in LAYERED else top


def module_graph(modules: Collection[str], imports: Collection[Import]) -> dict[str, set[str]]:
    """Which modules each module imports."""
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for edge in imports:
        graph[edge.source].add(edge.target)
    return graph


def package_graph(modules: Collection[str], imports: Collection[Import]) -> dict[str, set[str]]:
    """Which packages each package imports."""
    graph: dict[str, set[str]] = {package_of(module): set() for module in modules}
    for edge in imports:
        source, target = package_of(edge.source), package_of(edge.target)
        if source != target:
            graph[source].add(target)
    return graph


def find_circles(graph: Graph) -> list[list[str]]:
    """Groups of two or more nodes that all lead to each other (strongly connected components), the largest first."""
    circles = [sorted(group) for group in _components(graph) if len(group) > 1]
    return sorted(circles, key=lambda group: (-len(group), group))


def _components(graph: Graph) -> list[list[str]]:
    """Strongly connected components, each after those that it leads to. Source: Tarjan, SIAM J. Comput. 1 (1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == order[node]:
            start = stack.index(node)
            components.append(stack[start:])
            del stack[start:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return components


def find_levels(graph: Graph) -> dict[str, int]:
    """The length of the longest way down from each node; nodes of one circle share a level."""
    levels: dict[str, int] = {}
    for group in _components(graph):
        below = [levels[target] for node in group for target in graph[node] if target not in group]
        levels.update(dict.fromkeys(group, max(below, default=-1) + 1))
    return levels


def upward(graph: Graph, levels: Mapping[str, int]) -> list[tuple[str, str]]:
    """The edges that close circles: those of a circle that do not lead to a lower of the `levels`."""
    circles = find_circles(graph)
    return [
        (source, target)
        for circle in circles
        for source in circle
        for target in sorted(graph[source])
        if target in circle and levels[target] >= levels[source]
    ]


def describe(root: Path) -> tuple[str, bool]:
    """The figures and circles of the project under `root`, as text; and whether there is a circle.

    Levels are those of the imports that run when a module is imported: what goes up is deferred, for types, or in a
    circle that Python itself meets.
    """
    modules = find_modules(root)
    imports = find_imports(modules)
    at_import = [edge for edge in imports if edge.kind == "module"]
    lines, circular = [], False
    for name, make in {"modules": module_graph, "packages": package_graph}.items():
        graph, levels = make(modules, imports), find_levels(make(modules, at_import))
        climbing, circles = upward(graph, levels), find_circles(graph)
        lines.append(
            f"{len(graph)} {name} on {len(set(levels.values()))} levels, {sum(map(len, graph.values()))} edges, "
            f"{len(climbing)} upward, {len(circles)} circles"
        )
        lines += [f"  upward: {source} -> {target}" for source, target in climbing]
        lines += [f"  circle of {len(circle)}: {', '.join(circle)}" for circle in circles]
        circular = circular or bool(circles)
    return "\n".join(lines), circular


if __name__ == "__main__":
    text, circular = describe(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent))
    print(text)
    sys.exit(int(circular))
