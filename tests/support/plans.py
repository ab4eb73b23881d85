"""Plans of small jobs, and messages of their workers, for tests of the control plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.protocol.messages import EpochRequest, Progress

DATA = {"train": "/a", "labels": ["click"], "sparse": [{"name": "a"}]}


def job(num_servers: int = 1, num_trainers: int = 1, run_dir: str | Path = "/r", **sections: Any) -> JobConfig:
    """A small job; sections as in a job file."""
    plain = {"name": "j", "data": DATA, "run_dir": str(run_dir), **sections}
    return JobConfig.parse({**plain, "cluster": {"servers": num_servers, "trainers": num_trainers}})


def plan(num_servers: int = 1, num_trainers: int = 1, run_dir: str | Path = "/r", **sections: Any) -> JobPlan:
    """Of such a job."""
    return JobPlan(job=job(num_servers, num_trainers, run_dir, **sections))


def epoch_request(sizes: dict[int, int], epoch: int = 0, seed: int = 1) -> EpochRequest:
    """An epoch of these rows by slice, in this order."""
    runs = tuple((index, 1, rows) for index, rows in sizes.items())
    return EpochRequest(epoch=epoch, fingerprint="f", order="o", seed=seed, slices=tuple(sizes), sizes=runs)


def progress(**changes: Any) -> Progress:
    """A progress event in which nothing has happened but these changes."""
    figures: dict[str, Any] = dict.fromkeys(Progress.model_fields, 0)
    figures |= dict.fromkeys(("day", "loss", "auc", "rows_per_second", "seconds_left"))
    figures |= {name: {} for name in ("phase_seconds", "tables", "new_keys_of_features", "durations")}
    return Progress(**{**figures, "event": "progress", "step": 1, **changes})
