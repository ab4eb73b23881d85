"""What the coordinator of a job is given: its plan, with the days that are to be trained, and where the run starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paddlewheel.data_pipeline.days import find_days, parse_day, parse_days
from paddlewheel.trainer.coordinator import resume as resuming
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.resume import StartPoint
from paddlewheel.trainer.coordinator.specs import Mode, Resume
from paddlewheel.trainer.job.config import JobConfig, check_server_folders
from paddlewheel.trainer.job.days import DaysConfig, choose
from paddlewheel.trainer.job.errors import ConfigError, Problem


@dataclass(frozen=True)
class PlannedRun:
    """A run that has not begun."""

    plan: JobPlan

    @cached_property
    def start(self) -> StartPoint:
        """Where it would start, as the checkpoints were when this was first asked for.

        Only the coordinator, which owns them, makes sure of it (`resume.prepare_start`).

        Raises:
            ResumeError, CheckpointError: as `resume.find_start`.
        """
        return resuming.find_start(self.plan)

    @property
    def finished_result(self) -> dict[str, object] | None:
        """The result of the run before, if that has trained all that this one would; None otherwise."""
        return resuming.finished_result(self.plan, self.start)


def plan_of(job: JobConfig, mode: Mode = "train", *, restore: str | None = None, resume: Resume = "auto") -> PlannedRun:
    """What the coordinator of this job is given, and where the run starts.

    Raises:
        ConfigError: servers cannot save to, or load from, a folder of the job.
        ConfigError, DataError, DaysError, ResumeError: the days of the job cannot be trained.
    """
    check_server_folders(job, restore)
    plan = JobPlan(
        job=job,
        mode=mode,
        restore=restore,
        resume=resume,
        http_address=metrics_address(job, "coordinator"),
        targets=str(targets_folder(job)),
    )
    return PlannedRun(plan) if mode == "evaluate" or job.train.days is None else _with_days(plan, job.train.days)


def _with_days(plan: JobPlan, days: DaysConfig) -> PlannedRun:
    """The plan with the days that are trained and those that are to be."""
    job = plan.job
    if days.range is None:
        raise ConfigError(
            job.name,
            [Problem("train.days.range", "is missing: say which days to train, such as --days 2026-01-01..2026-01-07")],
        )
    trained, current = resuming.days_behind(PlannedRun(plan).start.cursor)
    chosen = choose(
        parse_days(days.range),
        find_days(job.data.train, days.column),
        trained=[parse_day(day) for day in trained],
        current=parse_day(current) if current is not None else None,
        skip_missing=days.skip_missing,
    )
    return PlannedRun(plan.model_copy(update={"days": tuple(day.isoformat() for day in chosen)}))


def metrics_address(job: JobConfig, role: str, rank: int = 0) -> str | None:
    """Where one process of a one-machine run serves its metrics; None: nowhere."""
    if not job.metrics.enabled:
        return None
    host = job.metrics.address or job.cluster.bind_address
    return f"{host}:{job.metrics.port(role, rank, job.cluster.servers)}"


def targets_folder(job: JobConfig) -> Path:
    """Where the processes of a job say to Prometheus (file_sd_configs) that they are there."""
    return Path(job.metrics.prometheus_sd_directory or Path(job.run_dir, "targets")).absolute()
