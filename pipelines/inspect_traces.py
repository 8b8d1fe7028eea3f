"""What a trace collection holds: `python -m pipelines.collect_traces inspect DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from data.contents import Contents, FarAttention, contents_of, far_attention
from data.trace import Traces, recorded_layers
from pipelines.cli import run
from pipelines.plots.heatmap import draw, head_map
from pipelines.reporting.tables import plain_table
from predictor.cache_layers import in_words
from predictor.errors import FadeError


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
    contents = contents_of(folder)
    print(summary(folder, contents))
    if not contents.manifest["complete"]:
        if layer is not None:
            raise FadeError(
                f"traces in {folder} are unfinished; run python -m pipelines.collect_traces again before you draw"
            )
        return
    traces = Traces(folder)
    heads = far_attention(traces)
    if layer is not None and not any((one.layer, one.head) == (layer, head) for one in heads):
        raise FadeError(
            f"layer {layer}, head {head} is not in the traces; they hold {in_words(traces.layers)} and "
            f"{in_words(sorted({one.head for one in heads}), 'kv head')}"
        )
    print(f"\n{far_table(heads[:top])}")
    if layer is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw(out, head_map(traces, {}, layer, head))
        print(f"\nAttention of layer {layer}, kv head {head}: {out}")


def summary(folder: str, contents: Contents) -> str:
    """Facts and the table of documents, as text."""
    manifest = contents.manifest
    settings, corpus = manifest["settings"], manifest["corpus"]["sha256"]
    planned, documents = len(manifest["shards"]), manifest["documents"]
    tokens = sum(one["tokens"] for one in documents)
    state = "complete" if manifest["complete"] else "unfinished"
    lines = [
        f"{folder}: {state}, {contents.shards} of {planned} shards, {contents.rows:,} rows, "
        f"{contents.bytes / 1e6:.1f} MB",
        f"model     {_model(manifest)}",
        f"text      {len(documents)} documents, {tokens:,} tokens, corpus {corpus[:12]}",
        f"settings  window {settings['window']}, block {settings['block']}, future {settings['future']}, "
        f"continuation {settings.get('continuation', 'text')}, template {settings.get('template', 'auto')}, "
        f"seed {settings['seed']}, schema {manifest['schema_version']}",
        "",
        plain_table(
            ("source", "split", "documents", "shortest prompt", "median", "longest"),
            [
                (
                    one.source,
                    one.split,
                    str(one.documents),
                    f"{one.shortest:,}",
                    f"{one.median:,.0f}",
                    f"{one.longest:,}",
                )
                for one in contents.groups
            ],
            words=2,
        ),
    ]
    return "\n".join(lines)


def far_table(heads: list[FarAttention]) -> str:
    """The heads that look farthest back, as a table."""
    return "Most retrieval-like heads (far: not the first 4 tokens, not the last 64 of the prompt)\n" + plain_table(
        ("layer", "kv head", "far tokens looked up", "attention far back"),
        [(str(one.layer), str(one.head), f"{one.looked_up:.2f}", f"{one.fraction:.1%}") for one in heads],
        words=2,
    )


def _model(manifest: dict) -> str:
    named, facts = manifest.get("model", {}), manifest.get("provenance", {})
    parts = [manifest["settings"]["model"]]
    if facts:
        layers, recorded = facts["layers"], recorded_layers(manifest)
        parts.append(f"{facts['model_type']} of {layers} layers x {facts['kv_heads']} kv heads")
        if len(recorded) < layers:
            parts.append(f"recorded: {in_words(recorded)}, the others keep no more than a window or a state")
        parts.append(f"weights {facts['weights'][:12]}")
    parts += [f"{name} {named[name]}" for name in ("revision", "dtype", "transformers") if named.get(name)]
    return ", ".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Entry point; the folder may stand first, without its name."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and not args[0].startswith("-"):
        args[0] = f"--folder={args[0]}"
    return run(inspect_traces, args)


if __name__ == "__main__":
    sys.exit(main())
