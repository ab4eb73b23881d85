"""Why an attempt was lost: what an observation says, and which of several explains it best."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from paddlewheel.pserver.messages import WorkerError
from paddlewheel.trainer.coordinator.members import Member, Membership, WorkerState
from paddlewheel.trainer.coordinator.messages import Role, RoleRank, WorkerExited
from paddlewheel.trainer.job.control import ControlConfig
from paddlewheel.trainer.job.exit_codes import EX_USAGE, EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED, describe_exit

IN_ORDER = frozenset({EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED})
"""Exit codes of a worker that was done, or was told to stop."""


class Severity(enum.IntEnum):
    """How well an observation explains a failure; smaller is better, the first of equals counts."""

    FIX_JOB = 0
    """The worker itself says that the job, its data or the environment is wrong."""
    LOSS = 1
    """A process was killed, an agent lost, a worker stuck, or it reported an error of its own."""
    CRASH = 2
    """A worker ended without a word, as it also may when a peer vanishes (abort in a communication thread)."""
    PEER = 3
    """A worker reports that it has lost another."""


CHECKPOINT = "checkpoint"
"""Kind of error of who could not restore a checkpoint: it is damaged, or of another job."""
_WEIGHT_OF_KIND = {
    "job": Severity.FIX_JOB,
    "data": Severity.FIX_JOB,
    "environment": Severity.FIX_JOB,
    CHECKPOINT: Severity.FIX_JOB,
    "peer": Severity.PEER,
}
"""What the kinds of a worker's error event mean; any other is a loss."""


@dataclass(frozen=True)
class Cause:
    """One observation of a failure."""

    weight: Severity
    text: str
    role_rank: RoleRank | None = None
    detail: str = ""
    of_restore: bool = False
    """Whether the checkpoint is to be looked at before the job is blamed."""

    @property
    def sentence(self) -> str:
        """'trainer 1 was killed by SIGKILL'."""
        return f"{self.role_rank} {self.text}" if self.role_rank else self.text


class FailureAnalysis:
    """What was observed since an attempt began to end."""

    def __init__(self) -> None:
        self._causes: list[Cause] = []

    def add(self, cause: Cause) -> None:
        """One more; of those that weigh the same the first counts."""
        self._causes.append(cause)

    def has_heard_of(self, role_rank: RoleRank) -> bool:
        """Whether an observation is of this role_rank."""
        return any(cause.role_rank == role_rank for cause in self._causes)

    def add_detail(self, role_rank: RoleRank, detail: str) -> None:
        """The end of a worker's log, for observations of it that have no detail."""
        self._causes = [
            replace(cause, detail=detail) if cause.role_rank == role_rank and not cause.detail else cause
            for cause in self._causes
        ]

    @property
    def best(self) -> Cause | None:
        """The one that explains most."""
        return min(self._causes, key=lambda cause: cause.weight, default=None)


def of_exit(member: Member, event: WorkerExited) -> Cause:
    """A worker has ended that should not have."""
    if event.reason:
        return Cause(Severity.LOSS, event.reason, member.role_rank, event.log_tail)
    if event.code in IN_ORDER and member.role_rank.role is Role.PSERVER:
        return Cause(Severity.CRASH, "stopped, but not by its coordinator", member.role_rank, event.log_tail)
    weight = Severity.FIX_JOB if event.code == EX_USAGE else Severity.LOSS if event.code == -9 else Severity.CRASH
    return Cause(weight, describe_exit(event.code), member.role_rank, event.log_tail)


def of_error(member: Member, error: WorkerError) -> Cause:
    """A worker's error event."""
    weight = _WEIGHT_OF_KIND.get(error.kind, Severity.LOSS)
    text = f"failed: {error.message}"
    return Cause(weight, text, member.role_rank, error.traceback, of_restore=error.kind == CHECKPOINT)


def of_delay(member: Member, members: Membership, limits: ControlConfig, now: float, *, training: bool) -> Cause | None:
    """A worker that takes longer than it may; None: it does not. Only while all are training must trainers move."""
    busy = member.worker_phase in {"loading", "saving", "evaluating"}
    if member.worker is WorkerState.STARTING:
        limit = limits.startup_timeout_seconds + (limits.checkpoint_timeout_seconds if busy else 0)
        if now - member.moved_at > limit:
            return Cause(Severity.LOSS, f"was not ready {limit:g} s after its start", member.role_rank)
    elif member.worker is WorkerState.READY and member.role_rank.role is Role.TRAINER and training:
        limit = limits.checkpoint_timeout_seconds if busy else limits.step_timeout_seconds
        if now - member.moved_at > limit:
            return _of_standstill(member, members, limit, now)
    return None


def _of_standstill(member: Member, members: Membership, limit: float, now: float) -> Cause:
    """One stuck trainer holds up all others, in the next AllReduce: then nobody can say which it is."""
    doing = member.worker_phase or "training"
    others = [s for s in members.of(Role.TRAINER) if s is not member and s.worker is WorkerState.READY]
    if any(now - other.moved_at > limit / 2 for other in others):
        return Cause(Severity.LOSS, f"no trainer made progress for {limit:g} s ({member.role_rank} was {doing})")
    return Cause(Severity.LOSS, f"made no progress for {limit:g} s (it was {doing})", member.role_rank)
