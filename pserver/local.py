"""Parameter servers on this machine while a `with` block lasts: for tests, benchmarks and one-machine tools."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING

from paddlewheel.pserver import admin
from paddlewheel.pserver.errors import ServerError
from paddlewheel.pserver.messages import ServerSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paddlewheel.pserver.config import Tables

_POLL_SECONDS = 0.02
_STOP_SECONDS = 10.0


class LocalServers:
    """Running server processes. endpoints: "127.0.0.1:port" in rank order."""

    def __init__(self, endpoints: tuple[str, ...], processes: tuple[subprocess.Popen[str], ...]) -> None:
        self.endpoints = endpoints
        self.processes = processes


@contextlib.contextmanager
def local_servers(
    tables: Tables,
    num_servers: int,
    log_directory: Path,
    *,
    gflags: Sequence[str] = (),
    seed: int = 0,
    logs_removed: bool = False,
    start_timeout_seconds: float = 60.0,
) -> Iterator[LocalServers]:
    """Start servers on free ports, wait until they are healthy; stop them in order afterwards, whatever happened.

    seed: as the clients', for tables with `l2`. logs_removed: for saves of changes (`Client.save_marked`). Logs go to
    `log_directory/pserver-<rank>.log`. Raises ServerError when one does not become healthy in time. They also stop when
    this process dies, whatever the cause.
    """
    endpoints = tuple(f"127.0.0.1:{port}" for port in _free_ports(num_servers))
    specs = [
        ServerSpec(
            tables=dict(tables),
            endpoints=endpoints,
            rank=rank,
            gflags=tuple(gflags),
            seed=seed,
            logs_removed=logs_removed,
            exit_on_stdin_eof=True,
        )
        for rank in range(num_servers)
    ]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context((log_directory / f"pserver-{r}.log").open("w")) for r in range(num_servers)]
        processes = tuple(stack.enter_context(_server(spec, log)) for spec, log in zip(specs, logs, strict=True))
        stack.callback(_stop_all, processes)
        deadline = time.monotonic() + start_timeout_seconds
        for rank, (endpoint, process) in enumerate(zip(endpoints, processes, strict=True)):
            host, port = endpoint.rsplit(":", 1)
            while not admin.is_healthy(host, int(port)):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ServerError(
                        f"parameter server {rank} at {endpoint} did not start (exit code {process.returncode}); "
                        f"its log: {log_directory / f'pserver-{rank}.log'}"
                    )
                time.sleep(_POLL_SECONDS)
        yield LocalServers(endpoints, processes)


@contextlib.contextmanager
def _server(spec: ServerSpec, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "paddlewheel.pserver.server_process"],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(spec.model_dump_json() + "\n")
        process.stdin.flush()
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _stop_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
