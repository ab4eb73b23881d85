"""A running child in the hands of its agent: its pipes, its output, its end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import psutil

from trainer.coordinator import coordinator_pb2 as pb
from trainer.logs import write_output
from trainer.process import kill_session, start

_NUM_TAIL_LINES = 30
_MAX_LINE_BYTES = 16 << 20


class HeldChild:
    """A running child: its pipes, its output, its end."""

    def __init__(
        self,
        process: Process,
        incarnation: int,
        outbox: asyncio.Queue[pb.AgentMessage],
        observe: Callable[[dict[str, Any]], None],
    ) -> None:
        self.incarnation = incarnation
        self._observe = observe
        self.stopping = self._killed = False
        self.deaf_reason = ""
        self._process = process
        self._outbox = outbox
        self._tail: collections.deque[str] = collections.deque(maxlen=_NUM_TAIL_LINES)
        self._readers: list[asyncio.Task[None]] = []
        self._killer: asyncio.TimerHandle | None = None
        self._usage = psutil.Process(process.pid)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        incarnation: int,
        outbox: asyncio.Queue[pb.AgentMessage],
        observe: Callable[[dict[str, Any]], None],
        environment: Mapping[str, str],
    ) -> HeldChild:
        """Starts command with a pipe for its events."""
        read_end, write_end = os.pipe()
        try:
            process = await start(command, environment=environment, stdin=True, event_fd=write_end)
        finally:
            os.close(write_end)
        child = cls(process, incarnation, outbox, observe)
        child._listen(child._read_events(read_end))
        child._listen(child._pass_on_output())
        return child

    @property
    def pid(self) -> int:
        """Of the child's process; also the number of its session."""
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
        kill_session(self.pid)

    def ended_as_asked(self, code: int) -> bool:
        """Whether an end with this status is what `stop` has brought about, and not somebody else's doing."""
        return self.stopping and (code != -signal.SIGKILL or self._killed)

    async def wait(self) -> int:
        """Its exit status (negative: the signal), once its last events and lines have been read."""
        code = await self._process.wait()
        if self._killer is not None:
            self._killer.cancel()
        kill_session(self.pid)  # what it had started
        await asyncio.wait(self._readers, timeout=2.0)
        for reader in self._readers:
            reader.cancel()
        return code

    def measure(self) -> pb.Heartbeat:
        """Its memory and state, for the heartbeat."""
        try:
            with self._usage.oneshot():
                times = self._usage.cpu_times()
                return pb.Heartbeat(
                    child_memory_bytes=self._usage.memory_info().rss,
                    child_cpu_seconds=times.user + times.system,
                    child_stopped=self._usage.status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP},
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
                try:
                    said = json.loads(line)
                except ValueError:
                    said = None
                if not isinstance(said, dict):
                    said = {"event": "log", "level": "warning", "message": f"not an event: {line[:200]!r}"}
                if said.get("event") == "signal":
                    said["asked"] = self.stopping
                self._observe(said)
                self._outbox.put_nowait(
                    pb.AgentMessage(child_event=pb.ChildEvent(incarnation=self.incarnation, json=json.dumps(said)))
                )
        finally:
            transport.close()

    async def _pass_on_output(self) -> None:
        assert self._process.stdout is not None
        last = b""
        while chunk := await self._process.stdout.read(1 << 16):
            write_output(chunk)
            *lines, last = (last + chunk).split(b"\n")
            self._tail.extend(line.decode(errors="replace") for line in lines)
        if last:
            self._tail.append(last.decode(errors="replace"))
