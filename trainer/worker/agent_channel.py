"""The worker's end of the pipe to its agent: events out, commands and replies in, one JSON object a line."""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

EVENT_FD = "PADDLEWHEEL_EVENT_FD"


def to_json(value: Any) -> str:
    """JSON, in which numbers that are not finite are null: JSON has no other word for them."""
    try:
        return json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


class AgentChannel:
    """Talks to the agent. Safe from any thread.

    Args:
        on_command: called in the reading thread with each command line ({"command": ...}).
    """

    def __init__(self, on_command: Callable[[dict[str, Any]], None]) -> None:
        fd = os.environ.get(EVENT_FD)
        self._out = os.fdopen(int(fd), "w", encoding="utf-8") if fd else sys.stdout
        self._write_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._replies: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._on_command = on_command

    def listen(self) -> None:
        """StartPoint reading standard input. Its end means that the agent is gone: the process then exits at once."""
        threading.Thread(target=self._read, name="agent-link", daemon=True).start()

    def event(self, name: str, **fields: Any) -> None:
        """Send one event."""
        line = to_json({"event": name, **fields})
        with self._write_lock:
            self._out.write(line + "\n")
            self._out.flush()

    def request(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask the coordinator through the agent and wait for the reply."""
        number = next(self._numbers)
        self._replies[number] = queue.SimpleQueue()
        self.event("request", id=number, what=what, **fields)
        reply = self._replies[number].get()
        del self._replies[number]
        return reply

    def _read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "reply" in message:
                waiting = self._replies.get(int(message["reply"]))
                if waiting is not None:
                    waiting.put(message)
            else:
                self._on_command(message)
        os._exit(75)
