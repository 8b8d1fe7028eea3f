"""Text and a language model -> a trace collection on disk, resumable shard by shard."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, TQDMProgressBar
from torch.utils.data import DataLoader

from data.lm import load_lm, load_tokenizer
from data.plan import CollectSettings, Task, begin_manifest, prepare
from data.record import record_forward
from data.trace import Row, read_manifest, write_manifest, write_shard
from predictor.errors import FadeError
from predictor.files import sha256_file
from predictor.provenance import model_provenance


@dataclass
class Summary:
    """What a collection holds.

    Attributes:
        folder: where it is. documents: how many, of both splits. tokens: read by the language model.
        rows: documents x layers x kv heads. bytes: of the shards. seconds: of this run.
        kept: shards that were there already.
    """

    folder: Path
    documents: int
    tokens: int
    rows: int
    bytes: int
    seconds: float
    kept: int


def collect(settings: CollectSettings) -> Summary:
    """Collect traces into ``settings.out``; whole shards that are there already are kept.

    Raises:
        FadeError: bad text, model or settings; a folder begun with other settings, text or weights.
    """
    began = time.perf_counter()
    folder = Path(settings.out)
    stored = read_manifest(folder)
    if stored is None and any(folder.glob("shard-*.parquet")):
        raise FadeError(f"{folder} holds shards without a manifest; choose another out, or delete it")
    if stored is not None:
        _refuse_other(folder, "settings", stored["settings"], settings.content())
    tasks = prepare(settings, load_tokenizer(settings.model))
    manifest = begin_manifest(settings, tasks)
    if stored is not None:
        _refuse_other(
            folder, "text", {"sha256": stored["corpus"]["sha256"]}, {"sha256": manifest["corpus"]["sha256"]}
        )
        manifest["provenance"] = stored["provenance"]
    hashes = {shard["name"]: shard.get("sha256") for shard in (stored or {}).get("shards", [])}
    kept = {
        shard["name"] for shard in manifest["shards"] if is_whole(folder, shard, hashes.get(shard["name"]))
    }
    missing = [task for task in tasks if task.shard not in kept]
    if missing:
        trainer = Trainer(
            accelerator=settings.accelerator,
            devices=min(settings.devices, len({task.shard for task in missing})),
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[ShardWriter(folder, manifest, missing), DocumentProgress(refresh_rate=1)],
        )
        try:
            trainer.predict(TraceCollector(settings, missing), return_predictions=False)
        except SystemExit as stop:  # Lightning's answer to Ctrl-C
            raise KeyboardInterrupt from stop
    elif stored is not None and not stored["complete"]:
        finish(folder, manifest)
    done = read_manifest(folder)
    if done is None or not done["complete"]:
        raise FadeError(f"collection into {folder} was interrupted; run it again to continue")
    return Summary(
        folder=folder,
        documents=len(tasks),
        tokens=sum(len(task.tokens) for task in tasks),
        rows=sum(shard["rows"] for shard in done["shards"]),
        bytes=sum(shard["bytes"] for shard in done["shards"]),
        seconds=time.perf_counter() - began,
        kept=len(kept),
    )


class TraceCollector(LightningModule):
    """Runs the language model once over each document; ``Trainer.predict`` drives it.

    Args:
        settings: what to collect.
        tasks: the documents that are still to be read, in order of their shards.
    """

    def __init__(self, settings: CollectSettings, tasks: list[Task]):
        super().__init__()
        self.settings, self.tasks = settings, tasks
        self._held: list[
            Any
        ] = []  # in a plain list, so that Lightning neither registers, moves nor saves the model

    @property
    def language_model(self) -> Any:
        """The model, from ``setup`` on."""
        return self._held[0]

    def setup(self, stage: str) -> None:
        """Load the language model on this process's device.

        Raises:
            FadeError: it cannot be loaded, or was not made for prompts this long.
        """
        model, _ = load_lm(self.settings.model, self.settings.dtype)
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit and self.settings.max_prompt + self.settings.future > limit:
            raise FadeError(
                f"max_prompt {self.settings.max_prompt} and future {self.settings.future} pass the {limit} positions "
                f"of {self.settings.model}; lower max_prompt"
            )
        self._held[:] = [model.to(self.trainer.strategy.root_device)]

    def predict_dataloader(self) -> DataLoader:
        """Documents of this process: whole shards, so that each file has one writer."""
        shards = sorted({task.shard for task in self.tasks})
        mine = set(shards[self.trainer.global_rank :: self.trainer.world_size])
        tasks: Any = [task for task in self.tasks if task.shard in mine]
        return DataLoader(tasks, batch_size=1, collate_fn=_only, num_workers=0)

    def transfer_batch_to_device(self, batch: Task, device: torch.device, dataloader_idx: int) -> Task:
        """Move a document's tokens."""
        return replace(batch, tokens=batch.tokens.to(device))

    def predict_step(self, batch: Task, batch_idx: int) -> list[Row]:
        """Return the trace rows of one document."""
        settings, document = self.settings, batch.document
        rows = record_forward(self.language_model, batch.tokens, batch.prompt, settings.spec, settings.h2o)
        origin = {"doc": document.id, "split": document.split, "source": document.source}
        return [origin | row for row in rows]


class ShardWriter(BasePredictionWriter):
    """Writes a shard when its last document is done, and completes the manifest at the end.

    Args:
        folder: where to.
        manifest: from ``begin_manifest``, with the provenance of an earlier run if there was one.
        tasks: the collector's.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], tasks: list[Task]):
        super().__init__(write_interval="batch")
        self.folder, self.manifest = folder, manifest
        self._awaited: dict[str, int] = {}
        for task in tasks:
            self._awaited[task.shard] = self._awaited.get(task.shard, 0) + 1
        self._rows: list[Row] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the manifest of an unfinished collection.

        Raises:
            FadeError: the collection was begun with other weights.
        """
        assert isinstance(pl_module, TraceCollector)
        provenance = model_provenance(pl_module.language_model, load_tokenizer(pl_module.settings.model))
        if self.manifest.get("provenance", provenance) != provenance:
            raise FadeError(
                f"traces in {self.folder} were begun with other weights; choose another out, or delete it"
            )
        self.manifest["provenance"] = provenance
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
            write_shard(self.folder / batch.shard, self._rows)
            self._rows = []

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hash all shards and mark the collection complete."""
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
        self._tokens += len(batch.tokens)
        rate = self._tokens / (time.perf_counter() - self._began)
        self.predict_progress_bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        super().on_predict_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)


def finish(folder: Path, manifest: dict[str, Any]) -> None:
    """Enter each shard's rows, bytes and hash into the manifest and write it as complete."""
    shards = []
    for shard in manifest["shards"]:
        path = folder / shard["name"]
        facts = {
            "rows": pq.read_metadata(path).num_rows,
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
        }
        shards.append(shard | facts)
    write_manifest(folder, manifest | {"complete": True, "shards": shards})


def is_whole(folder: Path, shard: dict[str, Any], sha256: str | None) -> bool:
    """Tell whether a shard is on disk with the documents it should hold, and with the hash if one is known."""
    path = folder / shard["name"]
    try:
        held = set(pq.read_table(path, columns=["doc"])["doc"].to_pylist())
    except (OSError, pa.ArrowException):
        return False
    return held == set(shard["documents"]) and sha256 in (None, sha256_file(path))


def _only(items: list[Task]) -> Task:
    return items[0]


def _refuse_other(folder: Path, what: str, stored: dict[str, Any], now: dict[str, Any]) -> None:
    for name in {**stored, **now}:
        if stored.get(name) != now.get(name):
            raise FadeError(
                f"traces in {folder} were begun with other {what}: {name} was {stored.get(name)}, now "
                f"{now.get(name)}; choose another out, or delete the folder"
            )
