"""The `checkpoint` section of a job file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from paddlewheel.pserver.config import Tables
from paddlewheel.trainer.job.errors import Problem, did_you_mean
from paddlewheel.trainer.job.section import Section

_STORES = ("s3", "gs", "hdfs")


class CheckpointConfig(Section):
    """When the state of a run is saved, and where."""

    directory: str | None = None
    """Where `step-<n>` checkpoints are kept: a folder that all hosts see, or `s3://bucket/prefix` (also `gs://`,
    `hdfs://`), which needs no shared folder. Credentials, region and endpoint of a store come from the environment of
    every role, never from this file. None: `checkpoints` inside `run_dir`."""

    staging: str | None = None
    """With an object store: folder on each server's host where its part of a checkpoint lies until it is uploaded or
    loaded. It needs room for one checkpoint's share. None: inside `run_dir`."""

    every_steps: int | None = Field(default=None, ge=1)
    """Steps between checkpoints during training. None: steps do not count."""

    every_minutes: float | None = Field(default=None, ge=0.001, le=1e7)
    """Minutes between checkpoints during training. None: time does not count. There is always one at the end."""

    full_every: int | None = Field(default=None, ge=1)
    """Every how many checkpoints one is full, such as 10. The others hold only the rows of tables that changed since
    the one before, and the keys that are gone since: they are smaller, and a restore reads all from the full one on.
    After a day boundary that decays counts, and after a save that failed, the next one is full in any case. Needs
    tables of the engine `paddlewheel`. None: all are full."""

    keep: int = Field(default=3, ge=1)
    """How many committed checkpoints to keep; older ones are removed after a newer one is committed, but for those
    that a kept one leads on from (`full_every`)."""

    on_failure: Literal["continue", "stop"] = "continue"
    """What a checkpoint that cannot be saved does to a running job. One at the end of training that fails ends it."""


def check_full_every(config: CheckpointConfig, tables: Tables) -> Iterator[Problem]:
    """Only tables of our own can tell what changed."""
    others = [name for name, table in tables.items() if table.engine == "paddle"]
    if config.full_every is not None and others:
        yield Problem(
            "checkpoint.full_every",
            f"is {config.full_every}, but tables.{others[0]}.engine is paddle, which saves whole tables only: leave "
            "one of them out",
        )


def check_store(config: CheckpointConfig) -> Iterator[Problem]:
    """An address of an object store that can be used, and says nothing secret."""
    directory = config.directory or ""
    if "://" not in directory:
        if config.staging is not None:
            yield Problem(
                "checkpoint.staging", "is for checkpoints in an object store; checkpoint.directory is a folder"
            )
        return
    scheme, _, rest = directory.partition("://")
    host = rest.partition("/")[0]
    if scheme not in _STORES:
        yield Problem(
            "checkpoint.directory",
            f"there is no store {scheme}://{did_you_mean(scheme, _STORES)} Known: {', '.join(_STORES)}; a folder is "
            "written as a plain path.",
        )
    elif not host and scheme != "hdfs":
        yield Problem("checkpoint.directory", f"names no bucket: write {scheme}://bucket/prefix")
    if "?" in rest or "#" in rest:
        yield Problem(
            "checkpoint.directory",
            "holds options after ? or #: set AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and the like in the environment of "
            "every process instead.",
        )
