"""Bundles in and out of an MLflow model registry, by name and version or alias; directories and hub ids too.

mlflow and huggingface_hub are imported inside the functions that need them, with telemetry switched off.
"""

from __future__ import annotations

import http.client
import logging
import os
import re
import sqlite3
import ssl
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from predictor.bundle import CARD, FACTS, WEIGHTS, Predictor, load_bundle
from predictor.errors import FadeError, first_line
from predictor.files import locked, recover

STORE = "sqlite:///artefacts/mlflow.db"  # unless MLFLOW_TRACKING_URI says otherwise
EXPERIMENT = "fade-register"
ARTEFACT = "bundle"  # folder of a registering run that holds the bundle
SHIPPED = Path(__file__).with_name("bundles")  # bundles that come with the package
PATIENCE = 10.0  # seconds that a server or a locked database is waited for
LIBRARIES = ("mlflow", "sqlalchemy", "sqlite3", "alembic", "requests", "urllib3")  # whose errors become one line
EXISTS = "RESOURCE_ALREADY_EXISTS"  # MLflow's code for what somebody else has made first
_held = threading.local()  # files that this thread has for itself
REFERENCE = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>[^/@]+))")


def resolve_store(tracking_uri: str | None = None, must_exist: bool = False) -> tuple[str, str | None]:
    """Say where runs are tracked, and where their files go.

    Args:
        tracking_uri: an MLflow tracking URI; by default MLFLOW_TRACKING_URI of the environment, or
            :data:`STORE`.
        must_exist: it is to be read, so that an SQLite file which is not there is a mistake and not made.

    Returns:
        The URI, and for a local SQLite file the URI of ``mlartifacts`` beside it (None: the server decides).

    Raises:
        FadeError: a plain folder, which MLflow 3 no longer takes, or nothing to read.

    Example:
        >>> resolve_store("https://tracking.example.org")
        ('https://tracking.example.org', None)
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or STORE
    if uri.startswith("file:") or "://" not in uri:
        place = unquote(urlsplit(uri).path) if uri.startswith("file:") else uri
        raise FadeError(f"tracking URI {uri} is a folder, which MLflow 3 refuses; use sqlite:///{place.rstrip('/')}.db")
    file = _sqlite_file(uri)
    if file is None:
        return uri, None
    if must_exist and not file.is_file():
        raise FadeError(f"there is no registry at {uri}; check the path, or make one with pipelines.register")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FadeError(f"tracking URI {uri}: cannot make {file.parent} ({error.strerror}); use another") from error
    return uri, (file.parent / "mlartifacts").resolve().as_uri()


def _sqlite_file(uri: str) -> Path | None:
    """The file of an SQLite URI; None for a server, or a database in memory."""
    if not uri.startswith("sqlite:///"):
        return None
    path = uri.removeprefix("sqlite:///").partition("?")[0]
    return None if path in ("", ":memory:") else Path(path)


def quiet_mlflow() -> None:
    """Switch off MLflow's telemetry and its chatter; call before mlflow is imported."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for name in ("alembic", "mlflow.store", "mlflow.tracking"):
        logging.getLogger(name).setLevel(logging.WARNING)


def open_experiment(name: str, tracking_uri: str | None = None) -> tuple[str, str | None]:
    """Make sure that a store answers and has an experiment.

    Returns:
        As :func:`resolve_store`.

    Raises:
        FadeError: it does not answer, is locked, or is no store.
    """
    client = _client(tracking_uri)
    uri, location = resolve_store(tracking_uri)
    with _one_line_errors(uri), _alone(uri):
        _experiment(client, name, location)
    return uri, location


def _client(tracking_uri: str | None, must_exist: bool = False) -> Any:
    """A client of a store that answers."""
    quiet_mlflow()
    uri, _ = resolve_store(tracking_uri, must_exist)
    _refuse_silent(uri, write=not must_exist)
    from mlflow import MlflowClient

    with _one_line_errors(uri), _alone(uri):  # two processes that make the tables of a new file get in each other's way
        return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _refuse_silent(uri: str, write: bool) -> None:
    """Ask a store whether it is there, which MLflow does for minutes.

    Raises:
        FadeError: a server that does not answer, an SQLite file that is locked, or no database.
    """
    if uri.startswith(("http://", "https://")):
        try:
            urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            return  # it answers
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLError):
                return  # it answers, and MLflow may have been set to trust it
            raise FadeError(
                f"tracking server {uri} does not answer ({reason}); start it, or check the address"
            ) from error
    file = _sqlite_file(uri)
    if file is None or not file.exists():
        return
    try:
        where = f"{file.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(where, uri=True, timeout=PATIENCE, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE" if write else "SELECT count(*) FROM sqlite_master")
    except sqlite3.Error as error:
        raise _unusable(uri, error) from error


@contextmanager
def _one_line_errors(uri: str) -> Iterator[None]:
    """Turn what MLflow, its database or the network raise into one line."""
    try:
        yield
    except FadeError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in LIBRARIES:
            raise
        raise _unusable(uri, error) from error


def _unusable(uri: str, error: Exception) -> FadeError:
    reason = first_line(error)
    if "database is locked" in reason:
        return FadeError(f"tracking URI {uri} is locked by another process; wait until it is done, or end it")
    return FadeError(f"tracking URI {uri} cannot be used: {reason[:300]}; check it, or name another")


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Keep other processes and threads of this project from writing to the same SQLite file."""
    file, mine = _sqlite_file(uri), vars(_held).setdefault("files", set())
    if file is None or file in mine:
        yield
        return
    with locked(file.parent, PATIENCE * 12):
        mine.add(file)
        try:
            yield
        finally:
            mine.discard(file)


def _experiment(client: Any, name: str, location: str | None) -> str:
    """Id of an experiment, which is made unless somebody has."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, location)
        except MlflowException as error:
            found = client.get_experiment_by_name(name)
            if error.error_code != EXISTS or found is None:
                raise
    return found.experiment_id


def _registered_model(client: Any, name: str) -> Any:
    """A registered model, which is made unless somebody has."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException:
        try:
            return client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != EXISTS:
                raise
            return client.get_registered_model(name)


def register_bundle(
    path: str | Path,
    name: str,
    *,
    alias: str | None = None,
    tags: Mapping[str, Any] | None = None,
    tracking_uri: str | None = None,
) -> int:
    """Register a bundle as the next version of a model; the whole version or none.

    What fails takes its own version and run back, and an alias that it had moved. The name of the model stays, since
    another process may have registered a version under it meanwhile.

    Args:
        path: bundle directory; it is verified first.
        name: of the registered model, made when it is not there.
        alias: set on the new version, for example ``"champion"``.
        tags: of the version; values become text.
        tracking_uri: see :func:`resolve_store`.

    Returns:
        The version number.

    Raises:
        FadeError: damaged bundle, a name that MLflow does not take, or a store that does not answer.
    """
    predictor = load_bundle(path)
    if not re.fullmatch(r"[\w.-]+", name):
        raise FadeError(f"model name {name!r} may hold letters, digits, '.', '_' and '-' only")
    client = _client(tracking_uri)
    uri, location = resolve_store(tracking_uri)
    with _one_line_errors(uri), _alone(uri):
        where = _experiment(client, EXPERIMENT, location)
        run_id = client.create_run(where, run_name=name).info.run_id
        before, version = None, None
        try:
            client.log_artifacts(run_id, str(path), ARTEFACT)
            for key, value in predictor.metrics.items():
                client.log_metric(run_id, key, value)
            before = _registered_model(client, name).aliases.get(alias)
            source = f"{client.get_run(run_id).info.artifact_uri}/{ARTEFACT}"
            version = client.create_model_version(name, source=source, run_id=run_id).version
            for key, value in (tags or {}).items():
                client.set_model_version_tag(name, version, key, str(value))
            client.set_terminated(run_id)
            if alias:
                client.set_registered_model_alias(name, alias, version)
        except BaseException:
            _take_back(client, name, version, run_id, alias, before)
            raise
    return int(version)


def _take_back(client: Any, name: str, version: Any, run_id: str, alias: str | None, before: Any) -> None:
    """Remove a version and its run, as far as the store still answers; nothing that is another process's."""
    if version is not None:
        with suppress(Exception):
            client.delete_model_version(name, version)  # and the alias, if it was set
    if version is not None and alias and before is not None:
        with suppress(Exception):
            if alias not in client.get_registered_model(name).aliases:
                client.set_registered_model_alias(name, alias, before)
    with suppress(Exception):
        client.set_terminated(run_id, "FAILED")
    with suppress(Exception):
        client.delete_run(run_id)


def set_alias(name: str, alias: str, version: int, tracking_uri: str | None = None) -> None:
    """Point an alias at a version of a registered model.

    Raises:
        FadeError: no such model or version.
    """
    client = _client(tracking_uri, must_exist=True)
    uri, _ = resolve_store(tracking_uri)
    with _one_line_errors(uri), _alone(uri):
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
        client = _client(tracking_uri, must_exist=True)
        with _one_line_errors(resolve_store(tracking_uri)[0]):
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
        reason = first_line(error)
        raise FadeError(f"predictor {repo} is no directory, and the hub does not give it: {reason}") from error


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
