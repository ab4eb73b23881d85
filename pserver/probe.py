"""Questions to a running server from outside, without Paddle: is it there, what are its metrics, stop.

A server's port also answers HTTP. The server process itself cannot be asked through Python: Paddle holds its GIL.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request

from pserver.config import table_id
from pserver.errors import ServerError
from pserver.wire import Command, Connection, Reply

_POLL_SECONDS = 0.02
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_healthy(host: str, port: int, *, timeout_seconds: float = 1.0) -> bool:
    """Does the server accept requests? False when nothing, or something else, answers."""
    try:
        with _NO_PROXY.open(f"http://{_bracketed(host)}:{port}/health", timeout=timeout_seconds) as answer:
            return bool(answer.status == 200 and answer.read(16).strip() == b"OK")
    except (OSError, ValueError, urllib.error.URLError):
        return False


def brpc_metrics(host: str, port: int, *, timeout_seconds: float = 2.0) -> dict[str, float]:
    """The numbers of the server's /brpc_metrics page by name; labels stay in the name. Raises ServerError."""
    found = {}
    for line in _page(host, port, "brpc_metrics", timeout_seconds).splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            found[name] = float(value)
    return found


def identity(host: str, port: int, *, timeout_seconds: float = 5.0) -> str:
    """Process id and start time of the server at this address: another text means another, empty, server.

    A server is healthy a moment before it tells its start time, so this waits for it. Raises ServerError.
    """
    name = f"rpc_server_{port}_start_time"
    deadline = time.monotonic() + timeout_seconds
    while True:
        told = dict(
            line.split(" : ", 1) for line in _page(host, port, f"vars/pid;{name}", timeout_seconds).splitlines()
        )
        if "pid" in told and name in told:
            return f"{told['pid']} {told[name]}"
        if time.monotonic() > deadline:
            raise ServerError(f"parameter server {host}:{port} does not tell when it was started")
        time.sleep(_POLL_SECONDS)


def num_keys(host: str, port: int, table: str, *, timeout_seconds: float = 5.0) -> int:
    """Keys of a table on this server. Raises ServerError, also when the server has no such table.

    The server walks through all its keys for it (0.1 s of CPU time at 20 million): ask a few times a minute.
    """
    reply = _ask(host, port, Command.PRINT_TABLE_STAT, table_id(table), timeout_seconds)
    return int.from_bytes(reply.data[:8], "little")


def stop(host: str, port: int, *, timeout_seconds: float = 5.0) -> None:
    """Ask the server to end in order: it answers, then its process leaves `run_server`. Raises ServerError."""
    _ask(host, port, Command.STOP_SERVER, 0, timeout_seconds)


def _page(host: str, port: int, page: str, timeout_seconds: float) -> str:
    # brpc answers browsers with HTML: it is told apart by the name that the client gives.
    request = urllib.request.Request(f"http://{_bracketed(host)}:{port}/{page}", headers={"User-Agent": "curl/8"})
    try:
        with _NO_PROXY.open(request, timeout=timeout_seconds) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError) as error:
        raise ServerError(f"parameter server {host}:{port} gives no page {page!r}: {error}") from error


def _ask(host: str, port: int, command: Command, table: int, timeout_seconds: float) -> Reply:
    deadline = time.monotonic() + timeout_seconds
    connection = Connection(f"{_bracketed(host)}:{port}", connect_timeout_seconds=timeout_seconds)
    try:
        connection.send(command, table, deadline=deadline)
        return connection.receive(deadline=deadline)
    finally:
        connection.close()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
