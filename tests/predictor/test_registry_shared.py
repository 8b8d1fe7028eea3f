"""A registry that others use, is locked, gone or was never there: one line each, and nothing of others is touched."""

from __future__ import annotations

import socket
import sqlite3
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from predictor import registry
from predictor.errors import FadeError
from predictor.registry import load_predictor, open_experiment, register_bundle, set_alias
from tests.processes import Process

REGISTER = """import sys
from predictor.registry import register_bundle
print(register_bundle(sys.argv[1], "new", tracking_uri=sys.argv[2]))
"""


def versions(client, name):
    return sorted(int(version.version) for version in client.search_model_versions(f"name = '{name}'"))


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
def test_four_processes_register_a_new_name_in_a_new_store(bundle, tmp_path):
    uri = f"sqlite:///{tmp_path}/new/m.db"
    running = [Process("-c", REGISTER, bundle, uri) for _ in range(4)]
    told = [each.communicate(timeout=300) for each in running]
    assert [each.returncode for each in running] == [0] * 4, told
    assert sorted(int(out) for out, _ in told) == [1, 2, 3, 4]
    for version in range(1, 5):
        load_predictor(f"models:/new/{version}", uri)


@pytest.mark.parametrize("step", ["set_model_version_tag", "set_terminated", "set_registered_model_alias"])
def test_what_fails_leaves_the_version_of_another(store, bundle, client, monkeypatch, step):
    """Another registers under the new name between the steps of one that then fails."""
    name, seen, real = f"shared-{step}", [], getattr(type(client), step)

    def fails(self, *given, **options):
        if not seen:
            seen.append(None)
            seen.append(register_bundle(bundle, name, tracking_uri=store))
            raise RuntimeError("power, network, disk")
        return real(self, *given, **options)

    monkeypatch.setattr(type(client), step, fails)
    with pytest.raises(RuntimeError, match="power"):
        register_bundle(bundle, name, alias="champion", tags={"kind": "mlp"}, tracking_uri=store)
    monkeypatch.undo()
    assert versions(client, name) == [seen[1]]
    load_predictor(f"models:/{name}/{seen[1]}", store)


@pytest.mark.parametrize("step", ["create_registered_model", "create_experiment"])
def test_what_another_has_just_made_is_used(store, bundle, client, monkeypatch, step):
    """It was not there when it was looked for, and is when it is to be made."""
    monkeypatch.setattr(registry, "EXPERIMENT", f"of-{step}")
    real = getattr(type(client), step)

    def made_twice(self, *given, **options):
        real(self, *given, **options)
        return real(self, *given, **options)

    monkeypatch.setattr(type(client), step, made_twice)
    assert register_bundle(bundle, f"twice-{step}", tracking_uri=store) == 1


def test_an_alias_that_was_moved_goes_back(store, bundle, client, monkeypatch):
    register_bundle(bundle, "moved", alias="champion", tracking_uri=store)
    real = type(client).set_registered_model_alias
    calls = []

    def interrupted(self, *given):
        real(self, *given)
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(client), "set_registered_model_alias", interrupted)
    with pytest.raises(KeyboardInterrupt):
        register_bundle(bundle, "moved", alias="champion", tracking_uri=store)
    monkeypatch.undo()
    assert versions(client, "moved") == [1]
    assert int(client.get_model_version_by_alias("moved", "champion").version) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda path, uri: register_bundle(path, "x", tracking_uri=uri),
        lambda path, uri: open_experiment("x", uri),
        lambda path, uri: set_alias("x", "champion", 1, uri),
        lambda path, uri: load_predictor("models:/x@champion", uri),
    ],
    ids=["register", "fit", "alias", "load"],
)
class TestOutOfReach:
    def test_a_locked_database_is_one_line(self, bundle, tmp_path, monkeypatch, use):
        monkeypatch.setattr(registry, "PATIENCE", 0.2)
        with closing(sqlite3.connect(tmp_path / "m.db", isolation_level=None)) as other:
            other.execute("CREATE TABLE held (x)")
            other.execute("BEGIN EXCLUSIVE")
            began = time.monotonic()
            with pytest.raises(FadeError, match=r"m.db is locked by another process; wait") as error:
                use(bundle, f"sqlite:///{tmp_path}/m.db")
            one_line(error)
            assert time.monotonic() - began < 20  # 41 seconds before; the patience of .2, and what is imported

    def test_a_server_that_is_gone_is_one_line(self, bundle, use):
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with pytest.raises(FadeError, match=f"tracking server http://127.0.0.1:{port} does not answer") as error:
            use(bundle, f"http://127.0.0.1:{port}")
        one_line(error)

    def test_a_server_that_says_nothing_is_one_line(self, bundle, monkeypatch, use):
        monkeypatch.setattr(registry, "PATIENCE", 0.2)
        with closing(socket.create_server(("127.0.0.1", 0))) as silent:
            with pytest.raises(FadeError, match="does not answer") as error:
                use(bundle, f"http://127.0.0.1:{silent.getsockname()[1]}")
        one_line(error)

    def test_a_file_that_is_no_database_is_one_line(self, bundle, tmp_path, use):
        (tmp_path / "m.db").write_text("a letter to a friend, which is not a database" * 30)
        with pytest.raises(FadeError, match="m.db cannot be used: file is not a database") as error:
            use(bundle, f"sqlite:///{tmp_path}/m.db")
        one_line(error)
        assert (tmp_path / "m.db").read_text().startswith("a letter")

    def test_a_folder_uri_is_one_line(self, bundle, tmp_path, use):
        with pytest.raises(FadeError, match=f"is a folder, .*use sqlite:///{tmp_path}/mlruns.db") as error:
            use(bundle, (tmp_path / "mlruns").as_uri())
        one_line(error)
        assert list(tmp_path.iterdir()) == [bundle]


@pytest.mark.parametrize("path", ["mlfow.db", "artefcts/mlflow.db"])
def test_reading_makes_no_database(tmp_path, path):
    uri = f"sqlite:///{tmp_path}/{path}"
    with pytest.raises(FadeError, match=f"there is no registry at {uri}; check the path") as error:
        load_predictor("models:/x@champion", uri)
    one_line(error)
    with pytest.raises(FadeError, match="there is no registry at"):
        set_alias("x", "champion", 1, uri)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_answers_with_an_error_is_not_taken_for_gone():
    """Whatever it says of /health (older servers do not know it), it is there."""

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        registry._refuse_silent(f"http://127.0.0.1:{server.server_port}", write=True)
    finally:
        server.shutdown()
        server.server_close()
