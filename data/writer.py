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

from data.checks import AGAIN, mark_of, refuse_other_collection
from data.folder import Folder
from data.lm import load_tokenizer
from data.plan import CollectSettings, Task
from data.trace import HASH, HASHED, RECORDED, Row, recorded_layers, rows_of, write_manifest, write_shard
from predictor.cache_layers import in_words, learnable_layers
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
            FadeError: the collection was begun with other weights, or by a release that recorded other layers.
        """
        settings: CollectSettings = pl_module.settings
        model = pl_module.language_model
        begun = self.manifest.get("provenance")
        provenance = model_provenance(model, load_tokenizer(settings.model), like=begun)
        if begun not in (None, provenance):
            raise FadeError(f"traces in {self.folder} were begun with other weights; choose another out, or delete it")
        layers = learnable_layers(model.config.get_text_config(decoder=True))
        if begun is not None and recorded_layers(self.manifest) != layers:
            raise FadeError(
                f"traces in {self.folder} were begun by a release that did not record just {in_words(layers)} of this "
                f"model; choose another out, or delete it"
            )
        self.manifest |= {"provenance": provenance, RECORDED: layers}
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
                write_hash(self.folder, batch.shard, write_shard(path, self._rows, mark_of(self.manifest)))
            self._rows = []

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Mark the collection complete, with the hashes of all shards; processes without a document come here too."""
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


def write_hash(folder: Folder, shard: str, sha256: str) -> None:
    """Put a shard's hash beside it; before the shard itself, so that none is without."""
    with folder.write(f"{shard}{HASH}") as path:
        path.write_text(f"{sha256}  {shard}\n", encoding="utf-8")


def read_hash(folder: Folder, shard: str) -> str | None:
    """What :func:`write_hash` wrote, or None where it did not."""
    with folder.fetch(f"{shard}{HASH}") as path:
        return path.read_text(encoding="utf-8", errors="replace").partition(" ")[0] if path.is_file() else None


def finish(folder: Folder, manifest: dict[str, Any]) -> None:
    """Enter each shard's rows, bytes and hash into the manifest and write it as complete.

    Raises:
        FadeError: a shard, or the hash of one, is not there.
    """
    shards = []
    for shard in manifest["shards"]:
        name = shard["name"]
        sha256 = shard.get("sha256") or read_hash(folder, name)
        with folder.fetch(name) as path:
            if sha256 is None or not path.is_file():
                raise FadeError(f"shard {folder}/{name} or its hash was taken away meanwhile; run {AGAIN}")
            shards.append(shard | {"rows": rows_of(path), "bytes": path.stat().st_size, "sha256": sha256})
    write_manifest(folder, manifest | {"complete": True, "shards": shards})
    for shard in shards:
        folder.remove(f"{shard['name']}{HASH}")


def whole_shard(
    folder: Folder, manifest: dict[str, Any], shard: dict[str, Any], stored: dict[str, Any] | None
) -> str | None:
    """Look whether a shard is there with the documents it should hold, byte by byte as it was written.

    Args:
        folder: of the collection. manifest: that is wanted. shard: of it. stored: the manifest that is there.

    Returns:
        Its hash, or None when it must be collected (again).

    Raises:
        FadeError: it has other bytes than were written, and is a shard of another collection.
    """
    name, before = shard["name"], stored or {}
    known = next((one.get("sha256") for one in before.get("shards", ()) if one["name"] == name), None)
    known = known or read_hash(folder, name)
    with folder.fetch(name) as path:
        if not path.is_file():
            return None
        found = sha256_file(path)
        if known != found:
            if "provenance" in manifest:
                refuse_other_collection(path, f"{folder}/{name}", manifest)
            if known is not None or HASHED in before:  # collections of old had no hashes before their end
                return None
        try:
            held = set(pq.read_table(path, columns=["doc"])["doc"].to_pylist())
        except (OSError, pa.ArrowException):
            return None
    return found if held == set(shard["documents"]) else None
