"""Checkpoint -> bundle -> registry: `python -m pipelines.register --checkpoint artefacts/fit/mlp --name NAME`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.trace import Traces
from pipelines.checkpoints import load_checkpoint, refuse_other_traces
from pipelines.cli import DEMO_MODEL, run
from pipelines.evaluation.certificate import CLOSED_FORM, THIS, HeldOutTexts, as_facts, verdict
from predictor.budgets import HeadBudgets, learn_budgets
from predictor.bundle import Predictor
from predictor.errors import FadeError
from predictor.heuristics import GATE, best_heuristic
from predictor.nets import TokenMLP
from predictor.registry import register_bundle
from predictor.scorenet import ScoreNet, token_scores

NOT_PROMOTED = 3  # exit status: registered, but not good enough for the alias


@dataclass(frozen=True)
class RegisterSettings:
    """Options of `pipelines.register`.

    Args:
        checkpoint: folder that ``lightning fit`` wrote (its option ``output``), or a bundle.
        name: of the registered model.
        traces: folder of the traces that the predictor was trained on.
        bundle: folder to write the bundle to; artefacts/bundles/NAME by default.
        alias: set on the new version if it is good enough.
        model: directory or hub id of the language model that it was trained for.
        held_out: text to measure on in the cache, of sources that were not trained on (as for collect_traces).
        held_out_documents: how many documents of it; each is measured as it is, and as the source of a copy.
        context: tokens of each document before decoding starts.
        steps: tokens decoded after it, teacher-forced.
        budget: share of the context that is kept in the body of the cache.
        tracking_uri: MLflow tracking URI; MLFLOW_TRACKING_URI by default, else sqlite under artefacts.
    """

    checkpoint: str = "artefacts/fit/mlp"
    name: str = "smollm2-135m-mlp"
    traces: str = "artefacts/traces/demo"
    bundle: str | None = None
    alias: str = "champion"
    model: str = DEMO_MODEL
    held_out: list[str] = field(default_factory=lambda: ["builtin:readmes"])
    held_out_documents: int = 2
    context: int = 1024
    steps: int = 32
    budget: float = 0.25
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            FadeError: names those that cannot be.
        """
        if self.steps < 2 or self.held_out_documents < 1 or not 0 < self.budget <= 1:
            raise FadeError(
                f"steps {self.steps}, held_out_documents {self.held_out_documents}, budget {self.budget}: "
                "use at least 2, at least 1, and a share in (0, 1]"
            )

    def texts(self) -> HeldOutTexts:
        """The text that is measured on in the cache."""
        return HeldOutTexts(self.model, self.held_out, self.held_out_documents, self.context, self.steps)

    def folders(self) -> tuple[Path, Path]:
        """Folders of the bundle, and of the closed form where that takes its place."""
        folder = Path(self.bundle or f"artefacts/bundles/{self.name}")
        return folder, folder.with_name(f"{folder.name}-closed-form")


def register(settings: RegisterSettings) -> int:
    """Register a trained predictor, and promote it if it serves the cache better than everything built in.

    Measures recovery on the validation documents of the traces it was trained on, learns from the training
    documents how much each kv head must keep, unless the checkpoint brings that (configs/fit_heads_demo.yaml), then
    measures in the cache, on text of another source, what it costs the language model: KL on average, KL of the
    worst text, KL where the text is a copy, top-1. Writes a bundle with all of it and registers it as the next
    version. The alias is set when its recovery is at least that of the best heuristic, and in the cache it is
    nowhere worse than position, h2o, ema, or the untrained closed form with head budgets of its own, and somewhere
    better than the heuristics; otherwise one line says why not and the exit status is 3. Where only the closed form
    with its head budgets is better than the trained network, it is registered and promoted instead.

    Returns:
        The exit status: 0 promoted, 3 registered without the alias.
    """
    predictor, traces = load_checkpoint(settings.checkpoint), Traces(settings.traces)
    refuse_other_traces(predictor.manifest, f"checkpoint {settings.checkpoint}", traces)
    if predictor.budgets is None:
        predictor.budgets = head_budgets(predictor.net, settings.traces)
    trained = measured_on_traces(predictor, settings.traces)
    print(format_table(trained.metrics.table()))
    candidates = [trained]
    if trained.promoted:
        candidates += certify_candidate(trained, settings, traces)
    return publish_candidates(candidates, settings)


@dataclass
class Candidate:
    """A predictor, its metrics on the traces, what it cost in the cache, and what that means."""

    predictor: Predictor
    metrics: Any
    certificate: dict[str, Any] | None = None
    promoted: bool = False
    reason: str = ""


def measured_on_traces(predictor: Predictor, traces: str) -> Candidate:
    """A predictor beside the heuristics on the validation documents: promoted if it is as good as the best."""
    metrics = evaluate(predictor, traces)
    table = metrics.table()
    best, best_recovery = best_heuristic(table)
    recovery = table["net"][GATE]
    reason = f"recovery {recovery:.4f} at budget {GATE} against {best_recovery:.4f} of {best}, the best heuristic"
    return Candidate(predictor, metrics, promoted=recovery >= best_recovery, reason=reason)


def certify_candidate(trained: Candidate, settings: RegisterSettings, traces: Traces) -> list[Candidate]:
    """Measure a candidate in the cache, and give what is promoted a ladder; returns who may take its place."""
    predictor, texts = trained.predictor, settings.texts()
    spec, manifest = replace(predictor.spec, hidden=False), {**predictor.manifest, "epoch": 0}
    closed_form = Predictor(TokenMLP(), spec, predictor.provenance, manifest=manifest)
    closed_form.budgets = head_budgets(closed_form.net, settings.traces)
    trained_on = sources(traces)
    trained.certificate = texts.certificate(predictor, closed_form, settings.budget, not_from=trained_on)
    trained.promoted, trained.reason = verdict(trained.certificate["figures"])
    others = [] if trained.promoted else closed_form_instead(trained, closed_form, settings.traces)
    for candidate in (trained, *others):
        if candidate.promoted and candidate.certificate is not None:
            candidate.certificate["ladder"] = texts.ladder(candidate.predictor, not_from=trained_on)
    return others


def closed_form_instead(trained: Candidate, closed_form: Predictor, traces: str) -> list[Candidate]:
    """The closed form with head budgets of its own, if the heuristics are no match for it: then it is to be used."""
    assert trained.certificate is not None
    figures = trained.certificate["figures"]
    promoted, reason = verdict({**figures, THIS: figures[CLOSED_FORM]})
    if not promoted:
        return []
    renamed = {THIS: figures[CLOSED_FORM], "trained network": figures[THIS]}
    rest = {name: each for name, each in figures.items() if name not in (THIS, CLOSED_FORM)}
    certificate = {**trained.certificate, "figures": renamed | rest}
    print("the trained network does not serve the cache better than the closed form, which takes its place")
    return [Candidate(closed_form, evaluate(closed_form, traces), certificate, promoted, f"closed form, {reason}")]


def publish_candidates(candidates: Sequence[Candidate], settings: RegisterSettings) -> int:
    """Publish candidates until one is promoted; returns the exit status."""
    name, alias = settings.name, settings.alias
    for candidate, folder in zip(candidates, settings.folders()):
        version = publish(candidate, folder, name, alias, settings.tracking_uri)
        print(f"bundle {folder}, version {version} of {name}")
        if candidate.promoted:
            print(f"promoted: {candidate.reason}\nuse it as: models:/{name}@{alias}")
            return 0
        print(
            f"not promoted: {candidate.reason}; train longer or on more documents, or use models:/{name}/{version} as "
            "it is",
            file=sys.stderr,
        )
    print(f"alias {alias} stays where it was", file=sys.stderr)
    return NOT_PROMOTED


def publish(candidate: Candidate, folder: Path, name: str, alias: str, tracking_uri: str | None) -> int:
    """Write the bundle, register it, set the alias if it is promoted; returns the version."""
    predictor, certificate = candidate.predictor, candidate.certificate
    predictor.metrics |= candidate.metrics.values()
    predictor.certificate = None if certificate is None else as_facts(certificate)
    predictor.save(folder)
    table = candidate.metrics.table()
    best, best_recovery = best_heuristic(table)
    tags = {
        "kind": predictor.net.kind,
        f"recovery_at_{GATE}": f"{table['net'][GATE]:.5f}",
        "best_heuristic": best,
        f"best_heuristic_recovery_at_{GATE}": f"{best_recovery:.5f}",
        "traces_sha256": predictor.manifest["traces_sha256"],
        "verdict": candidate.reason,
        **certificate_tags(certificate),
    }
    promoted = alias if candidate.promoted else None
    return register_bundle(folder, name, alias=promoted, tags=tags, tracking_uri=tracking_uri)


def certificate_tags(certificate: dict[str, Any] | None) -> dict[str, str]:
    """What the registry shows of a certificate: the predictor's own figures."""
    if certificate is None:
        return {}
    return {f"cache_{name}": f"{value:.5f}" for name, value in asdict(certificate["figures"][THIS]).items()}


def evaluate(predictor: Predictor, traces: str) -> Any:
    """Compare a predictor with oracle and heuristics on the validation documents; returns the RankingMetrics."""
    from data.datamodule import TraceDataModule  # lightning: five seconds
    from predictor.ranking_metrics import RankingMetrics  # torchmetrics: three seconds

    module = TraceDataModule(traces)
    module.setup("validate")
    metrics = RankingMetrics()
    for batch in tqdm(module.val_dataloader(), desc="Validation documents", unit="batch"):
        metrics.update(predictor.net, batch)
    return metrics


def head_budgets(net: ScoreNet, traces: str) -> HeadBudgets:
    """Learn how much each kv head must keep under a network's scores, from the training documents."""
    from data.datamodule import TraceDataModule  # lightning: five seconds

    module = TraceDataModule(traces)
    module.setup("fit")
    batches = tqdm(module.train_dataloader(), desc="Head budgets", unit="batch")
    return learn_budgets(partial(token_scores, net), batches)


def format_table(table: dict[str, dict[float, float]]) -> str:
    """Lay out mean recovery, best first, for a terminal.

    Example:
        >>> print(format_table({"net": {0.5: 0.91, 0.25: 0.8}, "oracle": {0.5: 0.95, 0.25: 0.9}}))
        recovery at budget     0.5    0.25
        oracle               0.9500  0.9000
        net                  0.9100  0.8000
    """
    budgets = list(table["net"])
    lines = ["recovery at budget " + "".join(f"{budget:>7}" + " " for budget in budgets).rstrip()]
    for name in sorted(table, key=lambda row: -table[row][budgets[-1]]):
        lines.append(f"{name:<19}" + "".join(f"{table[name][budget]:>8.4f}" for budget in budgets))
    return "\n".join(lines)


def sources(traces: Traces) -> list[str]:
    """Families of text that a collection was made of, validation included."""
    return sorted({document["source"] for document in traces.manifest["documents"]})


if __name__ == "__main__":
    sys.exit(run(register))
