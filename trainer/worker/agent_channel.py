"""The worker's end of the pipe to its agent: events out, commands and replies in, one message a line."""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable

from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL
from paddlewheel.trainer.protocol.messages import (
    Reply,
    Request,
    SaveCheckpoint,
    StopTraining,
    TrainerReply,
    TrainerRequest,
    WorkerEvent,
    read_command,
    to_line,
)

EVENT_FD = "PADDLEWHEEL_EVENT_FD"


class AgentChannel:
    """Talks to the agent. Safe from any thread.

    Args:
        on_command: called in the reading thread with each command that is no reply.
    """

    def __init__(self, on_command: Callable[[SaveCheckpoint | StopTraining], None]) -> None:
        fd = os.environ.get(EVENT_FD)
        self._out = os.fdopen(int(fd), "w", encoding="utf-8") if fd else sys.stdout
        self._write_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._replies: dict[int, queue.SimpleQueue[TrainerReply]] = {}
        self._on_command = on_command

    def listen(self) -> None:
        """Begin to read standard input. Its end means that the agent is gone: the process then exits at once."""
        threading.Thread(target=self._read, name="agent-link", daemon=True).start()

    def send(self, event: WorkerEvent) -> None:
        """Send one event."""
        line = to_line(event)
        with self._write_lock:
            self._out.write(line + "\n")
            self._out.flush()

    def request(self, ask: TrainerRequest) -> TrainerReply:
        """Ask the coordinator through the agent and wait for the reply."""
        number = next(self._numbers)
        self._replies[number] = queue.SimpleQueue()
        self.send(Request(id=number, ask=ask))
        answer = self._replies[number].get()
        del self._replies[number]
        return answer

    def _read(self) -> None:
        for line in sys.stdin:
            command = read_command(line)
            if isinstance(command, Reply):
                waiting = self._replies.get(command.id)
                if waiting is not None:
                    waiting.put(command.answer)
            else:
                self._on_command(command)
        os._exit(EX_TEMPFAIL)
