"""Worker processes that cannot outlive their parent, what their end means, and ports kept free for them.

Linux only, as is Paddle. Every process of a job is started through `start`: the kernel kills it when its parent dies
(PR_SET_PDEATHSIG), which also works while Paddle holds the worker's GIL or the parent was killed with -9.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from typing import IO

from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL

EVENT_FD = 3
"""Where a worker writes its events, one JSON object a line; its number is also in PADDLEWHEEL_EVENT_FD."""

_LOOK_SECONDS = 0.1  # between looks at a process whose pipes are held open

# Runs in the new process before the real program: ties its life to the parent's, puts the event pipe in its place, and
# becomes the program. (A preexec_fn would run Python right after a fork of gRPC's threads, which may deadlock.)
_GUARD = f"""
import ctypes, os, signal, sys
parent, event_fd = int(sys.argv[1]), int(sys.argv[2])
if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0) != 0:
    raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != parent:
    sys.exit({EX_TEMPFAIL})
if event_fd >= 0:
    if event_fd != {EVENT_FD}:
        os.dup2(event_fd, {EVENT_FD})
        os.close(event_fd)
    os.set_inheritable({EVENT_FD}, True)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def tied(command: Sequence[str], event_fd: int | None = None) -> list[str]:
    """The command, to be killed by the kernel when the calling *thread's* process ends; the rest as in `start`."""
    here = [str(os.getpid()), str(-1 if event_fd is None else event_fd)]
    return [sys.executable, "-I", "-S", "-c", _GUARD, *here, *command]


async def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    stdin: bool = False,
    event_fd: int | None = None,
    pass_fds: Sequence[int] = (),
) -> Process:
    """Starts command in a session of its own, to be killed by the kernel when the calling *thread's* process ends.

    Args:
        command: program and arguments.
        environment: added to this process's environment.
        output: file for standard output and error; without it they come through the process's `stdout`.
        stdin: whether its standard input is a pipe (else /dev/null).
        event_fd: write end of a pipe that becomes the worker's EVENT_FD.
        pass_fds: descriptors that stay open in the worker under their numbers.
    """
    variables = dict(os.environ)
    variables.update(environment or {})
    inherited = list(pass_fds)
    if event_fd is not None:
        variables["PADDLEWHEEL_EVENT_FD"] = str(EVENT_FD)
        inherited.append(event_fd)
    return await asyncio.create_subprocess_exec(
        *tied(command, event_fd),
        stdin=PIPE if stdin else asyncio.subprocess.DEVNULL,
        stdout=PIPE if output is None else output,
        stderr=STDOUT,
        env=variables,
        pass_fds=inherited,
        start_new_session=True,
    )


async def exit_status(process: Process) -> int:
    """The exit status of a process of `start` (negative: the signal), as soon as it has one.

    `process.wait` of Python 3.10 to 3.12 returns only when the process's pipes are closed too, and what the process has
    started may hold them open for as long as it likes.
    """
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait([waiting], timeout=_LOOK_SECONDS)
    finally:
        waiting.cancel()
    return process.returncode


def kill_session(pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Sends a signal to every process of the session that `start` made for pid; does nothing if none is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal_number)


def kill_leftovers(pid: int) -> None:
    """Kills what a process of `start` has left in its session. Call it when the process itself was waited for.

    Its number is then free, unless something of its session lives: the kernel gives no number away that is a group's.
    So if a process has that number, it is somebody else's, and so is the group.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        kill_session(pid)
    except PermissionError:
        pass


class PortTakenError(ValueError):
    """The port that the user asked for is in use."""


def reserve_port(host: str, port: int | None = None) -> socket.socket:
    """A bound socket that keeps a TCP port of host from being given to anyone by the kernel; close it to let go.

    It does not listen, so a server that sets SO_REUSEADDR (brpc, gloo's store and gRPC do) can bind the port meanwhile.

    Raises:
        PortTakenError: port is given, and some other process listens there.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(address)
    except OSError as error:
        holder.close()
        if port is None:
            raise
        raise PortTakenError(
            f"port {port} of {host} cannot be used ({error.strerror}):"
            " end the process that listens there, or choose another port"
        ) from error
    return holder


def interface_of(host: str) -> str | None:
    """The network interface that has the address of `host`; None if no interface of this machine has it."""
    import psutil

    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    for name, found in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in addresses for address in found):
            return name
    return None


def port_of(holder: socket.socket) -> int:
    """The port that reserve_port keeps."""
    return int(holder.getsockname()[1])
