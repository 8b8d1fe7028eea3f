"""Text and a language model -> product-quantisation codebooks: `python -m pipelines.train_codebook --config ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from data.encoding import encode
from data.lm import DEMO_MODEL, load_lm, refuse_too_long
from data.packing import Document
from data.text import corpus_hash, load_documents
from fade_runtime import transformers_api as hf
from fade_runtime.storage.codebook import CodebookSet
from fade_runtime.storage.pq import LayerCodebook, PQCodebook, check_sizes
from pipelines import cli
from predictor.errors import FadeError
from predictor.provenance import head_dim, model_provenance
from predictor.rope import Rotary, find_rotary, unrotate

Vectors = tuple[Tensor, Tensor]  # un-rotated keys and values [T, D] of one layer, its kv heads pooled

SINKS = 4  # first tokens of a document that are left out: caches keep them exact, and they are unlike all others


@dataclass(frozen=True)
class CodebookSettings:
    """Options of `pipelines.train_codebook`.

    Args:
        model: directory, GGUF file or hub id of a causal language model; by default the demo's.
        text: one or several of "builtin", .txt, .md or .jsonl files, folders of them, "hf:NAME[:CONFIG[:SPLIT]]".
        documents: number of documents to train on.
        validation_documents: number of documents to measure the error on; no passage is in both.
        context: tokens of each document.
        samples: keys and values of each layer that are clustered, drawn from all documents and kv heads; at least
            num_centroids. Memory: layers x samples x head dim x 8 bytes.
        sub_dim: channels coded by one byte; must divide the head dim.
        value_sub_dim: the same for values; by default sub_dim.
        num_centroids: of each part, 2 to 256.
        dtype: of the model: float32, bfloat16 or float16.
        seed: of the draw and of the clustering.
        out: directory to write; by default artefacts/codebooks/ and the model's name.
    """

    OLD_NAMES: ClassVar[dict[str, str]] = {"held_out": "validation_documents"}

    model: str = DEMO_MODEL
    text: list[str] | str = "builtin"
    documents: int = 12
    validation_documents: int = 2
    context: int = 1024
    samples: int = 8192
    sub_dim: int = 32
    value_sub_dim: int | None = None
    num_centroids: int = 256
    dtype: str = "float32"
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            FadeError: names the one that cannot be.
        """
        least = {"documents": 1, "validation_documents": 1, "context": SINKS + 1, "samples": self.num_centroids}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise FadeError(f"{name} {getattr(self, name)} is too small; use at least {bound}")

    @property
    def sizes(self) -> tuple[int, int]:
        """Channels of a part of a key and of a value."""
        return self.sub_dim, self.sub_dim if self.value_sub_dim is None else self.value_sub_dim

    @property
    def folder(self) -> str | Path:
        """The directory to write."""
        return self.out or Path("artefacts/codebooks") / Path(self.model).name


def train_codebook(settings: CodebookSettings) -> None:
    """Train the codebooks that `low_tier="pq"` needs, for the model and the kind of text that you run.

    Reads documents with the model, takes keys (un-rotated) and values from its cache, and clusters them layer by
    layer. Prints how far decoded keys and values are from the true ones on documents that were held out.

    A token then takes head dim / sub_dim bytes per kv head for its key and as many for its value. Smaller parts:
    more bytes, smaller error. Values gain more by it than keys.
    Use: FadeConfig(int4_budget=0.25, low_budget=None, low_tier="pq", codebook="artefacts/codebooks/NAME").
    """
    lm, tokenizer = load_lm(settings.model, settings.dtype)
    _check_model(lm, settings)
    train, held_out = read_documents(settings, tokenizer)
    with tqdm(total=len(train) + len(held_out), unit="document", desc="Reading", mininterval=1) as bar:
        vectors, others = (gather(lm, tokenizer, part, settings, bar.update) for part in (train, held_out))
    layers, errors = cluster_layers(vectors, others, settings)
    facts = codebook_facts(settings, train, vectors, errors)
    path = CodebookSet(layers, model_provenance(lm, tokenizer), facts).save(settings.folder)
    width = next(layer.width for layer in layers if layer is not None)
    print(f"\n{error_table(errors)}\n\n{width} bytes a token and kv head. Codebooks: {path}")


def read_documents(settings: CodebookSettings, tokenizer: Any) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and those that are held out."""
    documents = load_documents(
        [settings.text] if isinstance(settings.text, str) else settings.text,
        train=settings.documents,
        validation=settings.validation_documents,
        length=settings.context,
        measure=lambda words: len(encode(tokenizer, words)),
        seed=settings.seed,
    )
    return documents[: settings.documents], documents[settings.documents :]


def cluster_layers(
    vectors: Sequence[Vectors | None], held_out: Sequence[Vectors | None], settings: CodebookSettings
) -> tuple[list[LayerCodebook | None], dict[int, tuple[float, float]]]:
    """Codebooks of each layer, and their errors on what was held out, with a progress bar."""
    layers: list[LayerCodebook | None] = []
    errors = {}
    with tqdm(total=len(vectors), unit="layer", desc="Clustering", mininterval=1) as bar:
        for index, (train, others) in enumerate(zip(vectors, held_out)):
            if train is None or others is None:
                layers.append(None)
            else:
                layer = cluster(train, settings.sizes, settings.num_centroids, settings.seed)
                layers.append(layer)
                errors[index] = layer_error(layer, others)
            bar.update()
    return layers, errors


def codebook_facts(
    settings: CodebookSettings,
    train: Sequence[Document],
    vectors: Sequence[Vectors | None],
    errors: dict[int, tuple[float, float]],
) -> dict[str, Any]:
    """What the codebooks' manifest says of how they were made."""
    return {
        "text": settings.text,
        "corpus": corpus_hash(train),
        "documents": settings.documents,
        "context": settings.context,
        "samples": min(settings.samples, max(len(each[0]) for each in vectors if each is not None)),
        "sub_dim": settings.sizes[0],
        "value_sub_dim": settings.sizes[1],
        "num_centroids": settings.num_centroids,
        "seed": settings.seed,
        "held_out_error": {str(index): list(both) for index, both in errors.items()},
    }


def gather(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    settings: CodebookSettings,
    on_document: Callable[[], Any] = lambda: None,
) -> list[Vectors | None]:
    """Read documents and draw keys and values of each layer that can be tiered, the same number from each document.

    Args:
        model: causal language model. tokenizer: of the model.
        documents: texts of at least ``settings.context`` tokens.
        settings: of which ``samples`` are of each layer, over all documents; where there are fewer, all are taken.
        on_document: called after each document.

    Returns:
        For each layer of the model's cache the drawn keys and values, float32 [at most samples, D]; None for others.
    """
    rotary, samples = find_rotary(model), settings.samples
    generator = torch.Generator().manual_seed(settings.seed)
    per_layer: list[list[Vectors] | None] = []
    for number, document in enumerate(documents):
        tokens = torch.tensor(encode(tokenizer, document.text)[: settings.context], device=model.device)[None]
        count = samples * (number + 1) // len(documents) - samples * number // len(documents)
        layers = read_cache(model, rotary, tokens)
        drawn = [None if both is None else _draw(both, count, generator) for both in layers]
        per_layer = per_layer or [None if both is None else [] for both in drawn]
        for parts, both in zip(per_layer, drawn):
            if parts is not None and both is not None:
                parts.append(both)
        on_document()
    return [None if parts is None else _join(parts) for parts in per_layer]


def read_cache(model: Any, rotary: Rotary | None, tokens: Tensor) -> list[Vectors | None]:
    """Un-rotated keys and values [H * tokens, D] of each layer after a forward pass over tokens [1, S], less the sinks.

    Layers that the tiered cache leaves to transformers are None.
    """
    config = hf.text_config(model)
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        model(tokens, logits_to_keep=1, use_cache=True, **hf.forward_kwargs(cache, model))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        vectors: list[Vectors | None] = []
        for index, layer in enumerate(cache.layers):
            if not hf.can_tier(layer):
                vectors.append(None)
                continue
            table = None if rotary is None else rotary.table(positions, index)
            key, value = unrotate(layer.keys[0].float(), table), layer.values[0].float()  # [H, S, D]
            vectors.append((key[:, SINKS:].flatten(0, 1), value[:, SINKS:].flatten(0, 1)))
    if not any(vectors):
        raise FadeError(f"{config.model_type} has no full-attention layer; a codebook has nothing to code")
    return vectors


def cluster(vectors: Vectors, sizes: tuple[int, int], num_centroids: int, seed: int) -> LayerCodebook:
    """Train the codebooks of one layer; ``sizes`` are the channels of a part of a key and of a value."""
    key, value = (PQCodebook.train(each, size, num_centroids, seed) for each, size in zip(vectors, sizes))
    return LayerCodebook(key, value)


def layer_error(layer: LayerCodebook, vectors: Vectors) -> tuple[float, float]:
    """Relative error of keys and of values: root of the squared distance to what is decoded ÷ squared length."""
    errors = []
    for book, true in zip((layer.key, layer.value), vectors):
        off = (book.decode(book.encode(true)) - true).square().sum()
        errors.append(float((off / true.square().sum()).sqrt()))
    return errors[0], errors[1]


def error_table(errors: dict[int, tuple[float, float]]) -> str:
    """Lay out the relative errors by layer, and their means.

    Example:
        >>> print(error_table({0: (0.25, 0.5), 2: (0.35, 0.7)}))
        layer    key  value
            0   .250   .500
            2   .350   .700
         mean   .300   .600
    """
    means = tuple(sum(column) / len(errors) for column in zip(*errors.values()))
    rows = [*((str(index), both) for index, both in errors.items()), ("mean", means)]
    lines = [f"{name:>5}" + "".join(f"{f'{value:.3f}'.removeprefix('0'):>7}" for value in both) for name, both in rows]
    return "\n".join(["layer    key  value", *lines])


def _check_model(model: Any, settings: CodebookSettings) -> None:
    """Refuse what this model cannot do before a document is read."""
    config = hf.text_config(model)
    refuse_too_long(model, settings.context, f"context {settings.context} passes", "lower context")
    for index, layer in enumerate(hf.stock_layers(config)):
        if hf.can_tier(layer):
            for size in settings.sizes:
                check_sizes(head_dim(config.per_layer_config[index]), size, settings.num_centroids)


def _draw(vectors: Vectors, count: int, generator: torch.Generator) -> Vectors:
    chosen = torch.randperm(len(vectors[0]), generator=generator)[:count].to(vectors[0].device)
    key, value = (each[chosen].cpu().clone() for each in vectors)
    return key, value


def _join(parts: Sequence[Vectors]) -> Vectors:
    key, value = (torch.cat(each) for each in zip(*parts))
    return key, value


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(train_codebook, argv)


if __name__ == "__main__":
    sys.exit(main())
