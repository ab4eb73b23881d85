"""What the client does between a call and the wire; the servers are stand-ins here."""

import threading

import numpy as np
import pytest

from data_pipeline.keys import integer_keys, space_seed
from pserver.client import Client
from pserver.config import TableConfig

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
