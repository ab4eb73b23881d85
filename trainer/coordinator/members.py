"""A job's members: who sits there, what its worker does, and who gets the next one."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paddlewheel.trainer.coordinator.messages import Heartbeat, Joined, Refuse, Role, RoleRank
from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL, EX_USAGE
from paddlewheel.trainer.protocol.messages import Progress


class WorkerState(str, enum.Enum):
    """A member's Paddle worker, as far as the coordinator knows."""

    NONE = "none"
    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"

    def __str__(self) -> str:
        return self.value


@dataclass
class Member:
    """One server's or trainer's place, with or without an agent."""

    role_rank: RoleRank
    session: int | None = None
    host: str = ""
    pid: int = 0
    port: int = 0
    available: bool = False
    """The agent has said that it could start a worker."""
    lost: bool = False
    """Its last agent was lost rather than left; the launcher makes sure that its process is gone."""
    heard_at: float = 0.0
    worker: WorkerState = WorkerState.NONE
    worker_pid: int = 0
    server_uid: str = ""
    """Of the server's process."""
    worker_memory_bytes: int = 0
    memory_limit_bytes: int = 0
    seconds_to_limit: float | None = None
    num_stopped_heartbeats: int = 0
    worker_phase: str = ""
    moved_at: float = 0.0
    """When the worker last made progress."""
    progress: Progress | None = None
    """What the worker told last."""

    @property
    def has_worker(self) -> bool:
        """Whether a worker runs that an agent can still end."""
        return self.session is not None and self.worker in {WorkerState.STARTING, WorkerState.READY}

    @property
    def state(self) -> str:
        """One word for the status."""
        if self.session is None:
            return "lost" if self.lost else "absent"
        if self.worker is WorkerState.NONE:
            return "waiting"
        if self.has_worker and self.worker_phase:
            return self.worker_phase
        return str(self.worker)

    @property
    def agent(self) -> int:
        """The session of an agent that is known to be there."""
        assert self.session is not None, f"{self.role_rank} has no agent"
        return self.session

    def hear(self, beat: Heartbeat) -> None:
        """Takes what a heartbeat tells."""
        self.worker_memory_bytes = beat.worker_memory_bytes
        self.memory_limit_bytes, self.seconds_to_limit = beat.memory_limit_bytes, beat.seconds_to_limit
        self.num_stopped_heartbeats = self.num_stopped_heartbeats + 1 if beat.worker_stopped else 0

    def start_worker(self, now: float) -> None:
        """The agent is told to start its worker."""
        self.worker, self.available, self.moved_at = WorkerState.STARTING, False, now
        self.worker_phase, self.num_stopped_heartbeats, self.lost = "", 0, False

    def worker_ready(self, now: float) -> None:
        """The worker answers; said again, it means nothing."""
        if self.worker is WorkerState.STARTING:
            self.worker, self.moved_at = WorkerState.READY, now

    def take_progress(self, told: Progress, now: float) -> None:
        """Keeps a progress event, which counts as a move only if it tells of one."""
        before = self.progress
        if before is None or (told.step, told.rows, told.epoch) != (before.step, before.rows, before.epoch):
            self.moved_at = now
        self.progress = told

    def lose_agent(self) -> None:
        """The agent is gone, and its worker with it."""
        self.session, self.available, self.lost = None, False, True
        if self.worker in {WorkerState.STARTING, WorkerState.READY}:
            self.worker = WorkerState.ENDED


class Membership(Mapping[RoleRank, Member]):
    """All members of a job: servers, then trainers, by rank."""

    def __init__(self, num_servers: int, num_trainers: int) -> None:
        self._number = {Role.PSERVER: num_servers, Role.TRAINER: num_trainers}
        role_ranks = [RoleRank(role, rank) for role, number in self._number.items() for rank in range(number)]
        self._members = {role_rank: Member(role_rank) for role_rank in role_ranks}

    def __getitem__(self, role_rank: RoleRank) -> Member:
        return self._members[role_rank]

    def __iter__(self) -> Iterator[RoleRank]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def of(self, role: Role) -> Iterator[Member]:
        """The members of one role, by rank."""
        return (member for role_rank, member in self._members.items() if role_rank.role is role)

    @property
    def first_trainer(self) -> Member:
        """Trainer 0, which speaks for all."""
        return self._members[RoleRank(Role.TRAINER, 0)]

    @property
    def server_endpoints(self) -> list[str]:
        """Where the servers listen, by rank."""
        return [f"{member.host}:{member.port}" for member in self.of(Role.PSERVER)]

    def of_session(self, session: int | None) -> Member | None:
        """Where the agent of a session sits; None: nowhere (any more)."""
        if session is None:
            return None
        return next((member for member in self._members.values() if member.session == session), None)

    def place(self, event: Joined, now: float) -> Member | Refuse:
        """Gives a new agent the member it asks for, or any free one of its role."""
        if event.rank is None:
            member = next((member for member in self.of(event.role) if member.session is None), None)
            if member is None:
                return Refuse(event.session, f"every {event.role} member is taken", EX_TEMPFAIL)
        else:
            member = self._members.get(RoleRank(event.role, event.rank))
            if member is None:
                number = self._number[event.role]
                reason = f"there is no {event.role} {event.rank}: the job has {number}, counted from 0"
                return Refuse(event.session, reason, EX_USAGE)
            if member.session is not None:
                reason = f"{member.role_rank} is already there (process {member.pid} on {member.host})"
                return Refuse(event.session, reason, EX_TEMPFAIL)
        taken = Member(member.role_rank, event.session, event.host, event.pid, heard_at=now)
        self._members[member.role_rank] = taken
        return taken
