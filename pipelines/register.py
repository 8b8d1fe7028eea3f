"""Checkpoint -> bundle -> registry: `python -m pipelines.register --checkpoint artefacts/fit/mlp --name NAME`."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from data.trace import Traces
from pipelines.certify import CLOSED_FORM, THIS, HeldOutTexts, as_facts, verdict
from pipelines.cli import run
from predictor.budgets import HeadBudgets, learn_budgets
from predictor.bundle import Predictor, load_bundle
from predictor.errors import FadeError
from predictor.files import recover
from predictor.nets import ScoreNet, TokenMLP
from predictor.registry import register_bundle

BEST = "best"  # the bundle of the best epoch, inside a folder that `lightning fit` wrote
NOT_PROMOTED = 3  # exit status: registered, but not good enough for the alias


def register(
    checkpoint: str = "artefacts/fit/mlp",
    name: str = "smollm2-135m-mlp",
    traces: str = "artefacts/traces/demo",
    bundle: str | None = None,
    alias: str = "champion",
    model: str = "artefacts/models/smollm2-135m-instruct",
    held_out: list[str] = ["builtin:readmes"],  # noqa: B006
    held_out_documents: int = 2,
    context: int = 1024,
    steps: int = 32,
    budget: float = 0.25,
    tracking_uri: str | None = None,
) -> int:
    """Register a trained predictor, and promote it if it serves the cache better than everything built in.

    Measures recovery on the validation documents of the traces it was trained on, learns from the training
    documents how much each kv head must keep, unless the checkpoint brings that (configs/fit_heads_demo.yaml), then
    measures in the cache, on text of another source, what it costs the language model: KL on average, KL of the
    worst text, KL where the text is a copy, top-1. Writes a bundle with all of it and registers it as the next
    version. The alias is set when its recovery is at least that of the best heuristic, and in the cache it is
    nowhere worse than position, h2o, ema, or the untrained closed form with head budgets of its own, and somewhere
    better than the heuristics; otherwise one line says why not and the exit status is 3. Where only the closed form
    with its head budgets is better than the trained network, it is registered and promoted instead.

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

    Returns:
        The exit status: 0 promoted, 3 registered without the alias.
    """
    if steps < 2 or held_out_documents < 1 or not 0 < budget <= 1:
        raise FadeError(
            f"steps {steps}, held_out_documents {held_out_documents}, budget {budget}: use at least 2, at least 1, "
            "and a share in (0, 1]"
        )
    predictor, collection = _load(checkpoint), Traces(traces)
    refuse_other_traces(predictor.manifest, f"checkpoint {checkpoint}", collection)
    from predictor.heuristics import GATE, best_heuristic

    if predictor.budgets is None:
        predictor.budgets = head_budgets(predictor.net, traces)
    trained = Candidate(predictor, evaluate(predictor, traces))
    table = trained.metrics.table()
    print(format_table(table))
    best, mark = best_heuristic(table)
    reached = table["net"][GATE]
    trained.promoted = reached >= mark
    trained.reason = f"recovery {reached:.4f} at budget {GATE} against {mark:.4f} of {best}, the best heuristic"
    candidates = [trained]
    if trained.promoted:
        untrained = {**predictor.manifest, "epoch": 0}
        spec = replace(predictor.spec, hidden=False)
        closed_form = Predictor(TokenMLP(), spec, predictor.provenance, manifest=untrained)
        closed_form.budgets = head_budgets(closed_form.net, traces)
        texts = HeldOutTexts(model, held_out, held_out_documents, context, steps)
        trained.certificate = texts.certificate(predictor, closed_form, budget, not_from=sources(collection))
        trained.promoted, trained.reason = verdict(trained.certificate["figures"])
        if not trained.promoted:
            candidates += closed_form_instead(trained, closed_form, traces)

    where = Path(bundle or f"artefacts/bundles/{name}")
    for candidate in candidates:
        if candidate.promoted and candidate.certificate is not None:
            ladder = texts.ladder(candidate.predictor, not_from=sources(collection))
            candidate.certificate["ladder"] = ladder
    for candidate, folder in zip(candidates, (where, where.with_name(f"{where.name}-closed-form"))):
        version = publish(candidate, folder, name, alias, tracking_uri)
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


@dataclass
class Candidate:
    """A predictor, its metrics on the traces, what it cost in the cache, and what that means."""

    predictor: Predictor
    metrics: Any
    certificate: dict[str, Any] | None = None
    promoted: bool = False
    reason: str = ""


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


def publish(candidate: Candidate, folder: Path, name: str, alias: str, tracking_uri: str | None) -> int:
    """Write the bundle, register it, set the alias if it is promoted; returns the version."""
    from predictor.heuristics import GATE, best_heuristic

    predictor, certificate = candidate.predictor, candidate.certificate
    predictor.metrics |= candidate.metrics.values()
    predictor.certificate = None if certificate is None else as_facts(certificate)
    predictor.save(folder)
    table = candidate.metrics.table()
    best, mark = best_heuristic(table)
    tags = {
        "kind": predictor.net.kind,
        f"recovery_at_{GATE}": f"{table['net'][GATE]:.5f}",
        "best_heuristic": best,
        f"best_heuristic_recovery_at_{GATE}": f"{mark:.5f}",
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


def _load(checkpoint: str) -> Predictor:
    folder = Path(checkpoint)
    if folder.suffix == ".ckpt":
        raise FadeError(f"checkpoint {checkpoint} is Lightning's own file; give its folder, {folder.parent}")
    if not folder.is_dir():
        raise FadeError(f"there is no checkpoint folder {checkpoint}; make one with: lightning fit --config ...")
    recover(folder / BEST)
    return load_bundle(folder / BEST if (folder / BEST).is_dir() else folder)


def evaluate(predictor: Predictor, traces: str) -> Any:
    """Hold a predictor against oracle and heuristics on the validation documents; returns the RankingMetrics."""
    from tqdm import tqdm

    from data.datamodule import TraceDataModule
    from predictor.ranking_metrics import RankingMetrics

    module = TraceDataModule(traces)
    module.setup("validate")
    metrics = RankingMetrics()
    for batch in tqdm(module.val_dataloader(), desc="Validation documents", unit="batch"):
        metrics.update(predictor.net, batch)
    return metrics


def head_budgets(net: ScoreNet, traces: str) -> HeadBudgets:
    """Learn how much each kv head must keep under a network's scores, from the training documents."""
    from tqdm import tqdm

    from data.datamodule import TraceDataModule
    from predictor.scorenet import token_scores

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


def refuse_other_traces(manifest: Mapping[str, Any], what: str, traces: Traces) -> None:
    """Refuse a predictor that was not trained on these traces.

    Args:
        manifest: of the predictor. what: names it in the error. traces: what it is to be used on.

    Raises:
        FadeError: it was trained on others.
    """
    if manifest.get("traces_sha256") != trace_facts(traces)["traces_sha256"]:
        raise FadeError(
            f"{what} was trained on other traces than {traces.folder}, and may have seen their validation documents; "
            "name its own traces, or train again"
        )


def sources(traces: Traces) -> list[str]:
    """Families of text that a collection was made of, validation included."""
    return sorted({document["source"] for document in traces.manifest["documents"]})


def trace_facts(traces: Traces) -> dict[str, Any]:
    """What a bundle remembers of its traces: how much of which text, and a hash that names exactly these."""
    manifest = traces.manifest
    documents, shards = manifest["documents"], manifest["shards"]
    splits = Counter(document["split"] for document in documents)
    sources = Counter(document["source"] for document in documents)
    return {
        "train_documents": splits["train"],
        "validation_documents": splits["validation"],
        "prompt_tokens": sum(document["prompt"] for document in documents),
        "rows": sum(shard["rows"] for shard in shards),
        "sources": ", ".join(f"{source} {count}" for source, count in sorted(sources.items())),
        "text_sha256": manifest["corpus"]["sha256"],
        "traces_sha256": hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest(),
    }


if __name__ == "__main__":
    sys.exit(run(register))
