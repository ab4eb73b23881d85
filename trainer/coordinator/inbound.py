"""What comes over gRPC, turned into events: every number is looked at before anything is done with it.

Python's event loop takes a NaN for a time and never wakes up again; a port of 70,000 or a process number of 2^40 fail
far from here. So what does not make sense is refused, with its name, its value and what is allowed.
"""

from __future__ import annotations

import math
import signal
from typing import Any

from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import messages, wire
from paddlewheel.trainer.job.exit_codes import EXIT_TERMINATED
from paddlewheel.trainer.protocol.messages import MessageError

ROLES = {pb.ROLE_PSERVER: messages.Role.PSERVER, pb.ROLE_TRAINER: messages.Role.TRAINER}
_MAX_SECONDS = 86_400.0
_MAX_PID = 2**31 - 1
_MAX_HOST = 255
_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


def watch_interval_seconds(request: pb.StatusRequest) -> float:
    """The least time between two answers of WatchStatus. Raises MessageError."""
    return float(_within("min_interval_seconds", request.min_interval_seconds, 0.0, _MAX_SECONDS))


def checkpoint_timeout_seconds(request: pb.CheckpointRequest) -> float | None:
    """How long to wait for the checkpoint; None: for ever. Raises MessageError."""
    return _within("timeout_seconds", request.timeout_seconds, 0.0, _MAX_SECONDS) or None


def stop_of(request: pb.StopRequest) -> messages.StopRequested:
    """What an observer who stops the job asks for. Raises MessageError."""
    try:
        return messages.StopRequested(request.reason or "stopped by a user", request.exit_code or EXIT_TERMINATED)
    except ValueError as error:
        raise MessageError(str(error)) from error


def joined(session: int, message: pb.AgentMessage | None) -> messages.Joined:
    """An agent's first message. Raises MessageError."""
    role = ROLES.get(message.join.role) if message is not None and message.HasField("join") else None
    if message is None or role is None:
        raise MessageError("the first message must be a Join that names a role")
    join = message.join
    if (
        not 0 < len(join.host) <= _MAX_HOST
        or not join.host.isprintable()
        or any(letter.isspace() for letter in join.host)
    ):
        raise MessageError(f"host is {join.host[:_MAX_HOST]!r}: it must be a name or an address")
    pid = _within("pid", join.pid, 0, _MAX_PID)
    return messages.Joined(session, role, join.rank if join.HasField("rank") else None, join.host, pid, join.version)


def event_of(session: int, message: pb.AgentMessage) -> messages.Event | None:
    """An agent's message as an event; None: of a kind that this version does not know. Raises MessageError."""
    match message.WhichOneof("message"):
        case "heartbeat":
            beat = message.heartbeat
            _within("worker_cpu_seconds", beat.worker_cpu_seconds, 0.0, math.inf)
            left = beat.seconds_to_limit if beat.HasField("seconds_to_limit") else None
            if left is not None:
                _within("seconds_to_limit", left, 0.0, math.inf)
            memory = _within("worker_memory_bytes", beat.worker_memory_bytes, 0, 2**63)
            limit = _within("memory_limit_bytes", beat.memory_limit_bytes, 0, 2**63)
            return messages.Heartbeat(session, memory, beat.worker_stopped, limit, left)
        case "available":
            return messages.Available(session, _within("port", message.available.port, 1, 65_535))
        case "worker_started":
            pid = _within("pid", message.worker_started.pid, 1, _MAX_PID)
            return messages.WorkerStarted(session, message.worker_started.attempt, pid)
        case "worker_ready":
            return messages.WorkerReady(session, message.worker_ready.attempt, message.worker_ready.server_uid)
        case "worker_event":
            told = wire.read_union(message.worker_event, "event")
            return messages.WorkerEvent(session, message.worker_event.attempt, told)
        case "worker_exited":
            gone = message.worker_exited
            code = _within("exit_code", gone.exit_code, -64, 255)
            return messages.WorkerExited(session, gone.attempt, code, gone.expected, gone.log_tail, gone.reason)
        case "host_response":
            answer = wire.read_union(message.host_response, "answer")
            return messages.HostResponse(session, message.host_response.attempt, answer)
        case "leaving":
            if message.leaving.signal not in _SIGNALS:
                raise MessageError(f"signal is {message.leaving.signal}: an agent is told to go by one of {_names()}")
            return messages.Leaving(session, message.leaving.signal)
    return None


def _names() -> str:
    return ", ".join(f"{number} ({signal.Signals(number).name})" for number in sorted(_SIGNALS))


def _within(name: str, value: Any, least: Any, most: Any) -> Any:
    """The value, if it is a number of this range; NaN never is."""
    if not least <= value <= most:
        raise MessageError(f"{name} is {value}: it must be a number from {least:g} to {most:g}")
    return value
