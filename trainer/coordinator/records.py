"""The journal's records: what a coordinator decided, written and read as the same classes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from paddlewheel.pserver.messages import Message
from paddlewheel.trainer.protocol.messages import BoundaryTable, DayTable, Document, Run


class _Record(Message):
    """What every record has. The journal fills both in."""

    record: int = 0
    """Its number, from 1."""
    time: float = 0.0
    """Unix time."""


class RunBegan(_Record):
    """A coordinator began."""

    what: Literal["run"] = "run"
    mode: str
    resume: str
    restore: str | None
    """Address of the checkpoint that it begins with."""
    asked: str | None
    """The checkpoint that it was told to begin with."""
    checkpoints: str
    """Where checkpoints are."""


class AttemptOpened(_Record):
    """An attempt opened. parent: draft name of the checkpoint it begins with; rows: trained until that."""

    what: Literal["attempt"] = "attempt"
    attempt: int
    restore: str | None
    parent: str | None
    rows: int
    num_servers: int
    num_trainers: int


class TrainersRunning(_Record):
    """All trainers are ready. load_seconds: what restoring took trainer 0."""

    what: Literal["running"] = "running"
    attempt: int
    load_seconds: float | None


class EpochBegan(_Record):
    """What an epoch consists of: rows by slice, as runs."""

    what: Literal["epoch"] = "epoch"
    attempt: int
    epoch: int
    fingerprint: str
    order: str
    seed: int
    slices: tuple[Run, ...]
    day: str | None = None


class CommitBegan(_Record):
    """What a checkpoint's cursor adds to the one before it; written before the draft gets its name."""

    what: Literal["committing"] = "committing"
    attempt: int
    cursor: Document


class CommitDone(_Record):
    """A draft is a checkpoint. Sizes and times are None where another coordinator committed it."""

    what: Literal["committed"] = "committed"
    attempt: int
    step: int
    draft: str
    path: str
    bytes: int | None = None
    save_seconds: float | None = None
    commit_seconds: float | None = None


class CommitFailed(_Record):
    """There is no checkpoint of this step."""

    what: Literal["failed"] = "failed"
    attempt: int
    step: int
    error: str


class DayNoted(_Record):
    """What a day has brought. Of one day, the last counts."""

    what: Literal["day"] = "day"
    attempt: int
    day: str
    number: int
    rows: int
    seconds: float | None
    validation: Document | None
    tables: dict[str, DayTable]


class BoundaryNoted(_Record):
    """A day boundary was carried out."""

    what: Literal["boundary"] = "boundary"
    attempt: int
    day: str | None
    rows: int
    tables: dict[str, BoundaryTable]
    redone: bool


class StopOrdered(_Record):
    """Somebody wants the job to stop in order."""

    what: Literal["stop"] = "stop"
    reason: str


class AttemptLost(_Record):
    """An attempt ended before its work was done."""

    what: Literal["lost"] = "lost"
    attempt: int
    failed_role: str
    cause: str
    halting_seconds: float
    """From the first observation of the loss until every worker was gone."""
    step: int
    rows: int
    """Trained, as trainer 0 said last."""


class JobOver(_Record):
    """The job has ended. draft: of its last checkpoint."""

    what: Literal["over"] = "over"
    exit_code: int
    cause: str
    failed_role: str
    rows: int
    draft: str | None
    result: Document | None = None


Record = (
    RunBegan
    | AttemptOpened
    | TrainersRunning
    | EpochBegan
    | CommitBegan
    | CommitDone
    | CommitFailed
    | DayNoted
    | BoundaryNoted
    | StopOrdered
    | AttemptLost
    | JobOver
)

RECORDS: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="what")])
