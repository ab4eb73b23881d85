"""The training step, in the order the data takes through it.

All trainers run the same steps: one AllReduce a step carries the dense gradients, the row weight and the control flags.
So every decision (skip, stop, checkpoint, end of epoch) is taken by all at the same step without another message.

Legend: T trainers.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.trainer.dense.protocols import DenseBackend
from paddlewheel.trainer.distributed.process_group import ProcessGroup
from paddlewheel.trainer.job.train import WireType
from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingPipeline
from paddlewheel.trainer.loop.metrics import ClickMetrics
from paddlewheel.trainer.protocol.messages import SaveCheckpoint, StopTraining
from paddlewheel.trainer.telemetry import DurationHistogram


class Slot(IntEnum):
    """Places behind the gradients in the AllReduce buffer; every one is a sum over trainers.

    They are float32, which holds whole numbers up to 2**24. `JobConfig` keeps the usable rows of a step (ROWS) below
    that. The rows that a step takes have no bound, since unusable ones come with the batch around them: they travel as
    two digits (TAKEN and TAKEN_HIGH, to the base `_DIGIT`).
    """

    LOSS = 0
    WEIGHT = 1
    ROWS = 2
    TAKEN = 3
    TAKEN_HIGH = 4
    BAD = 5
    STOP = 6
    CHECKPOINT = 7


_DIGIT = 4096


class BadStepsError(RuntimeError):
    """More steps than allowed had a loss or gradient that is not finite. To start again would not help."""


class RowsLostError(RuntimeError):
    """An epoch trained another number of rows than the data holds. To start again would not help."""


@dataclass
class Phases:
    """Seconds spent in each phase of the step, by name: in all, and how often how long."""

    seconds: dict[str, float] = field(default_factory=dict)
    durations: dict[str, DurationHistogram] = field(default_factory=lambda: defaultdict(DurationHistogram))
    _mark: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """Begin a step."""
        self._mark = time.perf_counter()

    def end(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._mark
        self.durations[phase].observe(now - self._mark)
        self._mark = now


@dataclass
class Progress:
    """Where training stands. Rows and loss are those of all trainers; own_rows are this trainer's.

    Counts are of the whole run, over restarts (`state`); `epoch_rows`, `epoch_taken` and `own_rows` are of this
    attempt. `epoch_taken` are the rows that this attempt has taken from the epoch: trained ones, those of
    skipped steps, and those that the reader left out as unusable. `taken` are those of all epochs and attempts, as
    the cursor counts.
    """

    epoch: int = 0
    step: int = 0
    rows: int = 0
    taken: int = 0
    own_rows: int = 0
    epoch_rows: int = 0
    epoch_taken: int = 0
    bad_steps: int = 0
    bad_rows: int = 0
    loss_sum: float = 0.0
    weight_sum: float = 0.0
    last_loss: float | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint must say of the run's counts, beside its cursor; JSON values."""
        return {name: getattr(self, name) for name in _KEPT}

    def load_state(self, state: Mapping[str, Any] | None, cursor: Mapping[str, Any]) -> None:
        """Go on from `state()` and the cursor of one checkpoint. Without a state every row taken counts as trained."""
        self.step, self.epoch = cursor["step"], cursor["position"]["epoch"]
        self.rows = self.taken = cursor["rows"]
        for name in _KEPT:
            setattr(self, name, (state or {}).get(name, getattr(self, name)))


_KEPT = ("rows", "bad_steps", "bad_rows", "loss_sum", "weight_sum", "last_loss")


@dataclass
class Signals:
    """Set from other threads, read once a step. A request of any trainer counts for all.

    Attributes:
        stop: leave after the next step.
        save_before_stop: with a checkpoint of that step; set it before `stop`.
        checkpoint: at the next step.
    """

    stop: bool = False
    save_before_stop: bool = False
    checkpoint: bool = False

    def obey(self, command: SaveCheckpoint | StopTraining) -> None:
        """Takes a command of the coordinator. The loop may look at any moment, and never sees half of it."""
        if isinstance(command, SaveCheckpoint):
            self.checkpoint = True
        else:
            self.save_before_stop = command.checkpoint
            self.stop = True


@dataclass(frozen=True)
class StepTaken:
    """A step was taken: with this trainer's batch, if it had one. skipped: it was not finite, and changed nothing."""

    batch: Batch | None
    skipped: bool


@dataclass(frozen=True)
class CheckpointDue:
    """At the same step on all trainers, with no push in flight on this one."""


@dataclass(frozen=True)
class BoundaryDue:
    """A day boundary with its checkpoint: nothing is in flight on this trainer until the loop goes on."""


@dataclass(frozen=True)
class EvaluationDue:
    """No push is in flight on any trainer. Who leaves the loop here ends training."""


@dataclass(frozen=True)
class EpochOver:
    """No trainer has rows left, and the pushes of all are applied. The last one."""


@dataclass(frozen=True)
class Stopped:
    """A stop was agreed on before the epoch was over; the pushes of this trainer are applied. The last one."""


Due = StepTaken | CheckpointDue | BoundaryDue | EvaluationDue | EpochOver | Stopped


class Schedule(Protocol):
    """What is due when, and how fast is learnt: the same on all trainers."""

    def checkpoint(self, step: int) -> bool:
        """Whether a checkpoint follows a step (the first is 1)."""
        ...

    def evaluation(self, step: int) -> bool:
        """Whether an evaluation follows a step, within an epoch."""
        ...

    def boundary(self, taken_rows: int) -> bool:
        """Whether a day boundary follows so many rows, within an epoch."""
        ...

    def dense_rate(self, step: int) -> float:
        """Factor on the dense learning rate in a step; the first is 0."""
        ...

    def table_rate(self, step: int) -> float:
        """The same for the learning rates of the tables."""
        ...


class NothingDue:
    """A `Schedule` of training alone, at constant learning rates."""

    def checkpoint(self, step: int) -> bool:
        """Never."""
        return False

    def evaluation(self, step: int) -> bool:
        """Never."""
        return False

    def boundary(self, taken_rows: int) -> bool:
        """Never."""
        return False

    def dense_rate(self, step: int) -> float:
        """As the job says."""
        return 1.0

    def table_rate(self, step: int) -> float:
        """As the job says."""
        return 1.0


@dataclass(frozen=True)
class _Agreed:
    """What all trainers agreed on in one step."""

    taken: StepTaken
    epoch_over: bool
    stop: bool
    checkpoint: bool


class TrainLoop:
    """Runs epochs over an `EmbeddingPipeline`. One per trainer; call from the main thread.

    Args:
        program: dense part.
        sync: the trainers' group.
        max_nonfinite_steps: see `TrainConfig.max_nonfinite_steps`.
        schedule: what is due when.
        wire: see `TrainConfig.allreduce_dtype`.
    """

    def __init__(
        self,
        program: DenseBackend,
        sync: ProcessGroup,
        *,
        max_nonfinite_steps: int,
        signals: Signals,
        schedule: Schedule,
        wire: WireType = "float32",
    ) -> None:
        self._program, self._sync, self._signals, self._schedule = program, sync, signals, schedule
        self._max_bad_steps = max_nonfinite_steps
        self._buffer = program.buffer(len(Slot), wire)
        self.progress = Progress()
        self.running = ClickMetrics(bits=14)
        self.phases = Phases()

    def run(self, pipeline: EmbeddingPipeline, *, rows_left: int, synchronous: bool) -> Iterator[Due]:
        """Train until no trainer has rows left or a stop is agreed on; yields what is due at the place where it is.

        All trainers meet the same things at the same steps (but for the batches in `StepTaken`), and training stands
        still until the next one is asked for.

        Args:
            pipeline: this trainer's batches of the epoch (or of what is left of it).
            rows_left: rows that all trainers together will take, if none is lost.
            synchronous: after every step, wait until all trainers' pushes are applied (`pipeline` must `wait_for_all`).

        Raises:
            BadStepsError, RowsLostError, PeerLostError, and whatever reading, pulling or pushing raised.
        """
        progress, schedule = self.progress, self._schedule
        progress.epoch_rows = progress.epoch_taken = 0
        pipeline.wait_for_first()  # however long reading takes one of them: within a step, 30 s is all that gloo waits
        self._sync.long_barrier()
        while True:
            agreed = self._step(pipeline)
            yield agreed.taken
            at_boundary = schedule.boundary(progress.taken)
            if agreed.checkpoint or agreed.epoch_over or synchronous or at_boundary:
                pipeline.drain()
            if synchronous:
                self._sync.barrier()
                pipeline.release()
            if at_boundary:
                with pipeline.held():
                    yield BoundaryDue()
            elif agreed.checkpoint:
                yield CheckpointDue()
            if agreed.epoch_over:
                if progress.epoch_taken != rows_left:
                    raise RowsLostError(
                        f"epoch {progress.epoch} ended after {progress.epoch_taken} rows of {rows_left}: the "
                        "files in data.train are no longer what they were when the epoch began. Leave them as they are "
                        "while the job runs, and train again; if nobody changed them, this is a mistake in paddlewheel"
                    )
                self._sync.barrier()  # whoever evaluates or saves now sees the pushes of all
                yield EpochOver()
                return
            if agreed.stop:  # before an evaluation: a resumed run makes up for it
                pipeline.drain()
                yield Stopped()
                return
            if schedule.evaluation(progress.step):
                pipeline.drain()
                self._sync.barrier()
                yield EvaluationDue()

    def _step(self, pipeline: EmbeddingPipeline) -> _Agreed:
        program, progress, phases, buffer = self._program, self.progress, self.phases, self._buffer
        phases.start()
        item = next(pipeline, None)
        phases.end("wait")
        buffer.clear()
        tail = buffer.tail
        gradients = None
        if item is not None:
            taken = sum(span.num_rows for span in item.batch.spans)
            tail[Slot.TAKEN_HIGH], tail[Slot.TAKEN] = divmod(taken, _DIGIT)
        if item is not None and item.batch.num_rows:
            batch = item.batch
            gradients = program.gradients(batch, item.rows)
            phases.end("compute")
            tail[Slot.ROWS] = batch.num_rows
            progress.own_rows += batch.num_rows
            if gradients.finite:
                buffer.take(gradients)
                self.running.update(gradients.logit_BY[:, 0], batch.labels_BL[:, 0])
            else:
                tail[Slot.BAD] = 1.0
        requested = self._signals
        tail[Slot.STOP] = requested.stop
        tail[Slot.CHECKPOINT] = requested.checkpoint or (tail[Slot.STOP] > 0 and requested.save_before_stop)
        if tail[Slot.CHECKPOINT]:
            requested.checkpoint = False
        buffer.sum(self._sync)
        phases.end("allreduce")
        agreed = {slot: float(tail[slot]) for slot in Slot}
        taken = int(agreed[Slot.TAKEN_HIGH]) * _DIGIT + int(agreed[Slot.TAKEN])
        epoch_over = taken == 0
        progress.step += not epoch_over
        progress.rows += int(agreed[Slot.ROWS])
        progress.epoch_rows += int(agreed[Slot.ROWS])
        progress.epoch_taken += taken
        progress.taken += taken
        bad = agreed[Slot.BAD] > 0 or not np.isfinite(agreed[Slot.LOSS])
        if agreed[Slot.ROWS] > 0 and not bad and agreed[Slot.WEIGHT] > 0:
            factor = self._schedule.dense_rate(progress.step - 1)
            buffer.apply(agreed[Slot.WEIGHT], rate_factor=factor)
            progress.loss_sum += agreed[Slot.LOSS]
            progress.weight_sum += agreed[Slot.WEIGHT]
            progress.last_loss = agreed[Slot.LOSS] / agreed[Slot.WEIGHT]
        phases.end("apply")
        if item is not None:
            if bad or gradients is None:
                item.discard()
            else:
                item.push(gradients.tables, rate=self._schedule.table_rate(progress.step - 1))
            phases.end("push")
        if bad:
            self._count_bad_step(int(agreed[Slot.ROWS]))
        due = not epoch_over and self._schedule.checkpoint(progress.step)
        step = StepTaken(None if item is None else item.batch, bad)
        return _Agreed(step, epoch_over, agreed[Slot.STOP] > 0, due or agreed[Slot.CHECKPOINT] > 0)

    def _count_bad_step(self, rows: int) -> None:
        self.progress.bad_steps += 1
        self.progress.bad_rows += rows
        if self.progress.bad_steps > self._max_bad_steps:
            raise BadStepsError(
                f"{self.progress.bad_steps} steps ({self.progress.bad_rows} rows) had a loss or gradient that is not "
                f"finite; train.max_nonfinite_steps allows {self._max_bad_steps}. Look at the data with `paddlewheel "
                "data check`, lower the learning rates, or raise the limit."
            )
