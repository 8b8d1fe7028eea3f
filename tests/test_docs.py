"""The documentation is true: commands parse, code runs and prints what is said, links and names lead somewhere."""

from __future__ import annotations

import doctest
import hashlib
import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from fade_runtime import FadeConfig
from fade_runtime.storage.packed import pack_tokens
from tests.commands import run_command
from tests.pages import DOCS, FENCE, PAGES, ROOT, blocks, commands, named, runs

TEXTS = {page: page.read_text() for page in PAGES}
LINES = list(dict.fromkeys(line for text in TEXTS.values() for line in commands(text)))
OURS = [line for line in LINES if line.startswith(("python -m pipelines.", "lightning "))]
OTHERS = "pipelines.lm_eval"  # another project's command line
MAIN = 'if __name__ == "__main__"'
COMMANDS = sorted(path.stem for path in (ROOT / "pipelines").glob("*.py") if MAIN in path.read_text())


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_make_knows_it(line: str) -> None:
    done = subprocess.run([*shlex.split(line), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for line in OURS if OTHERS not in line])
def test_command_takes_its_options(line: str) -> None:
    status, out, err = run_command([*shlex.split(line), "--print_config"])
    assert status == 0, err
    assert ":" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_a_place_in_the_reference(name: str) -> None:
    assert f"pipelines.{name}" in TEXTS[DOCS / "reference" / "commands.md"]
    if name not in OTHERS:
        status, out, err = run_command(["python", "-m", f"pipelines.{name}", "--help"])
        assert status == 0, err
        assert out.startswith("usage: ")


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "page", [page for page, text in TEXTS.items() if runs(text) and page.parent != ROOT], ids=named
)
def test_the_python_blocks_run(
    page: Path,
    real_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In order, in one namespace, in a folder of their own."""
    (tmp_path / "artefacts" / "models").mkdir(parents=True)
    (tmp_path / "artefacts" / "models" / real_model_dir.name).symlink_to(real_model_dir.resolve())
    (tmp_path / "LICENSE").symlink_to(ROOT / "LICENSE")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block, printed in runs(TEXTS[page]):
        exec(compile(block, named(page), "exec"), names)
        out = capsys.readouterr().out
        if printed is not None:
            assert out == printed


def test_every_option_of_a_cache_is_explained() -> None:
    told = TEXTS[DOCS / "choosing.md"] + TEXTS[DOCS / "guard.md"]
    bits = {"middle_v_bits", "low_k_bits"}  # between two that are named
    alias = {"phase"}  # FADE's name for what the budgets say
    for name in {field.name for field in fields(FadeConfig)} - bits - alias:
        assert re.search(rf"`[^`]*\b{name}\b", told), name


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_it_names_is_there(page: Path) -> None:
    """Links to files and headings, and files of the packages."""
    text = FENCE.sub("", TEXTS[page])
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():  # pages that the site takes from elsewhere (tools/site_hooks.py)
            assert file.relative_to(DOCS).as_posix() in (ROOT / "tools" / "site_hooks.py").read_text(), target
        elif anchor:
            assert anchor in [
                anchor_of(heading) for heading in re.findall(r"^#+ (.*)", TEXTS[file.resolve()], re.MULTILINE)
            ]
    for path in re.findall(r"`((?:fade_runtime|predictor|data|pipelines|configs|tests|tools|docs)/[\w./-]*\w)`", text):
        assert (ROOT / path).exists(), path


def anchor_of(heading: str) -> str:
    """Anchor that both mkdocs and GitHub give a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")


def test_the_tree_is_there() -> None:
    (tree,) = blocks("", TEXTS[DOCS / "architecture.md"])
    folders = [line.split()[0] for line in tree.splitlines()]
    assert len(folders) > 6
    for folder in folders:
        assert folder == "artefacts/" or (ROOT / folder).is_dir(), folder


def test_the_packages_of_the_runtime_are_named() -> None:
    text = TEXTS[DOCS / "architecture.md"]
    for package in (ROOT / "fade_runtime").iterdir():
        if (package / "__init__.py").is_file():
            assert f"| `{package.name}/` |" in text


def test_the_drawn_page_is_the_stored_one() -> None:
    (drawing,) = [block for block in blocks("text", TEXTS[DOCS / "architecture.md"]) if "of each token" in block]
    of_tokens, of_page = (
        {name: int(size) for name, size in re.findall(r"^  (\w+) [^=\n]* (\d+)(?: +=.*)?$", half, re.MULTILINE)}
        for half in drawing.split("of the page")
    )
    key, value = torch.randn(2, 32, 64)
    page = pack_tokens(key, value, torch.zeros(32).long(), torch.arange(32), torch.zeros(32))
    sizes = {name: t.numel() * t.element_size() for name, t in page.tensors().items() if t.numel()}
    assert of_page == {name: size for name, size in sizes.items() if name in page.PER_PAGE}
    assert of_tokens == {name: size // 32 for name, size in sizes.items() if name not in page.PER_PAGE}
    for number in (sum(of_tokens.values()), sum(of_page.values()), sum(sizes.values())):
        assert f"{number:,}" in drawing


def test_diagrams_are_drawn_as_they_are_written() -> None:
    drawn = 0
    for page in DOCS.rglob("*.md"):
        for source in blocks("mermaid", TEXTS[page]):
            name = source.splitlines()[0].removeprefix("%%").strip()
            digest = hashlib.sha256(source.strip().encode()).hexdigest()
            assert digest in (DOCS / "diagrams" / f"{name}.svg").read_text(), "run tools/draw_diagrams.py"
            drawn += 1
    assert drawn == len(list((DOCS / "diagrams").glob("*.svg")))


def test_docstrings_are_rewritten_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("griffe", reason="comes with the extra docs")
    monkeypatch.syspath_prepend(ROOT / "tools")
    import site_docstrings

    assert doctest.testmod(site_docstrings) == (0, 1)


def test_a_diagram_that_was_changed_and_not_drawn_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason="comes with the extra docs")
    monkeypatch.syspath_prepend(ROOT / "tools")
    import site_hooks
    from mkdocs.exceptions import PluginError

    (source, _) = blocks("mermaid", TEXTS[DOCS / "architecture.md"])
    assert "<svg" in site_hooks.diagram(source)
    with pytest.raises(PluginError, match="draw_diagrams"):
        site_hooks.diagram(source + "  more --> edges\n")
