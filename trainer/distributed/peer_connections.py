"""Direct connections between all trainers: an all-to-all, which Paddle's gloo lacks.

Gloo's send and receive cannot run beside each other either.
"""

from __future__ import annotations

import fcntl
import ipaddress
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

_LIMIT_SECONDS = 30.0
"""As gloo has it: a peer that is silent for longer counts as lost."""
_HELLO_SECONDS = 5.0
_SIOCGIFADDR = 0x8915
_RANK = struct.Struct("!I")


class PeerLostError(RuntimeError):
    """An AllReduce failed or did not end in time: some trainer is gone. A restart may help."""


class KeyValueStore(Protocol):
    """Where trainers leave texts for each other; the rendezvous store is one."""

    def set(self, key: str, value: str) -> None:
        """Leave a text."""
        ...

    def get(self, key: str) -> bytes:
        """Wait for a text."""
        ...


class PeerConnections:
    """A connection to every other trainer. All trainers build it at the same time.

    Args:
        rank, num_trainers: this trainer's place.
        store: tells addresses, and a secret of this mesh that keeps strangers out of it.
        address: of this host, as the other trainers reach it; see `own_address`.

    Raises:
        PeerLostError: another trainer did not come within 30 s, or trainer 0 within the store's own limit.
    """

    def __init__(self, rank: int, num_trainers: int, store: KeyValueStore, address: str) -> None:
        self._rank = rank
        self._sockets: dict[int, socket.socket] = {}
        deadline = time.monotonic() + _LIMIT_SECONDS
        if rank == 0:
            store.set("mesh/secret", secrets.token_hex(16))
        try:
            with socket.create_server((address, 0), family=_family(address), backlog=num_trainers) as listener:
                store.set(f"mesh/{rank}", f"{address} {listener.getsockname()[1]}")
                secret = store.get("mesh/secret")
                for peer in range(rank):
                    host, port = store.get(f"mesh/{peer}").decode().split()
                    self._keep(peer, socket.create_connection((host, int(port)), timeout=_LIMIT_SECONDS))
                    self._sockets[peer].sendall(secret + _RANK.pack(rank))
                while len(self._sockets) < num_trainers - 1:
                    listener.settimeout(max(0.01, deadline - time.monotonic()))
                    self._welcome(listener.accept()[0], secret)
        except Exception as error:
            self.close()
            missing = sorted(set(range(num_trainers)) - {rank} - set(self._sockets))
            raise PeerLostError(f"no connection to trainers {missing}: {error}") from error
        for connection in self._sockets.values():
            connection.setblocking(False)

    def _keep(self, peer: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[peer] = connection

    def _welcome(self, connection: socket.socket, secret: bytes) -> None:
        """Take a connection whose first bytes show that a trainer of this mesh made it; close any other."""
        deadline = time.monotonic() + _HELLO_SECONDS
        hello = b""
        try:
            while len(hello) < len(secret) + _RANK.size:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                more = connection.recv(len(secret) + _RANK.size - len(hello))
                if not more:
                    break
                hello += more
        except OSError:
            hello = b""
        if len(hello) == len(secret) + _RANK.size and secrets.compare_digest(hello[: len(secret)], secret):
            self._keep(_RANK.unpack(hello[len(secret) :])[0], connection)
        else:
            connection.close()

    def all_to_all(self, outgoing: Mapping[int, NDArray[Any]], incoming: Mapping[int, NDArray[Any]]) -> None:
        """Send an array to each trainer in `outgoing` and fill the arrays in `incoming`, all at the same time.

        Sizes are not sent: both sides know them. Arrays are C-contiguous.

        Raises:
            PeerLostError: a peer closed its connection, or nothing came or went for 30 s.
        """
        to_send = {peer: array.data.cast("B") for peer, array in outgoing.items()}
        to_fill = {peer: array.data.cast("B") for peer, array in incoming.items()}
        with selectors.DefaultSelector() as selector:
            for peer in to_send.keys() | to_fill.keys():
                selector.register(self._sockets[peer], _events(peer, to_send, to_fill), peer)
            while to_send or to_fill:
                ready = selector.select(_LIMIT_SECONDS)
                if not ready:
                    late = sorted(to_send.keys() | to_fill.keys())
                    raise PeerLostError(f"AllReduce failed: trainers {late} did not come to it within 30 s")
                for key, mask in ready:
                    self._move(key.data, mask, to_send, to_fill)
                    left = _events(key.data, to_send, to_fill)
                    if not left:
                        selector.unregister(key.fileobj)
                    elif left != key.events:
                        selector.modify(key.fileobj, left, key.data)

    def _move(self, peer: int, mask: int, to_send: dict[int, memoryview], to_fill: dict[int, memoryview]) -> None:
        """As many bytes as the connection takes and has."""
        connection = self._sockets[peer]
        try:
            if mask & selectors.EVENT_WRITE and peer in to_send:
                _advance(to_send, peer, connection.send(to_send[peer]))
            if mask & selectors.EVENT_READ and peer in to_fill:
                num_bytes = connection.recv_into(to_fill[peer])
                if num_bytes == 0:
                    raise ConnectionResetError("the connection was closed")
                _advance(to_fill, peer, num_bytes)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLostError(f"AllReduce failed: trainer {peer} is gone: {error}") from error

    def close(self) -> None:
        """Close all connections."""
        for connection in self._sockets.values():
            connection.close()


def own_address(interface: str | None, peer: str) -> str:
    """This host's address on a network interface; without one, where it reaches `peer` from ("host:port")."""
    if interface:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                name = struct.pack("256s", interface.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, name)[20:24])
        except OSError:
            pass  # it has no IPv4 address
    host, port = peer.rsplit(":", 1)
    family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address.partition("%")[0]).version == 6 else socket.AF_INET


def _events(peer: int, to_send: Mapping[int, Any], to_fill: Mapping[int, Any]) -> int:
    return selectors.EVENT_WRITE * (peer in to_send) | selectors.EVENT_READ * (peer in to_fill)


def _advance(views: dict[int, memoryview], peer: int, num_bytes: int) -> None:
    if num_bytes == len(views[peer]):
        del views[peer]
    else:
        views[peer] = views[peer][num_bytes:]
