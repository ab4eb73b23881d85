"""The network protocol of Paddle 2.6.2's parameter server, spoken directly: brpc's `baidu_std` frames.

A frame is "PRPC", body size, meta size (big-endian uint32), then meta and payload (protobuf messages) and attachment
(raw bytes). Messages and command numbers: `sendrecv.proto` in Paddle's source; frames: brpc's
documentation of baidu_std. Only what the client needs is here, so the two message types are put together by hand.
"""

from __future__ import annotations

import itertools
import socket
import struct
import time
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from paddlewheel.pserver.errors import RefusedError, ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview
_HEADER = struct.Struct(">4sII")
_SERVICE, _METHOD = b"PsService", b"service"
_MAX_FRAME_BYTES = 1 << 31
_RECEIVE_BYTES = 1 << 20
_LENGTH_DELIMITED = 2
_correlation = itertools.count(1)


class Command(IntEnum):
    """What a server can be asked (PsCmdID of sendrecv.proto)."""

    PULL_SPARSE = 2
    PUSH_SPARSE = 3
    SHRINK_TABLE = 4
    SAVE_ONE_TABLE = 5
    LOAD_ONE_TABLE = 7
    STOP_SERVER = 12
    PRINT_TABLE_STAT = 20


# What our own table understands beyond Paddle's protocol, in fields that Paddle's do not look at (native/plugin.cc).
PULL_STATISTICS, PULL_LAST_ERROR, PULL_WHOLE_ROWS = 0x57480001, 0x57480002, 0x57480100  # frequency of the first key
PUSH_HEADER_BITS = 0x7FC05748  # class of a first row of key 0, which then says how the others are meant


class TableStatistics(NamedTuple):
    """Counts of one server's table since its start; rows, the three sizes and saving: as they are now."""

    rows: int
    row_bytes: int
    index_bytes: int
    kept_bytes: int  # rows that pushes changed since a mark, as they were, for the save that is under way
    evicted: int
    deleted: int
    pushed: int
    pulled: int
    max_rows: int  # 0: no bound
    saving: int


class Reply(NamedTuple):
    """What a server answered: the message's data field, and the raw attachment."""

    data: memoryview
    attachment: memoryview


class Connection:
    """One TCP connection to one server; one request at a time: `send`, then `receive`. Not for two threads at once."""

    def __init__(self, endpoint: str, *, connect_timeout_seconds: float) -> None:
        """endpoint: "host:port". Raises ServerError when nothing answers there."""
        self.endpoint = endpoint
        host, port = endpoint.rsplit(":", 1)
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=connect_timeout_seconds)
        except OSError as error:
            raise ServerError(f"no connection to parameter server {endpoint}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expected = 0
        self._command = "request"

    def send(
        self,
        command: Command,
        table: int,
        params: Sequence[bytes] = (),
        data: Sequence[Buffer] = (),
        attachment: Sequence[Buffer] = (),
        *,
        deadline: float,
    ) -> None:
        """Send one request. data, attachment: pieces that are sent one after the other without being copied together.

        deadline: on the clock of time.monotonic().
        """
        self._expected, self._command = next(_correlation), command.name
        num_data, num_attached = sum(map(_num_bytes, data)), sum(map(_num_bytes, attachment))
        payload = _varint_field(1, command) + _varint_field(2, table)
        payload += b"".join(_bytes_field(3, param) for param in params) + _varint_field(4, 0)
        if data:
            payload += _tag(5, _LENGTH_DELIMITED) + _varint(num_data)
        meta = _bytes_field(1, _bytes_field(1, _SERVICE) + _bytes_field(2, _METHOD))
        meta += _varint_field(4, self._expected)
        if num_attached:
            meta += _varint_field(5, num_attached)
        body_bytes = len(meta) + len(payload) + num_data + num_attached
        assert body_bytes < _MAX_FRAME_BYTES, body_bytes
        head = _HEADER.pack(b"PRPC", body_bytes, len(meta)) + meta + payload
        self._send_all([head, *data, *attachment], deadline)

    def receive(self, *, deadline: float) -> Reply:
        """The answer to the last `send`. Raises ServerError on a time-out, a closed connection, or an error answer."""
        magic, body_bytes, meta_bytes = _HEADER.unpack(self._receive_exactly(_HEADER.size, deadline))
        if magic != b"PRPC" or not meta_bytes <= body_bytes < _MAX_FRAME_BYTES:
            raise ServerError(f"parameter server {self.endpoint} answered {bytes(magic)!r}: not Paddle's protocol")
        body = self._receive_exactly(body_bytes, deadline)
        meta = _fields(body[:meta_bytes])
        if meta.get(4, 0) != self._expected:
            raise ServerError(f"parameter server {self.endpoint} answered request {meta.get(4)}, not {self._expected}")
        outcome = _fields(meta.get(2, memoryview(b"")))  # type: ignore[arg-type]
        if outcome.get(1, 0):
            raise ServerError(f"{self._command} at parameter server {self.endpoint} failed: {_text(outcome.get(2))}")
        num_attached = meta.get(5, 0)
        assert isinstance(num_attached, int)
        payload = _fields(body[meta_bytes : body_bytes - num_attached])
        if payload.get(1, 0):
            raise RefusedError(
                f"{self._command} at parameter server {self.endpoint} failed: "
                f"{_text(payload.get(2)) or payload.get(1)}",
                self.endpoint,
            )
        data = payload.get(3, memoryview(b""))
        assert isinstance(data, memoryview)
        return Reply(data, body[body_bytes - num_attached :])

    def close(self) -> None:
        self._socket.close()

    def _send_all(self, pieces: list[Buffer], deadline: float) -> None:
        views = [memoryview(piece).cast("B") for piece in pieces if _num_bytes(piece)]
        try:
            while views:
                self._set_timeout(deadline)
                sent = self._socket.sendmsg(views[:64])
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
        except OSError as error:
            raise self._lost(error) from error

    def _receive_exactly(self, num_bytes: int, deadline: float) -> memoryview:
        view = memoryview(bytearray(num_bytes))
        got = 0
        try:
            while got < num_bytes:
                self._set_timeout(deadline)
                count = self._socket.recv_into(view[got:], min(num_bytes - got, _RECEIVE_BYTES))
                if count == 0:
                    raise ConnectionResetError("it closed the connection")
                got += count
        except OSError as error:
            raise self._lost(error) from error
        return view

    def _set_timeout(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)

    def _lost(self, error: OSError) -> ServerError:
        return ServerError(f"{self._command} at parameter server {self.endpoint} got no answer: {error}")


def _num_bytes(piece: Buffer) -> int:
    return piece.nbytes if isinstance(piece, memoryview) else len(piece)


def _text(value: int | memoryview | None) -> str:
    return bytes(value).decode(errors="replace") if isinstance(value, memoryview) else ""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint_field(field: int, value: int) -> bytes:
    return _tag(field, 0) + _varint(value)


def _bytes_field(field: int, value: bytes) -> bytes:
    return _tag(field, _LENGTH_DELIMITED) + _varint(len(value)) + value


def _fields(message: memoryview) -> dict[int, int | memoryview]:
    """Field number -> value of a protobuf message that holds only varints and length-delimited fields."""
    found: dict[int, int | memoryview] = {}
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if tag & 7 == _LENGTH_DELIMITED:
            found[tag >> 3] = message[at : at + value]
            at += value
        elif tag & 7 == 0:
            found[tag >> 3] = value - (1 << 64) if value >> 63 else value
        else:
            raise ServerError(
                f"a parameter server's answer holds a field of wire type {tag & 7}: not Paddle's protocol"
            )
    return found


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message):
            raise ServerError("a parameter server's answer ends within a number: not Paddle's protocol")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
