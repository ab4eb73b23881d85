"""What the coordinator of a job is given: its plan, with the days that are to be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from paddlewheel.data_pipeline.days import find_days, parse_day, parse_days
from paddlewheel.trainer.coordinator import resume as resuming
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.job.config import JobConfig, check_server_folders
from paddlewheel.trainer.job.days import DaysConfig, choose
from paddlewheel.trainer.job.errors import ConfigError, Problem

Mode = Literal["train", "evaluate"]
Resume = Literal["auto", "always", "never"]


def plan_of(job: JobConfig, mode: Mode = "train", *, restore: str | None = None, resume: Resume = "auto") -> JobPlan:
    """What the coordinator of this job is given.

    Raises:
        ConfigError: servers cannot save to, or load from, a folder of the job.
        ConfigError, DataError, DaysError, ResumeError: the days of the job cannot be trained.
    """
    check_server_folders(job, restore)
    plan = JobPlan(
        name=job.name,
        mode=mode,
        num_servers=job.cluster.servers,
        num_trainers=job.cluster.trainers,
        run_dir=str(Path(job.run_dir).absolute()),
        job=job.model_dump(mode="json"),
        tables={name: job.tables[name].model_dump(mode="json") for name in job.data.tables},
        control=job.control,
        restore=restore,
        resume=resume,
        http_address=metrics_address(job, "coordinator"),
        targets=str(targets_folder(job)),
    )
    return plan if mode == "evaluate" or job.train.days is None else _with_days(plan, job, job.train.days)


def _with_days(plan: JobPlan, job: JobConfig, days: DaysConfig) -> JobPlan:
    """The plan with the days that are trained and those that are to be."""
    if days.range is None:
        raise ConfigError(
            job.name,
            [Problem("train.days.range", "is missing: say which days to train, such as --days 2026-01-01..2026-01-07")],
        )
    trained, current = resuming.days_behind(resuming.find_start(plan).cursor)
    chosen = choose(
        parse_days(days.range),
        find_days(job.data.train, days.column),
        trained=[parse_day(day) for day in trained],
        current=parse_day(current) if current is not None else None,
        skip_missing=days.skip_missing,
    )
    return plan.model_copy(update={"days": tuple(day.isoformat() for day in chosen)})


def metrics_address(job: JobConfig, role: str, rank: int = 0) -> str | None:
    """Where one process of a one-machine run serves its metrics; None: nowhere."""
    if not job.metrics.enabled:
        return None
    host = job.metrics.address or job.cluster.bind_address
    return f"{host}:{job.metrics.port(role, rank, job.cluster.servers)}"


def targets_folder(job: JobConfig) -> Path:
    """Where the processes of a job say to Prometheus (file_sd_configs) that they are there."""
    return Path(job.metrics.prometheus_sd_directory or Path(job.run_dir, "targets")).absolute()
