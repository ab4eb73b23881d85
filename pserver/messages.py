"""What a server's process is told at its start, and what it tells; each message is one JSON object a line.

They are written and read as the same class. A field that is missing, unknown or of another type is refused by name.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from paddlewheel.pserver.config import Tables


class Message(BaseModel):
    """The base of all messages: frozen, and strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Measure = Annotated[float | None, BeforeValidator(_finite_or_none)]
"""A measured number; None where there is none yet, or where it is not finite."""


class ServerSpec(Message):
    """The first line on a server's standard input."""

    tables: Annotated[Tables, Field(strict=False)]
    """By name, as in the job file."""
    endpoints: tuple[str, ...]
    """`host:port` of every server, by rank."""
    rank: int = Field(ge=0)
    """Of this server."""
    num_trainers: int = 1
    seed: int = 0
    attempt: int = 0
    """Number of the attempt; 0 without a coordinator."""
    gflags: tuple[str, ...] = ()
    """More of Paddle's flags, each `-name=value`."""
    logs_removed: bool = False
    """Whether our own tables remember deleted keys, for saves of changes."""
    exit_on_stdin_eof: bool = False
    """Whether the end of standard input is an order to stop."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of this server. Raises ValueError when there is no such endpoint."""
        if self.rank >= len(self.endpoints):
            raise ValueError(f"rank is {self.rank}, but there are {len(self.endpoints)} endpoints")
        host, _, port = self.endpoints[self.rank].rpartition(":")
        return host, int(port)


# ---------------------------------------------------------------------------------------------------- what it tells


class Starting(Message):
    """A server's process has begun."""

    event: Literal["starting"] = "starting"


class Serving(Message):
    """Paddle takes over, and listens in a moment."""

    event: Literal["serving"] = "serving"
    pid: int
    endpoint: str


class SignalReceived(Message):
    """A server was sent a signal that asks it to stop."""

    event: Literal["signal"] = "signal"
    signal: str
    """Its name, such as SIGTERM."""
    asked: bool = False
    """Whether the agent sent it; the agent fills this in."""


class Stopped(Message):
    """A server has stopped in order."""

    event: Literal["stopped"] = "stopped"


ErrorKind = Literal["job", "data", "environment", "checkpoint", "peer", "port", "runtime"]


class WorkerError(Message):
    """Why a worker ends before it is done."""

    event: Literal["error"] = "error"
    kind: ErrorKind
    """`job`, `data`, `environment`: fix the job. `checkpoint`: it could not be restored. `peer`: another role was lost
    and this one only noticed. `port`, `runtime`: a retry may help."""
    message: str
    traceback: str = ""


class Remark(Message):
    """Something for the people who follow the job."""

    event: Literal["log"] = "log"
    level: Literal["debug", "info", "warning", "error"]
    message: str


ServerEvent = Starting | Serving | SignalReceived | Stopped | WorkerError | Remark
"""What a server's process writes."""
