"""What a trainer is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddlewheel.trainer.checkpoint.object_draft import StagingPlan
from paddlewheel.trainer.job.config import JobConfig


@dataclass(frozen=True)
class Spec:
    """What the coordinator tells a trainer at its start (one JSON line)."""

    job: JobConfig
    mode: str  # train or evaluate
    rank: int
    num_trainers: int
    servers: list[str]
    server_identities: list[str] | None
    store: str
    interface: str | None
    attempt: int
    restore: str | None
    staging: StagingPlan | None = None
    days: tuple[str, ...] | None = None
    resume: str = "auto"  # always: go on although the job, or its fit, was changed

    @property
    def num_epochs(self) -> int:
        """Passes over the training data, or days."""
        return self.job.train.epochs if self.days is None else len(self.days)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Spec:
        """Raises ConfigError when the job inside is not usable."""
        return cls(
            job=JobConfig.parse(raw["job"]),
            mode=raw["mode"],
            rank=raw["rank"],
            num_trainers=raw["num_trainers"],
            servers=raw["servers"],
            server_identities=raw.get("server_identities"),
            store=raw["store"],
            interface=raw.get("interface"),
            attempt=raw.get("attempt", 1),
            restore=raw.get("restore"),
            staging=StagingPlan.from_json(raw["staging"]) if raw.get("staging") else None,
            days=tuple(raw["days"]) if raw.get("days") is not None else None,
            resume=raw.get("resume", "auto"),
        )
