"""What a run's journal proves: how often each row was trained in the final lineage, and what losses have cost.

The journal (`run_dir/journal.jsonl`) is written by the coordinator and outlives it. Nothing here trusts the
coordinator's own counting: the proof adds up the spans of the cursors from the first checkpoint to the last. It is one
only if nothing of that line is missing, and if something else than the line says where it ends: the outcome of the run,
or the newest checkpoint itself. Else the verdict is that nothing is proven, which is not to say that a row was lost.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from paddlewheel.trainer.checkpoint.folder_store import open_checkpoints
from paddlewheel.trainer.checkpoint.store import is_remote
from paddlewheel.trainer.coordinator import journal
from paddlewheel.trainer.coordinator.journal import Content
from paddlewheel.trainer.coordinator.records import (
    AttemptLost,
    AttemptOpened,
    BoundaryNoted,
    CommitBegan,
    CommitDone,
    CommitFailed,
    DayNoted,
    EpochBegan,
    JobOver,
    Record,
    RunBegan,
    TrainersRunning,
)
from paddlewheel.trainer.coordinator.row_ledger import EpochProof, prove, sizes_of
from paddlewheel.trainer.protocol.messages import BoundaryTable, DayTable

AnyRecord = TypeVar("AnyRecord", bound=Record)

_COORDINATOR_LOST = "the coordinator was lost"
_TOLD = ("version", "step", "attempt", "draft", "parent", "rows", "spans", "skipped")


Verdict = Literal["exact", "not exact", "not proven"]


class NoHistoryError(ValueError):
    """The folder holds no journal of a training run."""


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt, from its opening to its end.

    Attributes:
        began: Unix time at which it was opened; `running` when all trainers were ready, `ended` when it was lost or
            over (None: still going on, or nobody lived to write it down).
        restored: step of the checkpoint it began with; None: from nothing.
        cause: why it ended; empty while it goes on and after success.
        rows_replayed: rows that it had trained after its last checkpoint, to be trained again; None: not known.
        repeated_seconds: time that it had spent on those.
        down_seconds: from its loss until the next one was training.
    """

    number: int
    began: float
    running: float | None
    ended: float | None
    restored: int | None
    num_servers: int
    num_trainers: int
    num_checkpoints: int
    failed_role: str
    cause: str
    rows_replayed: int | None
    repeated_seconds: float
    down_seconds: float


@dataclass(frozen=True)
class DayRecord:
    """One day that was trained, or (by rows) one day boundary.

    Attributes:
        day: its date; empty for a boundary by rows.
        rows: of the day; by rows, those trained until the boundary.
        seconds: from its first step to its last checkpoint, without what an earlier attempt did; None by rows.
        validation: metrics of the day's rows before they were trained; None where nothing was learnt before.
        tables: by name: `keys` at its end, `new` and `admitted` ones, and `evicted` ones at the boundary after it
            (None: it has not come yet).
    """

    day: str
    rows: int
    seconds: float | None
    validation: Mapping[str, Any] | None
    tables: Mapping[str, Mapping[str, int | None]]


@dataclass(frozen=True)
class Report:
    """The proof and the story of a run.

    Attributes:
        steps: of the checkpoints of the final lineage, from the first to the last.
        epochs: how often the rows of each epoch were trained in that lineage; the last one may be unfinished.
        verdict: exact: no row twice, and none left out of an epoch that is over. not exact: some were. not proven: the
            journal cannot build_report, for the `reasons`.
        reasons: why nothing is proven; empty otherwise.
        lost_records: how many records of the journal are missing or damaged. (The proof does not need all of them.)
        outcome: of the last run; None while it goes on.
        warm_start: what the model began with (`job.warm_start`); None: nothing, or not told yet.
        days: how the tables grew, day by day or from boundary to boundary.
        day_names: of the epochs, if they are days.
    """

    steps: Sequence[int]
    epochs: Sequence[EpochProof]
    verdict: Verdict
    current_epoch: int
    attempts: Sequence[AttemptRecord]
    num_failed_checkpoints: int
    checkpoint_seconds: float
    outcome: Mapping[str, Any] | None
    reasons: Sequence[str] = ()
    lost_records: int = 0
    warm_start: Mapping[str, Any] | None = None
    days: Sequence[DayRecord] = ()
    day_names: Mapping[int, str] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether it is proven that each row was trained once."""
        return self.verdict == "exact"

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        plain = {**asdict(self), "exact": self.exact}
        plain["epochs"] = [{**asdict(proof), "is_exact": proof.is_exact} for proof in self.epochs]
        return plain


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint that is there. cursor: None if it cannot be read."""

    path: str
    cursor: Mapping[str, Any] | None


def told_of(cursor: Mapping[str, Any]) -> dict[str, Any]:
    """What the journal keeps of a checkpoint's cursor: what it adds to the one before, not the whole position, which
    names every slice of an epoch that was begun.
    """
    told = {key: cursor[key] for key in _TOLD if key in cursor}
    return {**told, "position": {key: value for key, value in cursor["position"].items() if key != "done"}}


def report(run_dir: Path | str) -> Report:
    """The report of a run folder, or of a job whose checkpoints are in an object store (as of the last one).

    Raises:
        NoHistoryError: there is no journal, or nothing in it.
    """
    location = str(run_dir)
    if is_remote(location):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "journal.jsonl")
            open_checkpoints(location).fetch_journal(path)
            content = journal.read(path)
    else:
        content = journal.read(Path(run_dir, "journal.jsonl"))
        runs = _of(RunBegan, content.records)
        location = runs[-1].checkpoints if runs else str(Path(run_dir, "checkpoints"))
    if not content.records:
        damage = f", only {len(content.damaged)} damaged lines" if content.damaged else ""
        raise NoHistoryError(
            f"{run_dir} holds no journal.jsonl with records{damage}: is it the run_dir of a job that was trained?"
        )
    return build_report(content, _newest(location))


def _newest(location: str) -> Newest | None:
    """None: there is none, or nobody can look."""
    try:
        kept = open_checkpoints(location)
        committed = kept.committed()
    except (OSError, ValueError):
        return None
    if not committed:
        return None
    try:
        cursor = kept.cursor(committed[-1])
        told_of(cursor)["draft"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Newest(committed[-1], None)
    return Newest(committed[-1], cursor)


def build_report(content: Content, newest: Newest | None = None) -> Report:
    """The report from what a journal holds, and the newest checkpoint, if that can be looked at."""
    records: Sequence[Record] = content.records
    fresh = [place for place, record in enumerate(records) if isinstance(record, RunBegan) and record.resume == "never"]
    records = records[fresh[-1] :] if fresh else records
    over = records[-1] if isinstance(records[-1], JobOver) else None
    line, reasons = _final_line(records, over, newest)
    begun = _of(EpochBegan, records)
    plans = {record.epoch: sizes_of(record.slices) for record in begun}
    current = line[-1]["position"]["epoch"] if line else 0
    touched = {epoch for cursor in line for epoch, *_ in cursor["spans"]}
    known = {epoch: sizes for epoch, sizes in plans.items() if epoch in touched or epoch < current}
    proofs = prove(known, line)
    reasons += [
        f"the record of what epoch {epoch + 1} consists of is missing" for epoch in sorted(touched - set(known))
    ]
    if not any("is missing" in reason for reason in reasons):
        reasons += [f"no checkpoint tells of epoch {e + 1}" for e in range(current) if e not in touched]
    whole = all(proof.is_exact if proof.epoch < current else proof.num_repeated == 0 for proof in proofs)
    repeated = any(proof.num_repeated for proof in proofs if proof.epoch in known)
    verdict: Verdict = "not exact" if repeated or (not reasons and not whole) else "not proven" if reasons else "exact"
    committed = _of(CommitDone, records)
    return Report(
        steps=[cursor["step"] for cursor in line],
        epochs=proofs,
        verdict=verdict,
        reasons=tuple(reasons) if verdict == "not proven" else (),
        lost_records=max(len(content.damaged), len(content.missing)),
        current_epoch=current,
        attempts=_stories(records),
        num_failed_checkpoints=len(_of(CommitFailed, records)),
        checkpoint_seconds=sum((r.save_seconds or 0.0) + (r.commit_seconds or 0.0) for r in committed),
        outcome={"exit_code": over.exit_code, "cause": over.cause, "failed_role": over.failed_role} if over else None,
        days=_days(records, current, line[-1]["rows"] if line else 0),
        day_names={record.epoch: record.day for record in begun if record.day is not None},
        warm_start=(over.result or {}).get("warm_start") if over else None,
    )


def _of(kind: type[AnyRecord], records: Sequence[Record]) -> list[AnyRecord]:
    """The records of one kind."""
    return [record for record in records if isinstance(record, kind)]


def _days(records: Sequence[Record], num_days: int, num_rows: int) -> list[DayRecord]:
    """What was told last of each day or boundary, up to where the final lineage stands."""
    days = {told.day: told for told in _of(DayNoted, records) if told.number <= num_days}
    boundaries = {told.day or told.rows: told for told in _of(BoundaryNoted, records) if told.rows <= num_rows}
    if not days:
        return [
            DayRecord("", told.rows, None, None, {name: _sizes(None, found) for name, found in told.tables.items()})
            for told in sorted(boundaries.values(), key=lambda told: told.rows)
        ]
    return [
        DayRecord(
            day,
            told.rows,
            told.seconds,
            told.validation,
            {
                name: _sizes(found, boundaries[day].tables.get(name) if day in boundaries else None)
                for name, found in told.tables.items()
            },
        )
        for day, told in sorted(days.items())
    ]


def _sizes(told: DayTable | None, boundary: BoundaryTable | None) -> dict[str, int | None]:
    return {
        "keys": told.keys if told is not None else boundary.before if boundary is not None else None,
        "new": told.new if told is not None else None,
        "admitted": told.admitted if told is not None else None,
        "evicted": boundary.evicted if boundary is not None else None,
    }


def _final_line(
    records: Sequence[Record], over: JobOver | None, newest: Newest | None
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Cursors from the first checkpoint to the newest, each the parent of the next; and why they prove nothing."""
    cursors = {record.cursor["draft"]: record.cursor for record in _of(CommitBegan, records)}
    head: str | None = None
    for record in records:
        if isinstance(record, CommitDone):
            head = record.draft
        elif isinstance(record, AttemptOpened):
            head = record.parent  # goes back when a checkpoint was damaged
    reasons = []
    if newest is not None and newest.cursor is not None:
        known = cursors.get(newest.cursor["draft"])
        if known is None:
            reasons.append(f"the record of the newest checkpoint, {newest.path}, is missing")
        elif told_of(known) != told_of(newest.cursor):
            reasons.append(f"the cursor of {newest.path} is not the one that the journal tells of")
        elif head is None or head in _ancestors(known["draft"], cursors) or known["draft"] in _ancestors(head, cursors):
            head = known["draft"]  # also if nobody lived to write down that it was committed, or another one is gone
        else:
            reasons.append(f"{newest.path} is not in the line that the journal ends with")
    confirmed = newest is not None and newest.cursor is not None
    if over is not None:
        confirmed = True
        if over.draft != head:
            reasons.append(
                f"the last run ended with the checkpoint {_name(over.draft, cursors)}, what is there leads to"
                f" {_name(head, cursors)}"
            )
    drafts = _ancestors(head, cursors)
    line: list[Mapping[str, Any]] = [cursors[draft] for draft in reversed(drafts) if draft in cursors]
    if len(line) < len(drafts):
        reasons.append(f"the record of a checkpoint in the line is missing ({drafts[-1]})")
    elif line and line[-1]["rows"] != sum(rows for cursor in line for *_, rows in cursor["spans"]):
        reasons.append(
            f"the last checkpoint has seen {line[-1]['rows']:,} rows, the records of its line build_report of others"
        )
    if not line and not reasons:
        reasons.append("no checkpoint was committed")
    elif not confirmed:
        reasons.append("neither the outcome of the run nor a checkpoint says that this is where the line ends")
    return line, reasons


def _ancestors(draft: str | None, cursors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A checkpoint, the one before it, and so on; ends with one that no record tells of if the line is broken."""
    found: list[str] = []
    while draft is not None and draft not in found:
        found.append(draft)
        draft = cursors[draft]["parent"] if draft in cursors else None
    return found


def _name(draft: str | None, cursors: Mapping[str, Mapping[str, Any]]) -> str:
    if draft is None:
        return "of nothing"
    return f"of step {cursors[draft]['step']}" if draft in cursors else repr(draft)


def _stories(records: Sequence[Record]) -> list[AttemptRecord]:
    opened = [(place, record) for place, record in enumerate(records) if isinstance(record, AttemptOpened)]
    ends: list[tuple[int, AttemptOpened | None]] = [*opened, (len(records), None)]
    return [
        _story(begin, records[place + 1 : end], after, records[end:])
        for (place, begin), (end, after) in zip(opened, ends[1:], strict=True)
    ]


def _first(kind: type[AnyRecord], records: Sequence[Record]) -> AnyRecord | None:
    return next(iter(_of(kind, records)), None)


def _story(
    begin: AttemptOpened, own: Sequence[Record], after: AttemptOpened | None, later: Sequence[Record]
) -> AttemptRecord:
    running, lost, new_run = _first(TrainersRunning, own), _first(AttemptLost, own), _first(RunBegan, own)
    commits = _of(CommitDone, own)
    ending = lost or _first(JobOver, own)
    ended = ending.time - (lost.halting_seconds if lost is not None else 0.0) if ending is not None else None
    cause, failed_role = (ending.cause, ending.failed_role) if ending is not None else ("", "")
    if ending is None and (new_run is not None or after is not None):
        cause, failed_role = _COORDINATOR_LOST, "coordinator"
        known = [record for record in own if record is not new_run and record.time <= (new_run or begin).time]
        ended = known[-1].time if known else begin.time  # the last that it wrote: it lived a little longer
    replayed: int | None = 0
    repeated = down = 0.0
    if cause and after is not None:
        replayed = max(0, ending.rows - after.rows) if ending is not None else None
        since = commits[-1].time if commits else running.time if running is not None else None
        repeated = max(0.0, (ended or 0.0) - since) if since is not None else 0.0
        again = _first(TrainersRunning, later)
        down = again.time - (ended or again.time) if again is not None else 0.0
    return AttemptRecord(
        number=begin.attempt,
        began=begin.time,
        running=running.time if running is not None else None,
        ended=ended,
        restored=_step_of(begin.restore),
        num_servers=begin.num_servers,
        num_trainers=begin.num_trainers,
        num_checkpoints=len(commits),
        failed_role=failed_role,
        cause=cause,
        rows_replayed=replayed,
        repeated_seconds=repeated,
        down_seconds=down,
    )


def _step_of(path: str | None) -> int | None:
    name = (path or "").rstrip("/").rpartition("/")[2]
    return int(name[5:]) if name.startswith("step-") and name[5:].isdecimal() else None
