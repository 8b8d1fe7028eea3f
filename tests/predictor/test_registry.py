"""Registry on a temporary SQLite store: round trip, aliases, and errors that list what exists."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from predictor.bundle import WEIGHTS, Predictor, load_bundle
from predictor.errors import FadeError
from predictor.registry import is_hub_id, load_predictor, register_bundle, resolve_store, set_alias


def weights(predictor):
    return predictor.net.head.weight


def test_versions_aliases_and_tags(store, bundle, client):
    first = register_bundle(bundle, "round", alias="champion", tags={"kind": "mlp"}, tracking_uri=store)
    second = register_bundle(bundle, "round", tracking_uri=store)
    assert (first, second) == (1, 2)
    for ref in ("models:/round@champion", "models:/round/1", "models:/round/2", str(bundle), bundle):
        loaded = load_predictor(ref, tracking_uri=store)
        assert torch.equal(weights(loaded), weights(load_bundle(bundle))), ref
        assert loaded.name == str(ref)
    assert load_predictor(loaded) is loaded
    assert client.get_model_version("round", "1").tags["kind"] == "mlp"
    set_alias("round", "champion", 2, tracking_uri=store)
    assert client.get_model_version_by_alias("round", "champion").version in (2, "2")


def test_no_pickle_in_the_store(store, bundle, client):
    version = register_bundle(bundle, "plain", tracking_uri=store)
    source = Path(client.get_model_version("plain", str(version)).source.removeprefix("file://"))
    assert sorted(file.name for file in source.rglob("*") if file.is_file()) == [
        "README.md",
        "bundle.json",
        "model.safetensors",
    ]


def test_missing_things_are_listed(store, bundle):
    register_bundle(bundle, "listed", alias="best", tracking_uri=store)
    for ref, told in {
        "models:/absent@champion": "no model 'absent'.*listed",
        "models:/listed@champion": r"no alias 'champion'; versions: \[1\], aliases: best \(version 1\)",
        "models:/listed/7": r"no version 7; versions: \[1\]",
        "models:/listed/first": r"no version first; versions: \[1\]",
        "models:/listed": "write models:/NAME@alias",
        "models:listed@best": "write models:/NAME@alias",
    }.items():
        with pytest.raises(FadeError, match=told) as error:
            load_predictor(ref, tracking_uri=store)
        assert "\n" not in str(error.value), ref
    with pytest.raises(FadeError, match="no version 9"):
        set_alias("listed", "champion", 9, tracking_uri=store)


def test_registered_files_that_vanish_or_rot(store, bundle, client):
    version = register_bundle(bundle, "rotten", tracking_uri=store)
    source = Path(client.get_model_version("rotten", str(version)).source.removeprefix("file://"))
    (source / WEIGHTS).write_bytes(b"rot")
    with pytest.raises(FadeError, match="models:/rotten/1 is damaged"):
        load_predictor("models:/rotten/1", tracking_uri=store)
    shutil.rmtree(source)
    with pytest.raises(FadeError, match="files are gone"):
        load_predictor("models:/rotten/1", tracking_uri=store)


def test_damaged_bundle_and_bad_name_register_nothing(store, bundle, client):
    with pytest.raises(FadeError, match="letters, digits"):
        register_bundle(bundle, "a/b", tracking_uri=store)
    (bundle / WEIGHTS).write_bytes(b"rot")
    with pytest.raises(FadeError, match="damaged"):
        register_bundle(bundle, "never", tracking_uri=store)
    assert "never" not in [model.name for model in client.search_registered_models()]


@pytest.mark.parametrize("step", ["create_model_version", "set_model_version_tag", "set_registered_model_alias"])
def test_nothing_is_registered_by_half(store, bundle, client, monkeypatch, step):
    def fails(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"mlflow.MlflowClient.{step}", fails)
    before = len(client.search_runs([e.experiment_id for e in client.search_experiments()]))
    with pytest.raises(KeyboardInterrupt):
        register_bundle(bundle, f"half-{step}", alias="champion", tags={"kind": "mlp"}, tracking_uri=store)
    monkeypatch.undo()
    assert client.search_model_versions(f"name = 'half-{step}'") == []
    assert len(client.search_runs([e.experiment_id for e in client.search_experiments()])) == before
    version = register_bundle(bundle, f"half-{step}", alias="champion", tracking_uri=store)
    assert [int(v.version) for v in client.search_model_versions(f"name = 'half-{step}'")] == [version]


def test_a_failed_later_version_leaves_the_earlier(store, bundle, client, monkeypatch):
    register_bundle(bundle, "kept", alias="champion", tracking_uri=store)
    monkeypatch.setattr("mlflow.MlflowClient.set_registered_model_alias", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        register_bundle(bundle, "kept", alias="champion", tracking_uri=store)
    monkeypatch.undo()
    assert [v.version for v in client.search_model_versions("name = 'kept'")] in ([1], ["1"])
    load_predictor("models:/kept@champion", tracking_uri=store)


def test_folder_store_is_refused_and_sqlite_resolved(tmp_path, monkeypatch):
    with pytest.raises(FadeError, match="sqlite:///"):
        resolve_store("./mlruns")
    with pytest.raises(FadeError, match=f"use sqlite:///{tmp_path}/mlruns.db"):
        resolve_store((tmp_path / "mlruns").as_uri())
    (tmp_path / "file").touch()
    with pytest.raises(FadeError, match="cannot make"):
        resolve_store(f"sqlite:///{tmp_path}/file/deep/mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/here/mlflow.db")
    uri, location = resolve_store()
    assert uri == f"sqlite:///{tmp_path}/here/mlflow.db"
    assert location == (tmp_path / "here" / "mlartifacts").as_uri()
    assert resolve_store("http://server:5000") == ("http://server:5000", None)


def test_not_a_database_is_one_line(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is no database, but it is long enough to be mistaken for one" * 20)
    with pytest.raises(FadeError, match="cannot be used: file is not a database") as error:
        load_predictor("models:/any@champion", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert "\n" not in str(error.value)


def test_hub_id_or_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundles").mkdir()
    assert is_hub_id("org/name")
    assert not any(map(is_hub_id, ("bundles/name", "name", "/org/name", "a/b/c", "../name", "org/")))
    with pytest.raises(FadeError, match="no bundle at bundles/name"):
        load_predictor("bundles/name")


def test_hub_id_is_fetched_from_the_hub(bundle, monkeypatch):
    """The hub's client is asked for the three files and nothing else."""
    asked = {}

    def snapshot_download(repo, allow_patterns):
        asked.update(repo=repo, files=set(allow_patterns))
        return str(bundle)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    loaded = load_predictor("org/name")
    assert isinstance(loaded, Predictor)
    assert loaded.name == "org/name"
    assert asked == {"repo": "org/name", "files": {"model.safetensors", "bundle.json", "README.md"}}


def test_hub_out_of_reach_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FadeError, match="no directory, and the hub does not give it") as error:
        load_predictor("org/surely-not-there")
    assert "\n" not in str(error.value)
