"""Which rows the model has seen: epochs, leases, cursors, as pure bookkeeping. No clock, no disk, no gRPC.

The rows of a slice are trained in the slice's own order, so what is done of it is a number: its first n rows. A cursor
moves these numbers forward by what all trainers say they have trained since the cursor before. What they say must fit
without overlap or gap, or nothing is saved: so whatever was killed, in the line of checkpoints that leads to the final
model each row of an epoch stands exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paddlewheel.trainer.protocol.messages import CursorRequest, EpochRequest, Run

CURSOR_VERSION = 1
_LARGEST_LEASE = 8
_MOST_SLICES = 1 << 26


class RowLedgerError(ValueError):
    """A request that cannot be granted. kind: as of a worker's error event."""

    def __init__(self, message: str, kind: Literal["job", "data", "runtime"] = "runtime") -> None:
        self.kind: Literal["job", "data", "runtime"] = kind
        super().__init__(message)


@dataclass(frozen=True)
class Cursor:
    """What all trainers have trained at one step; to be saved under the name `draft`, then committed or forgotten."""

    step: int
    draft: str
    body: Mapping[str, Any]
    """What the checkpoint's cursor.json says."""


@dataclass(frozen=True)
class EpochPlan:
    """What the trainers say an epoch consists of."""

    fingerprint: str
    order: str
    """What the order of the rows within a slice depends on, besides seed and epoch."""
    seed: int
    sizes: Mapping[int, int]
    """Rows by slice, in the order in which slices are given out."""

    @classmethod
    def from_request(cls, asked: EpochRequest) -> EpochPlan:
        rows_of = sizes_of(asked.sizes)
        sizes = {index: rows_of.get(index, 0) for index in asked.slices}
        if len(sizes) != len(asked.slices) or not all(rows > 0 for rows in sizes.values()):
            raise RowLedgerError("the plan of an epoch names a slice twice, or one without rows")
        return cls(asked.fingerprint, asked.order, asked.seed, sizes)

    @property
    def num_rows(self) -> int:
        return sum(self.sizes.values())


def runs_of(sizes: Mapping[int, int]) -> tuple[Run, ...]:
    """Rows by slice as runs [first slice, number of slices, rows of each]: data has few sizes, and many slices."""
    runs: list[list[int]] = []
    for index, rows in sorted(sizes.items()):
        if runs and runs[-1][0] + runs[-1][1] == index and runs[-1][2] == rows:
            runs[-1][1] += 1
        else:
            runs.append([index, 1, rows])
    return tuple((first, number, rows) for first, number, rows in runs)


def sizes_of(runs: Iterable[Run]) -> dict[int, int]:
    """What `runs_of` was given, by index."""
    sizes: dict[int, int] = {}
    for first, number, rows in runs:
        if not 0 < number <= _MOST_SLICES - len(sizes):
            raise RowLedgerError(f"an epoch of more than {_MOST_SLICES:,} slices, or a run of {number}")
        sizes.update(dict.fromkeys(range(first, first + number), rows))
    return sizes


@dataclass
class _Place:
    """Where the model stands: rows done of each slice of one epoch; those before it are complete."""

    epoch: int = 0
    done: dict[int, int] = field(default_factory=dict)
    step: int = 0
    rows: int = 0


class RowLedger:
    """The bookkeeping of one job. `begin` starts each attempt.

    Args:
        num_trainers: how many trainers ask.
        num_epochs: how many epochs the job has.
        cursor: of the checkpoint to begin with; None: from nothing.
        facts: what else every cursor shall say.
    """

    def __init__(
        self,
        num_trainers: int,
        num_epochs: int,
        cursor: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._num_trainers, self._num_epochs, self._facts = num_trainers, num_epochs, dict(facts or {})
        self._committed = dict(cursor) if cursor is not None else None
        self.begin(0)

    @property
    def cursor(self) -> dict[str, Any] | None:
        """Of the last committed checkpoint."""
        return self._committed

    @property
    def pending(self) -> Cursor | None:
        """The cursor that waits for its commit."""
        return self._pending

    def begin(self, attempt: int) -> None:
        """Forget everything since the last committed checkpoint."""
        saved = self._committed
        position: Mapping[str, Any] = saved["position"] if saved else {}
        done = {int(index): int(rows) for index, rows in position.get("done", ())}
        self._attempt = attempt
        self._saved_position = position if done else None  # without rows done in its epoch, any data may follow
        self._place = _Place(
            position.get("epoch", 0), done, saved["step"] if saved else 0, saved["rows"] if saved else 0
        )
        self._begun = (self._place.epoch, dict(done))
        self._plans: dict[int, EpochPlan] = {}
        self._queues: dict[int, deque[int]] = {}
        self._granted: dict[tuple[int, int], int] = {}  # rows by trainer and epoch
        self._unsaved: dict[tuple[int, int], list[int]] = {}  # (epoch, slice): [first row, rows] since the commit
        self._skipped: list[list[int]] = []
        self._reports: dict[int, CursorRequest] = {}
        self._pending: Cursor | None = None
        self._num_drafts = 0

    # -- epochs and leases

    def open_epoch(self, asked: EpochRequest) -> tuple[dict[int, int], EpochPlan | None]:
        """A trainer begins an epoch: rows already done of it, by slice; the plan when this is the first to say so.

        Raises:
            RowLedgerError: the trainers read different data, or others than the checkpoint was made of.
        """
        epoch, plan = asked.epoch, EpochPlan.from_request(asked)
        first, done = self._begun
        if not first <= epoch < max(self._num_epochs, first + 1):
            raise RowLedgerError(f"epoch {epoch} was begun; the job has {self._num_epochs} and stands in {first}")
        known = self._plans.get(epoch)
        if known is not None:
            if known != plan or list(known.sizes) != list(plan.sizes):
                raise RowLedgerError(
                    "the trainers do not read the same data: the fingerprint, the number of rows or the order of slices"
                    " differs. Every trainer must see the same files under data.train.",
                    "data",
                )
            return (dict(done) if epoch == first else {}), None
        if epoch == first and self._saved_position is not None:
            _check_same_data(plan, self._saved_position)
        here = done if epoch == first else {}
        if any(rows > plan.sizes.get(index, -1) for index, rows in here.items()):
            raise RowLedgerError("the checkpoint knows slices that the data does not have", "data")
        self._plans[epoch] = plan
        self._queues[epoch] = deque(index for index, rows in plan.sizes.items() if here.get(index, 0) < rows)
        return dict(here), plan

    def lease(self, rank: int, epoch: int) -> list[int]:
        """The next slices of an epoch for a trainer; empty when it gets no more. Each is given once in an attempt.

        Trainers step together, so one that reads ahead must not take the others' rows: nobody gets more once it has
        its share, rounded up to a slice. So all slices are given when everyone has asked until there were no more.
        """
        queue = self._queues.get(epoch)
        if queue is None:
            raise RowLedgerError(f"a lease of epoch {epoch} was asked for before the epoch was begun")
        sizes, done = self._plans[epoch].sizes, self._begun[1] if epoch == self._begun[0] else {}
        share = -(-(sum(sizes.values()) - sum(done.values())) // self._num_trainers)
        wanted = max(1, min(_LARGEST_LEASE, len(queue) // (4 * self._num_trainers)))
        leased: list[int] = []
        while queue and len(leased) < wanted and self._granted.get((rank, epoch), 0) < share:
            index = queue.popleft()
            leased.append(index)
            rows = sizes[index] - done.get(index, 0)
            self._granted[rank, epoch] = self._granted.get((rank, epoch), 0) + rows
        return leased

    # -- cursors

    def report(self, rank: int, asked: CursorRequest) -> Cursor | None:
        """What one trainer has trained since its report before; the cursor once all have reported.

        Raises:
            RowLedgerError: reports do not fit together: nothing may be saved.
        """
        if self._pending is not None:
            raise RowLedgerError("a cursor was asked for while another waits for its commit")
        if rank in self._reports:
            raise RowLedgerError(f"trainer {rank} asked twice for one cursor")
        others = next(iter(self._reports.values()), asked)
        if others.step != asked.step:
            raise RowLedgerError(f"trainers save at different steps: {others.step} and {asked.step}")
        self._reports[rank] = asked
        if len(self._reports) < self._num_trainers:
            return None
        reports, self._reports = self._reports, {}
        return self._move(asked.step, reports)

    def commit_finished(self, cursor: Cursor, *, committed: bool) -> None:
        """The cursor's checkpoint is committed, or has failed: then its rows count for the next one."""
        if committed:
            self._committed = dict(cursor.body)
        if cursor is not self._pending:
            return  # of an attempt that is gone
        self._pending = None
        if committed:
            self._unsaved, self._skipped = {}, []

    def is_last(self, cursor: Cursor) -> bool:
        """Whether nothing is left to train after it."""
        return bool(cursor.body["position"]["epoch"] >= self._num_epochs)

    def _move(self, step: int, reports: Mapping[int, CursorRequest]) -> Cursor:
        place = self._place
        runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for report in reports.values():
            for epoch, index, start, rows in report.spans:
                runs.setdefault((epoch, index), []).append((start, rows))
        if step < place.step or (step == place.step and runs and place.step > 0):
            raise RowLedgerError(f"rows were trained, but the step is {step} after {place.step}")
        moved: dict[tuple[int, int], tuple[int, int]] = {}
        for (epoch, index), pieces in runs.items():
            size = self._plans[epoch].sizes.get(index) if epoch in self._plans else None
            if size is None:
                raise RowLedgerError(f"slice {index} of epoch {epoch} was trained, which no plan holds")
            before = place.done.get(index, 0) if epoch == place.epoch else 0 if epoch > place.epoch else size
            moved[epoch, index] = (before, _tile(epoch, index, before, size, pieces) - before)
        done = dict(place.done)
        epoch = place.epoch
        for number in sorted({epoch, *(e for e, _ in runs)}):
            if number > epoch:
                raise RowLedgerError(
                    f"epoch {number} was begun before {_first_gap(self._plans.get(epoch), done, epoch)}"
                )
            done.update({index: start + rows for (e, index), (start, rows) in moved.items() if e == number})
            plan = self._plans.get(number)
            if plan is not None and done == dict(plan.sizes):
                epoch, done = number + 1, {}
        self._place = _Place(epoch, done, step, place.rows + sum(rows for _, rows in moved.values()))
        for key, (start, rows) in moved.items():
            self._unsaved.setdefault(key, [start, 0])[1] += rows
        self._skipped += [list(span) for report in reports.values() for span in report.skipped]
        self._num_drafts += 1
        draft = f".step-{step}-attempt-{self._attempt}-draft-{self._num_drafts}"
        self._pending = Cursor(step, draft, self._body(draft))
        return self._pending

    def _body(self, draft: str) -> dict[str, Any]:
        place = self._place
        plan = self._plans.get(place.epoch) or self._plans.get(place.epoch - 1)
        if plan is not None:
            data = {"fingerprint": plan.fingerprint, "order": plan.order, "seed": plan.seed}
        else:  # nothing was trained since the checkpoint that this attempt began with
            data = {k: v for k, v in (self._committed or {"position": {}})["position"].items() if k != "done"}
        return {
            "version": CURSOR_VERSION,
            **self._facts,
            "step": place.step,
            "attempt": self._attempt,
            "draft": draft,
            "parent": self._committed["draft"] if self._committed else None,
            "rows": place.rows,
            "position": {
                **data,
                "epoch": place.epoch,
                "num_trainers": self._num_trainers,
                "done": sorted([index, rows] for index, rows in place.done.items() if rows),
            },
            "spans": sorted([epoch, index, *run] for (epoch, index), run in self._unsaved.items()),
            "skipped": sorted(self._skipped),
        }


def _tile(epoch: int, index: int, before: int, size: int, pieces: Sequence[tuple[int, int]]) -> int:
    """The row after the pieces, which must follow each other from row `before` on."""
    end = before
    for start, rows in sorted(pieces):
        if rows <= 0:
            raise RowLedgerError(f"slice {index} of epoch {epoch}: a span of {rows} rows")
        if start < end:
            raise RowLedgerError(
                f"slice {index} of epoch {epoch}: rows {start} to {min(end, start + rows)} trained twice"
            )
        if start > end:
            raise RowLedgerError(f"slice {index} of epoch {epoch}: rows {end} to {start} left out")
        end = start + rows
    if end > size:
        raise RowLedgerError(f"slice {index} of epoch {epoch}: {end} rows trained of {size}")
    return end


def _first_gap(plan: EpochPlan | None, done: Mapping[int, int], epoch: int) -> str:
    for index, size in (plan.sizes if plan else {}).items():
        if done.get(index, 0) < size:
            return f"rows {done.get(index, 0)} to {size} of slice {index} of epoch {epoch} were trained"
    return f"epoch {epoch} was trained"


def _check_same_data(plan: EpochPlan, position: Mapping[str, Any]) -> None:
    remedies = {
        "fingerprint": "files were added, removed or rewritten in data.train: put the old ones back",
        "order": "set data.shuffle and data.memory_bytes back",
        "seed": "set the seed back",
    }
    for key, remedy in remedies.items():
        was, now = position[key], getattr(plan, key)
        if was != now:
            raise RowLedgerError(
                f"the checkpoint stands in the middle of epoch {position['epoch']} of other data ({key} was {was},"
                f" now {now}): {remedy}, or start anew with --from-scratch",
                "data",
            )


# ----------------------------------------------------------------------------------------------------------- the proof


@dataclass(frozen=True)
class EpochProof:
    """How often the rows of an epoch were trained in one line of checkpoints."""

    epoch: int
    num_rows: int
    num_trained: int
    num_repeated: int
    num_missing: int
    num_skipped: int
    """Of those trained: rows of steps whose gradients were not finite, so that they changed nothing."""

    @property
    def is_exact(self) -> bool:
        """Every row once."""
        return self.num_missing == 0 and self.num_repeated == 0


def prove(plans: Mapping[int, Mapping[int, int]], line: Iterable[Mapping[str, Any]]) -> list[EpochProof]:
    """Counts from the spans alone, trusting nothing else.

    Args:
        plans: rows by slice, for each epoch.
        line: cursors from the first to the last checkpoint of a line.
    """
    runs: dict[int, dict[int, list[tuple[int, int]]]] = {epoch: {} for epoch in plans}
    skipped = dict.fromkeys(plans, 0)
    for cursor in line:
        for epoch, index, start, rows in cursor["spans"]:
            runs.setdefault(epoch, {}).setdefault(index, []).append((start, start + rows))
        for epoch, _, _, rows in cursor.get("skipped", ()):
            skipped[epoch] = skipped.get(epoch, 0) + rows
    proofs = []
    for epoch in sorted(runs):
        sizes = plans.get(epoch, {})
        covered = repeated = 0
        for index, pieces in runs[epoch].items():
            end = 0
            for start, stop in sorted(pieces):
                inside = max(0, min(stop, sizes.get(index, 0)) - max(start, end))
                covered += inside
                repeated += stop - start - inside
                end = max(end, stop)
        total = sum(sizes.values())
        proofs.append(EpochProof(epoch, total, covered + repeated, repeated, total - covered, skipped.get(epoch, 0)))
    return proofs
