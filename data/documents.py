"""Documents for Lightning: prompts and what follows them, from the same sources and mixes as trace collections."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.lm import DEMO_MODEL, load_tokenizer, refuse_dtype
from data.plan import CollectSettings, Task, begin_manifest, prepare
from predictor.errors import FadeError
from predictor.features import FeatureSpec

Item = dict[str, Any]


class DocumentDataModule(LightningDataModule):
    """Gives one document at a time, of a length that is drawn for it.

    Args:
        text: sources and weights. validation_text: of validation alone. Both as ``collect_traces`` takes them.
        model: directory, GGUF file or hub id of the language model that is learned through.
        train_documents, validation_documents: how many there are.
        epoch_documents: train documents between two validations; the next epoch goes on with the others.
        min_prompt, max_prompt: shortest and longest prompt, in tokens. future: tokens after it.
        template: as ``collect_traces`` takes it.
        dtype: of the language model: float32, bfloat16 or float16.
        seed: of texts, lengths and order.
    """

    def __init__(
        self,
        text: dict[str, float] | list[str] | str,
        model: str = DEMO_MODEL,
        validation_text: dict[str, float] | list[str] | str = (),  # type: ignore[assignment]
        train_documents: int = 200,
        validation_documents: int = 12,
        epoch_documents: int = 50,
        min_prompt: int = 700,
        max_prompt: int = 1500,
        future: int = 64,
        template: str = "auto",
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        super().__init__()
        refuse_dtype(dtype)
        if epoch_documents < 1:
            raise FadeError(f"epoch_documents {epoch_documents} is too small; use at least 1")
        self.settings = CollectSettings(
            text=text, validation_text=validation_text or [], model=model, train_documents=train_documents,
            validation_documents=validation_documents, min_prompt=min_prompt, max_prompt=max_prompt, future=future,
            template=template, dtype=dtype, seed=seed,
        )  # fmt: skip
        self.folder = model  # what runs are called after
        self.epoch_documents, self.seed = epoch_documents, seed
        self.tokenizer: Any = None
        self.tasks: dict[str, list[Task]] = {}

    def spec(self, hidden: bool = False) -> FeatureSpec:
        """The features that are computed; ``hidden``: keys and values too."""
        return FeatureSpec(window=self.settings.window, block=self.settings.block, hidden=hidden)

    def setup(self, stage: str | None = None) -> None:
        """Choose the documents.

        Raises:
            FadeError: missing or too little text.
        """
        if self.tasks:
            return
        self.tokenizer = load_tokenizer(self.settings.model)
        tasks = prepare(self.settings, self.tokenizer)
        self.tasks = {split: [one for one in tasks if one.document.split == split] for split in ("train", "validation")}

    def train_dataloader(self) -> DataLoader[Item]:
        """So many train documents in an epoch, each pass over all of them in an order of its own."""
        number = (lambda: 0) if self.trainer is None else lambda trainer=self.trainer: trainer.current_epoch
        return DataLoader(_Epoch(self.tasks["train"], self.epoch_documents, self.seed, number), batch_size=None)

    def val_dataloader(self) -> DataLoader[Item]:
        """The validation documents."""
        return DataLoader(_Epoch(self.tasks["validation"], len(self.tasks["validation"])), batch_size=None)

    def first(self, count: int) -> list[Item]:
        """The first train documents, each source having its turn."""
        return [as_item(task) for task in self.tasks["train"][:count]]

    def manifest(self) -> dict[str, Any]:
        """What was read, as the manifest of a collection says it: settings, documents, corpus."""
        return begin_manifest(self.settings, [*self.tasks["train"], *self.tasks["validation"]])


class _Epoch(Dataset[Item]):
    """Some of the documents; which, and in what order, the number of the epoch decides."""

    def __init__(self, tasks: list[Task], size: int, seed: int | None = None, number: Callable[[], int] = lambda: 0):
        self.tasks, self.size, self.seed, self.number = tasks, size, seed, number

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Item:
        turn, place = divmod(self.number() * self.size + index, len(self.tasks))
        order = list(range(len(self.tasks)))
        if self.seed is not None:
            random.Random(f"{self.seed} {turn}").shuffle(order)
        return as_item(self.tasks[order[place]])


def as_item(task: Task) -> Item:
    """A document as a loader gives it: ``prompt`` [S] and ``following`` [T] ids, ``id`` and ``source``."""
    prompt, following = task.tokens[: task.prompt], task.tokens[task.prompt :]
    if len(following) < task.future:
        raise FadeError(f"document {task.document.id} has {len(task.tokens)} tokens; lower max_prompt or future")
    return {"prompt": prompt, "following": following, "id": task.document.id, "source": task.document.source}


def tokens_of(document: Item) -> int:
    """Tokens of a document, prompt and what follows."""
    parts: tuple[Tensor, Tensor] = document["prompt"], document["following"]
    return sum(map(len, parts))
