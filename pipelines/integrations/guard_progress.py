"""The guard of a cache while it generates: a line for the eye, and metrics in MLflow."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from fade_runtime.cache.telemetry import Exporter
from fade_runtime.events import Event, GuardEvent
from predictor.registry import open_experiment

EXPERIMENT = "fade-guard"


class Exporters:
    """Exports each event to several exporters."""

    def __init__(self, exporters: Sequence[Exporter]) -> None:
        self.exporters = exporters

    def export(self, event: Event) -> None:
        """Export to each of them."""
        for exporter in self.exporters:
            exporter.export(event)


class ProgressLine:
    """Shows the guard's last probe: on a terminal in one line that is written over, elsewhere only what it did.

    Args:
        stream: where to; standard error by default, so that it does not mix with the text.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.rewrites = self.stream.isatty()

    def export(self, event: Event) -> None:
        """Show a probe."""
        if isinstance(event, GuardEvent) and (self.rewrites or event.action != "look"):
            line = probe_line(event)
            self.stream.write(f"\r\x1b[K{line}" if self.rewrites else f"{line}\n")
            self.stream.flush()


class MlflowMetrics:
    """Logs the guard's probes to a run of the experiment "fade-guard", once in so many tokens.

    Args:
        tracking_uri: of the MLflow store, see :func:`predictor.registry.resolve_store`.
        every: tokens between two points.
        params: facts about the run.
    """

    def __init__(self, tracking_uri: str | None, every: int, params: dict[str, Any]) -> None:
        uri, _ = open_experiment(EXPERIMENT, tracking_uri)
        from mlflow import MlflowClient  # three seconds

        self.client, self.every = MlflowClient(uri), every
        self.run = self.client.create_run(self.client.get_experiment_by_name(EXPERIMENT).experiment_id).info.run_id
        for name, value in params.items():
            self.client.log_param(self.run, name, value)
        self.probes: dict[int, GuardEvent] = {}  # the latest of each layer
        self.last = 0

    def export(self, event: Event) -> None:
        """Take in a probe; log the latest of all layers when enough tokens have come."""
        if not isinstance(event, GuardEvent):
            return
        self.probes[event.layer] = event
        if event.seen >= self.last + self.every:
            self.log()

    def log(self) -> None:
        """Log what is known now."""
        from mlflow.entities import Metric  # three seconds

        if not self.probes:
            return
        self.last = max(each.seen for each in self.probes.values())
        now = int(1e3 * time.time())
        metrics = [Metric(name, value, now, self.last) for name, value in figures(list(self.probes.values())).items()]
        self.client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        """Log the last probes and end the run."""
        self.log()
        self.client.set_terminated(self.run)


def figures(probes: Sequence[GuardEvent]) -> dict[str, float]:
    """The latest probes of all layers in five numbers.

    Example:
        >>> probe = GuardEvent(0, 0, 64, "look", 0.04, 0.02, 0.9, 0.95, 1, 10, 0.5)
        >>> figures([probe, probe])
        {'guard/kl': 0.04, 'guard/kl_mean': 0.02, 'guard/recovery': 0.9, 'guard/recall': 0.95, 'guard/raised_heads': 2}
    """
    return {
        "guard/kl": max(each.kl for each in probes),
        "guard/kl_mean": sum(each.kl_mean for each in probes) / len(probes),
        "guard/recovery": min(each.recovery for each in probes),
        "guard/recall": min(each.recall for each in probes),
        "guard/raised_heads": sum(each.raised for each in probes),
    }


def probe_line(event: GuardEvent) -> str:
    """One probe in one line.

    Example:
        >>> probe_line(GuardEvent(0, 7, 1064, "raise", 0.31, 0.11, 0.72, 0.9, 2, 340, 1.2))
        'guard: 1,064 tokens, layer 7: KL 0.310, 72 % of attention kept; 2 heads keep everything, 340 tokens are back'
    """
    kept = f"{100 * event.recovery:.0f} % of attention kept"
    line = f"guard: {event.seen:,} tokens, layer {event.layer}: KL {event.kl:.3f}, {kept}"
    if event.action == "raise":
        return f"{line}; {event.raised} heads keep everything, {event.restored:,} tokens are back"
    return f"{line}; heads are back at their budgets" if event.action == "lower" else line


def report_line(report: dict[str, Any]) -> str:
    """What a guard measured and did, in one line.

    Example:
        >>> report_line({"state": "raised", "kl": 0.08, "recovery": 0.91, "raised": 3, "heads": 90, "restored": 1200,
        ...              "probes": 60, "ms": 75.0})
        'guard: raised after 60 probes (1.2 ms each): KL 0.080 and 91 % of attention kept at worst, 3 of 90 heads keep everything, 1,200 tokens came back'
    """  # noqa: E501
    each, kept = report["ms"] / max(report["probes"], 1), 100 * report["recovery"]
    return (
        f"guard: {report['state']} after {report['probes']} probes ({each:.1f} ms each): KL {report['kl']:.3f} and "
        f"{kept:.0f} % of attention kept at worst, {report['raised']} of {report['heads']} heads keep everything, "
        f"{report['restored']:,} tokens came back"
    )
