"""What the client does between a call and the wire; the servers are stand-ins here."""

import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from paddlewheel.data_pipeline.keys import integer_keys, space_seed
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.errors import PathError, ServerError

ONE = np.ones(1, np.float32)


@pytest.mark.parametrize("num_servers", [2, 3, 8])
@pytest.mark.parametrize(
    "ids",
    [np.arange(40_000), np.arange(40_000) * 1000, np.arange(40_000) << 40],
    ids=["counted", "thousands", "high-bits"],
)
def test_structured_ids_are_balanced_over_servers(num_servers, ids):
    client = Client({"t": TableConfig(width=1)}, [f"127.0.0.1:{i + 1}" for i in range(num_servers)])
    keys = integer_keys(ids.astype(np.uint64), space_seed("user"))
    counts = np.bincount(client._tables["t"].server_of(keys), minlength=num_servers)
    assert counts.min() > 0.93 * counts.max()


def test_a_flush_waits_for_pushes_of_other_threads(monkeypatch):
    client = Client({"t": TableConfig(width=1)}, ["127.0.0.1:1"])
    begun, release, flushed = threading.Event(), threading.Event(), threading.Event()

    def answer(requests, deadline):
        begun.set()
        assert release.wait(10)
        return {}

    monkeypatch.setattr(client, "_ask", answer)
    keys = np.array([7], np.uint64)
    pushing = threading.Thread(target=client.push, args=("t", keys, np.ones((1, 2), np.float32), ONE, ONE))
    pushing.start()
    assert begun.wait(10)
    flushing = threading.Thread(target=lambda: (client.flush(), flushed.set()))
    flushing.start()
    assert not flushed.wait(0.2)
    release.set()
    assert flushed.wait(10)
    pushing.join()
    flushing.join()


def test_no_servers_is_refused():
    with pytest.raises(ValueError, match="at least one server"):
        Client({"t": TableConfig()}, [])


NO_LINKS = SimpleNamespace(links=[None], kind="text")


@pytest.mark.parametrize("alone", ["load_per_host", "end_day"])
@pytest.mark.parametrize("beside", ["pull", "push", "num_keys", "save_bytes"])
def test_nothing_is_asked_while_servers_rebuild_their_tables(monkeypatch, alone, beside):
    """Paddle locks nothing there: one that is asked meanwhile can crash."""
    client = Client({"t": TableConfig(width=1)}, ["127.0.0.1:1"])
    client._tables["t"].is_ours = False
    begun, release, asked = threading.Event(), threading.Event(), threading.Event()

    def rebuild(command, t, params):
        begun.set()
        assert release.wait(10)
        return []

    def answer(*_):
        assert release.is_set(), "asked while the tables are rebuilt"
        asked.set()
        raise ServerError("answered")

    keys = np.array([7], np.uint64)
    calls = {
        "load_per_host": lambda: client.load_per_host([], {"t": NO_LINKS}),
        "end_day": client.end_day,
        "pull": lambda: client.pull("t", keys),
        "push": lambda: client.push("t", keys, np.ones((1, 2), np.float32), ONE, ONE),
        "num_keys": client.num_keys,
        "save_bytes": client.save_bytes,
    }

    def call(name):
        with contextlib.suppress(ServerError):
            calls[name]()

    monkeypatch.setattr(client, "_ask_everyone", rebuild)
    monkeypatch.setattr(client, "_check_loaded", lambda *_: None)
    monkeypatch.setattr("paddlewheel.pserver.client.saved_tables.check_fits", lambda *_: None)
    rebuilding = threading.Thread(target=calls[alone])
    rebuilding.start()
    assert begun.wait(10)
    monkeypatch.setattr(client, "_ask_everyone", answer)
    monkeypatch.setattr(client, "_ask", answer)
    asking = threading.Thread(target=call, args=(beside,))
    asking.start()
    assert not asked.wait(0.1)
    release.set()
    assert asked.wait(10)
    rebuilding.join()
    asking.join()


def test_tables_are_not_rebuilt_while_something_is_asked(monkeypatch):
    client = Client({"t": TableConfig(width=1)}, ["127.0.0.1:1"])
    pulling, release, rebuilt = threading.Event(), threading.Event(), threading.Event()

    def answer(requests, deadline):
        pulling.set()
        assert release.wait(10)
        raise ServerError("answered")

    def pull():
        with contextlib.suppress(ServerError):
            client.pull("t", np.array([7], np.uint64))

    monkeypatch.setattr(client, "_ask", answer)
    monkeypatch.setattr(client, "_ask_everyone", lambda *_: rebuilt.set())
    threads = [threading.Thread(target=pull), threading.Thread(target=client.end_day)]
    threads[0].start()
    assert pulling.wait(10)
    threads[1].start()
    assert not rebuilt.wait(0.1)
    release.set()
    assert rebuilt.wait(10)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name", ["../x", "a;b", "a b", "x$(touch y)", ""])
def test_a_name_that_a_shell_would_misread_is_no_tables_name(name):
    with pytest.raises(ValueError, match="cannot be a table's name"):
        Client({name: TableConfig()}, ["127.0.0.1:1"])


def test_the_whole_path_is_looked_at_the_tables_name_too(tmp_path, monkeypatch):
    """Every folder that a server is told, by whichever call."""
    looked = []

    def look(path):
        looked.append(path)
        raise PathError(str(path))

    monkeypatch.setattr("paddlewheel.pserver.client.saved_tables.check_path", look)
    monkeypatch.setattr("paddlewheel.pserver.client.saved_tables.check_fits", lambda *_: None)
    client = Client({"t": TableConfig()}, ["127.0.0.1:1"])
    calls = (
        lambda: client.save(tmp_path),
        lambda: client.save_per_host([tmp_path], list),
        lambda: client.load_per_host([tmp_path], {"t": None}),
    )
    for call in calls:
        with pytest.raises(PathError):
            call()
    assert looked == [tmp_path / "t"] * len(calls)
