"""Telemetry: what a tiered cache does at each reassignment, and what its guard sees, for whoever attaches an exporter.

Nothing leaves the machine.

Without :func:`attach_telemetry` a cache measures and counts nothing.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fade_runtime import transformers_api as hf
from fade_runtime.cache.accounting import full_bytes, memory_report, stored_bytes
from fade_runtime.cache.parts import CacheParts
from fade_runtime.cache.session import stored_options
from fade_runtime.events import Event, GuardEvent, Reassignment, ShadowEvent
from fade_runtime.kernels.dispatch import kernel_name
from fade_runtime.layer import CompressedLayer, TieredLayer
from fade_runtime.storage.tiers import Tier
from predictor.errors import FadeError
from predictor.files import write_aside

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


KINDS = {Reassignment: "reassignment", GuardEvent: "guard", ShadowEvent: "shadow"}


class Exporter(Protocol):
    """Takes events."""

    def export(self, event: Event) -> None:
        """Take one event."""


@dataclass
class ListExporter:
    """Keeps events in memory.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from fade_runtime import FadeConfig, create_tiered_cache
        >>> tiny = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16,
        ...                    vocab_size=8)
        >>> model = LlamaForCausalLM(tiny).eval()
        >>> cache = create_tiered_cache(model, FadeConfig(recent_window=8, int4_budget=16))
        >>> telemetry = attach_telemetry(cache, ListExporter())
        >>> _ = model(torch.randint(8, (1, 64)), **hf.forward_kwargs(cache, model))
        >>> [(event.layer, event.seen, event.evicted) for event in telemetry.exporter.events]
        [(0, 64, 72)]
    """

    events: list[Event] = field(default_factory=list)

    def export(self, event: Event) -> None:
        """Append the event to ``events``."""
        self.events.append(event)


class JsonlExporter:
    """Appends one JSON object a line to a file; the file is open only while a line is written.

    Args:
        path: of the file; folders on the way are made.

    Raises:
        FadeError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append("")
        except OSError as error:
            raise FadeError(
                f"telemetry file {self.path} cannot be written ({error.strerror}); name another path"
            ) from error

    def export(self, event: Event) -> None:
        """Append a line."""
        self._append(json.dumps({"event": KINDS[type(event)], **asdict(event)}, allow_nan=False) + "\n")

    def _append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)


class Telemetry:
    """Watches the layers of a cache.

    Attributes:
        exporter: where events go.
        reassignments, demoted, evicted: counted since it was attached; tokens are summed over rows and layers.
        ms: milliseconds that all reassignments took.
        lost: events that could not be written.
    """

    def __init__(self, exporter: Exporter) -> None:
        self.exporter = exporter
        self.reassignments = self.demoted = self.evicted = self.lost = 0
        self.ms = 0.0

    def __deepcopy__(self, memo: object) -> Telemetry:
        """Copies of a cache tell the same exporter."""
        return self

    def __call__(self, layer: CompressedLayer, ms: float) -> None:
        """Count one reassignment and tell of it. A file that cannot be written any more is warned about, once."""
        event = describe_reassignment(layer, ms)
        self.reassignments += 1
        self.demoted += event.demoted
        self.evicted += event.evicted
        self.ms += ms
        self.note(event)

    def note(self, event: Event) -> None:
        """Tell of an event."""
        try:
            self.exporter.export(event)
        except OSError as error:
            if not self.lost:
                warnings.warn(f"telemetry is lost from here on: {error}", RuntimeWarning, stacklevel=2)
            self.lost += 1


def attach_telemetry(cache: CacheParts, exporter: Exporter) -> Telemetry:
    """Tell ``exporter`` of each reassignment of a cache and each probe of its guard, and no other exporter any more.

    Returns:
        The counters.
    """
    telemetry = Telemetry(exporter)
    for layer in cache.tiered:
        layer.observer = telemetry
    if cache.guard is not None:
        cache.guard.observer = telemetry.note
    return telemetry


def detach_telemetry(cache: CacheParts) -> None:
    """Stop measuring."""
    for layer in cache.tiered:
        layer.observer = layer.last_plan = None
    if cache.guard is not None:
        cache.guard.observer = None


def describe_reassignment(layer: CompressedLayer, ms: float) -> Reassignment:
    """The event of a layer that has just reassigned its tokens, which took ``ms`` milliseconds."""
    demoted = evicted = 0
    scores: dict[str, float | None] = {}
    if layer.last_plan is not None:
        ranked, before, after = layer.last_plan
        gone = after == Tier.EVICTED
        evicted, demoted = int(gone.sum()), int(((after != before) & ~gone).sum())
        scores = {} if ranked is None else score_statistics(ranked)
    return Reassignment(
        time=time.time(),
        layer=layer.index,
        seen=layer.seen,
        policy=layer.policy.name,
        path=attention_path(layer),
        tokens=layer.tokens.counts(),
        demoted=demoted,
        evicted=evicted,
        scores=scores,
        resident_bytes=stored_bytes(*layer.resident().values()),
        full_bytes=full_bytes(layer),
        ms=ms,
    )


def score_statistics(scores: Tensor) -> dict[str, float | None]:
    """Describe scores [T] in a few numbers; what is not finite becomes None, which JSON has a word for.

    Example:
        >>> score_statistics(torch.tensor([3.0, 1.0, 2.0]))
        {'count': 3, 'min': 1.0, 'mean': 2.0, 'max': 3.0, 'q05': 1.0, 'q25': 2.0, 'q50': 2.0, 'q75': 3.0, 'q95': 3.0}
    """
    if not len(scores):
        return {"count": 0}
    ordered = scores.double().sort().values
    nearest = [math.floor(quantile * (len(ordered) - 1) + 0.5) for quantile in QUANTILES]
    numbers = torch.stack((ordered[0], ordered.mean(), ordered[-1], *ordered[nearest])).tolist()
    names = ("min", "mean", "max", *(f"q{round(100 * quantile):02d}" for quantile in QUANTILES))
    return {"count": len(scores), **{n: x if math.isfinite(x) else None for n, x in zip(names, numbers)}}


def attention_path(layer: CompressedLayer) -> str:
    """What computes a layer's attention: see :class:`Reassignment`."""
    config = layer.setup.model_config()
    if config is not None and not hf.is_attached(config):
        return f"materialised for {config._attn_implementation}"
    if layer.store is None or not layer.store.compressed:
        return "dense"
    return kernel_name(layer.device)


def dump_debug(cache: CacheParts, path: str | Path, *, slots: bool = False) -> Path:
    """Write a snapshot of a cache as JSON, for debugging.

    Args:
        cache: in any state.
        path: of the file, which is replaced.
        slots: also list the slots in each tier: places among the tokens of a row, padding left out.

    Returns:
        The path. The file has the options, the memory report and for each layer: its kind and, if it is tiered,
        tokens seen and prompt, the attention path, and for each row of batch and kv head the tokens in each tier.

    Raises:
        FadeError: the path cannot be written.
    """
    path = Path(path)
    found = {
        "options": stored_options(cache.config),
        "policy": cache.policy.name,
        "memory": memory_report(cache),
        "layers": [
            {
                "kind": type(layer).__name__,
                **(_snapshot(layer, slots) if isinstance(layer, TieredLayer) else {}),
            }
            for layer in cache.layers
        ],
    }
    try:
        with write_aside(path) as aside:
            aside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise FadeError(f"{path} cannot be written ({error.strerror}); name another path") from error
    return path


def _snapshot(layer: CompressedLayer, slots: bool) -> dict[str, Any]:
    path = attention_path(layer)
    return {"seen": layer.seen, "prompt": layer.prompt, "path": path, "rows": list(_rows(layer, slots))}


def _rows(layer: CompressedLayer, slots: bool) -> Iterator[dict[str, Any]]:
    """Each row of batch and kv head: how many tokens are in each tier, and which."""
    if (store := layer.store) is None:
        return
    tiers = (Tier.HIGH, Tier.LOW, Tier.PQ)
    body = [(tokens.token_row(), tokens.slots(), tokens.tiers()) for tokens in store.body()]
    rows, places, kinds = (torch.cat(each) for each in zip(*body))
    for row in range(store.batch * store.heads):
        batch, head = divmod(row, store.heads)
        full = store.full.slots[batch]
        kept = {"FULL": full[full >= 0].tolist()}
        kept |= {tier.name: places[(rows == row) & (kinds == tier)].sort().values.tolist() for tier in tiers}
        counts = {name: len(found) for name, found in kept.items()}
        counts["EVICTED"] = store.sequences.counts[batch] - sum(counts.values())
        yield {"batch": batch, "head": head, "tokens": counts, **({"slots": kept} if slots else {})}
