"""Where a run begins: at the newest whole checkpoint of the same job, or at nothing. Files only; no decisions later on.

A run continues what it finds (`resume: auto`), if the job is the same in everything that the model depends on; a job
that was changed is refused, because neither to go on nor to begin again may be what its user wants: `always` goes on
with the new values, `never` begins again and puts the old checkpoints aside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paddlewheel.trainer.checkpoint.folder_store import open_address, open_checkpoints
from paddlewheel.trainer.checkpoint.manifest import CheckpointError, step_of
from paddlewheel.trainer.checkpoint.store import Checkpoints, is_remote
from paddlewheel.trainer.checkpoint.trained_model import inputs_of
from paddlewheel.trainer.coordinator import journal
from paddlewheel.trainer.coordinator.records import CommitDone, JobOver, Record, RunBegan
from paddlewheel.trainer.coordinator.row_ledger import CURSOR_VERSION, RowLedger

if TYPE_CHECKING:
    from paddlewheel.trainer.coordinator.plan import JobPlan
    from paddlewheel.trainer.job.config import JobConfig

_SECTIONS = ("name", "seed", "data", "tables", "model", "train", "warm_start")
_FREE = {  # may change from one run to the next
    "data": (
        *("train", "eval", "threads", "prefetch_batches", "encoder_backend", "slice_assignment"),
        *("on_bad_file", "quarantine_directory", "statistics"),
    ),
    "model": ("folder",),
    "train": ("epochs", "days", "max_nonfinite_steps"),
}


class ResumeError(ValueError):
    """The run cannot begin with what is in its folders; the message says what to do."""


@dataclass(frozen=True)
class StartPoint:
    """Where to begin.

    Attributes:
        path: address of the checkpoint to restore; None: from nothing.
        cursor: what it says about the rows seen.
        notes: what a person should know.
    """

    path: str | None = None
    cursor: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def identity(job: JobConfig) -> dict[str, Any]:
    """What the trained model depends on, of a job; as plain data, without where its files lie."""
    plain_job = job.model_dump(mode="json")
    found = {section: plain_job[section] for section in _SECTIONS}
    for section, keys in _FREE.items():
        if isinstance(found.get(section), Mapping):
            found[section] = {key: value for key, value in found[section].items() if key not in keys}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def without_types(job: Any) -> Any:
    """A job as plain data without what features declare of their columns' types. Where a checkpoint says of which kind
    its keys are, these decide: to declare `type: integer` for what always were integers changes no key.
    """
    if not isinstance(job, Mapping) or not isinstance(job.get("data"), Mapping):
        return job
    data = job["data"]
    features = [{k: v for k, v in feature.items() if k != "type"} for feature in data.get("sparse") or ()]
    return {**job, "data": {**data, "sparse": features}}


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """'train.dense_optimizer.learning_rate: 0.001 before, 0.01 now', one for each value that differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif before != now:
        yield f"{path}: {json.dumps(before)} before, {json.dumps(now)} now"


def find_start(plan: JobPlan) -> StartPoint:
    """Where the run would begin. Changes nothing, and reads manifests and cursors only.

    Raises:
        ResumeError: the newest checkpoint is of another job, or there is none where one is wanted.
    """
    if plan.resume == "never" or plan.mode != "train":
        return StartPoint()
    if plan.restore is not None:
        return _start_from(*open_address(plan.restore), plan)
    return _newest(open_checkpoints(plan.checkpoint_location), plan)


def _newest(kept: Checkpoints, plan: JobPlan) -> StartPoint:
    address = newest_complete(kept)
    if address is not None:
        return _start_from(kept, address, plan)
    if plan.resume == "always":
        found = kept.committed()
        damaged = f", only damaged ones ({found[-1]})" if found else ""
        raise ResumeError(f"--resume: {plan.checkpoint_location} holds no checkpoint to go on from{damaged}")
    return StartPoint()


def newest_complete(kept: Checkpoints) -> str | None:
    """The checkpoint that a run would go on from; None: there is none."""
    for address in reversed(kept.committed()):
        try:
            kept.check_complete(address)
        except CheckpointError:
            continue
        return address
    return None


def finished_result(plan: JobPlan, start: StartPoint) -> dict[str, Any] | None:
    """The result of the run before, if that trained all that this one would; None otherwise.

    start: as `find_start` gives it.
    """
    if plan.mode != "train" or plan.restore is not None:
        return None
    if start.cursor is None or start.cursor["position"]["epoch"] < plan.num_epochs:
        return None
    last = next((record for record in reversed(read_journal(plan.journal)) if isinstance(record, JobOver)), None)
    if last is None or last.exit_code != 0 or not last.result:
        return None  # the last checkpoint is there, but what follows (the evaluation) was not done
    if changed := list(differences(start.cursor.get("job"), identity(plan.job))):
        raise ResumeError(
            f"{plan.job.name} is trained already, to the end of {start.path}, with other values:\n  "
            + _shortened(changed)
            + "\nThere is nothing left for --resume to train with the new ones: train more (train.epochs, --days),"
            " begin again and put the checkpoints aside (--from-scratch), or give this job another folder (--set "
            "run_dir=...)."
        )
    return last.result


def prepare_start(plan: JobPlan, kept: Checkpoints) -> StartPoint:
    """As `find_start`, for the coordinator, which owns `kept` from here on: cleans up and verifies.

    A damaged checkpoint is put aside under the name step-<n>.damaged, and the one before it is taken. With a checkpoint
    to begin with, those of later steps are put aside: the newest is always the one that the job goes on from.
    """
    if plan.mode != "train":
        return StartPoint()
    notes = []
    kept.clear()
    kept.fetch_journal(plan.journal)
    if plan.resume == "never" and (old := kept.committed()):
        notes.append(f"{len(old)} checkpoints of earlier runs were moved to {kept.set_aside(old)}")
    asked = asked_for(plan)
    if asked is not None and plan.restore_once and _has_gone_on(read_journal(plan.journal), asked):
        notes.append(f"this job has begun with {asked} before, and goes on from what it has committed since")
        plan = plan.model_copy(update={"restore": None, "resume": "always"})
    if plan.restore is None:
        notes += _set_damaged_aside(kept, kept.check_restorable)
    elif plan.resume != "never":
        notes += _set_later_aside(kept, plan)
    start = find_start(plan)
    return StartPoint(start.path, start.cursor, tuple(notes))


def fall_back(plan: JobPlan, kept: Checkpoints, failed: str) -> StartPoint:
    """Where a running job goes on from, after a checkpoint could not be restored: from that one, if it is whole.

    Else from the newest whole one, as a new start would; without any, from nothing. Reads checkpoints through.

    Raises:
        CheckpointError: the damaged one was asked for by name, and nothing was committed since.
        ResumeError: what is left is of another job.
        OSError: it cannot be told now.
    """
    place, address = open_address(failed)
    try:
        place.verify(address)
    except CheckpointError:
        if address == asked_for(plan):
            raise
        notes = _set_damaged_aside(kept, kept.verify)
        resume: Literal["always", "auto"] = "always" if kept.committed() else "auto"
        start = find_start(plan.model_copy(update={"restore": None, "resume": resume}))
        gone = f"{failed} is damaged or gone" if not notes else "; ".join(notes)
        return StartPoint(start.path, start.cursor, (f"{gone}; going on from {start.path or 'nothing'}",))
    return StartPoint(failed)


def asked_for(plan: JobPlan) -> str | None:
    """The full address of the checkpoint that the run was told to begin with."""
    return open_address(plan.restore)[1] if plan.restore is not None else None


def _set_damaged_aside(kept: Checkpoints, look: Callable[[str], None]) -> list[str]:
    """Until the newest one is whole; what a person should know of it."""
    notes = []
    for address in reversed(kept.committed()):
        try:
            look(address)
            break
        except CheckpointError as error:
            aside = kept.set_damaged_aside(address)
            notes.append(f"{error}. It is put aside as {aside}, and the checkpoint before it is used")
    return notes


def _set_later_aside(kept: Checkpoints, plan: JobPlan) -> list[str]:
    """What was committed after the checkpoint to begin with. Raises CheckpointError when that one is not whole."""
    assert plan.restore is not None
    place, address = open_address(plan.restore)
    place.check_restorable(address)
    find_start(plan)  # it is of this job
    step = int(place.manifest(address)["step"])
    later = [other for other in kept.committed() if not _same(other, address) and _step(other) >= step]
    if not later:
        return []
    return [f"{len(later)} checkpoints of later steps than {address} were moved to {kept.set_aside(later)}"]


def _same(first: str, second: str) -> bool:
    return first == second or (not is_remote(first + second) and Path(first).resolve() == Path(second).resolve())


def _step(address: str) -> int:
    step = step_of(address.rpartition("/")[2])
    assert step is not None, address
    return step


def _has_gone_on(records: Sequence[Record], asked: str) -> bool:
    """Whether the runs since the last one that was asked for something else have committed anything."""
    has_committed = is_ours = False
    for record in records:
        if isinstance(record, RunBegan):
            has_committed = has_committed and record.asked == asked
            is_ours = record.asked == asked
        elif isinstance(record, CommitDone) and record.path != asked:  # that one may be noted at a run's begin
            has_committed = is_ours
    return has_committed


def read_journal(path: Path) -> list[Record]:
    """The records of a journal that are whole, oldest first."""
    return list(journal.read(path).records)


def _start_from(kept: Checkpoints, address: str, plan: JobPlan) -> StartPoint:
    knows_kinds = inputs_of(kept.manifest(address), address) is not None
    cursor = kept.cursor(address)
    if cursor.get("version") != CURSOR_VERSION:
        raise ResumeError(
            f"{address} has a cursor of version {cursor.get('version')}, this version reads {CURSOR_VERSION}:"
            " begin again with --from-scratch, or in another run_dir"
        )
    try:
        RowLedger(1, 1, cursor)
        days_behind(cursor)
        numbers = (cursor["step"], cursor["rows"], cursor["attempt"], cursor["position"]["epoch"])
        if not all(isinstance(number, int) for number in numbers) or not isinstance(cursor["draft"], str):
            raise ValueError(f"step, rows, attempt, epoch, draft: {numbers}, {cursor['draft']!r}")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{address} has a cursor that paddlewheel does not write: {error!r}") from error
    _check_days(address, cursor, plan)
    before, now = cursor.get("job"), identity(plan.job)
    changed = list(differences(*map(without_types, (before, now)) if knows_kinds else (before, now)))
    if changed and plan.resume != "always" and plan.restore is None:
        raise ResumeError(
            f"{kept.location} holds checkpoints of this job with other values:\n  " + _shortened(changed) + "\n"
            "Go on from them with the new values (--resume), begin again and put them aside (--from-scratch), or give "
            "this job another folder (--set run_dir=...)."
        )
    return StartPoint(address, cursor)


def _shortened(changed: list[str]) -> str:
    more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
    return "\n  ".join(changed[:3]) + more


def days_behind(cursor: Mapping[str, Any] | None) -> tuple[tuple[str, ...], str | None]:
    """The days that a cursor has behind it, and the one in whose middle it stands (None: between two)."""
    if cursor is None:
        return (), None
    days, position = cursor.get("days") or (), cursor["position"]
    current = days[position["epoch"]] if days and position["done"] else None
    return tuple(days[: position["epoch"]]), current


def _check_days(address: str, cursor: Mapping[str, Any], plan: JobPlan) -> None:
    """Epochs are days, or they are not; and days that were trained keep their number."""
    if ("days" in cursor) != (plan.job.train.days is not None) and cursor["rows"]:
        was, now = ("by days", "in epochs") if "days" in cursor else ("in epochs", "by days")
        raise ResumeError(
            f"{address} was trained {was}, this job trains {now} (train.days, --days): begin again with --from-scratch"
            ", or give this job another folder (--set run_dir=...)"
        )
    behind, current = days_behind(cursor)
    known = (*behind, *([current] if current is not None else []))
    if plan.days is not None and plan.days[: len(known)] != known:
        raise ResumeError(f"{address} has trained {', '.join(known)}, the run's list of days begins otherwise")
