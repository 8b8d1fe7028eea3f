"""Text and a language model -> attention traces: `python -m pipelines.collect_traces --config configs/collect.yaml`."""

from __future__ import annotations

import sys
from typing import Any

from data.plan import CollectSettings
from pipelines.cli import run


def collect_traces(**settings: Any) -> None:
    """Run a language model over text and record what each kv head attends to.

    Each document is a prompt and a continuation, the text's own or the model's, read in one forward pass. Writes
    Parquet shards and a manifest; a run that was interrupted continues where it stopped.

    What a collection holds: python -m pipelines.collect_traces inspect DIR [--layer N --head N --out PNG]
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from data.collect import collect

    done = collect(CollectSettings(**settings))
    if getattr(rank_zero_only, "rank", 0):  # another process says it
        return
    if done.kept:
        print(f"Kept {done.kept} shards that were there already.")
    print(
        f"{done.documents} documents, {done.tokens:,} tokens, {done.rows:,} rows, {done.bytes / 1e6:.1f} MB in "
        f"{done.folder} ({done.seconds:.1f} s)"
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["inspect"]:
        from pipelines import inspect_traces

        return inspect_traces.main(given[1:])
    return run(collect_traces, given, again="run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
