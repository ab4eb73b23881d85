"""Events and requests of a worker, the replies and commands that it gets, and what servers' hosts are asked to do.

Each is a frozen class, written and read as the same one: as a JSON object a line between a worker and its agent
(`to_line`, `read_event`, `read_command`), as protobuf between an agent and the coordinator
(`trainer.coordinator.wire`). The tag of a class (`event`, `what`, `command`, `order`, `answer`) says which one it is.
A field that is missing, unknown or of another type is refused by name, never replaced by a default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from paddlewheel.pserver.messages import (
    Measure,
    Message,
    Remark,
    Serving,
    SignalReceived,
    Starting,
    Stopped,
    WorkerError,
)

Span = tuple[int, int, int, int]
"""Rows of a slice that were trained: epoch, slice, first row, rows."""
Run = tuple[int, int, int]
"""Slices of one size: first slice, number of slices, rows of each."""
Done = tuple[int, int]
"""A slice, and how many of its rows are done."""
Document = dict[str, Any]
"""Figures or a file's content that is passed on as it is: nobody on the way decides on it."""


class MessageError(ValueError):
    """A message says what cannot be, or cannot be read."""


# ------------------------------------------------------------------------------------------ orders to servers' hosts


class PrepareHost(Message):
    """Make an empty folder for a draft."""

    order: Literal["prepare"] = "prepare"
    draft: str
    num_bytes: tuple[int, ...]
    """Room that each server's host needs, by rank."""


class UploadDraft(Message):
    """Upload what the server has saved of a draft."""

    order: Literal["upload"] = "upload"
    draft: str


class ForgetFiles(Message):
    """Remove everything from the folder."""

    order: Literal["forget"] = "forget"


HostOrder = PrepareHost | UploadDraft | ForgetFiles


class UploadedPart(Message):
    """One file of a saved table; the fields are those of `pserver.saved_tables.Part`."""

    name: str
    num_bytes: int
    num_rows: int
    xxh3_128: str
    num_keys: int | None
    """Of a part that holds only what changed: keys that the shard has then."""


class UploadedTable(Message):
    """The parts of one table that a host has uploaded."""

    parts: tuple[UploadedPart, ...]


class HostDone(Message):
    """A host has prepared, or forgotten."""

    answer: Literal["done"] = "done"


class HostUploaded(Message):
    """A host has uploaded its part of a draft."""

    answer: Literal["uploaded"] = "uploaded"
    tables: dict[str, UploadedTable]


class HostFailed(Message):
    """A host could not do what it was asked for."""

    answer: Literal["failed"] = "failed"
    error: str


HostAnswer = HostDone | HostUploaded | HostFailed

# ------------------------------------------------------------------------------------------ a trainer's requests


class EpochRequest(Message):
    """This trainer begins an epoch, and says what it consists of."""

    what: Literal["epoch"] = "epoch"
    epoch: int
    fingerprint: str
    """Of the data."""
    order: str
    """What the order of the rows within a slice depends on, beside seed and epoch."""
    seed: int
    slices: tuple[int, ...]
    """In the order in which they are trained."""
    sizes: tuple[Run, ...]


class LeaseRequest(Message):
    """This trainer needs more slices."""

    what: Literal["lease"] = "lease"
    epoch: int


class CursorRequest(Message):
    """This trainer is at a checkpoint, and has trained these rows since the last one."""

    what: Literal["cursor"] = "cursor"
    step: int
    epoch: int
    spans: tuple[Span, ...]
    skipped: tuple[Span, ...]
    """Those of `spans` whose step was skipped."""


class HostsRequest(Message):
    """Trainer 0 asks the hosts of all servers for something."""

    what: Literal["hosts"] = "hosts"
    order: HostOrder = Field(discriminator="order")


class CommitRequest(Message):
    """Trainer 0 has a draft that is complete."""

    what: Literal["commit"] = "commit"
    step: int
    draft: str
    """Its address."""
    seconds: float
    """What the save has taken."""


class SaveFailed(Message):
    """Trainer 0 could not save."""

    what: Literal["save_failed"] = "save_failed"
    step: int
    error: str
    kind: Literal["job", "runtime"]
    """`job`: every other checkpoint will fail as this one did."""


TrainerRequest = EpochRequest | LeaseRequest | CursorRequest | HostsRequest | CommitRequest | SaveFailed

# ------------------------------------------------------------------------------------------ replies to them


class EpochReply(Message):
    """Rows of the epoch that are done already, by slice."""

    what: Literal["epoch"] = "epoch"
    done: tuple[Done, ...]


class LeaseReply(Message):
    """The next slices; none: the epoch has no more for this trainer."""

    what: Literal["lease"] = "lease"
    slices: tuple[int, ...]


class CursorReply(Message):
    """All trainers have asked for the cursor: trainer 0 may save."""

    what: Literal["cursor"] = "cursor"
    cursor: Document
    """The content of the checkpoint's cursor.json."""
    draft: str
    """Name for the draft."""


class HostsReply(Message):
    """What all hosts have answered, by rank of their servers."""

    what: Literal["hosts"] = "hosts"
    answers: tuple[Annotated[HostAnswer, Field(discriminator="answer")], ...]


class Committed(Message):
    """The draft is a checkpoint now."""

    what: Literal["committed"] = "committed"
    path: str


class NotCommitted(Message):
    """There is no checkpoint of this step."""

    what: Literal["not_committed"] = "not_committed"
    error: str
    stop: bool
    """Whether the job ends for that."""


class Refusal(Message):
    """The coordinator does not grant a request."""

    what: Literal["refusal"] = "refusal"
    error: str
    kind: Literal["job", "data", "runtime"]
    """As of an error event."""


TrainerReply = EpochReply | LeaseReply | CursorReply | HostsReply | Committed | NotCommitted | Refusal

# ------------------------------------------------------------------------------------------ a worker's events


class Ready(Message):
    """A trainer can begin. (A server is probed instead.) Counts are of the restored checkpoint."""

    event: Literal["ready"] = "ready"
    step: int
    bad_steps: int
    bad_rows: int
    load_seconds: float
    """What restoring has taken."""


class TableFigures(Message):
    """One table, as trainer 0 counted it last."""

    keys: tuple[int, ...]
    """By server; empty: not counted yet."""
    bytes: int
    """Of the rows."""
    new: int
    """Keys that this trainer saw first."""
    admitted: int | None
    """Keys with an embedding, as last saved; None: not known."""
    evicted: int
    """Since the start."""
    shard_skew: float | None
    """The largest shard against the mean, as last saved."""


class Durations(Message):
    """How often something took how long, since the worker's start."""

    counts: tuple[int, ...]
    """By the buckets of `SECONDS_BOUNDS`; the last has no bound."""
    sum_seconds: float


class Progress(Message):
    """Where a trainer stands, at most twice a second. Trainer 0's is the job's.

    A change of step, rows or epoch counts as progress.
    """

    event: Literal["progress"] = "progress"
    epoch: int
    """From 0."""
    epochs: int
    """Of the job: passes over the data, or days."""
    day: str | None
    """The epoch's day, if the job is by days."""
    step: int
    rows: int
    """Trained by all trainers, over restarts."""
    total_rows: int
    """Of all epochs."""
    loss: Measure
    """Of the last step."""
    auc: Measure
    """Of recent rows."""
    rows_per_second: Measure
    """Of all trainers, since the worker's start."""
    seconds_left: Measure
    """At the pace so far."""
    bad_steps: int
    """Steps that were skipped because loss or gradient was not finite, over restarts."""
    bad_rows: int
    """Rows of those steps."""
    phase_seconds: dict[str, float]
    """Seconds by phase of the step."""
    own_rows: int
    """Trained by this trainer since its start."""
    skipped_rows: int
    """Rows that the reader left out as unusable."""
    truncated_ids: int
    """Ids beyond `max_length`."""
    pulled_keys: int
    pulled_bytes: int
    pushed_bytes: int
    staleness_steps: int
    """Batches before the last pull whose push was not applied yet."""
    ready_batches: int
    """Batches that wait for the step."""
    tables: dict[str, TableFigures]
    new_keys_of_features: dict[str, int]
    """Of the features that bring most."""
    durations: dict[str, Durations]
    """By phase of the step, and `servers_pull`, `servers_push`, `lease`."""


WorkerPhase = Literal["loading", "training", "evaluating", "saving", ""]


class PhaseChanged(Message):
    """What a worker does now; chooses which limit on time applies."""

    event: Literal["phase"] = "phase"
    phase: WorkerPhase
    rows: int = 0
    """Rows that an evaluation has scored."""


class Request(Message):
    """A trainer asks the coordinator, and waits for the reply of this number."""

    event: Literal["request"] = "request"
    id: int
    ask: TrainerRequest = Field(discriminator="what")


class Evaluation(Message):
    """An evaluation during training; every trainer tells the same one."""

    event: Literal["evaluation"] = "evaluation"
    step: int
    epoch: int
    trained_rows: int
    loss: Measure
    """Of the step."""
    best: bool
    """Whether it is the best so far."""
    report: Document


class Validation(Message):
    """Metrics of a day's rows before they were trained."""

    event: Literal["validation"] = "validation"
    day: str
    report: Document


class DayTable(Message):
    """A table at the end of a day."""

    keys: int
    new: int
    admitted: int | None


class DayTrained(Message):
    """What a day has brought; its checkpoint is committed. Kept in the journal; of one day, the last counts."""

    event: Literal["day"] = "day"
    day: str
    number: int
    """From 1."""
    rows: int
    seconds: float | None
    """None: an earlier attempt trained it."""
    validation: Document | None
    tables: dict[str, DayTable]


class BoundaryTable(Message):
    """A table at a day boundary: keys before it, and how many were evicted."""

    before: int
    evicted: int


class Boundary(Message):
    """A day boundary was carried out. Kept in the journal."""

    event: Literal["boundary"] = "boundary"
    day: str | None
    """None: it came by rows."""
    rows: int
    """Trained until then."""
    tables: dict[str, BoundaryTable]
    redone: bool
    """After a restore."""


class Published(Message):
    """A link was added to a table's published chain."""

    event: Literal["published"] = "published"
    table: str
    link: Document


class CheckpointSaved(Message):
    """Trainer 0's checkpoint is committed."""

    event: Literal["checkpoint"] = "checkpoint"
    step: int
    keys: dict[str, int]
    checkpoint: str
    """Its address."""
    checkpoint_seconds: float


class Result(Message):
    """The final figures, as `result.json` has them. Trainer 0 must tell them before it ends with code 0."""

    event: Literal["result"] = "result"
    figures: Document


WorkerEvent = (
    Ready
    | Progress
    | PhaseChanged
    | Request
    | Evaluation
    | Validation
    | DayTrained
    | Boundary
    | Published
    | CheckpointSaved
    | Result
    | WorkerError
    | Remark
    | Starting
    | Serving
    | SignalReceived
    | Stopped
)
"""What a worker writes on its event pipe."""

# ------------------------------------------------------------------------------------------ what a worker is told


class Reply(Message):
    """The answer to a trainer's request of this number."""

    command: Literal["reply"] = "reply"
    id: int
    answer: TrainerReply = Field(discriminator="what")


class SaveCheckpoint(Message):
    """For trainer 0: raise the checkpoint flag in the next all-reduce."""

    command: Literal["checkpoint"] = "checkpoint"


class StopTraining(Message):
    """For all trainers: raise the stop flag, then leave with code 0 or 143."""

    command: Literal["stop"] = "stop"
    checkpoint: bool
    """Whether a checkpoint is saved first."""


WorkerCommand = Reply | SaveCheckpoint | StopTraining
"""What a trainer reads on its standard input, after its specification."""


class HostStaging(Message):
    """What the agent of a server needs for checkpoints in an object store."""

    folder: str
    """On the server's host."""
    owner: str
    """Name of the coordinator in the store."""
    location: str
    """Where checkpoints are."""
    restore: str | None
    """Address of the checkpoint whose parts the agent fetches first."""


class StagingPlan(Message):
    """What trainers need for checkpoints in an object store."""

    folders: tuple[str, ...]
    """Of the servers' hosts, in rank order."""
    owner: str
    """Name of the coordinator in the store."""


_EVENTS: TypeAdapter[WorkerEvent] = TypeAdapter(
    Annotated[WorkerEvent, Field(discriminator="event")], config={"defer_build": True}
)
_COMMANDS: TypeAdapter[WorkerCommand] = TypeAdapter(
    Annotated[WorkerCommand, Field(discriminator="command")], config={"defer_build": True}
)


def read_event(line: str | bytes) -> WorkerEvent:
    """A line from a worker's event pipe. Raises MessageError, which names the field."""
    try:
        return _EVENTS.validate_json(line)
    except ValidationError as error:
        raise MessageError(explain("an event", error)) from None


def read_command(line: str | bytes) -> WorkerCommand:
    """A line for a trainer's standard input. Raises MessageError, which names the field."""
    try:
        return _COMMANDS.validate_json(line)
    except ValidationError as error:
        raise MessageError(explain("a command", error)) from None


def explain(what: str, error: ValidationError) -> str:
    """'an event cannot be read: progress.loss: Field required', with at most three problems."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    told = [f"{'.'.join(map(str, problem['loc'])) or 'it'}: {problem['msg']}" for problem in problems[:3]]
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return f"{what} cannot be read: {'; '.join(told)}{more}"


def to_line(message: Message) -> str:
    """The message as one line of JSON, without its end. Numbers in documents that are not finite become null."""
    plain = message.model_dump()
    try:
        return json.dumps(plain, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(plain), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
