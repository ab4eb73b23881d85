"""Where a job stands in its data: short, exact to the row, and refused where it does not fit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paddlewheel.data_pipeline.dataset import Dataset, Slice, assign, plan_epoch
from paddlewheel.data_pipeline.errors import DataError

_VERSION = 1


@dataclass(frozen=True)
class ReadCursor:
    """Rows done in one epoch, by slice. The cursors of all trainers together are the job's."""

    fingerprint: str
    order_id: str
    seed: int
    epoch: int
    num_trainers: int
    done: Mapping[int, int] = field(default_factory=dict)
    """Rows done by slice index; slices not begun are left out."""

    @classmethod
    def start(cls, dataset: Dataset, seed: int, epoch: int, num_trainers: int) -> "ReadCursor":
        """The beginning of an epoch."""
        return cls(dataset.fingerprint, dataset.order_id, seed, epoch, num_trainers)

    @property
    def num_rows(self) -> int:
        return sum(self.done.values())

    def with_done(self, *parts: Mapping[int, int]) -> "ReadCursor":
        """This cursor after what the trainers' loaders say (`Loader.state()`), which must not contradict
        each other.
        """
        done = dict(self.done)
        owners: dict[int, int] = {}
        for number, part in enumerate(parts):
            for index, rows in part.items():
                if rows < done.get(index, 0):
                    raise ValueError(f"slice {index}: {rows} rows done after {done[index]}")
                if rows > self.done.get(index, 0) and owners.setdefault(index, number) != number:
                    raise ValueError(f"slice {index} was read by trainers {owners[index]} and {number}")
                done[index] = max(rows, done.get(index, 0))
        return ReadCursor(self.fingerprint, self.order_id, self.seed, self.epoch, self.num_trainers, done)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "fingerprint": self.fingerprint,
            "order": self.order_id,
            "seed": self.seed,
            "epoch": self.epoch,
            "num_trainers": self.num_trainers,
            "done": sorted([i, n] for i, n in self.done.items() if n),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ReadCursor":
        """Raises DataError for a version that this code does not read."""
        if content.get("version") != _VERSION:
            raise DataError(
                f"read cursor: version {content.get('version')!r} cannot be read, this is version {_VERSION}"
            )
        return cls(
            fingerprint=content["fingerprint"],
            order_id=content["order"],
            seed=content["seed"],
            epoch=content["epoch"],
            num_trainers=content["num_trainers"],
            done={int(index): int(rows) for index, rows in content["done"]},
        )

    def check(self, dataset: Dataset) -> None:
        """Raises DataError if the data or its cut into slices is not the one that this cursor is about."""
        if self.fingerprint != dataset.fingerprint:
            raise DataError(
                f"read cursor: the data has changed since (fingerprint {self.fingerprint}, now "
                f"{dataset.fingerprint}): files were added, removed or "
                "rewritten. Put the old data back, or begin a new epoch"
            )
        if self.order_id != dataset.order_id:
            raise DataError(
                f"read cursor: it counts rows in {self.order_id}; with the job's data.shuffle and "
                "data.memory_bytes these are now "
                f"{dataset.order_id}. Set them back, or begin a new epoch"
            )
        sizes = {s.index: s.num_rows for s in dataset.slices()}
        wrong: Iterable[int] = (i for i, n in self.done.items() if not 0 <= n <= sizes.get(i, -1))
        for index in wrong:
            raise DataError(
                f"read cursor: slice {index} cannot have {self.done[index]} rows done (it has {sizes.get(index)})"
            )

    def slices(self, dataset: Dataset, num_trainers: int, rank: int) -> list[Slice]:
        """What trainer `rank` reads from here (with `resume=cursor.done`).

        With as many trainers as before, each goes on exactly where it was. With another number, the rows that are
        left are dealt out anew.
        """
        self.check(dataset)
        plan = plan_epoch(dataset, self.seed, self.epoch)
        if num_trainers == self.num_trainers:
            return assign(plan, num_trainers, rank)
        return assign(plan, num_trainers, rank, self.done)
