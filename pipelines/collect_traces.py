"""Text and a language model -> attention traces: `python -m pipelines.collect_traces --config configs/collect.yaml`."""

from __future__ import annotations

import sys

from data.plan import CollectSettings
from pipelines import inspect_traces
from pipelines.cli import run


def collect_traces(settings: CollectSettings) -> None:
    """Run a language model over text and record what each kv head attends to.

    Each document is a prompt and a continuation, the text's own or the model's, read in one forward pass. Writes
    Parquet shards and a manifest; a run that was interrupted continues where it stopped.

    What a collection holds: python -m pipelines.collect_traces inspect DIR [--layer N --head N --out PNG]
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_only  # five seconds

    from data.collect import collect  # lightning too

    done = collect(settings)
    if getattr(rank_zero_only, "rank", 0):  # another process prints it
        return
    if done.kept:
        print(f"Kept {done.kept} shards that were there already.")
    print(
        f"{done.documents} documents, {done.tokens:,} tokens, {done.rows:,} rows, {done.bytes / 1e6:.1f} MB in "
        f"{done.folder} ({done.seconds:.1f} s)"
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    args = sys.argv[1:] if argv is None else argv
    if args[:1] == ["inspect"]:
        return inspect_traces.main(args[1:])
    return run(collect_traces, args, again="run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
