"""Why an incarnation was lost: what an observation says, and which of several explains it best."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from paddlewheel.trainer.coordinator.members import ChildState, Seat, Seats
from paddlewheel.trainer.coordinator.messages import ChildExited, Member, Role
from paddlewheel.trainer.job.control import ControlConfig
from paddlewheel.trainer.job.exit_codes import EXIT_DONE, EXIT_FIX_JOB, EXIT_INTERRUPTED, EXIT_TERMINATED, describe_exit

IN_ORDER = frozenset({EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED})
"""Exit codes of a child that was done, or was told to stop."""


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


CHECKPOINT = "checkpoint"
"""Kind of error of who could not restore a checkpoint: it is damaged, or of another job."""
_WEIGHT_OF_KIND = {
    "job": Weight.FIX_JOB,
    "data": Weight.FIX_JOB,
    "environment": Weight.FIX_JOB,
    CHECKPOINT: Weight.FIX_JOB,
    "peer": Weight.PEER,
}
"""What the kinds of a child's error event mean; any other is a loss."""


@dataclass(frozen=True)
class Cause:
    """One observation of a failure."""

    weight: Weight
    text: str
    member: Member | None = None
    detail: str = ""
    of_restore: bool = False
    """Whether the checkpoint is to be looked at before the job is blamed."""

    @property
    def sentence(self) -> str:
        """'trainer 1 was killed by SIGKILL'."""
        return f"{self.member} {self.text}" if self.member else self.text


class Causes:
    """What was observed since an incarnation began to end."""

    def __init__(self) -> None:
        self._causes: list[Cause] = []

    def add(self, cause: Cause) -> None:
        """One more; of those that weigh the same the first counts."""
        self._causes.append(cause)

    def has_heard_of(self, member: Member) -> bool:
        """Whether an observation is of this member."""
        return any(cause.member == member for cause in self._causes)

    def add_detail(self, member: Member, detail: str) -> None:
        """The end of a child's log, for observations of it that have no detail."""
        self._causes = [
            replace(cause, detail=detail) if cause.member == member and not cause.detail else cause
            for cause in self._causes
        ]

    @property
    def best(self) -> Cause | None:
        """The one that explains most."""
        return min(self._causes, key=lambda cause: cause.weight, default=None)


def of_exit(seat: Seat, event: ChildExited) -> Cause:
    """A child has ended that should not have."""
    if event.reason:
        return Cause(Weight.LOSS, event.reason, seat.member, event.log_tail)
    if event.code in IN_ORDER and seat.member.role is Role.PSERVER:
        return Cause(Weight.CRASH, "stopped, but not by its coordinator", seat.member, event.log_tail)
    weight = Weight.FIX_JOB if event.code == EXIT_FIX_JOB else Weight.LOSS if event.code == -9 else Weight.CRASH
    return Cause(weight, describe_exit(event.code), seat.member, event.log_tail)


def of_error(seat: Seat, said: dict[str, Any]) -> Cause:
    """A child's error event."""
    weight = _WEIGHT_OF_KIND.get(str(said.get("kind")), Weight.LOSS)
    text, detail = f"failed: {said.get('message', 'no message')}", str(said.get("traceback", ""))
    return Cause(weight, text, seat.member, detail, of_restore=said.get("kind") == CHECKPOINT)


def of_delay(seat: Seat, seats: Seats, limits: ControlConfig, now: float, *, training: bool) -> Cause | None:
    """A child that takes longer than it may; None: it does not. Only while all are training must trainers move."""
    busy = seat.child_phase in {"loading", "saving", "evaluating"}
    if seat.child is ChildState.STARTING:
        limit = limits.start_seconds + (limits.save_seconds if busy else 0)
        if now - seat.moved_at > limit:
            return Cause(Weight.LOSS, f"was not ready {limit:g} s after its start", seat.member)
    elif seat.child is ChildState.READY and seat.member.role is Role.TRAINER and training:
        limit = limits.save_seconds if busy else limits.step_seconds
        if now - seat.moved_at > limit:
            return _of_standstill(seat, seats, limit, now)
    return None


def _of_standstill(seat: Seat, seats: Seats, limit: float, now: float) -> Cause:
    """One stuck trainer holds up all others, in the next AllReduce: then nobody can say which it is."""
    doing = seat.child_phase or "training"
    others = [s for s in seats.of(Role.TRAINER) if s is not seat and s.child is ChildState.READY]
    if any(now - other.moved_at > limit / 2 for other in others):
        return Cause(Weight.LOSS, f"no trainer made progress for {limit:g} s ({seat.member} was {doing})")
    return Cause(Weight.LOSS, f"made no progress for {limit:g} s (it was {doing})", seat.member)
