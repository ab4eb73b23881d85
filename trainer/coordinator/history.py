"""What a run's journal proves: how often each row was trained in the final lineage, and what losses have cost.

The journal (`run_dir/journal.jsonl`) is written by the coordinator and outlives it. Nothing here trusts the
coordinator's own counting: the proof adds up the spans of the cursors from the first checkpoint to the last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoints import open_checkpoints
from trainer.coordinator.lineage import EpochProof, prove
from trainer.coordinator.resume import read_journal
from trainer.location import is_remote

_COORDINATOR_LOST = "the coordinator was lost"


class NoHistoryError(ValueError):
    """The folder holds no journal of a training run."""


@dataclass(frozen=True)
class IncarnationStory:
    """One incarnation, from its opening to its end.

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
    culprit: str
    cause: str
    rows_replayed: int | None
    repeated_seconds: float
    down_seconds: float


@dataclass(frozen=True)
class DayStory:
    """One day that was trained, or (by rows) one day boundary.

    Attributes:
        day: its date; empty for a boundary by rows.
        rows: of the day; by rows, those trained until the boundary.
        seconds: from its first step to its last checkpoint, without what an earlier incarnation did; None by rows.
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
        exact: no row twice, and none left out of an epoch that is over.
        outcome: of the last run; None while it goes on.
        warm_start: what the model began with (`job.warm_start`); None: nothing, or not told yet.
        days: how the tables grew, day by day or from boundary to boundary.
        day_names: of the epochs, if they are days.
    """

    steps: Sequence[int]
    epochs: Sequence[EpochProof]
    exact: bool
    current_epoch: int
    incarnations: Sequence[IncarnationStory]
    num_failed_checkpoints: int
    checkpoint_seconds: float
    outcome: Mapping[str, Any] | None
    warm_start: Mapping[str, Any] | None = None
    days: Sequence[DayStory] = ()
    day_names: Mapping[int, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        plain = asdict(self)
        plain["epochs"] = [{**asdict(proof), "is_exact": proof.is_exact} for proof in self.epochs]
        return plain


def report(run_dir: Path | str) -> Report:
    """The report of a run folder, or of a job whose checkpoints are in an object store (as of the last one).

    Raises:
        NoHistoryError: there is no journal, or nothing in it.
    """
    if is_remote(str(run_dir)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "journal.jsonl")
            open_checkpoints(str(run_dir)).fetch_journal(path)
            records = read_journal(path)
    else:
        records = read_journal(Path(run_dir, "journal.jsonl"))
    if not records:
        raise NoHistoryError(f"{run_dir} holds no journal.jsonl: is it the run_dir of a job that was trained?")
    return tell(records)


def tell(records: Sequence[Mapping[str, Any]]) -> Report:
    """The report from the journal's records, oldest first."""
    fresh = [
        place for place, record in enumerate(records) if record["what"] == "run" and record.get("resume") == "never"
    ]
    records = records[fresh[-1] :] if fresh else records
    line = _final_line(records)
    plans: dict[int, dict[int, int]] = {}
    for record in records:
        if record["what"] == "epoch":
            plans[record["epoch"]] = dict(record["slices"])
    current = line[-1]["position"]["epoch"] if line else 0
    touched = {epoch for cursor in line for epoch, *_ in cursor["spans"]}
    proofs = prove({epoch: sizes for epoch, sizes in plans.items() if epoch in touched or epoch < current}, line)
    whole = all(proof.is_exact if proof.epoch < current else proof.num_repeated == 0 for proof in proofs)
    complete = sorted(touched) == list(range(len(touched))) and all(epoch in touched for epoch in range(current))
    committed = [record for record in records if record["what"] == "committed"]
    over = records[-1] if records[-1]["what"] == "over" else None
    return Report(
        steps=[cursor["step"] for cursor in line],
        epochs=proofs,
        exact=whole and complete,
        current_epoch=current,
        incarnations=_stories(records),
        num_failed_checkpoints=sum(record["what"] == "failed" for record in records),
        checkpoint_seconds=sum(r.get("save_seconds", 0.0) + r.get("commit_seconds", 0.0) for r in committed),
        outcome={key: over[key] for key in ("exit_code", "cause", "culprit")} if over else None,
        days=_days(records, current, line[-1]["rows"] if line else 0),
        day_names={r["epoch"]: r["day"] for r in records if r["what"] == "epoch" and "day" in r},
        warm_start=(over.get("result") or {}).get("warm_start") if over else None,
    )


def _days(records: Sequence[Mapping[str, Any]], num_days: int, num_rows: int) -> list[DayStory]:
    """What was told last of each day or boundary, up to where the final lineage stands."""
    days = {r["day"]: r for r in records if r["what"] == "day" and r["number"] <= num_days}
    boundaries = {r.get("day") or r["rows"]: r for r in records if r["what"] == "boundary" and r["rows"] <= num_rows}
    if not days:
        return [
            DayStory("", told["rows"], None, None, {name: _sizes({}, found) for name, found in told["tables"].items()})
            for told in sorted(boundaries.values(), key=lambda told: int(told["rows"]))
        ]
    return [
        DayStory(
            day,
            told["rows"],
            told["seconds"],
            told["validation"],
            {
                name: _sizes(found, boundaries[day]["tables"].get(name, {}) if day in boundaries else {})
                for name, found in told["tables"].items()
            },
        )
        for day, told in sorted(days.items())
    ]


def _sizes(told: Mapping[str, int], boundary: Mapping[str, int]) -> dict[str, int | None]:
    return {
        "keys": told.get("keys", boundary.get("before")),
        "new": told.get("new"),
        "admitted": told.get("admitted"),
        "evicted": boundary.get("evicted"),
    }


def _final_line(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Cursors from the first checkpoint to the newest committed one, each the parent of the next."""
    cursors = {r["cursor"]["draft"]: r["cursor"] for r in records if r["what"] == "committing"}
    heads = {"committed": "draft", "incarnation": "parent"}  # the latter goes back when a checkpoint was damaged
    drafts = [record[heads[record["what"]]] for record in records if record["what"] in heads]
    line: list[Mapping[str, Any]] = []
    draft = drafts[-1] if drafts else None
    while draft is not None and draft in cursors:
        line.insert(0, cursors[draft])
        draft = cursors[draft]["parent"]
    return line


def _stories(records: Sequence[Mapping[str, Any]]) -> list[IncarnationStory]:
    opened = [place for place, record in enumerate(records) if record["what"] == "incarnation"]
    stories = []
    for place, following in zip(opened, [*opened[1:], len(records)], strict=True):
        begin, own = records[place], records[place + 1 : following]
        after = records[following] if following < len(records) else None
        stories.append(_story(begin, own, after, records[following:]))
    return stories


def _story(
    begin: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
    after: Mapping[str, Any] | None,
    later: Sequence[Mapping[str, Any]],
) -> IncarnationStory:
    def first(what: str, among: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        return next((record for record in among if record["what"] == what), None)

    running, lost, over, new_run = (first(what, own) for what in ("running", "lost", "over", "run"))
    commits = [record for record in own if record["what"] == "committed" and "path" in record]
    ending = lost or over
    ended = ending["time"] - ending.get("halting_seconds", 0.0) if ending else None
    cause = str(ending["cause"]) if ending else ""
    culprit = str(ending.get("culprit", "")) if ending else ""
    if ending is None and (new_run is not None or after is not None):
        cause, culprit = _COORDINATOR_LOST, "coordinator"
        known = [record for record in own if record is not new_run and record["time"] <= (new_run or begin)["time"]]
        ended = known[-1]["time"] if known else begin["time"]  # the last that it wrote: it lived a little longer
    replayed: int | None = 0
    repeated = down = 0.0
    if cause and after is not None:
        replayed = max(0, ending["rows"] - after["rows"]) if ending else None
        since = commits[-1]["time"] if commits else running["time"] if running else None
        repeated = max(0.0, (ended or 0.0) - since) if since is not None else 0.0
        again = first("running", later)
        down = again["time"] - (ended or again["time"]) if again else 0.0
    return IncarnationStory(
        number=begin["incarnation"],
        began=begin["time"],
        running=running["time"] if running else None,
        ended=ended,
        restored=_step_of(begin.get("restore")),
        num_servers=begin.get("num_servers", 0),
        num_trainers=begin.get("num_trainers", 0),
        num_checkpoints=len(commits),
        culprit=culprit,
        cause=cause,
        rows_replayed=replayed,
        repeated_seconds=repeated,
        down_seconds=down,
    )


def _step_of(path: str | None) -> int | None:
    name = (path or "").rstrip("/").rpartition("/")[2]
    return int(name[5:]) if name.startswith("step-") and name[5:].isdecimal() else None
