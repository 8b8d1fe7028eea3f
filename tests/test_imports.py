"""Imports lead one way: no circle in the whole project. `fade_runtime` is light: no training library comes with it."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT
from tools.import_graph import (
    describe,
    find_circles,
    find_imports,
    find_levels,
    find_modules,
    module_graph,
    package_graph,
    upward,
)

HEAVY = {"lightning", "pytorch_lightning", "mlflow", "datasets", "sklearn", "pyarrow", "matplotlib"}

# One child writes down which modules of transformers fade_runtime imports; the parent imports those alone; each further
# child, forked from it, times what fade_runtime adds to them: of the processor, since others may run beside it.
FRESH = """
import json, os, sys, time

def in_child(work):
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        with os.fdopen(write, "w") as out:
            json.dump(work(), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.wait()
    return json.loads(text)

def first():
    import fade_runtime
    needed = [name for name in sys.modules if name.split(".")[0] == "transformers"]
    import transformers
    config = transformers.LlamaConfig(vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    cache = fade_runtime.create_tiered_cache(transformers.LlamaForCausalLM(config).eval(), "safe")
    assert type(cache) is fade_runtime.TieredCache
    return {"needed": needed, "loaded": sorted({name.split(".")[0] for name in sys.modules})}

def again():
    start = time.process_time()
    import fade_runtime
    return time.process_time() - start

seen = in_child(first)
for name in seen["needed"]:
    __import__(name)
print(json.dumps({"loaded": seen["loaded"], "seconds": [in_child(again) for _ in range(3)]}))
"""


def graphs(root: Path) -> list[dict[str, set[str]]]:
    """The import graph of the modules under `root`, and that of the packages."""
    modules = find_modules(root)
    imports = find_imports(modules)
    return [module_graph(modules, imports), package_graph(modules, imports)]


def test_no_circle_among_modules_nor_among_packages() -> None:
    modules, packages = graphs(ROOT)
    assert (find_circles(modules), find_circles(packages)) == ([], []), describe(ROOT)[0]


PLANTED = {
    "at the top": "from fade_runtime.cache.tiered_cache import TieredCache",
    "deferred": "def later():\n    from fade_runtime.cache import tiered_cache",
    "in a method": "class Tier:\n    def later(self):\n        import fade_runtime.cache.tiered_cache as above",
    "for types": "if TYPE_CHECKING:\n    from ..cache.tiered_cache import TieredCache",
    "through what the root re-exports": "def later():\n    from fade_runtime import TieredCache",
}


@pytest.mark.parametrize("statement", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_upward_import_is_a_circle(statement: str, tmp_path: Path) -> None:
    for package in ("fade_runtime", "predictor"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.json", "bundles", "__pycache__")
        )
    changed = tmp_path / "fade_runtime" / "storage" / "tiers.py"
    changed.write_text(f"{changed.read_text()}\n{statement}\n")
    for graph, low, high in zip(
        graphs(tmp_path),
        ("fade_runtime.storage.tiers", "fade_runtime.storage"),
        ("fade_runtime.cache.tiered_cache", "fade_runtime.cache"),
    ):
        assert any({low, high} <= set(circle) for circle in find_circles(graph))
    assert describe(tmp_path)[1]


def test_circles_and_levels_of_a_graph_drawn_by_hand() -> None:
    graph = {"a": ["b", "d"], "b": ["c"], "c": ["b", "d"], "d": ["e"], "e": [], "f": []}
    assert find_circles(graph) == [["b", "c"]]
    assert find_levels(graph) == {"a": 3, "b": 2, "c": 2, "d": 1, "e": 0, "f": 0}
    assert upward(graph, {**find_levels(graph), "b": 3}) == [("c", "b")]


@pytest.mark.slow
def test_the_runtime_is_light() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FRESH], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert HEAVY & set(seen["loaded"]) == set()
    assert statistics.median(seen["seconds"]) <= 0.3
