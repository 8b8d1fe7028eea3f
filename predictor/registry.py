"""Bundles in and out of an MLflow model registry, by name and version or alias; directories and hub ids too.

mlflow and huggingface_hub are imported inside the functions that need them, with telemetry switched off.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from predictor.bundle import CARD, FACTS, WEIGHTS, Predictor, load_bundle
from predictor.errors import FadeError
from predictor.files import recover

STORE = "sqlite:///artefacts/mlflow.db"  # unless MLFLOW_TRACKING_URI says otherwise
EXPERIMENT = "fade-register"
ARTEFACT = "bundle"  # folder of a registering run that holds the bundle
SHIPPED = Path(__file__).with_name("bundles")  # bundles that come with the package
REFERENCE = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>[^/@]+))")


def resolve_store(tracking_uri: str | None = None) -> tuple[str, str | None]:
    """Say where runs are tracked, and where their files go.

    Args:
        tracking_uri: an MLflow tracking URI; by default MLFLOW_TRACKING_URI of the environment, or
            :data:`STORE`.

    Returns:
        The URI, and for a local SQLite file the URI of ``mlartifacts`` beside it (None: the server decides).

    Raises:
        FadeError: a plain folder, which MLflow 3 no longer takes.

    Example:
        >>> resolve_store("https://tracking.example.org")
        ('https://tracking.example.org', None)
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or STORE
    if uri.startswith("file:") or "://" not in uri:
        raise FadeError(
            f"tracking URI {uri} is a folder, which MLflow 3 refuses; use sqlite:///{uri.rstrip('/')}.db"
        )
    if not uri.startswith("sqlite:///"):
        return uri, None
    folder = Path(uri.removeprefix("sqlite:///")).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FadeError(
            f"tracking URI {uri}: cannot make {folder} ({error.strerror}); use another"
        ) from error
    return uri, (folder / "mlartifacts").resolve().as_uri()


def quiet_mlflow() -> None:
    """Switch off MLflow's telemetry and its chatter; call before mlflow is imported."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for name in ("alembic", "mlflow.store", "mlflow.tracking"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _client(tracking_uri: str | None) -> Any:
    quiet_mlflow()
    from mlflow import MlflowClient

    uri, _ = resolve_store(tracking_uri)
    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except Exception as error:  # mlflow's own, or sqlalchemy's of whatever database it is
        raise FadeError(f"tracking URI {uri} cannot be opened: {str(error).splitlines()[0]}") from error


def register_bundle(
    path: str | Path,
    name: str,
    *,
    alias: str | None = None,
    tags: Mapping[str, Any] | None = None,
    tracking_uri: str | None = None,
) -> int:
    """Register a bundle as the next version of a model; all of it or nothing.

    Args:
        path: bundle directory; it is verified first.
        name: of the registered model, made when it is not there.
        alias: set on the new version, for example ``"champion"``.
        tags: of the version; values become text.
        tracking_uri: see :func:`resolve_store`.

    Returns:
        The version number.

    Raises:
        FadeError: damaged bundle, or a name that MLflow does not take.
    """
    predictor = load_bundle(path)
    if not re.fullmatch(r"[\w.-]+", name):
        raise FadeError(f"model name {name!r} may hold letters, digits, '.', '_' and '-' only")
    client = _client(tracking_uri)
    from mlflow.exceptions import MlflowException

    _, location = resolve_store(tracking_uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    where = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT, location)
    run_id = client.create_run(where, run_name=name).info.run_id
    made_model, version = False, None
    try:
        client.log_artifacts(run_id, str(path), ARTEFACT)
        for key, value in predictor.metrics.items():
            client.log_metric(run_id, key, value)
        try:
            client.get_registered_model(name)
        except MlflowException:
            client.create_registered_model(name)
            made_model = True
        source = f"{client.get_run(run_id).info.artifact_uri}/{ARTEFACT}"
        version = client.create_model_version(name, source=source, run_id=run_id).version
        for key, value in (tags or {}).items():
            client.set_model_version_tag(name, version, key, str(value))
        if alias:
            client.set_registered_model_alias(name, alias, version)
        client.set_terminated(run_id)
    except BaseException:
        if version is not None:
            client.delete_model_version(name, version)
        if made_model:
            client.delete_registered_model(name)
        client.set_terminated(run_id, "FAILED")
        client.delete_run(run_id)
        raise
    return int(version)


def set_alias(name: str, alias: str, version: int, tracking_uri: str | None = None) -> None:
    """Point an alias at a version of a registered model.

    Raises:
        FadeError: no such model or version.
    """
    client = _client(tracking_uri)
    _find(client, f"models:/{name}/{version}")
    client.set_registered_model_alias(name, alias, str(version))


def load_predictor(ref: str | Path | Predictor, tracking_uri: str | None = None) -> Predictor:
    """Load a predictor from wherever it is named.

    Args:
        ref: ``"models:/NAME@alias"``, ``"models:/NAME/3"``, a bundle directory, the name of a bundle that comes with
            the package, a hub id ``"org/name"`` (the only form that uses the network), or a predictor, which is
            returned as it is.
        tracking_uri: see :func:`resolve_store`.

    Raises:
        FadeError: not there (the message lists what is), or damaged.
    """
    if isinstance(ref, Predictor):
        return ref
    text = str(ref)
    if text.startswith("models:"):
        client = _client(tracking_uri)
        version = _find(client, text)
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        uri, _ = resolve_store(tracking_uri)
        with tempfile.TemporaryDirectory() as folder:
            try:
                local = download_artifacts(artifact_uri=version.source, dst_path=folder, tracking_uri=uri)
            except (MlflowException, OSError) as error:
                raise FadeError(
                    f"{text} is version {version.version}, but its files are gone from {version.source}"
                ) from error
            return load_bundle(local, name=text)
    if not Path(text).exists():
        recover(text)
    if not Path(text).exists() and text in shipped():
        return load_bundle(SHIPPED / text, name=text)
    if not Path(text).exists() and is_hub_id(text):
        return load_bundle(_from_hub(text), name=text)
    if not Path(text).exists() and "/" not in text:
        names = ", ".join(shipped()) or "none"
        raise FadeError(
            f"there is no bundle at {text}, and none of that name comes with the package ({names}); check the path, or "
            "make one with pipelines.register"
        )
    return load_bundle(text)


def shipped() -> list[str]:
    """Names of the bundles that come with the package."""
    return sorted(facts.parent.name for facts in SHIPPED.glob(f"*/{FACTS}"))


def is_hub_id(text: str) -> bool:
    """Tell a hub id ``org/name`` from a path: exactly one slash, and its first part is no folder here.

    Example:
        >>> is_hub_id("org/name"), is_hub_id("./name"), is_hub_id("a/b/c")
        (True, False, False)
    """
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text)) and not Path(text.split("/")[0]).exists()


def _from_hub(repo: str) -> str:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(repo, allow_patterns=[WEIGHTS, FACTS, CARD])
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FadeError(
            f"predictor {repo} is no directory, and the hub does not give it: {reason}"
        ) from error


def _find(client: Any, ref: str) -> Any:
    """The model version that a ``models:/`` reference names, or an error that lists what there is."""
    from mlflow.exceptions import MlflowException

    match = REFERENCE.fullmatch(ref)
    if not match:
        raise FadeError(f"{ref!r} is not a registry reference; write models:/NAME@alias or models:/NAME/3")
    name, alias, version = match["name"], match["alias"], match["version"]
    try:
        model = client.get_registered_model(name)
    except MlflowException as error:
        names = ", ".join(sorted(m.name for m in client.search_registered_models())) or "no model at all"
        raise FadeError(f"the registry has no model {name!r}, but {names}; see pipelines.register") from error
    try:
        if alias:
            return client.get_model_version_by_alias(name, alias)
        return client.get_model_version(name, version)
    except MlflowException as error:
        versions = sorted(int(v.version) for v in client.search_model_versions(f"name = '{name}'"))
        aliases = ", ".join(f"{key} (version {v})" for key, v in sorted(model.aliases.items())) or "none"
        what = f"alias {alias!r}" if alias else f"version {version}"
        there = f"versions: {versions or 'none'}, aliases: {aliases}"
        raise FadeError(f"model {name!r} has no {what}; {there}") from error
