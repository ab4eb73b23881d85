"""``paddlewheel train`` and ``paddlewheel evaluate``: a whole job on this machine."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from paddlewheel.deploy.cli.arguments import (
    AnswerLostError,
    JobFile,
    Json,
    LogFormat,
    Overrides,
    answer,
    check_same,
)

if TYPE_CHECKING:
    from paddlewheel.deploy.launch.hosts import HostsConfig
    from paddlewheel.trainer.job.config import JobConfig


def train(
    job: JobFile,
    *,
    resume: Annotated[
        bool, Parameter(negative=(), help="Go on from the newest checkpoint even if the job was changed since.")
    ] = False,
    from_scratch: Annotated[
        bool, Parameter(negative=(), help="Begin again; checkpoints of earlier runs are put aside, not removed.")
    ] = False,
    days: Annotated[
        str | None, Parameter(help="Days to train, FIRST..LAST or one (2026-01-01..2026-01-07); as train.days.range.")
    ] = None,
    skip_missing_days: Annotated[
        bool, Parameter(negative=(), help="Leave out days without data; as train.days.skip_missing.")
    ] = False,
    hosts: Annotated[
        Path | None, Parameter(help="Machines for servers and trainers (YAML, see deploy/README.md); else this one.")
    ] = None,
    print_commands: Annotated[
        bool, Parameter(negative=(), help="With --hosts: print what to type on each machine, and start nothing.")
    ] = False,
    overrides: Overrides = (),
    log_format: LogFormat = "auto",
    json: Json = False,
) -> int:
    """Train a job: coordinator, servers and trainers, with progress, checkpoints and an evaluation.

    Everything that the job needs is checked before anything starts. A run that was interrupted goes on from its newest
    checkpoint; one that is trained already is not trained again. Ctrl-C saves a checkpoint and stops in order.
    """
    from paddlewheel.trainer.job.config import JobConfig

    if resume and from_scratch:
        raise ResumeChoiceError("give --resume or --from-scratch, not both")
    choice: Literal["auto", "always", "never"] = "always" if resume else "never" if from_scratch else "auto"
    if days is not None:
        overrides = (*overrides, f"train.days.range={days}")
    if skip_missing_days:
        overrides = (*overrides, "train.days.skip_missing=true")
    config = JobConfig.load(job, overrides)
    placed = None
    if hosts is not None:
        from paddlewheel.deploy.launch.hosts import HostsConfig
        from paddlewheel.deploy.launch.hosts import print_commands as commands_of

        placed = HostsConfig.load(hosts, config)
        if print_commands:
            print(commands_of(config, job, placed, overrides))
            return 0
    return _run(config, "train", None, choice, hosts=placed, log_format=log_format, json=json)


class ResumeChoiceError(ValueError):
    """Two options exclude each other."""


def evaluate(
    job: JobFile,
    *,
    checkpoint: Annotated[
        str | None,
        Parameter(help="A checkpoint (its `step-<n>` folder, or s3://...); by default the job's newest one."),
    ] = None,
    overrides: Overrides = (),
    log_format: LogFormat = "auto",
    json: Json = False,
) -> int:
    """Evaluate a checkpoint of a job on `data.eval`: AUC, logloss and calibration over all trainers."""
    from paddlewheel.trainer.checkpoint.folder_store import open_address, open_checkpoints
    from paddlewheel.trainer.checkpoint.manifest import CheckpointError
    from paddlewheel.trainer.checkpoint.trained_model import inputs_of
    from paddlewheel.trainer.job.config import JobConfig

    config = JobConfig.load(job, overrides)
    kept = open_checkpoints(config.checkpoint_location)
    found = next(reversed(kept.committed()), None) if checkpoint is None else None
    if checkpoint is not None:
        kept, found = open_address(checkpoint)
        if not re.fullmatch(r"step-\d+", found.rpartition("/")[2]):
            inside = [path for place in (found, f"{found}/checkpoints") for path in open_checkpoints(place).committed()]
            newest = inside[-1] if inside else None
            named = f"; it holds checkpoints, the newest is {newest}" if newest else ""
            raise CheckpointError(f"--checkpoint: {found} is no checkpoint: name a step-<n> folder{named}")
    if found is None:
        raise CheckpointError(
            f"{config.checkpoint_location} holds no committed checkpoint: run `paddlewheel train {job}` first, or "
            "name one with --checkpoint"
        )
    manifest = kept.check_complete(found)
    typed = inputs_of(manifest, found) is None
    trained = manifest.get("settings") or kept.cursor(found)["job"]
    check_same(config, trained, found, typed=typed, shapes_alone=True)
    return _run(config, "evaluate", found, "auto", log_format=log_format, json=json)


def _run(
    job: "JobConfig",
    mode: Literal["train", "evaluate"],
    restore: str | None,
    resume: Literal["auto", "always", "never"],
    *,
    hosts: "HostsConfig | None" = None,
    log_format: LogFormat = "auto",
    json: bool,
) -> int:
    from paddlewheel.deploy.checks import preflight
    from paddlewheel.deploy.launch.display import choose_display
    from paddlewheel.deploy.launch.launcher import run_local

    found = preflight.check(job, mode, here=hosts is None, restore=restore, resume=resume)
    display = choose_display(log_format=log_format, for_machines=json)
    try:
        for warning in found.warnings:
            display.note("warning", warning)
        outcome = run_local(job, mode, restore=restore, resume=resume, display=display, hosts=hosts)
    finally:
        display.close()
    try:
        answer(outcome.to_json(), json=json, text=outcome.summary)
    except AnswerLostError as error:
        display.note("error", f"{error}; it is in {outcome.run_dir}")
    return outcome.exit_code
