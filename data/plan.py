"""What a collection is going to hold: settings, documents, prompt lengths, shards. Decided before anything is run."""

from __future__ import annotations

import platform
import random
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from data.chat import chat_frame, chat_renderer
from data.continuation import KINDS
from data.encoding import encode
from data.leaks import pack_keys
from data.lm import DEMO_MODEL
from data.packing import Document
from data.text import corpus_hash, load_documents
from data.trace import HASHED, HIDDEN_VERSION, SCHEMA_VERSION
from predictor.errors import FadeError
from predictor.features import FeatureSpec


@dataclass
class CollectSettings:
    """What to collect.

    Args:
        text: sources, a list (in turn) or a mapping source -> weight: "builtin" or "builtin:FAMILY", files of text or
            code, FILE.jsonl or FILE.parquet (text or chat messages; FILE.jsonl:FIELD+FIELD for others), folders of
            them, "hf:NAME[:CONFIG[:SPLIT[:FIELD]]]", or "generated:KIND", text whose end asks for what came before:
            copies, key-value, lines, needles, multi-key or chat-facts.
        validation_text: sources of the validation documents, held out from training; by default those of text.
        model: directory, GGUF file or hub id of the language model that is watched; by default the demo's.
        out: folder of the collection.
        train_documents: number of documents to train on.
        validation_documents: number of documents to validate on.
        min_prompt: shortest prompt, in tokens.
        max_prompt: longest prompt, in tokens; lengths are drawn evenly between the two.
        future: tokens after the prompt whose attention is the target.
        continuation: what follows a prompt: text (of the document), or the model's own greedy or sample.
        temperature: of a sample. top_p: probability of the likeliest tokens together that a sample is drawn from.
        template: auto writes chats in the model's chat template (role lines where it has none) and leaves other text
            as it is, chat puts other text into the template too, as a user's message, raw uses no template.
        window: last queries of the prompt whose attention is kept.
        block: consecutive tokens pooled together in attention maps.
        h2o: also record the attention each token received from the whole prompt (a baseline; a fifth more time).
        record_hidden: also record each token's key before its rotation, and its value, for networks that read them
            (4 bytes a channel for each token and kv head: several times the disk).
        documents_per_shard: documents in one Parquet file; what an interruption can cost.
        dtype: of the model: float32, bfloat16 or float16.
        accelerator: Lightning's name of the device: auto, cpu, cuda.
        devices: how many of them (processes on a CPU); each collects its own shards.
        nodes: machines with so many devices each, started by torchrun; they share the folder.
        seed: of the order of the built-in corpus, of the prompt lengths and of samples.
    """

    text: dict[str, float] | list[str] | str = field(default_factory=lambda: ["builtin"])
    validation_text: dict[str, float] | list[str] | str = field(default_factory=list)
    model: str = DEMO_MODEL
    out: str = "artefacts/traces/demo"
    train_documents: int = 12
    validation_documents: int = 4
    min_prompt: int = 1024
    max_prompt: int = 2048
    future: int = 128
    continuation: str = "text"
    temperature: float = 1.0
    top_p: float = 1.0
    template: str = "auto"
    window: int = 64
    block: int = 16
    h2o: bool = True
    record_hidden: bool = False
    documents_per_shard: int = 2
    dtype: str = "float32"
    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            FadeError: names the one that cannot be.
        """
        self.text = _sources(self.text)
        self.validation_text = _sources(self.validation_text)
        least = {
            "train_documents": 1, "validation_documents": 1, "future": 1, "window": 8, "block": 1,
            "documents_per_shard": 1, "devices": 1, "nodes": 1,
            "min_prompt": self.window + 1, "max_prompt": self.min_prompt,
        }  # fmt: skip
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise FadeError(f"{name} {getattr(self, name)} is too small; use at least {bound}")
        if self.continuation not in KINDS:
            raise FadeError(f"continuation {self.continuation} is not known; use one of {', '.join(KINDS)}")
        if not 0 < self.temperature < float("inf"):
            raise FadeError(f"temperature {self.temperature} is out of range; use a number above 0")
        if not 0 < self.top_p <= 1:
            raise FadeError(f"top_p {self.top_p} is out of range; use a share in (0, 1]")

    @property
    def spec(self) -> FeatureSpec:
        """The features that are recorded."""
        return FeatureSpec(window=self.window, block=self.block, horizon=self.future, hidden=self.record_hidden)

    def content(self) -> dict[str, Any]:
        """The settings that decide what the shards hold."""
        elsewhere = ("out", "accelerator", "devices", "nodes")
        return {name: value for name, value in asdict(self).items() if name not in elsewhere}


@dataclass
class Task:
    """One document as the model reads it.

    Attributes:
        document: where it comes from. shard: file that its rows go to.
        tokens: [S + T] ids, or [S] when the model writes the continuation itself. prompt: S. future: T.
    """

    document: Document
    shard: str
    tokens: torch.Tensor
    prompt: int
    future: int


def prepare(settings: CollectSettings, tokenizer: Any) -> list[Task]:
    """Choose documents, draw prompt lengths and assign shards; no shard mixes splits.

    Raises:
        FadeError: missing or too little text, or a chat template that is missing or unfit.
    """
    render = chat_renderer(tokenizer, settings.template)
    follows = settings.future if settings.continuation == "text" else 0
    documents = load_documents(
        settings.text,
        train=settings.train_documents,
        validation=settings.validation_documents,
        length=settings.max_prompt + follows,
        measure=lambda text: len(encode(tokenizer, text)),
        seed=settings.seed,
        held_out=settings.validation_text,
        render=render,
    )
    frame = chat_frame(tokenizer, add_generation_prompt=not follows) if settings.template == "chat" else ([], [])
    tasks: list[Task] = []
    shard = 0
    for split in ("train", "validation"):
        part = [document for document in documents if document.split == split]
        count = -(-len(part) // settings.documents_per_shard)
        for index, document in enumerate(part):
            drawn = random.Random(f"{settings.seed} {document.id}")
            prompt = drawn.randint(settings.min_prompt, settings.max_prompt)
            ids = _read(tokenizer, document, prompt, follows, frame)
            name = f"shard-{shard + index * count // len(part):05d}.parquet"
            tasks.append(Task(document, name, torch.tensor(ids), prompt, settings.future))
        shard += count
    return tasks


def _read(
    tokenizer: Any, document: Document, prompt: int, follows: int, frame: tuple[list[int], list[int]]
) -> list[int]:
    """``prompt + follows`` ids of a document; ``frame`` goes around what is neither made of chats nor generated."""
    before, after = ([], []) if document.chat or document.generated else frame
    length = prompt + follows
    if length <= len(before) + len(after):
        raise FadeError(
            f"a prompt of {length} tokens has no room for the {len(before) + len(after)} of the chat template; "
            "raise min_prompt"
        )
    return [*before, *document.ids(tokenizer, prompt - len(before) - len(after), follows), *after]


def _sources(sources: dict[str, float] | list[str] | str) -> dict[str, float] | list[str]:
    if isinstance(sources, dict):
        return dict(sources)
    return [sources] if isinstance(sources, str) else list(sources)


def begin_manifest(settings: CollectSettings, tasks: list[Task]) -> dict[str, Any]:
    """Return the manifest of a collection that is still to be made, without the model's provenance."""
    documents = [task.document for task in tasks]
    shards: dict[str, dict[str, Any]] = {}
    for task in tasks:
        shard = shards.setdefault(task.shard, {"name": task.shard, "split": task.document.split, "documents": []})
        shard["documents"].append(task.document.id)
    return {
        "schema_version": HIDDEN_VERSION if settings.record_hidden else SCHEMA_VERSION,
        "complete": False,
        HASHED: True,
        "settings": settings.content(),
        "spec": settings.spec.to_dict(),
        "corpus": {
            "sha256": corpus_hash(documents),
            "sources": {
                source: corpus_hash([one for one in documents if one.source == source])
                for source in dict.fromkeys(one.source for one in documents)
            },
            "python": platform.python_version(),
        },
        "documents": [
            {
                "id": task.document.id,
                "source": task.document.source,
                "split": task.document.split,
                "origins": list(task.document.origins),
                "passages": pack_keys(task.document.keys),
                "prompt": task.prompt,
                "tokens": task.prompt + task.future,
                "shard": task.shard,
            }
            for task in tasks
        ],
        "shards": list(shards.values()),
    }
