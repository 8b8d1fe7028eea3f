"""Checkpoint -> bundle -> registry: `python -m pipelines.register --checkpoint artefacts/fit/mlp`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from data.trace import Traces
from pipelines.checkpoints import load_checkpoint, refuse_other_traces, trace_facts
from pipelines.cli import run
from pipelines.evaluation.certificate import (
    CLOSED_FORM,
    LADDER,
    THIS,
    HeldOutTexts,
    Measuring,
    as_facts,
    verdict,
)
from pipelines.evaluation.fragility import FEW, layer_weights, validation_texts
from pipelines.models import model_of, name_of
from pipelines.reporting.rows import mean
from predictor.budgets import HeadBudgets, learn_budgets
from predictor.bundle import Predictor
from predictor.certificate import Rung, ladder, smallest_budget
from predictor.errors import FadeError
from predictor.heuristics import GATE, best_heuristic
from predictor.nets import TokenMLP
from predictor.registry import register_bundle
from predictor.scorenet import ScoreNet, token_scores

NOT_PROMOTED = 3  # exit status: registered, but not good enough for the alias
LARGEST = max(filter(None, LADDER))  # budget to compare at where none meets the target


@dataclass(frozen=True)
class RegisterSettings:
    """Options of `pipelines.register`.

    Args:
        checkpoint: folder that ``lightning fit`` wrote (its option ``output``), or a bundle.
        name: of the registered model; by default that of the language model.
        traces: folder of the traces that the predictor was trained on.
        bundle: folder to write the bundle to; artefacts/bundles/NAME by default.
        alias: set on the new version if it is good enough.
        model: directory, GGUF file or hub id of the language model, if that is not where the traces say.
        text: what is measured on in the cache, none of it trained on (as for collect_traces).
        documents: how many documents of it; each is measured as it is, and as the source of a copy.
        context: tokens of each document before decoding starts.
        steps: tokens decoded after it, teacher-forced.
        weigh: on how many validation documents of the traces each layer is made to forget by itself, so that fragile
            layers keep more; 0: on none. By default 2 where at most 8 layers can evict. ``context`` and ``steps`` hold
            there too.
        kl: target: the smallest budget whose mean KL is at most this is recommended.
        budget: share of the context kept in the body of the cache at which the predictor is compared with all that is
            built in; by default the recommended one.
        tracking_uri: MLflow tracking URI; MLFLOW_TRACKING_URI by default, else sqlite under artefacts.
    """

    OLD_NAMES: ClassVar[dict[str, str]] = {"held_out": "text", "held_out_documents": "documents"}

    checkpoint: str = "artefacts/fit/mlp"
    name: str | None = None
    traces: str = "artefacts/traces/demo"
    bundle: str | None = None
    alias: str = "champion"
    model: str | None = None
    text: list[str] = field(default_factory=lambda: ["builtin:readmes"])
    documents: int = 2
    context: int = 1024
    steps: int = 32
    weigh: int | None = None
    kl: float = 0.01
    budget: float | None = None
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            FadeError: names those that cannot be.
        """
        budget = 1 if self.budget is None else self.budget
        if self.steps < 2 or self.documents < 1 or not self.kl > 0 or not 0 < budget <= 1:
            raise FadeError(
                f"steps {self.steps}, documents {self.documents}, kl {self.kl}, budget {self.budget}: "
                "use at least 2, at least 1, more than 0, and a share in (0, 1]"
            )

    def folders(self, name: str) -> tuple[Path, Path]:
        """Folders of the bundle, and of the closed form where that takes its place."""
        folder = Path(self.bundle or f"artefacts/bundles/{name}")
        return folder, folder.with_name(f"{folder.name}-closed-form")


def register(settings: RegisterSettings) -> int:
    """Register a trained predictor, and promote it if it serves the cache better than everything built in.

    Measures recovery on the validation documents of the traces it was trained on, learns from the training
    documents how much each kv head must keep, unless the checkpoint brings that (configs/fit_heads_demo.yaml), then
    measures in the cache, on other text, what it costs the language model: KL at several budgets, of which the
    smallest that meets the target is recommended; there KL on average, KL of the worst text, KL where the text is a
    copy, top-1. Writes a bundle with all of it and registers it as the next version. What is measured in the cache
    decides: the alias is set when it is nowhere worse than position, h2o, ema, or the untrained closed form with head
    budgets of its own, and somewhere better than the heuristics; otherwise one line says why not and the exit status
    is 3. Where only the closed form with its head budgets is better than the trained network, it is registered and
    promoted instead.

    Returns:
        The exit status: 0 promoted, 3 registered without the alias.
    """
    predictor, traces = load_checkpoint(settings.checkpoint), Traces(settings.traces)
    refuse_other_traces(predictor.manifest, f"checkpoint {settings.checkpoint}", traces)
    model = model_of(settings.model, traces=traces)
    held_out = HeldOutTexts(model, settings.text, settings.documents, settings.context, settings.steps)
    texts = held_out.read(trace_facts(traces))  # before anything is measured
    if predictor.budgets is None:
        predictor.budgets = head_budgets(predictor.net, settings.traces)
    trained = Candidate(predictor, evaluate(predictor, settings.traces))
    print(format_table(trained.metrics.table()))
    measuring = held_out.load(predictor, texts)
    predictor.budgets = weighed(predictor, measuring.lm, traces, model, settings)
    others = certify_candidate(trained, measuring, settings)
    return publish_candidates([trained, *others], settings, settings.name or name_of(model))


def weighed(predictor: Predictor, lm: Any, traces: Traces, model: str, settings: RegisterSettings) -> HeadBudgets:
    """A predictor's head budgets, their layers weighed by what the language model loses when one alone forgets."""
    budgets = predictor.budgets
    assert budgets is not None
    documents = settings.weigh
    if documents is None:
        documents = 2 if len(budgets.layers) <= FEW else 0
    if not documents:
        return budgets
    texts = validation_texts(model, traces.manifest["settings"], documents, settings.context + settings.steps)
    if not texts:
        print(
            f"no validation document of the traces has {settings.context + settings.steps} tokens: layers weigh alike"
        )
        return budgets
    weights = layer_weights(lm, predictor, texts, settings.steps)
    named = ", ".join(f"{layer}: {weight:.2f}" for layer, weight in zip(budgets.layers, weights))
    print(f"what each layer's lost attention costs the model, beside the mean: {named}")
    return replace(budgets, weights=weights)


@dataclass
class Candidate:
    """A predictor, its metrics on the traces, what it cost in the cache, and what that means."""

    predictor: Predictor
    metrics: Any
    certificate: dict[str, Any] | None = None
    promoted: bool = False
    reason: str = ""


def certify_candidate(trained: Candidate, measuring: Measuring, settings: RegisterSettings) -> list[Candidate]:
    """Measure a candidate in the cache; returns who may take its place."""
    predictor = trained.predictor
    spec, manifest = replace(predictor.spec, hidden=False), {**predictor.manifest, "epoch": 0}
    closed_form = Predictor(TokenMLP(), spec, predictor.provenance, manifest=manifest)
    weights = () if predictor.budgets is None else predictor.budgets.weights
    closed_form.budgets = replace(head_budgets(closed_form.net, settings.traces), weights=weights)
    measured = with_ladder({}, predictor, measuring, settings.kl)
    met = smallest_budget(ladder(measured), settings.kl)
    budget = settings.budget or (met and met.int4_budget) or LARGEST
    trained.certificate = {**measuring.certificate(predictor, closed_form, budget), **measured}
    trained.promoted, trained.reason = verdict(trained.certificate["figures"])
    others = [] if trained.promoted else closed_form_instead(trained, closed_form, settings.traces)
    for other in others:
        other.certificate = with_ladder(other.certificate or {}, closed_form, measuring, settings.kl)
    return others


def with_ladder(
    certificate: Mapping[str, Any], predictor: Predictor, measuring: Measuring, kl: float
) -> dict[str, Any]:
    """A certificate with KL at several budgets, and the target that the recommended one meets."""
    return {**certificate, "ladder": measuring.ladder(predictor), "target_kl": kl}


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


def publish_candidates(candidates: Sequence[Candidate], settings: RegisterSettings, name: str) -> int:
    """Publish candidates until one is promoted; returns the exit status."""
    alias = settings.alias
    for candidate, folder in zip(candidates, settings.folders(name)):
        version = publish(candidate, folder, name, alias, settings.tracking_uri)
        print(f"bundle {folder}, version {version} of {name}")
        if candidate.promoted:
            print(f"promoted: {candidate.reason}\nuse it as: models:/{name}@{alias}")
            if candidate.certificate is not None:
                print(advice(ladder(candidate.certificate), settings.kl))
            return 0
        print(f"not promoted: {candidate.reason}", file=sys.stderr)
    print(f"alias {alias} stays where it was", file=sys.stderr)
    return NOT_PROMOTED


def advice(rungs: Sequence[Rung], kl: float) -> str:
    """Which budget to take, as far as the numbers say one.

    Args:
        rungs: of the predictor's ladder, largest budget first. kl: the target.

    Example:
        >>> rungs = [Rung(None, 3.2, (0.001, 0.002)), Rung(0.3, 5.0, (0.006, 0.013)), Rung(0.2, 7.0, (0.02, 0.03))]
        >>> print(advice(rungs, kl=0.01))
        smallest budget with a mean KL of at most 0.01 on 2 texts: --budget 0.3 (5.00x, KL 0.0095, worst text 0.0130)
        >>> print(advice(rungs, kl=0.002))
        no budget has a mean KL of at most 0.002 on 2 texts, only all in 4 bits: --preset safe (3.20x, KL 0.0015)
        >>> print(advice(rungs, kl=0.001))
        nothing has a mean KL of at most 0.001 on 2 texts: all in 4 bits loses 0.0015
    """
    met, asked = smallest_budget(rungs, kl), f"has a mean KL of at most {kl:g} on {len(rungs[0].kl)} texts"
    if met is None:
        return f"nothing {asked}: all in 4 bits loses {mean(rungs[0].kl):.4f}"
    if met.int4_budget is None:
        return f"no budget {asked}, only all in 4 bits: --preset safe ({met.compression:.2f}x, KL {mean(met.kl):.4f})"
    return (
        f"smallest budget with{asked.removeprefix('has')}: --budget {met.int4_budget:g} ({met.compression:.2f}x, "
        f"KL {mean(met.kl):.4f}, worst text {max(met.kl):.4f})"
    )


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
    return learn_budgets(partial(token_scores, net, in_cache=True), batches)


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


if __name__ == "__main__":
    sys.exit(run(register))
