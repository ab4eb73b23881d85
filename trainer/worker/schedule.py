"""What is due when in a job, and how fast it learns: the loop's schedule from the job's blocks."""

from __future__ import annotations

from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.loop.early_stopping import due
from paddlewheel.trainer.loop.lr_schedule import rate_factor
from paddlewheel.trainer.worker.day_boundaries import Boundaries
from paddlewheel.trainer.worker.epoch_data import Epochs


class JobSchedule:
    """A `loop.train.Schedule`; the same on all trainers.

    Args:
        spec: of the trainer.
        epochs: all that is trained on.
        boundaries: that the tables have behind them.
    """

    def __init__(self, spec: TrainerSpec, epochs: Epochs, boundaries: Boundaries) -> None:
        self._train, self._every_steps = spec.job.train, spec.job.checkpoint.every_steps
        self._rows, self._by_days, self._boundaries = epochs.num_rows, spec.days is not None, boundaries
        self._total_steps = epochs.num_steps(spec.job.data.batch_rows * spec.num_trainers)

    def checkpoint(self, step: int) -> bool:
        """By `checkpoint.every_steps`."""
        return self._every_steps is not None and step % self._every_steps == 0

    def evaluation(self, step: int) -> bool:
        """By `train.evaluation`."""
        return due(self._train.evaluation, step)

    def boundary(self, taken_rows: int) -> bool:
        """Whether rows make a boundary here, and more rows follow."""
        return not self._by_days and taken_rows < self._rows and bool(self._boundaries.due(taken_rows))

    def dense_rate(self, step: int) -> float:
        """By `train.dense_optimizer.schedule`."""
        return rate_factor(self._train.dense_optimizer.schedule, step, self._total_steps)

    def table_rate(self, step: int) -> float:
        """The same, if `train.scheduled_tables` says so."""
        return self.dense_rate(step) if self._train.scheduled_tables else 1.0
