"""Questions to a running server from outside, without Paddle: is it there, what are its metrics, stop.

How many keys it has is not among them: it walks through its hash tables for that, and if they are rebuilt meanwhile (by
a load or a day boundary, of which an outsider does not know), it crashes. `Client.num_keys` is for whoever does these.

A server's port also answers HTTP. The server process itself cannot be asked through Python: Paddle holds its GIL.
"""

from __future__ import annotations

import contextlib
import http.client
import struct
import time
import urllib.request

from paddlewheel.pserver.brpc import (
    PULL_LAST_ERROR,
    PULL_STATISTICS,
    Buffer,
    Command,
    Connection,
    Reply,
    TableStatistics,
)
from paddlewheel.pserver.config import table_id
from paddlewheel.pserver.errors import ServerError

_POLL_SECONDS = 0.02
_NO_ANSWER = (OSError, ValueError, http.client.HTTPException)  # the last: who answers speaks something else
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_healthy(host: str, port: int, *, timeout_seconds: float = 1.0) -> bool:
    """Does the server accept requests? False when nothing, or something else, answers."""
    try:
        with _NO_PROXY.open(f"http://{_bracketed(host)}:{port}/health", timeout=timeout_seconds) as answer:
            return bool(answer.status == 200 and answer.read(16).strip() == b"OK")
    except _NO_ANSWER:
        return False


def brpc_metrics(host: str, port: int, *, timeout_seconds: float = 2.0) -> dict[str, float]:
    """The numbers of the server's /brpc_metrics page by name; labels stay in the name. Raises ServerError."""
    found = {}
    for line in _page(host, port, "brpc_metrics", timeout_seconds).splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            found[name] = float(value)
    return found


def server_uid(host: str, port: int, *, timeout_seconds: float = 5.0) -> str:
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


def table_statistics(host: str, port: int, table: str, *, timeout_seconds: float = 5.0) -> TableStatistics:
    """What our own table tells of itself on this server, whatever else it is doing. Raises ServerError.

    To be asked only of a table that insists on our engine: Paddle's would take it for a pull, which can end the server
    during a load or a day boundary.
    """
    deadline = time.monotonic() + timeout_seconds
    with contextlib.closing(Connection(f"{_bracketed(host)}:{port}", connect_timeout_seconds=timeout_seconds)) as to:
        words = read_words(to, table_id(table), PULL_STATISTICS, len(TableStatistics._fields), deadline)
        return TableStatistics(*words)


def tells_that_it_is_ours(statistics: Reply) -> bool:
    """Whether an answer to PRINT_TABLE_STAT comes from our own table: its second number is negative."""
    return int.from_bytes(statistics.data[8:16], "little", signed=True) < 0


def read_words(connection: Connection, number: int, what: int, count: int, deadline: float) -> list[int]:
    """Asks our own table for 64-bit words of its own, in the shape of a pull. Raises ServerError."""
    keys, asked = struct.pack(f"<{count}Q", *range(count)), struct.pack(f"<{count}I", *[what] * count)
    attachment: list[Buffer] = [b"\x01", keys, asked]
    connection.send(
        Command.PULL_SPARSE, number, [count.to_bytes(4, "little")], attachment=attachment, deadline=deadline
    )
    answer = connection.receive(deadline=deadline).attachment
    each = len(answer) // count
    return [int.from_bytes(answer[i * each : i * each + 8], "little") for i in range(count)]


def last_error(connection: Connection, number: int, deadline: float) -> str:
    """What our own table said of the last request that failed; "" when there was none. Raises ServerError."""
    words = read_words(connection, number, PULL_LAST_ERROR, 256, deadline)
    text = b"".join(word.to_bytes(8, "little") for word in words)
    return text.split(b"\0", 1)[0].decode(errors="replace")


def stop(host: str, port: int, *, timeout_seconds: float = 5.0) -> None:
    """Ask the server to end in order: it answers, then its process leaves `run_server`. Raises ServerError."""
    deadline = time.monotonic() + timeout_seconds
    with contextlib.closing(Connection(f"{_bracketed(host)}:{port}", connect_timeout_seconds=timeout_seconds)) as to:
        to.send(Command.STOP_SERVER, 0, deadline=deadline)
        to.receive(deadline=deadline)


def _page(host: str, port: int, page: str, timeout_seconds: float) -> str:
    # brpc answers browsers with HTML: it is told apart by the name that the client gives.
    request = urllib.request.Request(f"http://{_bracketed(host)}:{port}/{page}", headers={"User-Agent": "curl/8"})
    try:
        with _NO_PROXY.open(request, timeout=timeout_seconds) as answer:
            return str(answer.read().decode())
    except _NO_ANSWER as error:
        raise ServerError(f"parameter server {host}:{port} gives no page {page!r}: {error}") from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
