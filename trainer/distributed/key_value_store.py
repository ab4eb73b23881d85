"""The rendezvous store of the trainers: where they leave texts for each other until their group is made, and meet.

Paddle has one, but its server listens on every interface of the machine, whatever address it is given. This one speaks
the same protocol to Paddle's clients (`core.TCPStore(..., is_master=False)`) and listens on one address alone. It runs
in a process of its own, because trainer 0, which starts it, holds the GIL within Paddle's calls while others ask.

A request, in the machine's byte order: command (int32), length of the key (uint64), key; then with ADD an int64, with
SET a length (uint64) and the value. WAIT is answered when the key is there. Only the standard library is needed here,
and nothing of this package, so that the process starts within moments: `python -I -S key_value_store.py HOST PORT
READY_FD`.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import sys
from collections.abc import Iterator

ADD, GET, CHECK, SET, WAIT = range(5)
_STOP_WAIT, _READY, _NOT_READY = 1, 2, 3
_COMMAND, _REPLY = struct.Struct("=i"), struct.Struct("=i")
_LENGTH, _NUMBER = struct.Struct("=Q"), struct.Struct("=q")
_MAX_KEY_BYTES, _MAX_VALUE_BYTES = 4 << 10, 1 << 20
_MAX_CLIENTS = 4096


class ProtocolError(ValueError):
    """Bytes that no trainer sends."""


class Table:
    """What was left by the trainers, and who waits for what. No sockets: requests go in, answers come out."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[int]] = {}

    def answer(self, client: int, command: int, key: bytes, argument: bytes | int | None) -> list[tuple[int, bytes]]:
        """Carries out a request; returns what to send, and to which clients.

        Raises:
            ProtocolError: a key is asked for that is not there, or a number is to be added to a text.
        """
        if command == ADD:
            assert isinstance(argument, int)
            try:
                total = int(self._values.get(key, b"0")) + argument
                packed = _NUMBER.pack(total)
            except (ValueError, struct.error) as error:
                raise ProtocolError(f"nothing can be added to {key!r}") from error
            self._values[key] = str(total).encode()
            return [(client, packed), *self._woken(key)]
        if command == SET:
            assert isinstance(argument, bytes)
            self._values[key] = argument
            return self._woken(key)
        if command == GET:
            if key not in self._values:
                raise ProtocolError(f"{key!r} is not there")
            return [(client, _LENGTH.pack(len(self._values[key])) + self._values[key])]
        if command == CHECK:
            return [(client, _REPLY.pack(_READY if key in self._values else _NOT_READY))]
        if key in self._values:
            return [(client, _REPLY.pack(_STOP_WAIT))]
        self._waiting.setdefault(key, []).append(client)
        return []

    def forget(self, client: int) -> None:
        """The client is gone."""
        for waiting in self._waiting.values():
            waiting[:] = [other for other in waiting if other != client]

    def _woken(self, key: bytes) -> list[tuple[int, bytes]]:
        return [(client, _REPLY.pack(_STOP_WAIT)) for client in self._waiting.pop(key, [])]


class Requests:
    """Cuts what one client sends into requests."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, more: bytes) -> Iterator[tuple[int, bytes, bytes | int | None]]:
        """Command, key and argument of each request that is now complete. Raises ProtocolError."""
        self._bytes += more
        while (found := self._first()) is not None:
            size, request = found
            del self._bytes[:size]
            yield request

    def _first(self) -> tuple[int, tuple[int, bytes, bytes | int | None]] | None:
        end = _COMMAND.size + _LENGTH.size
        if len(self._bytes) < _COMMAND.size:
            return None
        (command,) = _COMMAND.unpack_from(self._bytes)
        if command not in {ADD, GET, CHECK, SET, WAIT}:
            raise ProtocolError(f"command {command}")
        if len(self._bytes) < end:
            return None
        key_end = end + self._length(_COMMAND.size, _MAX_KEY_BYTES)
        argument: bytes | int | None = None
        end = key_end
        if command == ADD:
            end += _NUMBER.size
            if len(self._bytes) >= end:
                (argument,) = _NUMBER.unpack_from(self._bytes, key_end)
        elif command == SET:
            end += _LENGTH.size
            if len(self._bytes) >= end:
                start, end = end, end + self._length(key_end, _MAX_VALUE_BYTES)
                argument = bytes(self._bytes[start:end])
        if len(self._bytes) < end:
            return None
        return end, (command, bytes(self._bytes[_COMMAND.size + _LENGTH.size : key_end]), argument)

    def _length(self, start: int, limit: int) -> int:
        (length,) = _LENGTH.unpack_from(self._bytes, start)
        if length > limit:
            raise ProtocolError(f"{length} bytes, more than {limit}")
        return int(length)


class Server:
    """The store at one address. A client that sends anything else than requests is cut off; the others go on."""

    def __init__(self, host: str, port: int) -> None:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, family=socket.AF_INET, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._listener = socket.socket(family, kind)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an agent keeps the port for us
        self._listener.bind(address)
        self._listener.listen(512)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[int, tuple[socket.socket, Requests, bytearray]] = {}
        self._table = Table()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def serve(self) -> None:
        """Answers, for ever."""
        while True:
            for key, mask in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                number = key.fd
                if number in self._clients and mask & selectors.EVENT_READ:
                    self._read(number)
                if number in self._clients and mask & selectors.EVENT_WRITE:
                    self._write(number)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it hung up before it was let in, or there is no descriptor left: the next one may have more luck
        if len(self._clients) >= _MAX_CLIENTS:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients[connection.fileno()] = (connection, Requests(), bytearray())
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, number: int) -> None:
        connection, requests, _ = self._clients[number]
        try:
            more = connection.recv(1 << 16)
            if not more:
                raise ProtocolError("the end")
            for command, key, argument in requests.feed(more):
                for client, answer in self._table.answer(number, command, key, argument):
                    self._send(client, answer)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self._drop(number)

    def _send(self, number: int, answer: bytes) -> None:
        if number in self._clients:
            self._clients[number][2].extend(answer)
            self._write(number)

    def _write(self, number: int) -> None:
        connection, _, to_send = self._clients[number]
        try:
            while to_send:
                del to_send[: connection.send(to_send)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(number)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if to_send else 0)
        self._selector.modify(connection, events)

    def _drop(self, number: int) -> None:
        connection, *_ = self._clients.pop(number)
        self._table.forget(number)
        self._selector.unregister(connection)
        connection.close()


def main() -> None:
    """Entry point of the store's process: listens, says so (or why not) on a descriptor, serves until it is killed."""
    host, port, ready = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with os.fdopen(ready, "w", encoding="utf-8") as pipe:
        try:
            server = Server(host, port)
        except OSError as error:
            pipe.write(f"{host}:{port} cannot be listened on: {error.strerror or error}\n")
            sys.exit(os.EX_TEMPFAIL)
        pipe.write("ready\n")
    server.serve()


if __name__ == "__main__":
    main()
