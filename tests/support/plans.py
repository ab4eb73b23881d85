"""Plans of small jobs, and messages of their workers, for tests of the control plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.records import RECORDS, Record
from paddlewheel.trainer.coordinator.specs import TrainerSpec
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


def trainer_spec(job: JobConfig, rank: int = 0, num_trainers: int = 1, **changes: Any) -> TrainerSpec:
    """What one of its trainers is told."""
    places = {"servers": ("h:1",), "server_uids": (), "store": "h:1", "interface": None}
    begin = {"attempt": 1, "restore": None, "staging": None, "days": None, "resume": "auto"}
    numbers = {"mode": "train", "rank": rank, "num_trainers": num_trainers}
    return TrainerSpec(**{"job": job, **numbers, **places, **begin, **changes})


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


_UNSAID: dict[str, dict[str, Any]] = {
    "run": {"mode": "train", "resume": "auto", "restore": None, "asked": None, "checkpoints": "/c"},
    "attempt": {"attempt": 1, "restore": None, "parent": None, "rows": 0, "num_servers": 1, "num_trainers": 1},
    "running": {"attempt": 1, "load_seconds": 0.0},
    "epoch": {"attempt": 1, "epoch": 0, "fingerprint": "f", "order": "o", "seed": 1},
    "committing": {"attempt": 1},
    "committed": {"attempt": 1, "step": 1},
    "over": {"exit_code": 0, "cause": "", "failed_role": "", "rows": 0, "draft": None},
    "lost": {"attempt": 1, "failed_role": "", "halting_seconds": 0.0, "step": 0, "rows": 0},
    "day": {"attempt": 1, "seconds": None, "validation": None},
    "boundary": {"attempt": 1, "day": None, "redone": False},
}


def record(what: str, **fields: Any) -> Record:
    """A record of the journal with these fields, and something in those that a test does not care for."""
    return RECORDS.validate_python({**_UNSAID.get(what, {}), **fields, "what": what})
