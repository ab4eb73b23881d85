"""What the coordinator's state machine receives (events) and what it orders (actions)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddlewheel.pserver.messages import ServerSpec
from paddlewheel.trainer.coordinator.records import Record
from paddlewheel.trainer.coordinator.row_ledger import Cursor
from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL, EX_USAGE, EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED
from paddlewheel.trainer.protocol import messages as protocol

if TYPE_CHECKING:
    from paddlewheel.trainer.coordinator.resume import StartPoint


class Role(str, enum.Enum):
    """What a member is for."""

    PSERVER = "pserver"
    TRAINER = "trainer"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, order=True)
class RoleRank:
    """Names a member by role and rank."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass(frozen=True)
class Outcome:
    """How the job ended. cause is empty after success."""

    exit_code: int
    cause: str = ""
    failed_role: str = ""
    detail: str = ""


# --------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Joined:
    """An agent has opened a stream (session) and said who it is; rank None: any free one."""

    session: int
    role: Role
    rank: int | None
    host: str
    pid: int
    version: str = ""
    """Of paddlewheel."""


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat. (Every other event of a session counts as one, too.)"""

    session: int
    worker_memory_bytes: int = 0
    worker_stopped: bool = False
    memory_limit_bytes: int = 0
    seconds_to_limit: float | None = None


@dataclass(frozen=True)
class Available:
    """The agent has no worker; its next one would listen at this port."""

    session: int
    port: int


@dataclass(frozen=True)
class WorkerStarted:
    """The agent has started its worker."""

    session: int
    attempt: int
    pid: int


@dataclass(frozen=True)
class WorkerReady:
    """The server answers, or the trainer has said that it is ready. server_uid: of the server's process."""

    session: int
    attempt: int
    server_uid: str = ""


@dataclass(frozen=True)
class WorkerEvent:
    """One event of the worker."""

    session: int
    attempt: int
    event: protocol.WorkerEvent


@dataclass(frozen=True)
class WorkerExited:
    """The worker is gone. expected: its agent ended it. reason: why, if the agent did so of its own accord."""

    session: int
    attempt: int
    code: int
    expected: bool = False
    log_tail: str = ""
    reason: str = ""


@dataclass(frozen=True)
class HostResponse:
    """What became of an order to a server's agent (see the action `HostRequest`)."""

    session: int
    attempt: int
    answer: protocol.HostAnswer


@dataclass(frozen=True)
class Leaving:
    """The agent was told to go by this signal."""

    session: int
    signal: int


@dataclass(frozen=True)
class Left:
    """The session's stream has ended."""

    session: int


STOP_CODES = frozenset({EX_USAGE, EX_TEMPFAIL, EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED})
"""What a job that is stopped before its end may exit with: never with 0, whoever asks for it."""


@dataclass(frozen=True)
class StopRequested:
    """A user wants the whole job to stop in order, and its processes to exit with this code.

    Raises:
        ValueError: the code is none of STOP_CODES.
    """

    reason: str
    exit_code: int = EXIT_TERMINATED

    def __post_init__(self) -> None:
        if self.exit_code not in STOP_CODES:
            allowed = ", ".join(str(int(code)) for code in sorted(STOP_CODES))
            raise ValueError(f"exit_code is {self.exit_code}: a job that is stopped exits with one of {allowed}")


@dataclass(frozen=True)
class CheckpointAsked:
    """A user wants a checkpoint now."""


@dataclass(frozen=True)
class CommitFinished:
    """What became of a commit (see the action `Commit`). path: the committed folder; empty when it failed."""

    commit: Commit
    path: str = ""
    error: str = ""
    is_for_good: bool = False
    """Whether every other checkpoint will fail as this one did."""


@dataclass(frozen=True)
class Examined:
    """What became of `Examine`: where to go on from. error: it could not be told now. refusal: nowhere, and why."""

    start: StartPoint | None = None
    error: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Tick:
    """Nothing happened but time."""


Event = (
    Joined
    | Heartbeat
    | Available
    | WorkerStarted
    | WorkerReady
    | WorkerEvent
    | WorkerExited
    | HostResponse
    | Leaving
    | Left
    | StopRequested
    | CheckpointAsked
    | CommitFinished
    | Examined
    | Tick
)

# -------------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class Welcome:
    """Tell the session its rank."""

    session: int
    rank: int


@dataclass(frozen=True)
class Refuse:
    """Refuse the session membership; its agent exits with this code (EX_TEMPFAIL: it may try again)."""

    session: int
    reason: str
    exit_code: int


@dataclass(frozen=True)
class StartWorker:
    """Have the session's agent start its worker with this specification. staging: for a server's agent, with
    checkpoints in an object store.
    """

    session: int
    attempt: int
    spec: ServerSpec | TrainerSpec
    staging: protocol.HostStaging | None = None


@dataclass(frozen=True)
class SendToWorker:
    """Write a command, or a reply, to the worker's standard input."""

    session: int
    attempt: int
    command: protocol.WorkerCommand


@dataclass(frozen=True)
class HostRequest:
    """Have a server's agent do something beside its worker, and answer."""

    session: int
    attempt: int
    order: protocol.HostOrder


@dataclass(frozen=True)
class StopWorker:
    """SIGTERM to the worker, SIGKILL after the grace."""

    session: int
    attempt: int
    grace_seconds: float


@dataclass(frozen=True)
class Finish:
    """Have the agent end."""

    session: int
    exit_code: int
    reason: str


@dataclass(frozen=True)
class CloseSession:
    """Close a session that is lost."""

    session: int


@dataclass(frozen=True)
class Commit:
    """Verify and rename the draft in the checkpoint folder; then say `CommitFinished`. seconds: what the save has
    taken.
    """

    cursor: Cursor
    seconds: float


@dataclass(frozen=True)
class Examine:
    """Read the checkpoint that could not be restored through; if it is damaged or gone, put it aside and find the one
    before it. Then say `Examined`.
    """

    path: str


@dataclass(frozen=True)
class Discard:
    """Remove the drafts of this pattern from the checkpoint folder: nobody will finish them."""

    drafts: str


@dataclass(frozen=True)
class CheckpointDone:
    """Answer those who asked for a checkpoint. error: why there is none."""

    step: int = -1
    path: str = ""
    error: str = ""


@dataclass(frozen=True)
class Log:
    """Something a person following the job should read. record: what the journal keeps of it, for the report."""

    level: str
    text: str
    record: Record | None = None


@dataclass(frozen=True)
class JobFinished:
    """The job has ended; the coordinator exits with outcome.exit_code."""

    outcome: Outcome


Action = (
    Welcome
    | Refuse
    | StartWorker
    | SendToWorker
    | HostRequest
    | StopWorker
    | Finish
    | CloseSession
    | Commit
    | Examine
    | Discard
    | CheckpointDone
    | Log
    | JobFinished
)


class Outbox:
    """The actions that one event has led to, in order."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def do(self, action: Action) -> None:
        """Adds an action."""
        self._actions.append(action)

    def note(self, level: str, text: str, record: Record | None = None) -> None:
        """Adds a line for people and, with a record, for the journal."""
        self.do(Log(level, text, record))

    def take(self) -> list[Action]:
        """All that was added since the last time."""
        taken, self._actions = self._actions, []
        return taken
