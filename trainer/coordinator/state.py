"""The coordinator's decisions as a pure state machine: events and the time go in, actions come out. No gRPC, no clock.

Seats and incarnations. A job has S server seats and T trainer seats; an agent that joins takes one. As soon as every
seat's agent is there and has no child, an *incarnation* opens: servers start, and when all are ready, the trainers.

    GATHERING -> SERVERS -> TRAINERS -> RUNNING -> DRAINING -> OVER       every trainer has left with code 0
                    |           |          |--> STOPPING -> DRAINING -> OVER        someone asked for an ordered stop
                    +-----------+----------+--> HALTING -> GATHERING (after a pause) or OVER      something was lost

In HALTING every child is ended; what is heard meanwhile helps to tell the cause from its consequences (`Weight`).
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.coordinator.lineage import Cursor, Lineage, LineageError
from trainer.coordinator.plan import JobPlan
from trainer.coordinator.resume import Start, identity
from trainer.process import EXIT_DONE, EXIT_FIX_JOB, EXIT_INTERRUPTED, EXIT_RETRY, EXIT_TERMINATED, describe_exit


class Role(str, enum.Enum):
    """What a seat is for."""

    PSERVER = "pserver"
    TRAINER = "trainer"

    def __str__(self) -> str:
        return self.value


class Phase(str, enum.Enum):
    """Where the job stands; see the module's picture."""

    GATHERING = "gathering"
    SERVERS = "starting servers"
    TRAINERS = "starting trainers"
    RUNNING = "running"
    STOPPING = "stopping"
    DRAINING = "draining"
    HALTING = "halting"
    OVER = "over"

    def __str__(self) -> str:
        return self.value


class ChildState(str, enum.Enum):
    """A seat's Paddle child, as far as the coordinator knows."""

    NONE = "none"
    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, order=True)
class Member:
    """A seat's name."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


# --------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Joined:
    """An agent has opened a stream (session) and said who it is; rank None: any free one."""

    session: int
    role: Role
    rank: int | None
    host: str
    pid: int


@dataclass(frozen=True)
class Heard:
    """A heartbeat. (Every other event of a session counts as one, too.)"""

    session: int
    child_memory_bytes: int = 0
    child_stopped: bool = False
    memory_limit_bytes: int = 0
    seconds_to_limit: float | None = None


@dataclass(frozen=True)
class Available:
    """The agent has no child; its next one would listen at this port."""

    session: int
    port: int


@dataclass(frozen=True)
class ChildStarted:
    """The agent has started its child."""

    session: int
    incarnation: int
    pid: int


@dataclass(frozen=True)
class ChildReady:
    """The server answers, or the trainer has said that it is ready. identity: of the server's process."""

    session: int
    incarnation: int
    identity: str = ""


@dataclass(frozen=True)
class ChildSaid:
    """One event of the child: {"event": "progress" | "phase" | "result" | "error" | ..., ...}."""

    session: int
    incarnation: int
    event: dict[str, Any]


@dataclass(frozen=True)
class ChildExited:
    """The child is gone. expected: its agent ended it. reason: why, if the agent did so of its own accord."""

    session: int
    incarnation: int
    code: int
    expected: bool = False
    log_tail: str = ""
    reason: str = ""


@dataclass(frozen=True)
class HostAnswered:
    """What became of an order to a server's agent (see the action `AskHost`)."""

    session: int
    incarnation: int
    answer: dict[str, Any]


@dataclass(frozen=True)
class Leaving:
    """The agent was told to go by this signal."""

    session: int
    signal: int


@dataclass(frozen=True)
class Left:
    """The session's stream has ended."""

    session: int


@dataclass(frozen=True)
class StopRequested:
    """A user wants the whole job to stop in order, and its processes to exit with this code."""

    reason: str
    exit_code: int = EXIT_TERMINATED


@dataclass(frozen=True)
class CheckpointAsked:
    """A user wants a checkpoint now."""


@dataclass(frozen=True)
class Settled:
    """What became of a commit (see the action `Commit`). path: the committed folder; empty when it failed."""

    commit: Commit
    path: str = ""
    error: str = ""


@dataclass(frozen=True)
class Tick:
    """Nothing happened but time."""


Event = (
    Joined
    | Heard
    | Available
    | ChildStarted
    | ChildReady
    | ChildSaid
    | ChildExited
    | HostAnswered
    | Leaving
    | Left
    | StopRequested
    | CheckpointAsked
    | Settled
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
    """Tell the session that it has no seat; it exits with this code (EXIT_RETRY: it may try again)."""

    session: int
    reason: str
    exit_code: int


@dataclass(frozen=True)
class StartChild:
    """Have the session's agent start its child with this first line."""

    session: int
    incarnation: int
    spec: dict[str, Any]


@dataclass(frozen=True)
class TellChild:
    """Write a line to the child's standard input."""

    session: int
    incarnation: int
    line: dict[str, Any]


@dataclass(frozen=True)
class AskHost:
    """Have a server's agent do something beside its child, and answer."""

    session: int
    incarnation: int
    order: dict[str, Any]


@dataclass(frozen=True)
class StopChild:
    """SIGTERM to the child, SIGKILL after the grace."""

    session: int
    incarnation: int
    grace_seconds: float


@dataclass(frozen=True)
class Finish:
    """Have the agent end."""

    session: int
    exit_code: int
    reason: str


@dataclass(frozen=True)
class Drop:
    """Close a session that is lost."""

    session: int


@dataclass(frozen=True)
class Commit:
    """Verify and rename the draft in the checkpoint folder; then say `Settled`. seconds: what the save has taken."""

    cursor: Cursor
    seconds: float


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
class Note:
    """Something a person following the job should read. record: what the journal keeps of it, for the report."""

    level: str
    text: str
    record: dict[str, Any] | None = None


@dataclass(frozen=True)
class Over:
    """The job has ended; the coordinator exits with outcome.exit_code."""

    outcome: Outcome


Action = (
    Welcome
    | Refuse
    | StartChild
    | TellChild
    | AskHost
    | StopChild
    | Finish
    | Drop
    | Commit
    | Discard
    | CheckpointDone
    | Note
    | Over
)


# ---------------------------------------------------------------------------------------------------------------- state


@dataclass(frozen=True)
class Outcome:
    """How the job ended. cause is empty after success."""

    exit_code: int
    cause: str = ""
    culprit: str = ""
    detail: str = ""


class Weight(enum.IntEnum):
    """How well an observation explains a failure; smaller is better, the first of equals counts."""

    FIX_JOB = 0
    """The child itself says that the job, its data or the environment is wrong."""
    LOSS = 1
    """A process was killed, an agent lost, a child stuck, or it reported an error of its own."""
    CRASH = 2
    """A child ended without a word, as it also may when a peer vanishes (abort in a communication thread)."""
    PEER = 3
    """A child reports that it has lost another."""


_WEIGHT_OF_KIND = {"job": Weight.FIX_JOB, "data": Weight.FIX_JOB, "environment": Weight.FIX_JOB, "peer": Weight.PEER}
"""What the kinds of a child's error event mean; any other is a loss."""


@dataclass(frozen=True)
class Cause:
    """One observation of a failure."""

    weight: Weight
    text: str
    member: Member | None = None
    detail: str = ""

    @property
    def sentence(self) -> str:
        """'trainer 1 was killed by SIGKILL'."""
        return f"{self.member} {self.text}" if self.member else self.text


@dataclass
class Seat:
    """One server's or trainer's place, with or without an agent."""

    member: Member
    session: int | None = None
    host: str = ""
    pid: int = 0
    port: int = 0
    available: bool = False
    """The agent has said that it could start a child."""
    lost: bool = False
    """Its last agent was lost rather than left; the launcher makes sure that its process is gone."""
    heard_at: float = 0.0
    child: ChildState = ChildState.NONE
    child_pid: int = 0
    identity: str = ""
    """Of the server's process."""
    child_memory_bytes: int = 0
    memory_limit_bytes: int = 0
    seconds_to_limit: float | None = None
    num_stopped_heartbeats: int = 0
    child_phase: str = ""
    moved_at: float = 0.0
    """When the child last made progress."""
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def has_child(self) -> bool:
        """Whether a child runs that an agent can still end."""
        return self.session is not None and self.child in {ChildState.STARTING, ChildState.READY}

    @property
    def state(self) -> str:
        """One word for the status."""
        if self.session is None:
            return "lost" if self.lost else "absent"
        if self.child is ChildState.NONE:
            return "waiting"
        if self.has_child and self.child_phase:
            return self.child_phase
        return str(self.child)


@dataclass
class CheckpointState:
    """What the status tells of checkpoints."""

    state: str = "idle"
    """idle, asked, saving or committing."""
    step: int = -1
    path: str = ""
    committed_at: float = 0.0
    seconds: float = 0.0
    num_committed: int = 0
    num_failed: int = 0


class Control:
    """Decides everything about one job. `handle` is the only way in; the public attributes are for the status.

    Args:
        plan: the job.
        now: seconds of the clock that `handle` is told.
        start: where training begins.
        incarnation: of the run before; its numbers are not used again.
    """

    def __init__(self, plan: JobPlan, now: float, start: Start | None = None, incarnation: int = 0) -> None:
        start = start or Start()
        self.plan = plan
        self.limits = plan.control
        members = [Member(Role.PSERVER, r) for r in range(plan.num_servers)]
        members += [Member(Role.TRAINER, r) for r in range(plan.num_trainers)]
        self.seats = {member: Seat(member) for member in members}
        self.phase = Phase.GATHERING
        self.incarnation = incarnation
        self.num_restarts = 0
        self.result: dict[str, Any] | None = None
        self.outcome: Outcome | None = None
        self.restore = start.path or plan.restore
        self.checkpoint = CheckpointState()
        if start.path and start.cursor:
            self.checkpoint = CheckpointState(step=start.cursor["step"], path=start.path, committed_at=now)
        facts: dict[str, Any] = {"job": identity(plan.job)}
        if plan.days is not None:
            facts["days"] = list(plan.days)
        self._lineage = Lineage(plan.num_trainers, plan.num_epochs, start.cursor, facts)
        self._asking: dict[int, Any] = {}  # the number of each trainer's request for the cursor that is under way
        self._hosts: tuple[Any, dict[int, dict[str, Any]]] | None = None  # request of trainer 0; answers by server
        self._load_seconds: float | None = None  # of this incarnation's restore
        self._committing: Commit | None = None
        self._commit_request: tuple[int, Any] | None = None  # incarnation and number of trainer 0's request
        self._checkpoint_due_at: float | None = None
        self._since = now  # when the phase began
        self._not_before = now  # end of the pause before the next incarnation
        self._num_fruitless = 0  # restarts in a row without a committed checkpoint
        self._causes: list[Cause] = []
        self._stop: StopRequested | None = None
        self._last_tick = now
        self._actions: list[Action] = []

    # -- entry

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event that happened at time now (seconds, never going back); returns what to do, in order."""
        self._actions = []
        if self.phase is Phase.OVER:
            self._handle_after_the_end(event)
        else:
            seat = self._seat_of(getattr(event, "session", None))
            if seat is not None:
                seat.heard_at = now
            self._dispatch(event, seat, now)
            self._advance(now)
        return self._actions

    @property
    def progress(self) -> dict[str, Any]:
        """Trainer 0's last progress event."""
        return self.seats[Member(Role.TRAINER, 0)].progress

    def seats_of(self, role: Role) -> Iterator[Seat]:
        """The seats of one role, by rank."""
        return (seat for member, seat in self.seats.items() if member.role is role)

    # -- events

    def _dispatch(self, event: Event, seat: Seat | None, now: float) -> None:  # noqa: C901, PLR0912 -- one line for each event
        match event:
            case Joined():
                self._join(event, now)
            case StopRequested():
                self._request_stop(event, now)
            case CheckpointAsked():
                self._ask_for_checkpoint()
            case Settled():
                self._settled(event, now)
            case Tick():
                self._watch(now)
            case _ if seat is None:
                pass  # a session without a seat: refused, dropped, or replaced
            case Left():
                self._lose(seat, "lost its agent (the connection broke)", now)
            case Leaving(signal=number):
                self._request_stop(
                    StopRequested(f"{seat.member} was sent {signal.Signals(number).name}", 128 + number), now
                )
            case Available(port=port):
                seat.port, seat.available, seat.child_pid = port, True, 0
            case Heard():
                seat.child_memory_bytes = event.child_memory_bytes
                seat.memory_limit_bytes, seat.seconds_to_limit = event.memory_limit_bytes, event.seconds_to_limit
                seat.num_stopped_heartbeats = seat.num_stopped_heartbeats + 1 if event.child_stopped else 0
                if seat.num_stopped_heartbeats == 2 and seat.has_child:
                    self._fail(Cause(Weight.LOSS, "is stopped (SIGSTOP or a debugger)", seat.member), now)
            case ChildStarted() | ChildReady() | ChildSaid() | ChildExited() | HostAnswered() if (
                event.incarnation != self.incarnation
            ):
                pass
            case HostAnswered(answer=answer):
                self._take_answer(seat, answer)
            case ChildStarted(pid=pid):
                seat.child_pid = pid
            case ChildReady(identity=identity):
                seat.identity = identity
                self._child_ready(seat, now)
            case ChildSaid(event=said):
                self._child_said(seat, said, now)
            case ChildExited():
                self._child_exited(seat, event, now)

    def _join(self, event: Joined, now: float) -> None:
        if event.rank is None:
            free = (seat for seat in self.seats_of(event.role) if seat.session is None)
            seat = next(free, None)
            if seat is None:
                self._do(Refuse(event.session, f"every {event.role} seat is taken", EXIT_RETRY))
                return
        else:
            seat = self.seats.get(Member(event.role, event.rank))
            if seat is None:
                number = self.plan.num_servers if event.role is Role.PSERVER else self.plan.num_trainers
                reason = f"there is no {event.role} {event.rank}: the job has {number}, counted from 0"
                self._do(Refuse(event.session, reason, EXIT_FIX_JOB))
                return
            if seat.session is not None:
                reason = f"{seat.member} is already there (process {seat.pid} on {seat.host})"
                self._do(Refuse(event.session, reason, EXIT_RETRY))
                return
        self.seats[seat.member] = Seat(seat.member, event.session, event.host, event.pid, heard_at=now)
        self._do(Welcome(event.session, seat.member.rank))
        self._note("debug", f"{seat.member} is there: process {event.pid} on {event.host}")

    def _child_ready(self, seat: Seat, now: float) -> None:
        if seat.child is ChildState.STARTING:
            seat.child = ChildState.READY
            seat.moved_at = now

    def _child_said(self, seat: Seat, said: dict[str, Any], now: float) -> None:
        kind = said.get("event")
        if kind == "ready":
            if seat.member == Member(Role.TRAINER, 0):
                self._load_seconds = said.get("load_seconds")
            self._child_ready(seat, now)
        elif kind == "progress":
            if any(said.get(key) != seat.progress.get(key) for key in ("step", "rows", "epoch", "phase")):
                seat.moved_at = now
            seat.progress = said
        elif kind == "phase":
            seat.child_phase, seat.moved_at = str(said.get("phase", "")), now
        elif kind == "result":
            seat.moved_at = now
            if seat.member.rank == 0:
                self.result = said
        elif kind == "error":
            weight = _WEIGHT_OF_KIND.get(str(said.get("kind")), Weight.LOSS)
            text = f"failed: {said.get('message', 'no message')}"
            self._fail(Cause(weight, text, seat.member, str(said.get("traceback", ""))), now)
        elif kind == "signal" and not said.get("asked"):
            self._signalled(seat, str(said.get("signal")), now)
        elif kind in {"day", "boundary"}:
            seat.moved_at = now
            record = {**said, "what": kind, "incarnation": self.incarnation}
            del record["event"]
            self._note("info", _sentence_of_day(said) if kind == "day" else _sentence_of_boundary(said), record)
        elif kind == "log":
            level = str(said.get("level", "info"))
            self._note(level, f"{seat.member}: {said.get('message', '')}")
        elif kind == "request":
            seat.moved_at = now
            self._answer(seat, said, now)

    def _signalled(self, seat: Seat, name: str, now: float) -> None:
        """Somebody but its agent told a server to stop. It will end in order, which tells nothing of why."""
        cause = Cause(Weight.LOSS, f"was sent {name} by somebody, and stopped", seat.member)
        if self.phase is Phase.HALTING:
            self._causes.append(cause)
        elif self.phase not in {Phase.STOPPING, Phase.DRAINING} and self.result is None:
            self._fail(cause, now)

    # -- requests of the trainers

    def _answer(self, seat: Seat, said: dict[str, Any], now: float) -> None:
        number = said.get("id")
        if self.phase is Phase.HALTING:
            return  # its child is about to be ended; a refusal would make it report an error that is none
        try:
            if seat.member.role is not Role.TRAINER:
                raise LineageError("only trainers ask")
            match said.get("what"):
                case "epoch":
                    self._open_epoch(seat, said)
                case "lease":
                    self._reply(seat, number, slices=self._lineage.lease(seat.member.rank, int(said["epoch"])))
                case "cursor":
                    self._take_report(seat, said)
                case "hosts":
                    self._ask_hosts(seat, said)
                case "commit":
                    self._begin_commit(seat, said, now)
                case what:
                    raise LineageError(f"unknown request {what!r}")
        except LineageError as error:
            self._note("error", f"{seat.member}: {error}")
            self._reply(seat, number, error=str(error), kind=error.kind)
        except (KeyError, TypeError, ValueError) as error:
            self._note("error", f"{seat.member}: a request that cannot be read: {error!r}")
            self._reply(seat, number, error=f"the request cannot be read: {error!r}", kind="runtime")

    def _open_epoch(self, seat: Seat, said: dict[str, Any]) -> None:
        done, plan = self._lineage.open_epoch(said)
        self._reply(seat, said.get("id"), done=sorted([index, rows] for index, rows in done.items()))
        if plan is None:
            return
        number = int(said["epoch"])
        left = plan.num_rows - sum(done.values())
        record = {
            "what": "epoch",
            "incarnation": self.incarnation,
            "epoch": number,
            "fingerprint": plan.fingerprint,
            "order": plan.order,
            "seed": plan.seed,
            "slices": sorted([index, rows] for index, rows in plan.sizes.items()),
        }
        rows = f"{left:,} of {plan.num_rows:,} rows" if done else f"{left:,} rows"
        what = f"epoch {number + 1}"
        if self.plan.days is not None:
            record["day"] = self.plan.days[number]
            what = f"day {number + 1} ({record['day']})"
        self._note("info", f"{what} of {self.plan.num_epochs} begins: {rows} to train", record)

    def _take_report(self, seat: Seat, said: dict[str, Any]) -> None:
        self._asking[seat.member.rank] = said.get("id")
        if self.checkpoint.state in {"idle", "asked"}:
            self.checkpoint.state = "saving"
        cursor = self._lineage.report(seat.member.rank, said)
        if cursor is None:
            return
        asking, self._asking = self._asking, {}
        for rank, number in asking.items():
            self._reply(self.seats[Member(Role.TRAINER, rank)], number, cursor=cursor.body, draft=cursor.draft)

    def _ask_hosts(self, seat: Seat, said: dict[str, Any]) -> None:
        """Passes an order of trainer 0 to the agents of all servers, and their answers back."""
        if self._hosts is not None or seat.member.rank != 0:
            raise LineageError("only trainer 0 gives orders to the servers' hosts, one at a time")
        self._hosts = (said.get("id"), {})
        for server in self.seats_of(Role.PSERVER):
            if server.session is not None:
                self._do(AskHost(server.session, self.incarnation, dict(said["order"])))

    def _take_answer(self, seat: Seat, answer: dict[str, Any]) -> None:
        if self._hosts is None or seat.member.role is not Role.PSERVER:
            return
        number, answers = self._hosts
        answers[seat.member.rank] = answer
        if len(answers) == self.plan.num_servers:
            self._hosts = None
            first = self.seats[Member(Role.TRAINER, 0)]
            self._reply(first, number, answers=[answers[rank] for rank in sorted(answers)])

    def _begin_commit(self, seat: Seat, said: dict[str, Any], now: float) -> None:
        cursor = self._lineage.pending
        if cursor is None or self._committing is not None or said["step"] != cursor.step or seat.member.rank != 0:
            raise LineageError("a commit was asked for that fits no cursor")
        self._commit_request = (self.incarnation, said.get("id"))
        commit = Commit(cursor, float(said.get("seconds", 0.0)))
        if "error" in said:
            self._settled(Settled(commit, error=f"saving failed: {said['error']}"), now)
            return
        if str(said["draft"]).rstrip("/").rpartition("/")[2] != cursor.draft:
            raise LineageError(f"the draft {said['draft']} is not {cursor.draft}")
        self.checkpoint.state = "committing"
        self._committing = commit
        self._do(commit)

    def _settled(self, event: Settled, now: float) -> None:
        cursor, seat = event.commit.cursor, self.seats[Member(Role.TRAINER, 0)]
        committed = not event.error
        self._lineage.settle(cursor, committed=committed)
        self._committing = None
        state = self.checkpoint
        if committed:
            self.restore = event.path
            self._num_fruitless = 0
            state.step, state.path, state.committed_at = cursor.step, event.path, now
            state.seconds, state.num_committed = event.commit.seconds, state.num_committed + 1
            self._note("info", f"checkpoint of step {cursor.step} committed: {event.path}")
            self._do(CheckpointDone(cursor.step, event.path))
        else:
            state.num_failed += 1
            self._do(Discard(cursor.draft))
            self._note(
                "error",
                f"no checkpoint of step {cursor.step}: {event.error}",
                {"what": "failed", "step": cursor.step, "incarnation": self.incarnation, "error": event.error},
            )
            self._do(CheckpointDone(cursor.step, error=event.error))
        request, self._commit_request = self._commit_request, None
        if request is None or request[0] != self.incarnation:
            return
        state.state = "idle"
        self._plan_next_checkpoint(now)
        if committed:
            self._reply(seat, request[1], committed=True, path=event.path)
            return
        stop = self._lineage.is_last(cursor) or self.plan.checkpoint.get("on_failure") == "stop"
        self._reply(seat, request[1], committed=False, stop=stop, error=event.error)
        if stop and self.phase is not Phase.HALTING:
            text = f"could not save the checkpoint of step {cursor.step}: {event.error}"
            self._fail(Cause(Weight.LOSS, text, seat.member), now)

    def _reply(self, seat: Seat, number: Any, **fields: Any) -> None:
        if seat.has_child:
            self._do(TellChild(self._session(seat), self.incarnation, {"reply": number, **fields}))

    def _ask_for_checkpoint(self) -> None:
        first = self.seats[Member(Role.TRAINER, 0)]
        if self.plan.mode != "train" or self.phase is not Phase.RUNNING or first.child_phase == "evaluating":
            self._do(CheckpointDone(error=f"the job is not training (it is {first.child_phase or self.phase})"))
        elif self.checkpoint.state == "idle" and first.has_child:
            self.checkpoint.state = "asked"
            self._do(TellChild(self._session(first), self.incarnation, {"command": "checkpoint"}))

    def _plan_next_checkpoint(self, now: float) -> None:
        minutes = self.plan.checkpoint.get("every_minutes") if self.plan.mode == "train" else None
        self._checkpoint_due_at = now + 60.0 * float(minutes) if minutes is not None else None

    def _child_exited(self, seat: Seat, event: ChildExited, now: float) -> None:
        seat.child = ChildState.ENDED
        in_order = event.code in {EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED}
        if self.phase is Phase.HALTING:
            has_spoken = any(cause.member == seat.member for cause in self._causes)  # its end then tells nothing new
            if not event.expected and not has_spoken and (not in_order or seat.member.role is Role.PSERVER):
                self._causes.append(self._cause_of_exit(seat, event))
            self._causes = [
                replace(c, detail=event.log_tail) if c.member == seat.member and not c.detail else c
                for c in self._causes
            ]
        elif seat.member.role is Role.TRAINER:
            leaving = self.phase in {Phase.STOPPING, Phase.DRAINING}
            if (
                event.code == EXIT_DONE
                and self.phase is Phase.RUNNING
                and seat.member.rank == 0
                and self.result is None
            ):
                self._fail(Cause(Weight.CRASH, "ended without a result", seat.member, event.log_tail), now)
            elif not (leaving and (in_order or event.expected)) and event.code != EXIT_DONE:
                self._fail(self._cause_of_exit(seat, event), now)
            elif self.phase in {Phase.SERVERS, Phase.TRAINERS}:
                self._fail(Cause(Weight.CRASH, "ended before it was ready", seat.member, event.log_tail), now)
        elif self.phase is Phase.DRAINING:
            if not in_order and not event.expected:
                self._note(
                    "warning", f"{seat.member} {describe_exit(event.code)} when it was to stop; training was over"
                )
        elif in_order and self.result is not None:
            pass  # stopped by a trainer at the end of its work
        elif not in_order or self.phase is not Phase.STOPPING:
            self._fail(self._cause_of_exit(seat, event), now)

    @staticmethod
    def _cause_of_exit(seat: Seat, event: ChildExited) -> Cause:
        if event.reason:
            return Cause(Weight.LOSS, event.reason, seat.member, event.log_tail)
        if event.code in {EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED} and seat.member.role is Role.PSERVER:
            return Cause(Weight.CRASH, "stopped, but not by its coordinator", seat.member, event.log_tail)
        weight = Weight.FIX_JOB if event.code == EXIT_FIX_JOB else Weight.LOSS if event.code == -9 else Weight.CRASH
        return Cause(weight, describe_exit(event.code), seat.member, event.log_tail)

    def _request_stop(self, request: StopRequested, now: float) -> None:
        if self._stop is not None or self.phase in {Phase.DRAINING, Phase.HALTING}:
            self._stop = self._stop or request
            return
        self._stop = request
        self._note("warning", f"stopping the job: {request.reason}", {"what": "stop", "reason": request.reason})
        if self.phase is Phase.RUNNING:
            self._enter(Phase.STOPPING, now)
            for seat in self.seats_of(Role.TRAINER):
                if seat.has_child:
                    line = {"command": "stop", "checkpoint": self.plan.mode == "train"}
                    self._do(TellChild(self._session(seat), self.incarnation, line))
        else:
            self._halt(now)

    # -- time

    def _watch(self, now: float) -> None:
        pause = now - self._last_tick
        self._last_tick = now
        if pause > self.limits.silence_seconds / 2:
            # It was the coordinator that slept (stopped, or the machine was): nobody could be heard meanwhile.
            for seat in self.seats.values():
                seat.heard_at += pause
                seat.moved_at += pause
        for seat in self.seats.values():
            if seat.session is not None and now - seat.heard_at > self.limits.silence_seconds:
                self._do(Drop(seat.session))
                self._lose(seat, f"sent no heartbeat for {self.limits.silence_seconds:g} s", now)
        if self.phase in {Phase.SERVERS, Phase.TRAINERS, Phase.RUNNING}:
            for seat in self.seats.values():
                self._watch_child(seat, now)
        if self.phase is Phase.RUNNING and self._checkpoint_due_at is not None and now >= self._checkpoint_due_at:
            self._checkpoint_due_at = None  # set anew when this one is settled
            if self.seats[Member(Role.TRAINER, 0)].child_phase != "evaluating":
                self._ask_for_checkpoint()
        if self.phase is Phase.GATHERING and now - max(self._since, self._not_before) > self.limits.gather_seconds:
            missing = ", ".join(str(m) for m, seat in self.seats.items() if not seat.available)
            self._fail(
                Cause(Weight.LOSS, f"not all roles came within {self.limits.gather_seconds:g} s; missing: {missing}"),
                now,
            )

    def _watch_child(self, seat: Seat, now: float) -> None:
        busy = seat.child_phase in {"loading", "saving", "evaluating"}
        if seat.child is ChildState.STARTING:
            limit = self.limits.start_seconds + (self.limits.save_seconds if busy else 0)
            if now - seat.moved_at > limit:
                self._fail(Cause(Weight.LOSS, f"was not ready {limit:g} s after its start", seat.member), now)
        elif seat.child is ChildState.READY and seat.member.role is Role.TRAINER and self.phase is Phase.RUNNING:
            limit = self.limits.save_seconds if busy else self.limits.step_seconds
            if now - seat.moved_at > limit:
                self._fail(self._cause_of_standstill(seat, limit, now), now)

    def _cause_of_standstill(self, seat: Seat, limit: float, now: float) -> Cause:
        """One stuck trainer holds up all others, in the next AllReduce: then nobody can say which it is."""
        doing = seat.child_phase or "training"
        text = f"made no progress for {limit:g} s (it was {doing})"
        others = [s for s in self.seats_of(Role.TRAINER) if s is not seat and s.child is ChildState.READY]
        if any(now - other.moved_at > limit / 2 for other in others):
            return Cause(Weight.LOSS, f"no trainer made progress for {limit:g} s ({seat.member} was {doing})")
        return Cause(Weight.LOSS, text, seat.member)

    def _lose(self, seat: Seat, how: str, now: float) -> None:
        had_child = seat.has_child
        seat.session, seat.available, seat.lost = None, False, True
        if seat.child in {ChildState.STARTING, ChildState.READY}:
            seat.child = ChildState.ENDED
        if self.phase is Phase.GATHERING or (not had_child and self.phase in {Phase.DRAINING, Phase.STOPPING}):
            self._note("warning", f"{seat.member} {how}")
        elif self.phase is Phase.DRAINING:
            self._note("warning", f"{seat.member} {how}; training was over")
        elif self.phase is Phase.HALTING:
            if had_child:
                self._causes.append(Cause(Weight.LOSS, how, seat.member))
        else:
            self._fail(Cause(Weight.LOSS, how, seat.member), now)

    # -- transitions

    def _advance(self, now: float) -> None:
        """Moves on from the phase if it is complete or its time is up; more than once if need be."""
        steps = {
            Phase.GATHERING: self._leave_gathering,
            Phase.SERVERS: self._leave_servers,
            Phase.TRAINERS: self._leave_trainers,
            Phase.RUNNING: self._leave_running,
            Phase.STOPPING: self._leave_stopping,
            Phase.DRAINING: self._leave_draining,
            Phase.HALTING: self._leave_halting,
        }
        before: Phase | None = None
        while before is not self.phase and self.phase is not Phase.OVER:
            before = self.phase
            steps[before](now)

    def _leave_gathering(self, now: float) -> None:
        if now >= self._not_before and self._committing is None and all(seat.available for seat in self.seats.values()):
            self._open(now)

    def _leave_servers(self, now: float) -> None:
        if all(seat.child is ChildState.READY for seat in self.seats_of(Role.PSERVER)):
            self._start_trainers(now)

    def _leave_trainers(self, now: float) -> None:
        if all(seat.child is ChildState.READY for seat in self.seats_of(Role.TRAINER)):
            self._enter(Phase.RUNNING, now)
            for seat in self.seats_of(Role.TRAINER):
                seat.moved_at = now
            self._plan_next_checkpoint(now)
            record = {"what": "running", "incarnation": self.incarnation, "load_seconds": self._load_seconds}
            self._note("info", f"all {self.plan.num_trainers} trainers are ready", record)

    def _leave_running(self, now: float) -> None:
        if all(seat.child is ChildState.ENDED for seat in self.seats_of(Role.TRAINER)):
            self._drain(now)

    def _leave_stopping(self, now: float) -> None:
        late = [str(seat.member) for seat in self.seats_of(Role.TRAINER) if seat.has_child]
        if not late:
            self._drain(now)
        elif now - self._since > self.limits.stop_seconds + (self.limits.stop_save_seconds if self._is_saving else 0):
            limit = f"{now - self._since:.0f} s"
            self._note("warning", f"{', '.join(late)} did not stop within {limit} and will be killed")
            self._halt(now)

    def _leave_draining(self, now: float) -> None:
        if self._all_gone(now, self.limits.drain_seconds):
            stop = self._stop if self.result is None else None
            self._finish(Outcome(stop.exit_code, stop.reason) if stop else Outcome(EXIT_DONE))

    def _leave_halting(self, now: float) -> None:
        if self._all_gone(now, self.limits.halt_seconds):
            self._settle(now)

    def _open(self, now: float) -> None:
        self.incarnation += 1
        self._causes = []
        self.result = None
        if self.plan.mode == "train" and self.incarnation > 1:
            self._do(Discard(f".step-*-incarnation-{self.incarnation - 1}-draft-*"))
        self._lineage.begin(self.incarnation)
        self._asking, self._hosts, self.checkpoint.state = {}, None, "idle"
        self._enter(Phase.SERVERS, now)
        restored = f", from {self.restore}" if self.restore else ""
        num_servers, num_trainers = self.plan.num_servers, self.plan.num_trainers
        self._note(
            "info",
            f"incarnation {self.incarnation} begins: {num_servers} servers, {num_trainers} trainers{restored}",
            {
                "what": "incarnation",
                "incarnation": self.incarnation,
                "restore": self.restore,
                "parent": self._lineage.cursor["draft"] if self._lineage.cursor else None,
                "rows": self._lineage.cursor["rows"] if self._lineage.cursor else 0,
                "num_servers": num_servers,
                "num_trainers": num_trainers,
            },
        )
        for seat in self.seats.values():
            seat.progress = {}
        endpoints = self._endpoints()

        def spec(rank: int) -> dict[str, Any]:
            return self.plan.server_spec(endpoints, rank, self.incarnation, self.restore)

        for seat in self.seats_of(Role.PSERVER):
            self._start(seat, spec(seat.member.rank), now)

    def _start_trainers(self, now: float) -> None:
        self._enter(Phase.TRAINERS, now)
        self._note("info", f"all {self.plan.num_servers} servers are ready")
        endpoints = self._endpoints()
        first = self.seats[Member(Role.TRAINER, 0)]
        store = f"{first.host}:{first.port}"
        identities = [seat.identity for seat in self.seats_of(Role.PSERVER)]
        for seat in self.seats_of(Role.TRAINER):
            spec = self.plan.trainer_spec(endpoints, store, seat.member.rank, self.incarnation, self.restore)
            spec["server_identities"] = identities
            self._start(seat, spec, now)

    def _start(self, seat: Seat, spec: dict[str, Any], now: float) -> None:
        seat.child, seat.available, seat.moved_at = ChildState.STARTING, False, now
        seat.child_phase, seat.num_stopped_heartbeats, seat.lost = "", 0, False
        self._do(StartChild(self._session(seat), self.incarnation, spec))

    def _drain(self, now: float) -> None:
        self._enter(Phase.DRAINING, now)
        for seat in self.seats.values():
            if seat.has_child:
                self._do(StopChild(self._session(seat), self.incarnation, self.limits.drain_seconds))

    def _fail(self, cause: Cause, now: float) -> None:
        if self.phase is not Phase.HALTING:
            self._note("error", cause.sentence)
        self._causes.append(cause)
        self._halt(now)

    def _halt(self, now: float) -> None:
        if self.phase is Phase.HALTING:
            return
        self._enter(Phase.HALTING, now)
        if self.checkpoint.state in {"asked", "saving"}:
            self._do(CheckpointDone(error=f"incarnation {self.incarnation} was lost before it was saved"))
        if self._committing is None:
            self.checkpoint.state = "idle"
        for seat in self.seats.values():
            if seat.has_child:
                self._do(StopChild(self._session(seat), self.incarnation, self.limits.halt_seconds))

    def _all_gone(self, now: float, grace_seconds: float) -> bool:
        """Whether no child is left. An agent that has not ended its child well after the grace is lost."""
        if now - self._since > grace_seconds + self.limits.silence_seconds:
            for seat in self.seats.values():
                if seat.session is not None and seat.has_child:
                    self._do(Drop(seat.session))
                    self._lose(seat, "did not end its child when told to", now)
        return self._committing is None and not any(seat.has_child for seat in self.seats.values())

    def _settle(self, now: float) -> None:
        """After HALTING: says why, and decides whether to start again."""
        if self._stop is not None:
            cause = min(self._causes, key=lambda c: c.weight, default=None)
            detail = f"{cause.sentence}\n{cause.detail}".strip() if cause else ""
            self._finish(Outcome(self._stop.exit_code, self._stop.reason, detail=detail))
            return
        cause = min(self._causes, key=lambda c: c.weight)
        culprit = str(cause.member) if cause.member else ""
        record = {
            "what": "lost",
            "incarnation": self.incarnation,
            "culprit": culprit,
            "cause": cause.sentence,
            "halting_seconds": now - self._since,
            "step": self.progress.get("step", 0),
            "rows": self.progress.get("rows", 0),
        }
        self._note("debug", f"incarnation {self.incarnation} is lost: {cause.sentence}", record)
        if cause.weight is Weight.FIX_JOB:
            self._finish(Outcome(EXIT_FIX_JOB, cause.sentence, culprit, cause.detail))
        elif self._num_fruitless >= self.limits.max_restarts:
            again = f" (after {self.num_restarts} restarts)" if self.num_restarts else ""
            self._finish(Outcome(EXIT_RETRY, cause.sentence + again, culprit, cause.detail))
        else:
            pause = min(self.limits.backoff_seconds * math.pow(2, self._num_fruitless), self.limits.max_backoff_seconds)
            self._num_fruitless += 1
            self.num_restarts += 1
            self._not_before = now + pause
            self._note(
                "warning",
                f"incarnation {self.incarnation} is lost ({cause.sentence}); starting again in {pause:g} s"
                f" (restart {self._num_fruitless} of {self.limits.max_restarts} in a row)",
            )
            self._enter(Phase.GATHERING, now)

    def _finish(self, outcome: Outcome) -> None:
        if self.checkpoint.state != "idle":
            self._do(CheckpointDone(error="the job is over"))
            self.checkpoint.state = "idle"
        self.phase = Phase.OVER
        self.outcome = outcome
        for seat in self.seats.values():
            if seat.session is not None:
                self._do(Finish(seat.session, outcome.exit_code, outcome.cause))
        self._do(Over(outcome))

    def _handle_after_the_end(self, event: Event) -> None:
        assert self.outcome is not None
        if isinstance(event, Joined):
            self._do(Finish(event.session, self.outcome.exit_code, self.outcome.cause))
        elif isinstance(event, CheckpointAsked):
            self._do(CheckpointDone(error="the job is over"))
        elif isinstance(event, Left):
            seat = self._seat_of(event.session)
            if seat is not None:
                seat.session = None

    # -- small things

    @property
    def _is_saving(self) -> bool:
        return self.checkpoint.state in {"saving", "committing"}

    def _endpoints(self) -> list[str]:
        return [f"{seat.host}:{seat.port}" for seat in self.seats_of(Role.PSERVER)]

    def _seat_of(self, session: int | None) -> Seat | None:
        if session is None:
            return None
        return next((seat for seat in self.seats.values() if seat.session == session), None)

    @staticmethod
    def _session(seat: Seat) -> int:
        assert seat.session is not None, f"{seat.member} has no agent"
        return seat.session

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._since = phase, now

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    def _note(self, level: str, text: str, record: dict[str, Any] | None = None) -> None:
        self._do(Note(level, text, record))


def _sentence_of_day(said: dict[str, Any]) -> str:
    scores = said.get("validation") or {}
    known = {name: scores.get(key) for name, key in (("AUC", "auc"), ("logloss", "logloss"))}
    before = ", ".join(f"{name} {value:.4f}" for name, value in known.items() if isinstance(value, (int, float)))
    tables = said.get("tables") or {}
    keys = ", ".join(f"{name} {found['keys']:,} keys ({found['new']:+,})" for name, found in tables.items())
    return f"day {said.get('day')} is trained: {said.get('rows', 0):,} rows{', ' + before if before else ''}; {keys}"


def _sentence_of_boundary(said: dict[str, Any]) -> str:
    tables = said.get("tables") or {}
    evicted = ", ".join(f"{name} {found['evicted']:,} of {found['before']:,} keys" for name, found in tables.items())
    again = " (again, after a restore)" if said.get("redone") else ""
    after = f"day {said['day']}" if said.get("day") else f"{said.get('rows', 0):,} rows"
    return f"day boundary after {after}{again}; evicted: {evicted}"
