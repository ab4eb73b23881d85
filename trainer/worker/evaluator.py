"""Evaluations of one attempt: which was the best, and whether to go on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from paddlewheel.data_pipeline.dataset import Dataset, assign, plan_epoch
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.trainer.loop.early_stopping import EarlyStopping, due, due_after_epoch
from paddlewheel.trainer.loop.evaluate import evaluate
from paddlewheel.trainer.loop.train import Progress
from paddlewheel.trainer.protocol.messages import Evaluation, PhaseChanged
from paddlewheel.trainer.worker.context import WorkerContext

_SECONDS_BETWEEN_PROGRESS = 0.5


class Evaluator:
    """All trainers have one, and call it at the same steps; each reads its share of the rows.

    Args:
        context: an evaluation is broken off when its signals ask to stop.
        data: the job's evaluation rows; None: there are none, and nothing is judged.
    """

    def __init__(self, context: WorkerContext, data: Dataset | None) -> None:
        self._context, self._data = context, data
        self._config = context.spec.job.train.evaluation
        self._best = EarlyStopping(self._config)
        self.evaluations: list[dict[str, Any]] = []

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation so far."""
        return self._best.step

    @property
    def stopped_early(self) -> bool:
        """Whether `patience` evaluations were without improvement."""
        return self._best.exhausted

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON values."""
        return {"best": self._best.state(), "all": self.evaluations}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self._best.load_state(state["best"])
        self.evaluations = list(state["all"])

    def is_owed(self, step: int, *, ended_epoch: int | None, epochs: int) -> bool:
        """True if the run may have crashed between saving the restored checkpoint, of this step, and finishing its
        evaluation (best mark, early stop).

        ended_epoch: the epoch that ended at this step, if one did.
        """
        return self._context.spec.restore is not None and (
            due(self._config, step)
            or (ended_epoch is not None and due_after_epoch(self._config, ended_epoch, epochs))
            or self._best.step == step
            or self._best.exhausted
        )

    def judge(self, progress: Progress) -> bool:
        """Evaluate this step, if that has not been done; whether its checkpoint is to be kept as the best."""
        if self._data is None:
            return False
        if not self.evaluations or self.evaluations[-1]["step"] != progress.step:
            report = self.evaluate(self._data)
            verdict = self._best.observe(progress.step, report)
            told = Evaluation(
                step=progress.step,
                epoch=progress.epoch,
                trained_rows=progress.rows,
                loss=progress.last_loss,
                best=verdict.best,
                report=report,
            )
            self.evaluations.append({**told.model_dump(exclude={"event", "report"}), **report})
            self._context.link.send(told)
            self._context.link.send(PhaseChanged(phase="training"))
        return self._best.step == progress.step and self._config.save_best

    def judge_final(self, step: int, report: Mapping[str, Any]) -> bool:
        """Whether the final evaluation, of the checkpoint just saved, is the best of all."""
        return self._best.observe(step, report).best

    def best(self) -> dict[str, Any]:
        """The best evaluation: its step and metric."""
        return {"step": self._best.step, self._config.metric: self._best.value}

    def evaluate(self, data: Dataset) -> dict[str, Any]:
        """Scores all rows, with the others; the report, and its `seconds`.

        Raises:
            BrokenOffError: the job is to stop; on all trainers.
        """
        context, job = self._context, self._context.spec.job
        context.link.send(PhaseChanged(phase="evaluating"))
        slices = assign(plan_epoch(data, job.seed, 0), context.spec.num_trainers, context.spec.rank)
        started = reported = time.monotonic()
        scored = 0

        def on_rows(rows: int) -> None:
            nonlocal scored, reported
            scored += rows
            if time.monotonic() - reported > _SECONDS_BETWEEN_PROGRESS:
                reported = time.monotonic()
                context.link.send(PhaseChanged(phase="evaluating", rows=scored))

        with Loader(data, job.data, slices, seed=job.seed, epoch=0, training=False) as loader:
            report = evaluate(
                context.program,
                context.client,
                context.group,
                iter(loader),
                labels=job.data.labels,
                weighted=job.data.sample_weight is not None,
                on_rows=on_rows,
                is_to_stop=lambda: context.signals.stop,
            )
        return {**report, "seconds": time.monotonic() - started}
