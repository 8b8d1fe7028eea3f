"""A predictor on disk: a directory with ``model.safetensors``, ``bundle.json`` and a model card."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from predictor.budgets import HeadBudgets
from predictor.cache_layers import in_words
from predictor.card import model_card
from predictor.certificate import refuse_damaged
from predictor.errors import FadeError
from predictor.features import FeatureSpec, PrefillFeatures
from predictor.nets import ScoreNet, build_net, tensors_of
from predictor.offsets import offsets_from_dict, offsets_to_dict
from predictor.provenance import check_provenance, model_provenance
from predictor.scorenet import OPTIONAL_TENSORS, forecast
from predictor.sealed import Header, Sealed

VERSION = 2  # 1 had no checksum over bundle.json
WEIGHTS, FACTS, CARD = "model.safetensors", "bundle.json", "README.md"
FIELDS = {"kind": str, "config": dict, "spec": dict, "provenance": dict, "metrics": dict, "manifest": dict}
BUNDLE = Sealed(
    "bundle",
    FACTS,
    WEIGHTS,
    version=VERSION,
    oldest=1,
    sealed_since=2,
    remedy="fetch or make it again (pipelines.register)",
    absent="make one with pipelines.register, or check the path",
)


class Predictor(nn.Module):
    """A trained network together with what it was made for.

    Attributes:
        name: under which it was loaded (directory or registry reference).
        net: the network.
        spec: features it expects.
        provenance: the language model it was trained on.
        metrics: validation numbers, name -> value.
        manifest: facts about the traces it was trained on.
        budgets: how much each kv head must keep, or None.
        certificate: what was measured in the cache, or None.
        offsets: [L, H] float32, added to the log importance of a kv head's tokens before those of all heads compete
            under one threshold; None where scores of different heads were not made comparable.
        layers: indices in the model of the L layers that budgets and offsets are for; none where it has neither.
    """

    offsets: Tensor | None

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
        offsets: Tensor | None = None,
        layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.budgets = budgets
        self.layers = tuple(layers) if budgets is None else budgets.layers
        self.register_buffer("offsets", offsets)
        if offsets is not None and (len(offsets) != len(self.layers) or self.layers != tuple(layers)):
            raise FadeError(
                f"{name} has offsets of {len(offsets)} layers, {in_words(layers)}, and head budgets for "
                f"{in_words(self.layers)}; make both for the same layers"
            )
        self.certificate = None if certificate is None else dict(certificate)
        self.net, self.spec, self.name = net, spec, name
        self.provenance, self.manifest = dict(provenance), dict(manifest or {})
        self.metrics = dict(metrics or {})

    @torch.no_grad()
    def log_importance(self, features: PrefillFeatures) -> Tensor:
        """Forecast the log of each token's attention, [H, S], up to a constant for each kv head; higher = keep."""
        return self.net.log_importance(features)

    @torch.no_grad()
    def forecast(self, features: PrefillFeatures) -> Tensor:
        """Forecast the attention of each token, [H, S].

        In the order of the network and as large as the moving average; where the features tell what reading on would
        give a token (``log_ahead``), no less than that.
        """
        return forecast(self.log_importance(features).float(), features.tokens)

    def comparable_importance(self, features: PrefillFeatures) -> Tensor:
        """Forecast as :meth:`log_importance`, with the offsets of the heads, [H, S]: tokens of all heads compete.

        Raises:
            FadeError: scores of different heads were not made comparable, or not those of this layer.
        """
        if self.offsets is None or features.heads is None:
            raise FadeError(
                f"predictor {self.name} has no head offsets; lightning fit --config configs/fit_distil.yaml learns them"
            )
        layer = int(features.heads[0, 0])
        if layer not in self.layers:
            raise FadeError(
                f"predictor {self.name} has head offsets for {in_words(self.layers)}, not for layer {layer}"
            )
        return self.log_importance(features).float() + self.offsets[self.layers.index(layer)][:, None]

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

    def save(self, path: str | Path, *, certificate: Mapping[str, Any] | None = None, model: Any = None) -> Path:
        """Write it as a bundle, whole or not at all.

        Args:
            path: the directory to make; a bundle that is there is replaced.
            certificate: in place of the one that it has.
            model: the language model it was trained on, to renew the fingerprint of a bundle of an earlier release.

        Returns:
            The path.

        Raises:
            FadeError: something else is at ``path``, or it was made for another model.
        """
        if model is not None:
            self.check(model)
            self.provenance |= model_provenance(model)
        facts = {
            "version": VERSION,
            "kind": self.net.kind,
            "config": self.net.config(),
            "spec": self.spec.to_dict(),
            "provenance": self.provenance,
            "metrics": self.metrics,
            "manifest": self.manifest,
            "budgets": None if self.budgets is None else self.budgets.to_dict(),
            "certificate": self.certificate if certificate is None else dict(certificate),
        }
        if self.offsets is not None:  # named only then, so that other bundles are the same bytes as before
            facts["offsets"] = offsets_to_dict(self.offsets, self.layers)
        card = model_card(facts, sum(p.numel() for p in self.net.parameters()))
        return BUNDLE.write(Path(path), facts, self.net.state_dict(), {CARD: card})


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
    facts = BUNDLE.read_facts(path, name)
    for field, kind in FIELDS.items():
        if not isinstance(facts.get(field), kind):
            raise BUNDLE.damaged(name, f"{FACTS} lacks {field!r}, a {kind.__name__}")
    provenance, certificate = facts["provenance"], facts.get("certificate")
    net = _read_net(path, name, facts)
    spec = FeatureSpec.from_dict(facts["spec"])
    net.check_spec(spec)
    budgets = HeadBudgets.from_dict(facts["budgets"]) if facts.get("budgets") else None
    if budgets is not None:
        budgets.refuse_beyond(f"bundle {name}", provenance.get("layers"), provenance.get("kv_heads"))
    refuse_damaged(certificate, f"bundle {name}")
    stored = facts.get("offsets")
    offsets, layers = (None, ()) if stored is None else offsets_from_dict(stored, f"bundle {name}", provenance)
    kept = facts["metrics"], facts["manifest"], name, budgets, certificate, offsets, layers
    predictor = Predictor(net, spec, provenance, *kept)
    return predictor.eval().requires_grad_(False)


def _read_net(path: Path, name: str, facts: Mapping[str, Any]) -> ScoreNet:
    """The network, with its weights; both are compared before anything is allocated."""
    expected = tensors_of(facts["kind"], facts["config"])

    def check(found: Header) -> None:
        if found != {key: of for key, of in expected.items() if key in found or key not in OPTIONAL_TENSORS}:
            raise BUNDLE.damaged(name, f"{WEIGHTS} does not fit a {facts['kind']} of {facts['config']}")

    tensors = BUNDLE.read_tensors(path, name, facts, check)
    net = build_net(facts["kind"], facts["config"])
    net.load_state_dict(tensors)
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise BUNDLE.damaged(name, "its weights are not all finite numbers")
    return net
