"""What a collection is going to hold: settings, documents, prompt lengths, shards. Decided before anything is run."""

from __future__ import annotations

import platform
import random
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from data.lm import encode
from data.text import Document, corpus_hash, load_documents
from data.trace import SCHEMA_VERSION
from predictor.errors import FadeError
from predictor.features import FeatureSpec


@dataclass
class CollectSettings:
    """What to collect.

    Args:
        text: sources: "builtin", .txt/.md/.jsonl files, folders of them, or "hf:NAME[:CONFIG[:SPLIT]]".
        model: model directory or hub id of the language model that is watched.
        out: folder of the collection.
        train_documents: number of documents to train on.
        validation_documents: number of documents to validate on.
        min_prompt: shortest prompt, in tokens.
        max_prompt: longest prompt, in tokens; lengths are drawn evenly between the two.
        future: tokens after the prompt whose attention is the target.
        window: last queries of the prompt whose attention is kept.
        block: consecutive tokens pooled together in attention maps.
        h2o: also record the attention each token received from the whole prompt (a baseline; a fifth more time).
        documents_per_shard: documents in one Parquet file; what an interruption can cost.
        dtype: of the model: float32, bfloat16 or float16.
        accelerator: Lightning's name of the device: auto, cpu, cuda.
        devices: how many of them; each collects its own shards.
        seed: of the order of the built-in corpus and of the prompt lengths.
    """

    text: list[str] | str = field(default_factory=lambda: ["builtin"])
    model: str = "artefacts/models/smollm2-135m-instruct"
    out: str = "artefacts/traces/demo"
    train_documents: int = 12
    validation_documents: int = 4
    min_prompt: int = 1024
    max_prompt: int = 2048
    future: int = 128
    window: int = 64
    block: int = 16
    h2o: bool = True
    documents_per_shard: int = 2
    dtype: str = "float32"
    accelerator: str = "auto"
    devices: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            FadeError: names the one that cannot be.
        """
        self.text = [self.text] if isinstance(self.text, str) else list(self.text)
        least = {
            "train_documents": 1, "validation_documents": 1, "future": 1, "window": 8, "block": 1,
            "documents_per_shard": 1, "devices": 1, "min_prompt": self.window + 1, "max_prompt": self.min_prompt,
        }  # fmt: skip
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise FadeError(f"{name} {getattr(self, name)} is too small; use at least {bound}")

    @property
    def spec(self) -> FeatureSpec:
        """The features that are recorded."""
        return FeatureSpec(window=self.window, block=self.block, horizon=self.future)

    def content(self) -> dict[str, Any]:
        """The settings that decide what the shards hold."""
        elsewhere = ("out", "accelerator", "devices")
        return {name: value for name, value in asdict(self).items() if name not in elsewhere}


@dataclass
class Task:
    """One document as the model reads it.

    Attributes:
        document: where it comes from. shard: file that its rows go to.
        tokens: [S + T] ids. prompt: S.
    """

    document: Document
    shard: str
    tokens: torch.Tensor
    prompt: int


def prepare(settings: CollectSettings, tokenizer: Any) -> list[Task]:
    """Choose documents, draw prompt lengths and assign shards; no shard mixes splits.

    Raises:
        FadeError: missing or too little text.
    """
    read = settings.max_prompt + settings.future
    documents = load_documents(
        settings.text,
        train=settings.train_documents,
        validation=settings.validation_documents,
        length=read,
        measure=lambda text: len(encode(tokenizer, text)),
        seed=settings.seed,
    )
    tasks: list[Task] = []
    shard = 0
    for split in ("train", "validation"):
        part = [document for document in documents if document.split == split]
        count = -(-len(part) // settings.documents_per_shard)
        for index, document in enumerate(part):
            drawn = random.Random(f"{settings.seed} {document.id}")
            prompt = drawn.randint(settings.min_prompt, settings.max_prompt)
            ids = torch.tensor(encode(tokenizer, document.text)[: prompt + settings.future])
            name = f"shard-{shard + index * count // len(part):05d}.parquet"
            tasks.append(Task(document, name, ids, prompt))
        shard += count
    return tasks


def begin_manifest(settings: CollectSettings, tasks: list[Task]) -> dict[str, Any]:
    """Return the manifest of a collection that is still to be made, without the model's provenance."""
    documents = [task.document for task in tasks]
    shards: dict[str, dict[str, Any]] = {}
    for task in tasks:
        shard = shards.setdefault(
            task.shard, {"name": task.shard, "split": task.document.split, "documents": []}
        )
        shard["documents"].append(task.document.id)
    return {
        "schema_version": SCHEMA_VERSION,
        "complete": False,
        "settings": settings.content(),
        "spec": settings.spec.to_dict(),
        "corpus": {"sha256": corpus_hash(documents), "python": platform.python_version()},
        "documents": [
            {
                "id": task.document.id,
                "source": task.document.source,
                "split": task.document.split,
                "origins": list(task.document.origins),
                "prompt": task.prompt,
                "tokens": len(task.tokens),
                "shard": task.shard,
            }
            for task in tasks
        ],
        "shards": list(shards.values()),
    }
