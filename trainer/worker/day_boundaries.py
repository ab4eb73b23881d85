"""When a table's day boundary is due: a pure account of the boundaries that the tables have behind them.

A boundary runs lazily: when training continues, not when a day or stretch of rows is over. A checkpoint therefore holds
the state before the boundary, and a run that resumes from it, in the same process or a later one, finds the boundary
pending and runs it once.

By days, the position is the number of days trained; otherwise it is the number of rows, and each table has its own
`lifecycle.every_rows`. Boundaries follow steps, so a step that passes several multiples (which takes a long stretch of
rows that cannot be used) makes one boundary and not several in a row: decay and unseen days are for keys that training
went by, and nothing was trained between those multiples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paddlewheel.pserver.config import Tables


class Boundaries:
    """The boundaries of the tables of one job.

    Args:
        tables: of the job.
        by_days: whether days make the boundaries; else `lifecycle.every_rows` does.
    """

    def __init__(self, tables: Tables, *, by_days: bool) -> None:
        self._kind = "days" if by_days else "rows"
        every = {name: 1 if by_days else table.lifecycle.every_rows for name, table in tables.items()}
        self._every = {name: size for name, size in every.items() if size is not None}
        self._at = dict.fromkeys(self._every, 0)  # position of the last boundary
        self.counts = dict.fromkeys(self._every, 0)
        """Boundaries carried out so far, by table."""

    def due(self, position: int) -> tuple[str, ...]:
        """The tables that have a boundary between their last one and this position (days or rows trained)."""
        return tuple(name for name, size in self._every.items() if position // size > self._at[name] // size)

    def carried_out(self, tables: Iterable[str], position: int) -> None:
        """These tables have just had theirs, at this position."""
        for name in tables:
            self._at[name] = position
            self.counts[name] += 1

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON values."""
        return {"kind": self._kind, "tables": {name: [self._at[name], self.counts[name]] for name in self._every}}

    def load_state(self, state: Mapping[str, Any] | None, position: int) -> None:
        """Go on from `state()` at a position.

        A table that had no boundaries, or another kind of them, begins to count at the position: nothing is made up
        for.
        """
        known = (state or {}).get("tables", {})
        same_kind = state is not None and state["kind"] == self._kind
        for name in self._every:
            at, count = known.get(name, (position, 0))
            self._at[name], self.counts[name] = (at if same_kind else position), count
