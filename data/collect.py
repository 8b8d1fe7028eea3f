"""Text and a language model -> a trace collection on disk, resumable shard by shard."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from data.checks import SHARDS, refuse_not_finite, refuse_other_shards
from data.continuation import continue_prompt
from data.folder import Folder
from data.lm import load_lm, load_tokenizer, refuse_too_long
from data.plan import CollectSettings, Task, begin_manifest, prepare
from data.record import record_forward, recording_twin
from data.trace import RECORDED, Row, read_manifest
from data.writer import DocumentProgress, ShardWriter, finish, whole_shard
from predictor.cache_layers import learnable_layers
from predictor.errors import FadeError


@dataclass
class Summary:
    """What a collection holds.

    Attributes:
        folder: path or URL. documents: how many, of both splits. tokens: read by the language model.
        rows: documents x recorded layers x kv heads. bytes: of the shards. seconds: of this run.
        kept: shards that were there already.
    """

    folder: str
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
    folder = Folder(settings.out)
    stored = read_manifest(folder)
    if stored is None and folder.names(SHARDS):
        raise FadeError(f"{folder} holds shards without a manifest; choose another out, or delete it")
    if stored is not None:
        # options that a manifest of an earlier release lacks were not there, and are at their defaults
        before = CollectSettings().content() | stored["settings"]
        _refuse_other(folder, "settings", before, settings.content())
    tasks = prepare(settings, load_tokenizer(settings.model))
    manifest = begin_manifest(settings, tasks)
    if stored is not None:
        _refuse_other(folder, "text", {"sha256": stored["corpus"]["sha256"]}, {"sha256": manifest["corpus"]["sha256"]})
        manifest |= {name: stored[name] for name in ("settings", "provenance", "model", RECORDED) if name in stored}
        refuse_other_shards(folder, manifest)
    kept = set()
    for shard in manifest["shards"]:
        if sha256 := whole_shard(folder, manifest, shard, stored):
            kept.add(shard["name"])
            shard["sha256"] = sha256
        else:
            folder.remove(shard["name"])  # nothing damaged stands there when another interruption comes
    missing = [task for task in tasks if task.shard not in kept]
    if missing:
        trainer = Trainer(
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.nodes,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[ShardWriter(folder, manifest, missing), DocumentProgress(refresh_rate=1), SigtermEnds()],
        )
        try:
            trainer.predict(TraceCollector(settings, missing), return_predictions=False)
        except SystemExit as stop:  # Lightning's answer to Ctrl-C
            raise stop.__context__ or KeyboardInterrupt from stop
    elif stored is not None and not stored["complete"]:
        finish(folder, manifest)
    done = read_manifest(folder)
    if done is None or not done["complete"]:
        raise FadeError(f"collection into {folder} was interrupted; run it again to continue")
    return Summary(
        folder=str(folder),
        documents=len(tasks),
        tokens=sum(task.prompt + task.future for task in tasks),
        rows=sum(shard["rows"] for shard in done["shards"]),
        bytes=sum(shard["bytes"] for shard in done["shards"]),
        seconds=time.perf_counter() - began,
        kept=len(kept),
    )


class SigtermEnds(Callback):
    """SIGTERM is handled as it was before Lightning came.

    Lightning's handler first broadcasts the signal. A process that has finished, and waits for the others, never joins
    in that: the first process, which would end it, waits for it in turn.
    """

    def __init__(self) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Undo what Lightning set; where nobody had set anything, that stays."""
        if callable(self.handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.handler)


class TraceCollector(LightningModule):
    """Runs the language model once over each document; ``Trainer.predict`` drives it.

    Args:
        settings: what to collect.
        tasks: the documents that are still to be read, in order of their shards.
    """

    def __init__(self, settings: CollectSettings, tasks: list[Task]):
        super().__init__()
        self.settings, self.tasks = settings, tasks
        self.allow_zero_length_dataloader_with_multiple_devices = True  # fewer shards left than processes
        # the model and its recording twin, in a plain list, so that Lightning neither registers, moves nor saves them
        self._held: list[Any] = []

    @property
    def language_model(self) -> Any:
        """The model, from ``setup`` on."""
        return self._held[0]

    def setup(self, stage: str) -> None:
        """Load the language model on this process's device.

        Raises:
            FadeError: it cannot be loaded, has no layer to record, or was not made for prompts this long.
        """
        model, _ = load_lm(self.settings.model, self.settings.dtype)
        learnable_layers(model.config.get_text_config(decoder=True))
        prompt, future = self.settings.max_prompt, self.settings.future
        refuse_too_long(model, prompt + future, f"max_prompt {prompt} and future {future} pass", "lower max_prompt")
        model.to(self.trainer.strategy.root_device)
        self._held[:] = [model, recording_twin(model)]

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
        """Return the trace rows of one document.

        Raises:
            FadeError: attention that is not a number in the model's dtype.
        """
        settings, document, tokens = self.settings, batch.document, batch.tokens
        if settings.continuation != "text":
            tokens = continue_prompt(
                self.language_model,
                tokens,
                batch.future,
                sample=settings.continuation == "sample",
                temperature=settings.temperature,
                top_p=settings.top_p,
                seed=f"{settings.seed} {document.id}",
            )
        rows = record_forward(self._held[1], tokens, batch.prompt, settings.spec, settings.h2o)
        origin = {"doc": document.id, "split": document.split, "source": document.source}
        for row in rows:
            refuse_not_finite(origin | row, "attention", f"use another dtype than {settings.dtype}")
        return [origin | row for row in rows]


def _only(items: list[Task]) -> Task:
    return items[0]


def _refuse_other(folder: Folder, what: str, stored: dict[str, Any], now: dict[str, Any]) -> None:
    for name in {**stored, **now}:
        if stored.get(name) != now.get(name):
            raise FadeError(
                f"traces in {folder} were begun with other {what}: {name} was {stored.get(name)}, now "
                f"{now.get(name)}; choose another out, or delete the folder"
            )
