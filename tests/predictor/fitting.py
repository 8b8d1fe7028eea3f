"""What tests of fits share: traces made up for them, a quiet trainer, what was said and tracked."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from data.trace import SCHEMA_VERSION, write_manifest, write_shard
from predictor.features import FEATURES, FeatureSpec
from predictor.files import sha256_file
from tests.predictor.rows import sequence

SPEC = FeatureSpec(window=8)
LENGTHS = {"train": [400, 411, 440], "validation": [401, 450]}


def rows_of(document, length, split, spec=SPEC):
    """Trace rows of one document: one layer, two kv heads, what is kept told by the value norm alone."""
    for head, row in enumerate(sequence(length, 12, spec, seed=document)):
        share = (4 * row["tokens"][:, FEATURES.index("value_norm")]).softmax(0)
        row["target_sum"] = row["target_max"] = share
        arrays = {name: value.numpy() for name, value in row.items()}
        arrays |= {name: row[name].clamp(min=1e-9).log().numpy() for name in ("target_sum", "target_max")}
        arrays["future_max"] = arrays["future_mean"]
        scalars = dict(doc=f"doc-{document}", split=split, source="made", layer=0, head=head, length=length, steps=12)
        yield scalars | arrays


def write_traces(folder: Path, model: Path, spec: FeatureSpec = SPEC) -> Path:
    """A collection of five made-up documents, as if a model had read them."""
    documents, shards = [], []
    for split, lengths in LENGTHS.items():
        name, rows = f"shard-{len(shards):05d}.parquet", []
        for length in lengths:
            rows += rows_of(len(documents), length, split, spec)
            documents.append(
                {
                    "id": f"doc-{len(documents)}",
                    "source": "made",
                    "split": split,
                    "prompt": length,
                    "shard": name,
                }
            )
        write_shard(folder / name, rows)
        facts = {"rows": len(rows), "sha256": sha256_file(folder / name)}
        shards.append({"name": name, "split": split, "documents": [], **facts})
    write_manifest(
        folder,
        {
            "schema_version": SCHEMA_VERSION,
            "complete": True,
            "spec": spec.to_dict(),
            "settings": {"model": str(model)},
            "provenance": {"model_type": "llama", "layers": 1, "kv_heads": 2},
            "corpus": {"sha256": "text"},
            "documents": documents,
            "shards": shards,
        },
    )
    return folder


def fit(module, batches, epochs=1, **options):
    """Train on whole batches, quietly, on the CPU."""
    loader = DataLoader(batches, batch_size=None, shuffle=False)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        deterministic=True,
        **options,
    )
    trainer.fit(module, loader, loader)
    return trainer


def runs(client, name):
    return client.search_runs([client.get_experiment_by_name(name).experiment_id])


def one_line(capsys):
    """What was said on standard error, without the progress bar."""
    told = [line for line in capsys.readouterr().err.splitlines() if line and "batch/s]" not in line]
    assert len(told) == 1, told
    return told[0]
