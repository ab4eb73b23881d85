"""Table maintenance on day boundaries (decay, eviction) and table-size statistics.

All trainers make one and call it at the same steps; trainer 0 alone speaks with the servers about whole tables.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paddlewheel.pserver.saved_tables import SavedTable, count_embeddings, row_bytes
from paddlewheel.trainer.loop.new_keys import NewKeyCounter
from paddlewheel.trainer.protocol.messages import (
    Boundary,
    BoundaryTable,
    DayTable,
    DayTrained,
    TableFigures,
    Validation,
)
from paddlewheel.trainer.worker.context import WorkerContext, tables_of
from paddlewheel.trainer.worker.day_boundaries import Boundaries

_SECONDS_BETWEEN_COUNTS, _SHARE_OF_COUNTS = 10.0, 0.02
_FEATURES_TOLD = 20


@dataclass
class _Day:
    """What a checkpoint must remember of the day that it stands in, or at the end of."""

    epoch: int = -1
    rows: int = 0
    keys_at_start: dict[str, int] = field(default_factory=dict)
    validation: dict[str, Any] | None = None
    seconds: float | None = None
    """Once it is over."""


class TableLifecycle:
    """See the module.

    Args:
        context: of this trainer; without days in its spec, boundaries come by rows.
        growth: this trainer's counts.
    """

    def __init__(self, context: WorkerContext, growth: NewKeyCounter) -> None:
        self._tables = tables = tables_of(context.spec.job)
        self._days = days = context.spec.days
        self._client, self._sync, self._link, self._growth = context.client, context.group, context.link, growth
        self.boundaries = Boundaries(tables, by_days=days is not None)
        self._day = _Day()
        self._evicted = dict.fromkeys(tables, 0)
        self._keys: dict[str, tuple[int, ...]] = {}
        self._saved_keys: dict[str, int] = {}
        self._admitted: dict[str, int | None] = {}
        self._skew: dict[str, float] = {}
        self._next_count_at = 0.0

    # -- boundaries

    def run_boundary(self, tables: Sequence[str], position: int, *, rows: int, redone: bool = False) -> None:
        """The day boundary of these tables. Nothing is in flight on any trainer, and their days are advanced.

        All trainers call it, at the same position (see `Boundaries`), after the checkpoint of that position.
        """
        if self._sync.rank == 0:
            before = self._client.num_keys()
            self._client.end_day(tables)
            self._keys = self._client.num_keys()
            told = {
                name: BoundaryTable(before=sum(before[name]), evicted=sum(before[name]) - sum(self._keys[name]))
                for name in tables
            }
            for name, found in told.items():
                self._evicted[name] += found.evicted
            day = self._days[position - 1] if self._days is not None else None
            self._link.send(Boundary(day=day, rows=rows, tables=told, redone=redone))
        self.boundaries.carried_out(tables, position)
        self._sync.long_barrier()

    # -- days

    def begin_day(self, epoch: int, rows: int) -> None:
        """Rows of this day are about to be trained, the first ones or (after a restore) further ones."""
        if self._day.epoch != epoch:
            self._day = _Day(epoch, rows)
            if self._sync.rank == 0:
                self._keys = self._client.num_keys()
                self._day.keys_at_start = {name: sum(keys) for name, keys in self._keys.items()}

    def on_validated(self, report: Mapping[str, Any]) -> None:
        """The day's rows were scored before any of them was trained."""
        names = ("rows", "auc", "logloss", "calibration", "normalised_entropy", "labels")
        self._day.validation = {name: report[name] for name in names if name in report}
        self._link.send(Validation(day=self._name(self._day.epoch), report=self._day.validation))

    def end_day(self, seconds: float) -> None:
        """All rows of the day are trained; the checkpoint of its end comes next."""
        self._day.seconds = seconds

    def report_day(self, epoch: int) -> None:
        """The checkpoint of this day's end, which `saved` has taken, is committed."""
        day = self._day
        if self._sync.rank != 0 or day.epoch != epoch:
            return
        tables = {
            name: DayTable(keys=count, new=count - day.keys_at_start.get(name, 0), admitted=self._admitted.get(name))
            for name, count in self._saved_keys.items()
        }
        self._link.send(
            DayTrained(
                day=self._name(day.epoch),
                number=day.epoch + 1,
                rows=day.rows,
                seconds=day.seconds,
                validation=day.validation,
                tables=tables,
            )
        )

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON values."""
        return {"boundaries": self.boundaries.state(), "day": asdict(self._day)}

    def load_state(self, state: Mapping[str, Any] | None, position: int) -> None:
        """Go on from `state()`; position: see `Boundaries`."""
        self.boundaries.load_state((state or {}).get("boundaries"), position)
        if state is not None and self._days is not None:
            self._day = _Day(**state["day"])

    def on_saved(self, tables: Mapping[str, SavedTable], *, readable: bool = True) -> None:
        """Take what a save of the tables holds; its parts are the tables' shards. readable: they lie where they say.

        Admitted keys are as of the last full save.
        """
        for name, table in tables.items():
            rows = [part.num_rows if part.num_keys is None else part.num_keys for part in table.parts]
            self._saved_keys[name] = sum(rows)
            if not readable:
                self._admitted[name] = None
            elif table.base is None:  # to count what a save of changes leads to would read the whole table
                self._admitted[name] = count_embeddings(table)
            self._skew[name] = max(rows) * len(rows) / sum(rows) if sum(rows) else 1.0

    # -- how large the tables are

    def figures(self) -> tuple[dict[str, TableFigures], dict[str, int]]:
        """For a progress event: tables as they were last counted, and new keys by feature as of now."""
        now = time.monotonic()
        if self._sync.rank == 0 and now >= self._next_count_at:
            self._keys = self._client.num_keys()
            took = time.monotonic() - now
            self._next_count_at = now + max(_SECONDS_BETWEEN_COUNTS, took / _SHARE_OF_COUNTS)
        new_keys, of_features = self._growth.counts()
        tables = {
            name: TableFigures(
                keys=tuple(self._keys.get(name, ())),
                bytes=sum(self._keys.get(name, ())) * row_bytes(table),
                new=new_keys[name],
                admitted=self._admitted.get(name),
                evicted=self._evicted[name],
                shard_skew=self._skew.get(name),
            )
            for name, table in self._tables.items()
        }
        return tables, dict(of_features.most_common(_FEATURES_TOLD))

    def _name(self, epoch: int) -> str:
        assert self._days is not None
        return self._days[epoch]
