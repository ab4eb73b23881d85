"""Connections between trainers, here threads: what comes is what was sent; strangers, late and dead peers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paddlewheel.trainer.distributed import peer_connections
from paddlewheel.trainer.distributed.peer_connections import PeerConnections, PeerLostError, own_address


class Texts:
    """The board of all trainers of a test."""

    def __init__(self):
        self._texts, self._changed = {}, threading.Condition()

    def set(self, key, value):
        with self._changed:
            self._texts[key] = value.encode()
            self._changed.notify_all()

    def get(self, key):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._texts, 20), key
            return self._texts[key]


@pytest.fixture
def meshes():
    built = []

    def build(num_trainers, board=None, address="127.0.0.1"):
        board = board or Texts()
        with ThreadPoolExecutor(num_trainers) as pool:
            built.extend(
                pool.map(lambda rank: PeerConnections(rank, num_trainers, board, address), range(num_trainers))
            )
        return built

    yield build
    for each in built:
        each.close()


def _exchange(built, rank, num_floats):
    """Trainer r sends r * 10 + t to trainer t."""
    peers = [t for t in range(len(built)) if t != rank]
    incoming = {t: np.zeros(num_floats, np.float32) for t in peers}
    built[rank].all_to_all({t: np.full(num_floats, rank * 10 + t, np.float32) for t in peers}, incoming)
    return incoming


@pytest.mark.parametrize("num_floats", [1, 3_000_000])
def test_each_gets_what_was_for_it(meshes, num_floats):
    built = meshes(3)
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda rank: _exchange(built, rank, num_floats), range(3)))
        for rank, incoming in enumerate(found):
            for peer, array in incoming.items():
                assert (array == peer * 10 + rank).all()


def test_a_stranger_is_sent_away(meshes):
    """Whoever connects without the secret, says nothing, or leaves, takes nobody's place."""

    class Watched(Texts):
        def set(self, key, value):
            if key == "mesh/0":
                host, port = value.split()
                for words in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 99, b""):
                    with socket.create_connection((host, int(port))) as stranger:
                        stranger.sendall(words)
            super().set(key, value)

    built = meshes(2, Watched())
    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(lambda rank: _exchange(built, rank, 10), range(2))
    assert (first[1] == 10).all()


def test_a_stranger_that_drips_does_not_hold_up_the_others(meshes, monkeypatch):
    """One byte now and then is no hello: it has as long as the whole hello may take."""
    monkeypatch.setattr(peer_connections, "_HELLO_SECONDS", 0.3)
    enough = threading.Event()

    def drip(stranger):
        with stranger, contextlib.suppress(OSError):
            for _ in range(30):
                stranger.sendall(b"x")
                if enough.wait(0.1):
                    return

    dripping = []

    class Watched(Texts):
        def set(self, key, value):
            if key == "mesh/0":
                host, port = value.split()
                stranger = socket.create_connection((host, int(port)))  # the first to be welcomed
                dripping.append(threading.Thread(target=drip, args=(stranger,)))
                dripping[0].start()
            super().set(key, value)

    began = time.monotonic()
    built = meshes(2, Watched())
    seconds = time.monotonic() - began
    enough.set()
    dripping[0].join()
    assert sorted(built[0]._sockets) == [1]
    assert seconds < 2


@pytest.mark.needs("ipv6")
def test_ipv6(meshes):
    built = meshes(2, address=own_address(None, "[::1]:80"))
    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(lambda rank: _exchange(built, rank, 10), range(2))
    assert (first[1] == 10).all()


def test_a_peer_that_is_gone(meshes):
    built = meshes(3)
    built[1].close()
    with pytest.raises(PeerLostError, match="trainer 1 is gone"):
        built[0].all_to_all({}, {1: np.zeros(9)})


def test_a_peer_that_does_not_come(meshes, monkeypatch):
    monkeypatch.setattr(peer_connections, "_LIMIT_SECONDS", 0.2)
    with pytest.raises(PeerLostError, match=r"trainers \[1\] did not come"):
        meshes(2)[0].all_to_all({}, {1: np.zeros(9)})


def test_a_trainer_that_never_connects(monkeypatch):
    monkeypatch.setattr(peer_connections, "_LIMIT_SECONDS", 0.2)
    with pytest.raises(PeerLostError, match=r"no connection to trainers \[1, 2\]"):
        PeerConnections(0, 3, Texts(), "127.0.0.1")


def test_own_address():
    assert own_address("lo", "203.0.113.1:80") == "127.0.0.1"
    assert own_address(None, "127.0.0.1:80") == "127.0.0.1"
    assert own_address("no-such-interface", "127.0.0.1:80") == "127.0.0.1"
