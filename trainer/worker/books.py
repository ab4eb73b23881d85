"""The books of a trainer: rows trained and left out, the curve of its loss, and what it tells as it goes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.trainer.loop.embedding_pipeline import Traffic
from paddlewheel.trainer.loop.loss_curve import LossCurve
from paddlewheel.trainer.loop.span_log import TrainedSpans
from paddlewheel.trainer.loop.train import StepTaken, TrainLoop
from paddlewheel.trainer.protocol.messages import Progress
from paddlewheel.trainer.worker.context import WorkerContext
from paddlewheel.trainer.worker.epoch_data import Epochs
from paddlewheel.trainer.worker.table_lifecycle import TableLifecycle

_SECONDS_BETWEEN_PROGRESS = 0.5


class TrainingBooks:
    """Since the start of this attempt, unless it says otherwise.

    Args:
        context: of this trainer.
        epochs: all that the job trains on.
        loop: whose steps are entered.
        life: of the tables.
    """

    def __init__(self, context: WorkerContext, epochs: Epochs, loop: TrainLoop, life: TableLifecycle) -> None:
        self._context, self._epochs, self._loop, self._life = context, epochs, loop, life
        self.spans, self.curve, self.traffic = TrainedSpans(), LossCurve(), Traffic()
        self._data_counters: Counter[str] = Counter()  # of epochs that are over
        self._own_left_out: Counter[str] = Counter()  # of this trainer's batches
        self._left_out_before: Counter[str] = Counter()  # of all trainers, before the restored checkpoint
        self._loader: Loader | None = None
        self._started = self._reported = time.monotonic()
        self._rows_before = self._taken_before = 0

    def open(self, left_out: Mapping[str, int]) -> None:
        """Training begins, after whatever was restored. left_out: `left_out_totals` of the restored checkpoint."""
        self._left_out_before = Counter(left_out)
        self._started = self._reported = time.monotonic()
        self._rows_before, self._taken_before = self._loop.progress.rows, self._loop.progress.taken

    def begin_epoch(self, loader: Loader) -> None:
        """The rows of an epoch come from here."""
        self._loader = loader

    def end_epoch(self, loader: Loader) -> None:
        """The loader's counts are final."""
        self._data_counters.update(loader.counters)
        self._loader = None

    def enter(self, step: StepTaken) -> None:
        """A step of the loop; tells how training goes, every half second."""
        progress, batch = self._loop.progress, step.batch
        if batch is not None:
            self.spans.add(progress.epoch, batch.spans, skipped=step.skipped)
            taken = sum(span.num_rows for span in batch.spans)
            self._own_left_out["skipped_rows"] += batch.num_skipped_rows
            self._own_left_out["left_out_rows"] += taken - batch.num_rows - batch.num_skipped_rows
        if not step.skipped and progress.last_loss is not None:
            self.curve.add(progress.step, progress.last_loss)
        now = time.monotonic()
        if now - self._reported >= _SECONDS_BETWEEN_PROGRESS or progress.step == 1:
            self._reported = now
            self.report()
            self._loop.running.decay(0.98)

    def pace(self) -> dict[str, Any]:
        """Seconds since training began, and rows a second."""
        seconds = time.monotonic() - self._started
        return {"seconds": seconds, "rows_per_second": (self._loop.progress.rows - self._rows_before) / seconds}

    def left_out(self) -> dict[str, Any]:
        """What the readers of all trainers did not hand to training: rows, and ids of lists that were too long.

        Of the whole run. Rows are those of the steps taken; unreadable rows and truncated ids are counted by readers,
        which are some batches ahead, so a restart may count a few twice.
        """
        counters = self._counters()

        def total(name: str, own: Mapping[str, int]) -> int:
            return self._left_out_before[name] + sum(self._context.group.all_gather(own.get(name, 0)))

        lists = [feature.name for feature in self._context.spec.job.data.sparse if feature.multi_valued]
        truncated = {name: total(f"truncated_ids.{name}", counters) for name in lists}
        return {
            "skipped_rows": total("skipped_rows", self._own_left_out),  # those of unreadable files among them
            "unreadable_rows": total("unreadable_rows", counters),
            "left_out_rows": total("left_out_rows", self._own_left_out),  # by train.negative_sampling
            "truncated_ids": {name: ids for name, ids in truncated.items() if ids},
        }

    def left_out_totals(self) -> dict[str, int]:
        """`left_out` by the counters' names, for a checkpoint."""
        found = self.left_out()
        truncated = found.pop("truncated_ids")
        return {**found, **{f"truncated_ids.{name}": ids for name, ids in truncated.items()}}

    def _counters(self) -> Counter[str]:
        """What this trainer's readers have counted so far."""
        counted = Counter(self._data_counters)
        if self._loader is not None:
            counted.update(dict(self._loader.counters))  # a copy in one go: threads of the reader add names to it
        return counted

    def report(self) -> None:
        """The progress event."""
        progress, traffic = self._loop.progress, self.traffic
        seconds = time.monotonic() - self._started
        rate = (progress.rows - self._rows_before) / seconds if seconds > 0 else 0.0
        counters = self._counters()
        tables, new_keys = self._life.figures()
        waits = {
            "servers_pull": traffic.pulls,
            "servers_push": traffic.pushes,
            "lease": self._context.coordinator.lease_waits,
        }
        days = self._context.spec.days
        told = Progress(
            epoch=progress.epoch,
            epochs=self._epochs.num_epochs,
            day=days[progress.epoch] if days is not None else None,
            step=progress.step,
            rows=progress.rows,
            total_rows=self._epochs.num_rows,
            loss=progress.last_loss,
            auc=self._loop.running.report().auc,
            rows_per_second=rate,
            seconds_left=self._seconds_left(seconds),
            bad_steps=progress.bad_steps,
            phase_seconds=self._loop.phases.seconds,
            own_rows=progress.own_rows,
            bad_rows=progress.bad_rows,
            skipped_rows=counters["skipped_rows"],
            truncated_ids=sum(ids for name, ids in counters.items() if name.startswith("truncated_ids.")),
            pulled_keys=traffic.pulled_keys,
            pulled_bytes=traffic.pulled_bytes,
            pushed_bytes=traffic.pushed_bytes,
            staleness_steps=traffic.staleness_steps,
            ready_batches=traffic.ready_batches,
            tables=tables,
            new_keys_of_features=new_keys,
            durations={
                name: histogram.message() for name, histogram in {**self._loop.phases.durations, **waits}.items()
            },
        )
        self._context.link.send(told)

    def _seconds_left(self, seconds: float) -> float | None:
        """At the pace of the seconds since the start. Rows that are left out are gone through, too."""
        taken = self._loop.progress.taken
        done = taken - self._taken_before
        return (self._epochs.num_rows - taken) * seconds / done if done > 0 else None
