"""Manages one worker subprocess: stdin and event pipes, log forwarding, termination."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import psutil

from paddlewheel.pserver.messages import Remark, SignalReceived, WorkerError
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.distributed.subprocesses import exit_status, kill_leftovers, kill_session, start
from paddlewheel.trainer.protocol.messages import MessageError, WorkerEvent, read_event
from paddlewheel.trainer.telemetry.logs import write_output

_NUM_TAIL_LINES = 30
_MAX_LINE_BYTES = 60 << 20
"""Of an event: a message of the control plane holds no more (security.CHANNEL_OPTIONS)."""
_MAX_OUTPUT_LINE_BYTES = 64 << 10
_QUIET_SECONDS = 2.0
"""A pipe of a worker that has ended, which brings nothing for this long, is held open by somebody else."""


class WorkerProcess:
    """A running worker: its pipes, its output, its end."""

    def __init__(
        self,
        process: Process,
        attempt: int,
        outbox: asyncio.Queue[pb.AgentMessage],
        observe: Callable[[WorkerEvent], None],
    ) -> None:
        self.attempt = attempt
        self._observe = observe
        self.stopping = self._killed = False
        self.deaf_reason = ""
        self._process = process
        self._outbox = outbox
        self._tail: collections.deque[str] = collections.deque(maxlen=_NUM_TAIL_LINES)
        self._readers: list[asyncio.Task[None]] = []
        self._num_read = 0  # events and pieces of output
        self._killer: asyncio.TimerHandle | None = None
        self._usage = psutil.Process(process.pid)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        attempt: int,
        outbox: asyncio.Queue[pb.AgentMessage],
        observe: Callable[[WorkerEvent], None],
        environment: Mapping[str, str],
    ) -> WorkerProcess:
        """Starts command with a pipe for its events."""
        read_end, write_end = os.pipe()
        try:
            process = await start(command, environment=environment, stdin=True, event_fd=write_end)
        finally:
            os.close(write_end)
        worker = cls(process, attempt, outbox, observe)
        worker._listen(worker._read_events(read_end))
        worker._listen(worker._pass_on_output())
        return worker

    @property
    def pid(self) -> int:
        """Of the worker's process; also the number of its session."""
        return self._process.pid

    @property
    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._tail)

    def tell(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line.encode() + b"\n")

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL after the grace; without grace at once."""
        if self._process.returncode is not None:
            return  # it ended before it was asked to, which must not be taken for an ordered end
        self.stopping = True
        if grace_seconds <= 0:
            self.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        if self._killer is None:
            self._killer = asyncio.get_running_loop().call_later(grace_seconds, self.kill)

    def kill(self) -> None:
        """SIGKILL to it and to whatever it started."""
        self._killed = True
        if self._process.returncode is None:  # else its number may be another's by now
            kill_session(self.pid)

    def ended_as_asked(self, code: int) -> bool:
        """Whether an end with this status is what `stop` has brought about, and not somebody else's doing."""
        return self.stopping and (code != -signal.SIGKILL or self._killed)

    async def wait(self) -> int:
        """Its exit status (negative: the signal), once its last events and lines have been read."""
        code = await exit_status(self._process)
        if self._killer is not None:
            self._killer.cancel()
        kill_leftovers(self.pid)  # what it had started
        num_read = -1
        while num_read != self._num_read:  # as long as there is more in its pipes
            num_read = self._num_read
            _, open_readers = await asyncio.wait(self._readers, timeout=_QUIET_SECONDS)
            if not open_readers:
                break
        for reader in self._readers:
            reader.cancel()
        return code

    def measure(self) -> pb.Heartbeat:
        """Its memory and state, for the heartbeat."""
        try:
            with self._usage.oneshot():
                times = self._usage.cpu_times()
                return pb.Heartbeat(
                    worker_memory_bytes=self._usage.memory_info().rss,
                    worker_cpu_seconds=times.user + times.system,
                    worker_stopped=self._usage.status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP},
                )
        except psutil.Error:
            return pb.Heartbeat()

    def _listen(self, reader: Coroutine[Any, Any, None]) -> None:
        self._readers.append(asyncio.create_task(reader))

    async def _read_events(self, fd: int) -> None:
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        pipe = os.fdopen(fd, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await reader.readline():
                self._num_read += 1
                self._pass_on(self._event_of(line))
        except ValueError:  # what follows in the pipe is the rest of that line, so nothing can be read any more
            text = f"it said more in one event than the {_MAX_LINE_BYTES >> 20} MiB that a message can hold"
            remedy = "if these are the slices of an epoch: fewer, larger row groups"
            self._pass_on(WorkerError(kind="job", message=f"{text} ({remedy})"))
            self.kill()
        finally:
            transport.close()

    def _event_of(self, line: bytes) -> WorkerEvent:
        """What the worker says. A line that is no JSON object is a remark: some library wrote to the pipe. An object
        that is no event is an error: whoever waits for what it was meant to bring would wait for ever.
        """
        try:
            event = read_event(line)
        except MessageError as error:
            if not line.lstrip().startswith(b"{"):
                return Remark(level="warning", message=f"not an event: {line[:200]!r}")
            return WorkerError(kind="runtime", message=f"{error}: {line[:200].decode(errors='replace')}")
        return event.model_copy(update={"asked": self.stopping}) if isinstance(event, SignalReceived) else event

    def _pass_on(self, event: WorkerEvent) -> None:
        """An event, to the metrics and to the coordinator."""
        self._observe(event)
        message = pb.WorkerEvent(attempt=self.attempt)
        try:
            wire.put_union(message, event)
        except (ValueError, TypeError) as error:  # such as a number of more than 64 bits
            message = pb.WorkerEvent(attempt=self.attempt)
            text = f"an event {event.event!r} cannot be passed on: {error}"
            wire.put_union(message, WorkerError(kind="runtime", message=text))
        self._outbox.put_nowait(pb.AgentMessage(worker_event=message))

    async def _pass_on_output(self) -> None:
        assert self._process.stdout is not None
        last = b""
        while chunk := await self._process.stdout.read(1 << 16):
            self._num_read += 1
            write_output(chunk)
            *lines, last = (last + chunk).split(b"\n")
            last = last[-_MAX_OUTPUT_LINE_BYTES:]  # a bar that is drawn over itself never ends its line
            self._tail.extend(line[-_MAX_OUTPUT_LINE_BYTES:].decode(errors="replace") for line in lines)
        if last:
            self._tail.append(last.decode(errors="replace"))
