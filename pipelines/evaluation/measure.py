"""Compressed caches against the full cache, on one text: loss, memory and speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fade_runtime.cache.shadow import next_token_kl
from fade_runtime.cache.telemetry import ListExporter, attach_telemetry
from pipelines.evaluation.runs import Method, Run, full_twin, read_prompt, show_future, start


@dataclass
class Measured:
    """One method on one text.

    Attributes:
        name: of the method.
        kl: KL(full || method) of each step's next-token distribution, nats.
        agree: whether the most likely next token is the full cache's, at each step.
        seconds: of each step's forward; empty if it was not timed.
        resident_bytes, full_bytes: at the last step, had the model been of two-byte floats.
        others_bytes, others_full_bytes: the part of both in layers that evict nothing; 0 without such layers.
    """

    name: str
    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    resident_bytes: int = 0
    full_bytes: int = 0
    others_bytes: int = 0
    others_full_bytes: int = 0

    @property
    def compression(self) -> float:
        """Bytes of a full cache divided by what was resident."""
        return self.full_bytes / self.resident_bytes

    def weigh(self, run: Run) -> None:
        """Take in what a run's cache holds now."""
        size = run.half_precision_bytes()
        self.resident_bytes, self.full_bytes = size.resident, size.full
        self.others_bytes, self.others_full_bytes = size.others, size.others_full

    def add(self, full: Tensor, other: Tensor) -> None:
        """Take in steps, whose logits [n, V] are the full cache's and this one's."""
        kl = [float(next_token_kl(p, q)) for p, q in zip(full.double(), other.double())]
        self.kl += [max(0.0, each) for each in kl]
        self.agree += (full.argmax(-1) == other.argmax(-1)).tolist()


def compare(
    model: Any,
    methods: Sequence[Method],
    tokens: Tensor,
    steps: int,
    on_step: Callable[[], None] = lambda: None,
    timed: bool = True,
    telemetry: dict[str, ListExporter] | None = None,
) -> list[Measured]:
    """Prefill each cache with a text's context, then feed its last ``steps`` tokens to each (teacher forcing).

    Timed, tokens come one at a time, and the methods take turns within each step, so that a machine that slows down
    slows all of them; who comes first in a step rotates. Otherwise tokens come ``reassign_every`` at a time, after
    which a cache compresses anyway: the same losses and bytes, several times sooner.

    Args:
        model: the language model; it is switched to tiered attention; the full cache runs on a twin.
        methods: the first one must be the full cache, which the others are compared with.
        tokens: [1, context + steps] token ids.
        steps: number of tokens to decode.
        on_step: called after each prefill, and for each method and step.
        timed: fill in ``seconds``.
        telemetry: takes the events of each tiered cache, which costs time, by name of the method.

    Returns:
        What was measured for each method, in order. The first step is left out of ``seconds``: it warms up.
    """
    require_full_first(methods)
    context, continuation = tokens.split([tokens.shape[1] - steps, steps], dim=1)
    measured = [Measured(method.name) for method in methods]
    runs = start(methods, model, full_twin(model))
    for method, run in zip(methods, runs):
        if telemetry is not None and run.tiered:
            telemetry[method.name] = ListExporter()
            attach_telemetry(run.cache, telemetry[method.name])
    with torch.inference_mode():
        show_future(runs, tokens, context.shape[1])
        read_prompt(runs, context, on_step)
        (_interleaved if timed else _one_by_one)(runs, continuation, measured, on_step)
    for row, run in zip(measured, runs):
        row.weigh(run)
    return measured


def require_full_first(methods: Sequence[Method]) -> None:
    """Refuse methods of which the full cache is not the first.

    Raises:
        ValueError: it is not.
    """
    if not methods or methods[0].config is not None:
        raise ValueError("the first method must be the full cache")


def _interleaved(
    runs: Sequence[Run], continuation: Tensor, measured: Sequence[Measured], on_step: Callable[[], None]
) -> None:
    for step, token in enumerate(continuation.split(1, dim=1)):
        logits: dict[int, Tensor] = {}
        for place in range(len(runs)):
            index = (step + place) % len(runs)
            started = time.perf_counter()
            logits[index] = runs[index].follow(token)
            if step > 0:
                measured[index].seconds.append(time.perf_counter() - started)
            on_step()
        for index, row in enumerate(measured):
            row.add(logits[0], logits[index])


def _one_by_one(
    runs: Sequence[Run], continuation: Tensor, measured: Sequence[Measured], on_step: Callable[[], None]
) -> None:
    expected = continuation.new_empty(0)
    for run, row in zip(runs, measured):
        logits = run.follow(continuation)
        expected = logits if row is measured[0] else expected
        row.add(expected, logits)
        for _ in range(continuation.shape[1]):
            on_step()
