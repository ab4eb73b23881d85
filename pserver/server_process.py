"""python -m paddlewheel.pserver.server_process: the process that holds a server's shards of the tables.

It reads one JSON line from standard input:

    a `messages.ServerSpec`

and writes the events of `messages.ServerEvent` as JSON lines to file descriptor 3 if that is open, else to standard
output: Starting, then Serving just before Paddle takes over, SignalReceived as soon as a signal asks it to stop,
Stopped after an ordered stop, or WorkerError.

Paddle's `run_server` holds the GIL until it returns, so no Python code of this process runs while it serves. Therefore:
readiness is asked from outside (`pserver.admin.is_healthy`), and a small helper process, forked before Paddle is
imported, turns SIGTERM and SIGINT (and the end of standard input, if wished) into an ordered stop: the signal's C
handler still writes to the wake-up pipe, the helper reads it and sends the stop request to this server's port.
The helper ends with this process, however that ends.

Exit codes: 0 stopped in order; 64 wrong job or environment; 75 port taken, or anything that a new start may mend.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from paddlewheel.pserver import admin, engine, native, paddle_core
from paddlewheel.pserver.descriptor import describe
from paddlewheel.pserver.errors import PortInUseError, RequirementError, ServerError
from paddlewheel.pserver.messages import (
    ErrorKind,
    Remark,
    ServerEvent,
    ServerSpec,
    Serving,
    SignalReceived,
    Starting,
    Stopped,
    WorkerError,
)
from paddlewheel.pserver.requirements import check

_EVENT_FD = 3
_STOP_RETRY_SECONDS = 0.2
_CANNOT_LISTEN_SECONDS = 0.02  # `run_server` returns that soon, and without an error, when it cannot listen
_signals_while_serving: list[int] = []


def main() -> int:
    """Serve until told to stop; returns the exit code."""
    events = _open_events()

    def emit(event: ServerEvent) -> None:
        events.write(event.model_dump_json() + "\n")
        events.flush()

    def fail(kind: ErrorKind, error: Exception, code: int) -> int:
        emit(WorkerError(kind=kind, message=str(error)))
        sys.stderr.write(f"parameter server: {error}\n")
        return code

    emit(Starting())
    try:
        spec = ServerSpec.model_validate_json(sys.stdin.readline())
        host, port = spec.address
    except ValueError as error:
        return fail("job", error, os.EX_USAGE)
    endpoints, rank = spec.endpoints, spec.rank

    wakeup_fd = _fork_stopper(host, port, watch_stdin=spec.exit_on_stdin_eof, event_fd=events.fileno())
    signal.signal(signal.SIGTERM, _exit_before_serving)
    signal.signal(signal.SIGINT, _exit_before_serving)
    try:
        check()
        chosen = engine.choose(
            spec.tables, num_servers=len(endpoints), rank=rank, seed=spec.seed, logs_removed=spec.logs_removed
        )
        if chosen.warning:
            emit(Remark(level="warning", message=chosen.warning))
        description = describe(
            spec.tables, len(endpoints), num_trainers=spec.num_trainers, gflags=spec.gflags, ours=chosen.ours
        )
        _refuse_taken_port(host, port)
    except PortInUseError as error:
        return fail("port", error, os.EX_TEMPFAIL)
    except (RequirementError, native.NativeError) as error:
        return fail("environment", error, os.EX_USAGE)
    except ValueError as error:
        return fail("job", error, os.EX_USAGE)

    core, _ = paddle_core.load()
    hosts = [_host_text(core, endpoint, i) for i, endpoint in enumerate(endpoints)]
    server = core.DistFleetWrapper()
    server.init_server(description, hosts, rank, spec.num_trainers, [])
    if chosen.ours:
        try:
            native.check_start()
        except native.NativeError as error:
            return fail("environment", error, os.EX_USAGE)
    emit(Serving(pid=os.getpid(), endpoint=endpoints[rank]))
    signal.signal(signal.SIGTERM, _note_while_serving)
    signal.signal(signal.SIGINT, _note_while_serving)
    signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
    started = time.monotonic()
    server.run_server(host, port)
    if not _signals_while_serving and time.monotonic() - started < _CANNOT_LISTEN_SECONDS:
        try:  # Paddle does not say whether it was stopped or could not listen; in that case the port is still taken
            _refuse_taken_port(host, port)
        except PortInUseError as error:
            return fail("port", error, os.EX_TEMPFAIL)
    emit(Stopped())
    return 0


def _open_events() -> Any:
    try:
        os.fstat(_EVENT_FD)
    except OSError:
        return sys.stdout
    return os.fdopen(_EVENT_FD, "w")


def _exit_before_serving(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _note_while_serving(number: int, _frame: object) -> None:
    """The helper has seen the signal already; Python gets here only when `run_server` has returned."""
    _signals_while_serving.append(number)


def _refuse_taken_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host.strip("[]"), port))
        except OSError as error:
            raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _host_text(core: Any, endpoint: str, rank: int) -> str:
    host, port = endpoint.rsplit(":", 1)
    return str(core.PSHost(host, int(port), rank).serialize_to_string())


def _fork_stopper(host: str, port: int, *, watch_stdin: bool, event_fd: int) -> int:
    """Start the helper; returns the descriptor to which a caught signal writes its number."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    if os.fork() == 0:
        os.close(write_fd)
        _stopper(host, port, read_fd, watch_stdin, event_fd)
    os.close(read_fd)
    return write_fd


def _stopper(host: str, port: int, signals_fd: int, watch_stdin: bool, event_fd: int) -> NoReturn:
    """Wait for a signal of the parent (or the end of stdin), then stop its server; end when the parent has ended."""
    import select

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a whole process group may be signalled
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        watched = [signals_fd, 0] if watch_stdin else [signals_fd]
        data, source = b"", 0
        while True:
            ready, _, _ = select.select(watched, [], [])
            source = ready[0]
            data = os.read(source, 4096)
            if source == signals_fd and not data:
                os._exit(0)  # the parent has ended
            if data and source == 0:
                continue
            break
        if source == signals_fd:  # one write of a short line is whole, whatever the parent writes
            line = SignalReceived(signal=signal.Signals(data[0]).name).model_dump_json() + "\n"
            with contextlib.suppress(OSError):
                os.write(event_fd, line.encode())
        watched = [signals_fd]
        while True:
            with contextlib.suppress(ServerError):  # not listening yet, or no longer
                admin.stop(host, port, timeout_seconds=2.0)
            ready, _, _ = select.select(watched, [], [], _STOP_RETRY_SECONDS)
            if ready and not os.read(signals_fd, 4096):
                os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
