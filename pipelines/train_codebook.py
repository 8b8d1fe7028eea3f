"""Text and a language model -> product-quantisation codebooks: `python -m pipelines.train_codebook --config ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import cli
from predictor.errors import FadeError

if TYPE_CHECKING:
    from torch import Tensor

    from data.text import Document
    from fade_runtime.storage.pq import LayerCodebook
    from predictor.rope import Rotary

    Vectors = tuple[Tensor, Tensor]  # un-rotated keys and values [T, D] of one layer, its kv heads pooled

SINKS = 4  # first tokens of a document that are left out: caches keep them exact, and they are unlike all others


def train_codebook(
    model: str = "artefacts/models/smollm2-135m-instruct",
    text: list[str] | str = "builtin",
    documents: int = 12,
    held_out: int = 2,
    context: int = 1024,
    samples: int = 8192,
    sub_dim: int = 32,
    value_sub_dim: int | None = None,
    num_centroids: int = 256,
    dtype: str = "float32",
    seed: int = 0,
    out: str | None = None,
) -> None:
    """Train the codebooks that `low_tier="pq"` needs, for the model and the kind of text that you run.

    Reads documents with the model, takes keys (un-rotated) and values from its cache, and clusters them layer by
    layer. Prints how far decoded keys and values are from the true ones on documents that were held out.

    A token then takes head dim / sub_dim bytes per kv head for its key and as many for its value. Smaller parts:
    more bytes, smaller error. Values gain more by it than keys.
    Use: FadeConfig(int4_budget=0.25, low_budget=None, low_tier="pq", codebook="artefacts/codebooks/NAME").

    Args:
        model: directory or hub id of a causal language model.
        text: one or several of "builtin", .txt, .md or .jsonl files, folders of them, "hf:NAME[:CONFIG[:SPLIT]]".
        documents: number of documents to train on.
        held_out: number of documents to measure the error on; no passage is in both.
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
    for name, value, least in (
        ("documents", documents, 1),
        ("held_out", held_out, 1),
        ("context", context, SINKS + 1),
        ("samples", samples, num_centroids),
    ):
        if value < least:
            raise FadeError(f"{name} {value} is too small; use at least {least}")

    from tqdm import tqdm

    from data.lm import encode, load_lm
    from data.text import corpus_hash, load_documents
    from fade_runtime.storage.pq import CodebookSet
    from predictor.provenance import model_provenance

    lm, tokenizer = load_lm(model, dtype)
    sizes = (sub_dim, sub_dim if value_sub_dim is None else value_sub_dim)
    _check_model(lm, context, sizes, num_centroids)
    read = load_documents(
        [text] if isinstance(text, str) else text,
        train=documents,
        validation=held_out,
        length=context,
        measure=lambda words: len(encode(tokenizer, words)),
        seed=seed,
    )
    train, validation = read[:documents], read[documents:]
    with tqdm(total=len(read), unit="document", desc="Reading", mininterval=1) as bar:
        seen = [gather(lm, tokenizer, part, context, samples, seed, bar.update) for part in (train, validation)]
    layers: list[LayerCodebook | None] = []
    errors = {}
    with tqdm(total=len(seen[0]), unit="layer", desc="Clustering", mininterval=1) as bar:
        for index, (vectors, others) in enumerate(zip(*seen)):
            layers.append(None if vectors is None else cluster(vectors, sizes, num_centroids, seed))
            if layers[-1] is not None:
                errors[index] = layer_error(layers[-1], others)
            bar.update()

    facts = {
        "text": text,
        "corpus": corpus_hash(train),
        "documents": documents,
        "context": context,
        "samples": min(samples, max(len(vectors[0]) for vectors in seen[0] if vectors is not None)),
        "sub_dim": sizes[0],
        "value_sub_dim": sizes[1],
        "num_centroids": num_centroids,
        "seed": seed,
        "held_out_error": {str(index): list(both) for index, both in errors.items()},
    }
    made = CodebookSet(layers, model_provenance(lm, tokenizer), facts)
    path = made.save(out or Path("artefacts/codebooks") / Path(model).name)
    width = next(layer.width for layer in layers if layer is not None)
    print(f"\n{error_table(errors)}\n\n{width} bytes a token and kv head. Codebooks: {path}")


def gather(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    context: int,
    samples: int,
    seed: int,
    on_document: Callable[[], Any] = lambda: None,
) -> list[Vectors | None]:
    """Read documents and draw keys and values of each layer that can be tiered, the same number from each document.

    Args:
        model: causal language model. tokenizer: of the model.
        documents: texts of at least ``context`` tokens. samples: of each layer, over all documents; where there are
            fewer, all are taken. seed: of the draw. on_document: called after each document.

    Returns:
        For each layer of the model's cache the drawn keys and values, float32 [at most samples, D]; None for others.
    """
    import torch

    from data.lm import encode
    from predictor.rope import find_rotary

    rotary = find_rotary(model)
    drawn = torch.Generator().manual_seed(seed)
    per_layer: list[list[Vectors] | None] = []
    for number, document in enumerate(documents):
        tokens = torch.tensor(encode(tokenizer, document.text)[:context], device=model.device)[None]
        share = samples * (number + 1) // len(documents) - samples * number // len(documents)
        found = [None if both is None else _draw(both, share, drawn) for both in read_cache(model, rotary, tokens)]
        per_layer = per_layer or [None if both is None else [] for both in found]
        for into, both in zip(per_layer, found):
            if into is not None and both is not None:
                into.append(both)
        on_document()
    return [None if parts is None else _join(parts) for parts in per_layer]


def read_cache(model: Any, rotary: Rotary | None, tokens: Tensor) -> list[Vectors | None]:
    """Un-rotated keys and values [H * tokens, D] of each layer after a forward pass over tokens [1, S], less the sinks.

    Layers that the tiered cache leaves to transformers are None.
    """
    import torch
    from transformers import DynamicCache

    from fade_runtime import transformers_api as hf
    from predictor.rope import unrotate

    config = hf.text_config(model)
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        model(tokens, logits_to_keep=1, use_cache=True, **hf.forward_kwargs(cache, model))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        found: list[Vectors | None] = []
        for index, layer in enumerate(cache.layers):
            if not hf.can_tier(layer):
                found.append(None)
                continue
            table = None if rotary is None else rotary.table(positions, index)
            key, value = unrotate(layer.keys[0].float(), table), layer.values[0].float()  # [H, S, D]
            found.append((key[:, SINKS:].flatten(0, 1), value[:, SINKS:].flatten(0, 1)))
    if not any(found):
        raise FadeError(f"{config.model_type} has no full-attention layer; a codebook has nothing to code")
    return found


def cluster(vectors: Vectors, sizes: tuple[int, int], num_centroids: int, seed: int) -> LayerCodebook:
    """Train the codebooks of one layer; ``sizes`` are the channels of a part of a key and of a value."""
    from fade_runtime.storage.pq import LayerCodebook, PQCodebook

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


def _check_model(model: Any, context: int, sizes: tuple[int, int], num_centroids: int) -> None:
    """Refuse what this model cannot do before a document is read."""
    from data.lm import refuse_too_long
    from fade_runtime import transformers_api as hf
    from fade_runtime.storage.pq import check_sizes
    from predictor.provenance import head_dim

    config = hf.text_config(model)
    refuse_too_long(model, context, f"context {context} passes", "lower context")
    for index, layer in enumerate(hf.stock_layers(config)):
        if hf.can_tier(layer):
            for size in sizes:
                check_sizes(head_dim(config.per_layer_config[index]), size, num_centroids)


def _draw(vectors: Vectors, count: int, drawn: Any) -> Vectors:
    import torch

    chosen = torch.randperm(len(vectors[0]), generator=drawn)[:count].to(vectors[0].device)
    key, value = (each[chosen].cpu().clone() for each in vectors)
    return key, value


def _join(parts: Sequence[Vectors]) -> Vectors:
    import torch

    key, value = (torch.cat(each) for each in zip(*parts))
    return key, value


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return cli.run(train_codebook, argv)


if __name__ == "__main__":
    sys.exit(main())
