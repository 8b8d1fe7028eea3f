"""The texts that caches are measured on: none of them was trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.chat import chat_renderer
from data.encoding import encode
from data.generated import GENERATED
from data.leaks import refuse_trained_on
from data.packing import Document
from data.plan import CollectSettings, prepare
from data.records import text_files
from data.text import load_documents
from data.trace import Traces
from pipelines.evaluation.tasks import PROSE
from pipelines.evaluation.tasks.recall import recalled
from pipelines.evaluation.tasks.task import PromptBuilder
from predictor.errors import FadeError


@dataclass
class HeldOut:
    """A text to measure on: its id, its source, and its first tokens [1, context + steps]."""

    id: str
    source: str
    tokens: Tensor


def choose_texts(
    traces: Traces | None,
    sources: Sequence[str] | Mapping[str, Sequence[str]],
    documents: int,
    context: int,
    steps: int,
    tokenizer: Any,
    trained: Iterable[Mapping[str, Any]] = (),
) -> list[HeldOut]:
    """Validation documents of a trace collection, or texts from elsewhere; from named sources so many of each.

    Raises:
        FadeError: too few or too short documents, text that is not what the traces were collected from, or text from
            elsewhere that is in ``trained``, manifests of predictors (those of earlier releases do not say).
    """
    length = context + steps
    generated: list[HeldOut] = []
    if traces is not None:
        found = _validation_documents(traces, documents, tokenizer)
    elif isinstance(sources, Mapping):
        found = []
        for name, places in sources.items():
            kinds = [place for place in places if place.startswith(GENERATED)]
            files = [place for place in places if place not in kinds]
            if files:
                read = _read(_files(files), documents, length, tokenizer)
                found += [replace(document, source=name) for document in read]
            else:
                generated += _generated(name, kinds, documents, context, steps, tokenizer)
    else:
        found = _read(sources, documents, length, tokenizer)
    for manifest in trained if traces is None else ():
        if "passages" in manifest:
            refuse_trained_on(found, manifest)
    return [_held_out(document, context, steps, tokenizer) for document in found] + generated


def _held_out(document: Document, context: int, steps: int, tokenizer: Any) -> HeldOut:
    """The first tokens of a document.

    Raises:
        FadeError: it has fewer.
    """
    tokens, length = torch.tensor(document.ids(tokenizer, context, steps))[None], context + steps  # [1, S]
    if tokens.shape[1] < length:
        raise FadeError(
            f"document {document.id} has {tokens.shape[1]} tokens, context + steps is {length}; lower context or steps"
        )
    return HeldOut(document.id, document.source, tokens)


def _generated(
    source: str, places: Sequence[str], documents: int, context: int, steps: int, tokenizer: Any
) -> list[HeldOut]:
    """Records of which parts come again, of each kind in turn."""
    builder = PromptBuilder(tokenizer, -(-documents // len(places)), context, 0, PROSE)
    kinds = [recalled(place.removeprefix(GENERATED), builder, steps) for place in places]
    texts = [
        HeldOut(f"{place}/{number}", source, torch.tensor(ids)[None])
        for number, texts in enumerate(zip(*kinds))
        for place, ids in zip(places, texts)
    ]
    return texts[:documents]


def _validation_documents(traces: Traces, documents: int, tokenizer: Any) -> list[Document]:
    tasks = prepare(CollectSettings(**traces.manifest["settings"]), tokenizer)
    found = [task.document for task in tasks if task.document.split == "validation"]
    known = [one["id"] for one in traces.manifest["documents"] if one["split"] == "validation"]
    if [document.id for document in found] != known:
        raise FadeError(
            f"the text that the traces in {traces.folder} were collected from has changed since "
            "(another Python, or edited files); collect them again, or give text"
        )
    if len(found) < documents:
        raise FadeError(f"documents {documents} is more than the {len(found)} validation documents of the traces")
    return found[:documents]


def _read(sources: Sequence[str], documents: int, length: int, tokenizer: Any) -> list[Document]:
    return load_documents(
        sources,
        train=0,
        validation=documents,
        length=length,
        measure=lambda words: len(encode(tokenizer, words)),
        render=chat_renderer(tokenizer),
    )


def _files(places: Sequence[str]) -> list[str]:
    """The files of a named source; those of a folder one by one, so that documents come from each in turn."""
    folders = {place: text_files(Path(place)) for place in places if Path(place).is_dir()}
    return [str(file) for place in places for file in folders.get(place, [place])]
