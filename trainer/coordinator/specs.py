"""What a trainer is told at its start. (A server's specification is `pserver.messages.ServerSpec`.)"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paddlewheel.pserver.messages import Message
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.protocol.messages import StagingPlan

Mode = Literal["train", "evaluate"]
Resume = Literal["auto", "always", "never"]


class TrainerSpec(Message):
    """The first line on a trainer's standard input."""

    job: Annotated[JobConfig, Field(strict=False)]
    mode: Mode
    rank: int
    num_trainers: int
    servers: tuple[str, ...]
    """`host:port` of every server, by rank."""
    server_uids: tuple[str, ...]
    """UIDs of the servers' processes, by rank: trainers speak to no other ones. Empty: to whoever answers first."""
    store: str
    """`host:port` where the trainers meet."""
    interface: str | None
    """Network interface of the all-reduce; None: chosen from the host's address."""
    attempt: int
    restore: str | None
    """Address of the checkpoint to begin with."""
    staging: StagingPlan | None
    """The way to the object store, if checkpoints are in one."""
    days: tuple[str, ...] | None
    """The job's days, as its epochs; None: not by days."""
    resume: Resume
    """always: go on although the job, or its fit, was changed."""

    @property
    def num_epochs(self) -> int:
        """Passes over the training data, or days."""
        return self.job.num_epochs(self.days)
