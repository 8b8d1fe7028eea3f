"""Text and a language model -> attention traces: `python -m pipelines.collect_traces --config configs/collect.yaml`."""

from __future__ import annotations

import sys
from typing import Any

from data.plan import CollectSettings
from pipelines.cli import run


def collect_traces(**settings: Any) -> None:
    """Run a language model over text and record what each kv head attends to.

    Each document is a prompt and a continuation of real text, read in one forward pass. Writes Parquet shards and
    a manifest; a run that was interrupted continues where it stopped.
    """
    from data.collect import collect

    done = collect(CollectSettings(**settings))
    if done.kept:
        print(f"Kept {done.kept} shards that were there already.")
    print(
        f"{done.documents} documents, {done.tokens:,} tokens, {done.rows:,} rows, {done.bytes / 1e6:.1f} MB in "
        f"{done.folder} ({done.seconds:.1f} s)"
    )


if __name__ == "__main__":
    sys.exit(run(collect_traces))
