"""What a trace collection holds: `python -m pipelines.collect_traces inspect DIR`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.cli import run
from predictor.errors import FadeError

if TYPE_CHECKING:
    from data.contents import Contents, FarAttention


def inspect_traces(
    folder: str,
    layer: int | None = None,
    head: int = 0,
    out: Path = Path("artefacts/attention.png"),
    top: int = 10,
) -> None:
    """Print what a collection holds and which kv heads look far back; draw the attention of one of them.

    Args:
        folder: of the collection (may also stand without its name: inspect DIR), or a URL.
        layer: draw the attention of this layer over the first validation document.
        head: kv head of the drawn layer.
        out: PNG to draw to.
        top: number of heads in the table of those that look far back.

    Raises:
        FadeError: no collection, a damaged one, or a layer and head that it does not hold.
    """
    from data.contents import contents_of, far_attention
    from data.trace import Traces

    found = contents_of(folder)
    print(summary(folder, found))
    if not found.manifest["complete"]:
        if layer is not None:
            raise FadeError(
                f"traces in {folder} are unfinished; run python -m pipelines.collect_traces again before you draw"
            )
        return
    traces = Traces(folder)
    heads = far_attention(traces)
    if layer is not None and not any((one.layer, one.head) == (layer, head) for one in heads):
        layers, kv_heads = (1 + max(getattr(one, name) for one in heads) for name in ("layer", "head"))
        raise FadeError(
            f"layer {layer}, head {head} is not in the traces; they hold layers 0 to {layers - 1} and kv heads "
            f"0 to {kv_heads - 1}"
        )
    print(f"\n{far_table(heads[:top])}")
    if layer is not None:
        from pipelines.plots.heatmap import draw, head_map

        out.parent.mkdir(parents=True, exist_ok=True)
        draw(out, head_map(traces, {}, layer, head))
        print(f"\nAttention of layer {layer}, kv head {head}: {out}")


def summary(folder: str, found: Contents) -> str:
    """Facts and the table of documents, as text."""
    manifest = found.manifest
    settings, corpus = manifest["settings"], manifest["corpus"]["sha256"]
    planned, documents = len(manifest["shards"]), manifest["documents"]
    tokens = sum(one["tokens"] for one in documents)
    state = "complete" if manifest["complete"] else "unfinished"
    lines = [
        f"{folder}: {state}, {found.shards} of {planned} shards, {found.rows:,} rows, {found.bytes / 1e6:.1f} MB",
        f"model     {_model(manifest)}",
        f"text      {len(documents)} documents, {tokens:,} tokens, corpus {corpus[:12]}",
        f"settings  window {settings['window']}, block {settings['block']}, future {settings['future']}, "
        f"continuation {settings.get('continuation', 'text')}, template {settings.get('template', 'auto')}, "
        f"seed {settings['seed']}, schema {manifest['schema_version']}",
        "",
        _table(
            ("source", "split", "documents", "shortest prompt", "median", "longest"),
            [
                (
                    one.source,
                    one.split,
                    one.documents,
                    f"{one.shortest:,}",
                    f"{one.median:,.0f}",
                    f"{one.longest:,}",
                )
                for one in found.groups
            ],
        ),
    ]
    return "\n".join(lines)


def far_table(heads: list[FarAttention]) -> str:
    """The heads that look farthest back, as a table."""
    return "Most retrieval-like heads (far: not the first 4 tokens, not the last 64 of the prompt)\n" + _table(
        ("layer", "kv head", "far tokens looked up", "attention far back"),
        [(one.layer, one.head, f"{one.looked_up:.2f}", f"{one.fraction:.1%}") for one in heads],
    )


def _model(manifest: dict) -> str:
    named, facts = manifest.get("model", {}), manifest.get("provenance", {})
    parts = [manifest["settings"]["model"]]
    if facts:
        parts.append(f"{facts['model_type']} of {facts['layers']} layers x {facts['kv_heads']} kv heads")
        parts.append(f"weights {facts['weights'][:12]}")
    parts += [f"{name} {named[name]}" for name in ("revision", "dtype", "transformers") if named.get(name)]
    return ", ".join(parts)


def _table(header: tuple[str, ...], rows: list[tuple]) -> str:
    cells = [header, *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point; the folder may stand first, without its name."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and not given[0].startswith("-"):
        given[0] = f"--folder={given[0]}"
    return run(inspect_traces, given)


if __name__ == "__main__":
    sys.exit(main())
