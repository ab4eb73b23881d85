"""The protocol against a scripted peer: what is sent, and what wrong answers become."""

import contextlib
import socket
import struct
import threading
import time

import pytest

from paddlewheel.pserver.brpc import Command, Connection
from paddlewheel.pserver.errors import ServerError


def varint(value):
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def frame(meta, payload=b"", attachment=b"", magic=b"PRPC"):
    return (
        struct.pack(">4sII", magic, len(meta) + len(payload) + len(attachment), len(meta)) + meta + payload + attachment
    )


def parse(message):
    found, at = [], 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = number()
        value = number()
        if tag & 7 == 2:
            value, at = message[at : at + value], at + value
        found.append((tag >> 3, value))
    return found


class Peer:
    """Accepts one connection; answers each request with what `answer(meta)` gives (None: closes)."""

    def __init__(self, answer):
        self.answer, self.requests = answer, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            with connection, connection.makefile("rb") as stream:
                while head := stream.read(12):
                    _, body, meta_size = struct.unpack(">4sII", head)
                    meta = dict(parse(stream.read(meta_size)))
                    rest = stream.read(body - meta_size)
                    attached = meta.get(5, 0)
                    self.requests.append((meta, parse(rest[: len(rest) - attached]), rest[len(rest) - attached :]))
                    answer = self.answer(meta)
                    if answer is None:
                        break
                    connection.sendall(answer)

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@contextlib.contextmanager
def peer(answer):
    it = Peer(answer)
    connection = Connection(it.endpoint, connect_timeout_seconds=5)
    try:
        yield it, connection
    finally:
        connection.close()
        it.close()


def soon(seconds=5.0):
    return time.monotonic() + seconds


def test_a_request_and_its_answer():
    def answer(meta):
        return frame(field(4, meta[4]) + field(5, 3), field(1, 0) + field(2, b"") + field(3, b"data"), b"raw")

    with peer(answer) as (it, connection):
        for _ in range(2):
            connection.send(
                Command.PUSH_SPARSE, 300, deadline=soon(), params=[b"p", b"q"], data=[b"keys", memoryview(b"values")],
                attachment=[b"x" * 200_000, b""],
            )  # fmt: skip
            reply = connection.receive(deadline=soon())
            assert (bytes(reply.data), bytes(reply.attachment)) == (b"data", b"raw")
    meta, payload, attachment = it.requests[0]
    assert parse(meta[1]) == [(1, b"PsService"), (2, b"service")]
    assert payload == [(1, 3), (2, 300), (3, b"p"), (3, b"q"), (4, 0), (5, b"keysvalues")]
    assert attachment == b"x" * 200_000
    assert it.requests[0][0][4] != it.requests[1][0][4]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda _: None, "closed the connection"),
        (lambda _: frame(b"", magic=b"HTTP"), "not Paddle's protocol"),
        (lambda _: struct.pack(">4sII", b"PRPC", 1, 2), "b'PRPC': not Paddle"),
        (lambda m: frame(field(4, m[4] + 1), field(1, 0)), "answered request"),
        (lambda m: frame(field(2, field(1, 112) + field(2, b"full")) + field(4, m[4])), "PULL_SPARSE.*full"),
        (lambda m: frame(field(4, m[4]), field(1, (1 << 64) - 1) + field(2, b"no such table")), "no such table"),
        (lambda m: frame(field(4, m[4]), b"\x0d\x00\x00\x00\x00"), "wire type 5"),
        (lambda m: frame(field(4, m[4]), b"\x80"), "ends within a number"),
    ],
)
def test_wrong_answers(answer, words):
    with peer(answer) as (it, connection):
        connection.send(Command.PULL_SPARSE, 1, deadline=soon())
        with pytest.raises(ServerError, match=words) as raised:
            connection.receive(deadline=soon())
        assert it.endpoint in str(raised.value) or "Paddle's protocol" in str(raised.value)


def test_no_answer_in_time():
    release = threading.Event()

    def answer(_):
        release.wait(10)

    with peer(answer) as (it, connection):
        connection.send(Command.PULL_SPARSE, 1, deadline=soon())
        started = time.monotonic()
        with pytest.raises(
            ServerError, match=f"PULL_SPARSE at parameter server {it.endpoint} got no answer: timed out"
        ):
            connection.receive(deadline=soon(0.2))
        assert time.monotonic() - started < 2
        release.set()


def test_a_peer_that_stops_reading_does_not_block_a_send():
    with socket.create_server(("127.0.0.1", 0)) as listener:  # never accepts: buffers fill up
        connection = Connection(f"127.0.0.1:{listener.getsockname()[1]}", connect_timeout_seconds=5)
        with pytest.raises(ServerError, match="timed out"):
            connection.send(Command.PUSH_SPARSE, 1, deadline=soon(0.3), data=[bytes(64 << 20)])
        connection.close()


def test_nobody_there():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerError, match=f"no connection to parameter server {endpoint}"):
            Connection(endpoint, connect_timeout_seconds=1)
