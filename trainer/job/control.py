"""The `control` section of a job: limits on time, and restarts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

_LONGEST = 30 * 86_400.0
"""Seconds: what nobody waits for."""


class ControlConfig(BaseModel):
    """How soon a loss is noticed, how long anything may take, and how often the job starts again."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    heartbeat_seconds: float = Field(default=0.5, ge=0.01, le=60)
    """Seconds between two heartbeats of an agent, and between two of the coordinator's answers."""
    heartbeat_timeout_seconds: float = Field(default=4.0, ge=0.01, le=_LONGEST)
    """An agent, or the coordinator, counts as lost after this many seconds of silence."""
    rendezvous_timeout_seconds: float = Field(default=300.0, ge=0.01, le=_LONGEST)
    """Seconds the coordinator waits for all servers and trainers to join before it gives up."""
    startup_timeout_seconds: float = Field(default=180.0, ge=0.01, le=_LONGEST)
    """Seconds a server or trainer may take from its start until it is ready (before restoring a checkpoint)."""
    step_timeout_seconds: float = Field(default=120.0, ge=0.01, le=_LONGEST)
    """A trainer that makes no step for this many seconds is stuck, and the attempt ends."""
    checkpoint_timeout_seconds: float = Field(default=3600.0, ge=0.01, le=_LONGEST)
    """The same limit while a checkpoint is saved or loaded."""
    server_health_timeout_seconds: float = Field(default=30.0, ge=0.01, le=_LONGEST)
    """A server whose port does not answer for this many seconds is stuck."""
    kill_grace_seconds: float = Field(default=1.0, ge=0, le=_LONGEST)
    """After a failure, seconds between asking the processes to end and killing them."""
    stop_seconds: float = Field(default=8.0, ge=0.01, le=_LONGEST)
    """On an ordered stop, seconds the trainers have to finish their step and leave; then they are killed."""
    drain_seconds: float = Field(default=5.0, ge=0.01, le=_LONGEST)
    """When training is over, seconds the servers have to end by themselves; then they are killed."""
    pull_timeout_seconds: float = Field(default=30.0, ge=0.01, le=_LONGEST)
    """A pull that took longer is never trained on: Paddle returns garbage after a failed one."""
    final_checkpoint_timeout_seconds: float = Field(default=60.0, ge=0, le=_LONGEST)
    """On an ordered stop, seconds more that a checkpoint may take which has begun within `stop_seconds`."""
    max_restarts: int = Field(default=3, ge=0, le=1_000_000)
    """How often in a row the job starts again after a loss; counted anew after each checkpoint of more rows trained."""
    backoff_seconds: float = Field(default=1.0, ge=0, le=_LONGEST)
    """Pause before the first restart; doubled for each one that follows without progress."""
    max_backoff_seconds: float = Field(default=60.0, ge=0, le=_LONGEST)
    """Longest such pause."""

    @model_validator(mode="after")
    def _check_limits(self) -> ControlConfig:
        if self.heartbeat_timeout_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"control.heartbeat_timeout_seconds is {self.heartbeat_timeout_seconds:g}, less than two heartbeats"
                f" (control.heartbeat_seconds = {self.heartbeat_seconds:g}), so a live role could count as lost."
                " Raise it, or send heartbeats more often."
            )
        return self
