"""A job's seats: who sits there, what its child does, and who gets the next one."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paddlewheel.trainer.coordinator.messages import Heard, Joined, Member, Refuse, Role
from paddlewheel.trainer.job.exit_codes import EXIT_FIX_JOB, EXIT_RETRY


class ChildState(str, enum.Enum):
    """A seat's Paddle child, as far as the coordinator knows."""

    NONE = "none"
    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"

    def __str__(self) -> str:
        return self.value


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

    @property
    def agent(self) -> int:
        """The session of an agent that is known to be there."""
        assert self.session is not None, f"{self.member} has no agent"
        return self.session

    def hear(self, beat: Heard) -> None:
        """Takes what a heartbeat tells."""
        self.child_memory_bytes = beat.child_memory_bytes
        self.memory_limit_bytes, self.seconds_to_limit = beat.memory_limit_bytes, beat.seconds_to_limit
        self.num_stopped_heartbeats = self.num_stopped_heartbeats + 1 if beat.child_stopped else 0

    def start_child(self, now: float) -> None:
        """The agent is told to start its child."""
        self.child, self.available, self.moved_at = ChildState.STARTING, False, now
        self.child_phase, self.num_stopped_heartbeats, self.lost = "", 0, False

    def child_ready(self, now: float) -> None:
        """The child answers; said again, it means nothing."""
        if self.child is ChildState.STARTING:
            self.child, self.moved_at = ChildState.READY, now

    def take_progress(self, said: dict[str, Any], now: float) -> None:
        """Keeps a progress event, which counts as a move only if it tells of one."""
        if any(said.get(key) != self.progress.get(key) for key in ("step", "rows", "epoch", "phase")):
            self.moved_at = now
        self.progress = said

    def lose_agent(self) -> None:
        """The agent is gone, and its child with it."""
        self.session, self.available, self.lost = None, False, True
        if self.child in {ChildState.STARTING, ChildState.READY}:
            self.child = ChildState.ENDED


class Seats(Mapping[Member, Seat]):
    """All seats of a job: servers, then trainers, by rank."""

    def __init__(self, num_servers: int, num_trainers: int) -> None:
        self._number = {Role.PSERVER: num_servers, Role.TRAINER: num_trainers}
        members = [Member(role, rank) for role, number in self._number.items() for rank in range(number)]
        self._seats = {member: Seat(member) for member in members}

    def __getitem__(self, member: Member) -> Seat:
        return self._seats[member]

    def __iter__(self) -> Iterator[Member]:
        return iter(self._seats)

    def __len__(self) -> int:
        return len(self._seats)

    def of(self, role: Role) -> Iterator[Seat]:
        """The seats of one role, by rank."""
        return (seat for member, seat in self._seats.items() if member.role is role)

    @property
    def first_trainer(self) -> Seat:
        """Trainer 0, which speaks for all."""
        return self._seats[Member(Role.TRAINER, 0)]

    @property
    def server_endpoints(self) -> list[str]:
        """Where the servers listen, by rank."""
        return [f"{seat.host}:{seat.port}" for seat in self.of(Role.PSERVER)]

    def of_session(self, session: int | None) -> Seat | None:
        """Where the agent of a session sits; None: nowhere (any more)."""
        if session is None:
            return None
        return next((seat for seat in self._seats.values() if seat.session == session), None)

    def place(self, event: Joined, now: float) -> Seat | Refuse:
        """Gives a new agent the seat it asks for, or any free one of its role."""
        if event.rank is None:
            seat = next((seat for seat in self.of(event.role) if seat.session is None), None)
            if seat is None:
                return Refuse(event.session, f"every {event.role} seat is taken", EXIT_RETRY)
        else:
            seat = self._seats.get(Member(event.role, event.rank))
            if seat is None:
                number = self._number[event.role]
                reason = f"there is no {event.role} {event.rank}: the job has {number}, counted from 0"
                return Refuse(event.session, reason, EXIT_FIX_JOB)
            if seat.session is not None:
                reason = f"{seat.member} is already there (process {seat.pid} on {seat.host})"
                return Refuse(event.session, reason, EXIT_RETRY)
        taken = Seat(seat.member, event.session, event.host, event.pid, heard_at=now)
        self._seats[seat.member] = taken
        return taken
