"""``paddlewheel train`` and ``paddlewheel evaluate``: a whole job on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from deploy.cli.arguments import JobFile, Json, Overrides, answer

if TYPE_CHECKING:
    from trainer.config import JobConfig


def train(job: JobFile, *, overrides: Overrides = (), json: Json = False) -> int:
    """Train a job on this machine: coordinator, servers and trainers, with progress, a checkpoint and an evaluation.

    Everything that the job needs is checked before anything starts. Ctrl-C stops in order.
    """
    from trainer.config import JobConfig

    return _run(JobConfig.load(job, overrides), "train", None, json=json)


def evaluate(
    job: JobFile,
    *,
    checkpoint: Annotated[
        Path | None, Parameter(help="A checkpoint (its step-<n> folder); by default the job's newest one.")
    ] = None,
    overrides: Overrides = (),
    json: Json = False,
) -> int:
    """Evaluate a checkpoint of a job on `data.eval`: AUC, logloss and calibration over all trainers."""
    from trainer import checkpoint as checkpoints
    from trainer.config import JobConfig

    config = JobConfig.load(job, overrides)
    found = checkpoint or checkpoints.latest(config.checkpoint_directory)
    if found is None:
        raise checkpoints.CheckpointError(
            f"{config.checkpoint_directory} holds no committed checkpoint: run `paddlewheel train {job}` first, or "
            "name one with --checkpoint"
        )
    return _run(config, "evaluate", found, json=json)


def _run(job: "JobConfig", mode: Literal["train", "evaluate"], restore: Path | None, *, json: bool) -> int:
    from deploy import preflight
    from deploy.launcher import run_local

    preflight.check(job, mode)
    outcome = run_local(job, mode, restore=restore)
    answer(outcome.to_json(), json=json, text=outcome.summary)
    return outcome.exit_code
