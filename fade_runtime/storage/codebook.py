"""The codebooks of a language model, and their files.

They are trained by `python -m pipelines.train_codebook` and stored as safetensors and JSON.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fade_runtime import transformers_api as hf
from fade_runtime.storage.pq import REMEDY, LayerCodebook, PQCodebook, other_dim
from predictor.errors import FadeError
from predictor.provenance import check_provenance, head_dim
from predictor.sealed import Header, Sealed

VERSION = 2  # 1 had no checksum over codebook.json
WEIGHTS, FACTS = "codebook.safetensors", "codebook.json"
MOST_LAYERS = 10_000  # of a language model
CODEBOOK = Sealed(
    "codebook",
    FACTS,
    WEIGHTS,
    version=VERSION,
    oldest=1,
    sealed_since=2,
    remedy=f"fetch it again, or {REMEDY}",
    absent=REMEDY,
)


@dataclass(frozen=True)
class CodebookSet:
    """The codebooks of a language model.

    Attributes:
        layers: one for each layer of the model's cache, None for a layer that is not tiered.
        provenance: the model (:func:`predictor.provenance.model_provenance`).
        facts: JSON-able facts about the training.
        name: how messages call it.
    """

    layers: Sequence[LayerCodebook | None]
    provenance: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    name: str = "(not saved)"

    def tensors(self) -> list[Tensor]:
        """Every stored tensor [n_sub, C, sub_dim], layer by layer."""
        return [tensor for layer in self.layers if layer is not None for tensor in layer.tensors()]

    def to(self, device: torch.device | str) -> CodebookSet:
        """The same codebooks on a device."""
        return replace(self, layers=[None if layer is None else layer.to(device) for layer in self.layers])

    def check(self, model: Any, strict: bool = True) -> None:
        """Hold the codebooks to the model they are to be used with.

        Args:
            model: a causal language model. strict: refuse another model of the same shape; with False, warn.

        Raises:
            FadeError: another head dim or other layers; with ``strict``, any other model.
        """
        config = hf.text_config(model)
        covered = [layer is not None for layer in self.layers]
        tiered = [hf.can_tier(layer) for layer in hf.stock_layers(config)]
        if covered != tiered:
            raise FadeError(
                f"codebook {self.name} covers {sum(covered)} of {len(covered)} layers, the model's cache can tier "
                f"{sum(tiered)} of {len(tiered)}; {REMEDY}"
            )
        for index, layer in enumerate(self.layers):
            here = head_dim(config.per_layer_config[index])  # Gemma 4's full attention has its own
            for book in () if layer is None else (layer.key, layer.value):
                if book.dim != here:
                    raise FadeError(other_dim(f"codebook {self.name}", book.dim, here))
        try:
            check_provenance(dict(self.provenance), model, f"codebook {self.name}")
        except FadeError as error:
            if strict:
                raise
            warnings.warn(f"{error} (allowed by strict=False)", stacklevel=2)

    def save(self, path: str | Path) -> Path:
        """Write a directory, whole or not at all; codebooks that are at ``path`` are replaced.

        Raises:
            FadeError: something else is at ``path``.
        """
        stored = {
            f"{index}.{part}": getattr(layer, part).centroids
            for index, layer in enumerate(self.layers)
            if layer is not None
            for part in ("key", "value")
        }
        facts = {
            "layers": len(self.layers),
            "shapes": {name: list(tensor.shape) for name, tensor in stored.items()},
            "provenance": dict(self.provenance),
            "facts": dict(self.facts),
        }
        return CODEBOOK.write(Path(path), facts, stored)


def load_codebook(path: str | Path) -> CodebookSet:
    """Read the codebooks that :meth:`CodebookSet.save` wrote, and verify them.

    Raises:
        FadeError: not there, damaged, or written by a newer release.
    """
    path, name = Path(path), str(path)
    stored = CODEBOOK.read_facts(path, name)
    try:
        layers, provenance, facts = range(stored["layers"]), dict(stored["provenance"]), dict(stored["facts"])
        shapes = {each: tuple(shape) for each, shape in stored["shapes"].items()}
        if not 0 < len(layers) <= MOST_LAYERS:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CODEBOOK.damaged(name, f"{FACTS} is not what was written") from error

    def check(found: Header) -> None:
        in_pairs = {f"{index}.{part}" for index in layers if f"{index}.key" in shapes for part in ("key", "value")}
        if {each: shape for each, (_, shape) in found.items()} != shapes or set(shapes) != in_pairs:
            raise CODEBOOK.damaged(name, f"{WEIGHTS} does not hold the shapes that {FACTS} names")

    tensors = CODEBOOK.read_tensors(path, name, stored, check)
    if not all(tensor.ndim == 3 and bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise CODEBOOK.damaged(name, f"{WEIGHTS} does not hold finite centroids")
    return CodebookSet([_layer(tensors, index) for index in layers], provenance, facts, name)


def _layer(tensors: dict[str, Tensor], index: int) -> LayerCodebook | None:
    if f"{index}.key" not in tensors:
        return None
    return LayerCodebook(PQCodebook(tensors[f"{index}.key"]), PQCodebook(tensors[f"{index}.value"]))
