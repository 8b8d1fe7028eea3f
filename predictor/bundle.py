"""A predictor on disk: a directory with ``model.safetensors``, ``bundle.json`` and a model card."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from predictor import scores
from predictor.budgets import HeadBudgets
from predictor.card import model_card
from predictor.errors import FadeError
from predictor.features import FeatureSpec, PrefillFeatures
from predictor.files import recover, sha256_file, write_aside
from predictor.nets import LOG_EMA, ScoreNet, build_net
from predictor.provenance import check_provenance

VERSION = 1
WEIGHTS, FACTS, CARD = "model.safetensors", "bundle.json", "README.md"
FIELDS = ("version", "kind", "config", "spec", "provenance", "metrics", "manifest", "weights_sha256")


class Predictor(nn.Module):
    """A trained network together with what it was made for.

    Attributes:
        name: how it was asked for (directory or registry reference).
        net: the network.
        spec: features it expects.
        provenance: the language model it was trained on.
        metrics: validation numbers, name -> value.
        manifest: facts about the traces it was trained on.
        budgets: how much each kv head must keep, or None.
        certificate: what was measured in the cache, or None.
    """

    def __init__(
        self,
        net: ScoreNet,
        spec: FeatureSpec,
        provenance: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        manifest: Mapping[str, Any] | None = None,
        name: str = "predictor",
        budgets: HeadBudgets | None = None,
        certificate: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.budgets = budgets
        self.certificate = None if certificate is None else dict(certificate)
        self.net, self.spec, self.name = net, spec, name
        self.provenance, self.manifest = dict(provenance), dict(manifest or {})
        self.metrics = dict(metrics or {})

    @torch.no_grad()
    def score(self, features: PrefillFeatures) -> Tensor:
        """Return log importance [H, S] of one layer's tokens, higher = keep."""
        return self.net.score(features)

    @torch.no_grad()
    def forecast(self, features: PrefillFeatures) -> Tensor:
        """Return the share of attention [H, S] expected of each token: ranked by score, as large as today's."""
        return scores.ranked_share(self.score(features).float(), features.tokens[..., LOG_EMA].exp())

    def check(self, model: Any, strict: bool = True) -> None:
        """Hold the predictor to the language model it was trained on.

        Args:
            model: the model it is to be used with.
            strict: refuse another model; with False, warn and go on.

        Raises:
            FadeError: made for another model.
        """
        try:
            check_provenance(self.provenance, model, f"predictor {self.name}")
        except FadeError as error:
            if strict:
                raise
            warnings.warn(f"{error} (allowed by strict=False)", stacklevel=2)


def save_bundle(
    path: str | Path,
    net: ScoreNet,
    *,
    spec: FeatureSpec,
    provenance: Mapping[str, Any],
    metrics: Mapping[str, float],
    manifest: Mapping[str, Any],
    budgets: HeadBudgets | None = None,
    certificate: Mapping[str, Any] | None = None,
) -> Path:
    """Write a bundle, whole or not at all; an existing one at ``path`` is replaced.

    Args:
        path: the directory to make.
        net: network whose weights are stored.
        spec: features it was trained on.
        provenance: of the language model (:func:`predictor.provenance.model_provenance`).
        metrics: validation numbers, name -> value.
        manifest: JSON-able facts about the traces: documents, counts, hash.
        budgets: how much each kv head must keep, if that was learned.
        certificate: what it cost the language model to be cached by it (``pipelines.certify``), if measured.

    Returns:
        The path.
    """
    path = Path(path)
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / FACTS).is_file()):
        raise FadeError(f"{path} is there already and is not a bundle; name another directory")
    with write_aside(path) as aside:
        aside.mkdir()
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()}
        save_file(weights, aside / WEIGHTS)
        (aside / WEIGHTS).chmod(0o644)  # safetensors writes for the owner only; a bundle is to be shared
        facts = {
            "version": VERSION,
            "kind": net.kind,
            "config": net.config(),
            "spec": spec.to_dict(),
            "provenance": dict(provenance),
            "metrics": dict(metrics),
            "manifest": dict(manifest),
            "budgets": None if budgets is None else budgets.to_dict(),
            "certificate": None if certificate is None else dict(certificate),
            "weights_sha256": sha256_file(aside / WEIGHTS),
        }
        (aside / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (aside / CARD).write_text(model_card(facts, sum(p.numel() for p in net.parameters())), encoding="utf-8")
    return path


def load_bundle(path: str | Path, name: str | None = None) -> Predictor:
    """Read a bundle and verify it.

    Args:
        path: the directory.
        name: how messages call it; the path by default.

    Returns:
        The predictor, in eval mode, on the CPU, without gradients.

    Raises:
        FadeError: not there, damaged, or written by a newer release.
    """
    path = Path(path)
    name = name or str(path)
    facts = _read_facts(path, name)
    try:
        digest = sha256_file(path / WEIGHTS)
    except OSError as error:
        raise _damaged(name, f"{WEIGHTS} cannot be read") from error
    if digest != facts["weights_sha256"]:
        raise _damaged(name, f"{WEIGHTS} does not match its checksum")
    net = build_net(facts["kind"], facts["config"])
    try:
        net.load_state_dict({key: tensor.clone() for key, tensor in load_file(path / WEIGHTS).items()})
    except (SafetensorError, RuntimeError) as error:
        raise _damaged(name, f"{WEIGHTS} does not fit a {facts['kind']} of {facts['config']}") from error
    if not all(tensor.isfinite().all() for tensor in net.state_dict().values()):
        raise _damaged(name, "its weights are not all finite numbers")
    spec = FeatureSpec.from_dict(facts["spec"])
    net.check_spec(spec)
    budgets = HeadBudgets.from_dict(facts["budgets"]) if facts.get("budgets") else None
    provenance, metrics, manifest = (facts[key] for key in ("provenance", "metrics", "manifest"))
    predictor = Predictor(net, spec, provenance, metrics, manifest, name, budgets, facts.get("certificate"))
    return predictor.eval().requires_grad_(False)


def _read_facts(path: Path, name: str) -> dict[str, Any]:
    if not path.exists():
        recover(path)
    if not path.is_dir():
        raise FadeError(f"there is no bundle at {name}; make one with pipelines.register, or check the path")
    try:
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FadeError(f"{name} is not a bundle: it has no {FACTS}; see pipelines.register") from error
    except ValueError as error:
        raise _damaged(name, f"{FACTS} is not JSON") from error
    version = facts.get("version") if isinstance(facts, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise FadeError(
            f"bundle {name} has format {version}, this release reads up to {VERSION}; upgrade fade-predictor"
        )
    if version != VERSION:
        raise _damaged(name, f"{FACTS} names no known format")
    if missing := [field for field in FIELDS if field not in facts]:
        raise _damaged(name, f"{FACTS} lacks {missing[0]!r}")
    return facts


def _damaged(name: str, why: str) -> FadeError:
    return FadeError(f"bundle {name} is damaged: {why}; fetch or make it again (pipelines.register)")
