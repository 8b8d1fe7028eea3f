"""From rows to a collection: shards as they become whole, the manifest, the bar."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, TQDMProgressBar

from data.checks import mark_of, refuse_stranger
from data.folder import Folder
from data.lm import load_tokenizer
from data.plan import CollectSettings, Task
from data.trace import Row, write_manifest, write_shard
from predictor.errors import FadeError
from predictor.files import sha256_file
from predictor.provenance import model_provenance


class ShardWriter(BasePredictionWriter):
    """Writes a shard when its last document is done, and completes the manifest at the end.

    Args:
        folder: where to.
        manifest: from ``begin_manifest``, with model and provenance of an earlier run if there was one.
        tasks: the collector's.
    """

    def __init__(self, folder: Folder, manifest: dict[str, Any], tasks: list[Task]):
        super().__init__(write_interval="batch")
        self.folder, self.manifest = folder, manifest
        self._awaited: dict[str, int] = {}
        for task in tasks:
            self._awaited[task.shard] = self._awaited.get(task.shard, 0) + 1
        self._rows: list[Row] = []

    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the manifest of an unfinished collection.

        Raises:
            FadeError: the collection was begun with other weights.
        """
        settings: CollectSettings = pl_module.settings
        model = pl_module.language_model
        begun = self.manifest.get("provenance")
        provenance = model_provenance(model, load_tokenizer(settings.model), like=begun)
        if begun not in (None, provenance):
            raise FadeError(
                f"traces in {self.folder} were begun with other weights; choose another out, or delete it"
            )
        self.manifest["provenance"] = provenance
        self.manifest.setdefault("model", model_facts(settings, model))
        if trainer.is_global_zero:
            write_manifest(self.folder, self.manifest)

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keep a document's rows until its shard is whole."""
        self._rows += prediction
        self._awaited[batch.shard] -= 1
        if self._awaited[batch.shard] == 0:
            with self.folder.write(batch.shard) as path:
                write_shard(path, self._rows, mark_of(self.manifest))
            self._rows = []

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hash all shards and mark the collection complete; processes without a document come here too."""
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            finish(self.folder, self.manifest)
        trainer.strategy.barrier()


class DocumentProgress(TQDMProgressBar):
    """A bar that counts documents and shows tokens per second."""

    def init_predict_tqdm(self) -> Any:
        """Name the bar's unit and start the clock."""
        bar = super().init_predict_tqdm()
        bar.unit = "document"
        self._began, self._tokens = time.perf_counter(), 0
        return bar

    @property
    def predict_description(self) -> str:
        """Title of the bar."""
        return "Collecting traces"

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Count the tokens of a document."""
        self._tokens += batch.prompt + batch.future
        rate = self._tokens / (time.perf_counter() - self._began)
        self.predict_progress_bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        super().on_predict_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)


def model_facts(settings: CollectSettings, model: Any) -> dict[str, Any]:
    """What a manifest says of the model beside its provenance: name, revision of the hub, dtype, library versions."""
    return {
        "id": settings.model,
        "revision": getattr(model.config, "_commit_hash", None),
        "dtype": settings.dtype,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def finish(folder: Folder, manifest: dict[str, Any]) -> None:
    """Enter each shard's rows, bytes and hash into the manifest and write it as complete."""
    shards = []
    for shard in manifest["shards"]:
        with folder.fetch(shard["name"]) as path:
            facts = {
                "rows": pq.read_metadata(path).num_rows,
                "bytes": path.stat().st_size,
                "sha256": sha256_file(path),
            }
        shards.append(shard | facts)
    write_manifest(folder, manifest | {"complete": True, "shards": shards})


def is_whole(folder: Folder, manifest: dict[str, Any], shard: dict[str, Any], sha256: str | None) -> bool:
    """Tell whether a shard is there with the documents it should hold, and with the hash if one is known.

    Raises:
        FadeError: the hash is not known, and it is a shard of another collection.
    """
    with folder.fetch(shard["name"]) as path:
        if not path.is_file() or sha256 not in (None, sha256_file(path)):
            return False
        if sha256 is None and "provenance" in manifest:
            refuse_stranger(path, f"{folder}/{shard['name']}", manifest)
        try:
            held = set(pq.read_table(path, columns=["doc"])["doc"].to_pylist())
        except (OSError, pa.ArrowException):
            return False
    return held == set(shard["documents"])
