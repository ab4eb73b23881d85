"""The trainers' rendezvous store: its protocol, its one address, and clients that send anything else."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.trainer.distributed.key_value_store import ADD, CHECK, GET, SET, WAIT, ProtocolError, Requests, Table
from paddlewheel.trainer.distributed.process_group import _start_store
from tests.support.ports import free_port

pytestmark = pytest.mark.processes


def request(command: int, key: bytes, argument: bytes | int | None = None) -> bytes:
    tail = b""
    if isinstance(argument, int):
        tail = struct.pack("=q", argument)
    elif argument is not None:
        tail = struct.pack("=Q", len(argument)) + argument
    return struct.pack("=i", command) + struct.pack("=Q", len(key)) + key + tail


KEYS = st.binary(max_size=8)
ASKED = st.one_of(
    st.tuples(st.just(ADD), KEYS, st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just(SET), KEYS, st.binary(max_size=40)),
    st.tuples(st.sampled_from([GET, CHECK, WAIT]), KEYS, st.none()),
)


@given(st.lists(ASKED, max_size=8), st.lists(st.integers(0, 400), max_size=8))
def test_requests_are_the_same_however_the_bytes_are_cut(asked: list, cuts: list[int]) -> None:
    sent = b"".join(request(*one) for one in asked)
    places = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    requests = Requests()
    pieces = [sent[start:end] for start, end in itertools.pairwise(places)]
    assert [one for piece in pieces for one in requests.feed(piece)] == asked


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", request(5, b""), struct.pack("=iQ", SET, 1 << 40), request(SET, b"k")[:-1]]
)
def test_other_bytes_are_refused_or_incomplete_and_never_a_request(sent: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert list(Requests().feed(sent)) == []


def test_a_value_larger_than_any_trainer_sends_is_refused_before_it_has_come() -> None:
    with pytest.raises(ProtocolError, match="more than"):
        list(Requests().feed(request(SET, b"k", b"")[:-8] + struct.pack("=Q", 1 << 30)))


def test_who_waits_is_told_when_the_key_comes_and_who_is_gone_is_not() -> None:
    table = Table()
    assert table.answer(1, WAIT, b"k", None) == table.answer(2, WAIT, b"k", None) == []
    table.forget(1)
    assert table.answer(3, SET, b"k", b"v") == [(2, struct.pack("=i", 1))]
    assert table.answer(1, GET, b"k", None) == [(1, struct.pack("=Q", 1) + b"v")]
    with pytest.raises(ProtocolError):
        table.answer(1, ADD, b"k", 1)
    assert table.answer(1, ADD, b"n", 2) == [(1, struct.pack("=q", 2))]
    assert table.answer(2, ADD, b"n", -5) == [(2, struct.pack("=q", -3))]


@contextmanager
def store(host: str = "127.0.0.1") -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = free_port()
    process = _start_store(host, port)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


def ask(connection: socket.socket, sent: bytes, size: int) -> bytes:
    connection.sendall(sent)
    return connection.recv(size, socket.MSG_WAITALL)


def test_it_listens_on_its_address_and_nowhere_else() -> None:
    with store() as (process, port):
        found = psutil.Process(process.pid).net_connections("inet")
        assert [tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN] == [("127.0.0.1", port)]


def test_a_stranger_is_cut_off_and_the_others_go_on() -> None:
    with store() as (_, port), socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        assert ask(peer, request(ADD, b"n", 1), 8) == struct.pack("=q", 1)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            assert ask(stranger, b"GET / HTTP/1.1\r\n\r\n", 1) == b""
        half = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(50)]
        for connection in half:
            connection.sendall(b"\0\0")
        assert ask(peer, request(ADD, b"n", 1), 8) == struct.pack("=q", 2)
        for connection in half:
            connection.close()


def test_a_taken_port_is_told() -> None:
    with store() as (_, port), pytest.raises(OSError, match=f"127.0.0.1:{port} cannot be listened on"):
        _start_store("127.0.0.1", port)
