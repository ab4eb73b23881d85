"""One trainer in one attempt: build or restore, train, save, evaluate. The coordinator decides; this does.

What is asked of the coordinator, and when, is described in coordinator/README.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.data_pipeline.dataset import Dataset, Slice, assign, plan_epoch
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.trainer.checkpoint.store import SavedModel
from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.loop.early_stopping import due_after_epoch
from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingPipeline
from paddlewheel.trainer.loop.evaluate import BrokenOffError
from paddlewheel.trainer.loop.negative_sampling import sample_negatives
from paddlewheel.trainer.loop.new_keys import NewKeyCounter
from paddlewheel.trainer.loop.train import (
    BoundaryDue,
    CheckpointDue,
    EpochOver,
    EvaluationDue,
    Signals,
    StepTaken,
    Stopped,
    TrainLoop,
)
from paddlewheel.trainer.protocol.messages import PhaseChanged, Ready
from paddlewheel.trainer.worker.agent_channel import AgentChannel
from paddlewheel.trainer.worker.agreement import check_same_inputs, dense_hash, known_inputs
from paddlewheel.trainer.worker.books import TrainingBooks
from paddlewheel.trainer.worker.checkpointer import Checkpointer
from paddlewheel.trainer.worker.context import WorkerContext, tables_of
from paddlewheel.trainer.worker.epoch_data import Epochs, open_epochs, training_columns
from paddlewheel.trainer.worker.evaluator import Evaluator
from paddlewheel.trainer.worker.first_biases import first_biases
from paddlewheel.trainer.worker.publish import publish_day
from paddlewheel.trainer.worker.schedule import JobSchedule
from paddlewheel.trainer.worker.table_lifecycle import TableLifecycle


class Trainer:
    """A trainer from its spec to its result.

    Building it restores the checkpoint that the spec names and ends when all trainers are as far.

    Raises:
        ValueError (ConfigError, DataError, CheckpointError): the job, its data or its checkpoint cannot be used.
    """

    def __init__(self, spec: TrainerSpec, link: AgentChannel, signals: Signals, resources: ExitStack) -> None:
        link.send(PhaseChanged(phase="loading"))
        self._spec, job = spec, spec.job
        self._trains = spec.mode == "train"
        self._eval_data = Dataset.open(job.data.eval, job.data) if job.data.eval else None
        self._epochs = open_epochs(spec) if self._trains else Epochs({}, 0)
        self._inputs = known_inputs(spec, self._epochs if self._trains else None, self._eval_data)
        self._context = context = WorkerContext.open(spec, link, signals, resources)
        self._growth = NewKeyCounter()
        self._life = TableLifecycle(context, self._growth)
        self._loop = TrainLoop(
            context.program,
            context.group,
            max_nonfinite_steps=job.train.max_nonfinite_steps,
            signals=signals,
            schedule=JobSchedule(spec, self._epochs, self._life.boundaries),
            wire=job.train.allreduce_dtype,
        )
        self._progress = self._loop.progress
        self._books = TrainingBooks(context, self._epochs, self._loop, self._life)
        self._saver = Checkpointer(context, self._life)
        self._evaluator = Evaluator(context, self._eval_data)
        self._warm_start: dict[str, Any] | None = None
        self._first_predictions: dict[str, Any] | None = None  # on trainer 0: see `first_biases`
        self._ended_epoch: int | None = None  # at the restored checkpoint
        if self._trains:
            self._check_tables_are_ours()
        started = time.monotonic()
        self._begin()
        self.load_seconds = time.monotonic() - started
        """What restoring has taken this trainer; on trainer 0 the servers' load is part of it."""
        self._meet()

    @property
    def ready(self) -> Ready:
        """For the coordinator and the metrics: what was restored."""
        progress = self._progress
        return Ready(
            step=progress.step,
            bad_steps=progress.bad_steps,
            bad_rows=progress.bad_rows,
            load_seconds=self.load_seconds,
        )

    def run(self) -> dict[str, Any] | None:
        """Train and evaluate, or evaluate alone: the fields of the `result` event; None after an agreed stop."""
        try:
            return self._run()
        except BrokenOffError:
            # an evaluation: no push is in flight on any trainer, and what was read ahead is not in the log
            save = max(self._context.group.all_gather(int(self._context.signals.save_before_stop)))
            if save and not self._saver.has(self._progress.step):
                self._save()
            return None

    def _run(self) -> dict[str, Any] | None:
        result: dict[str, Any] = {"mode": self._spec.mode}
        if self._trains:
            trained = self._train()
            if trained is None:
                return None
            result |= trained | {"warm_start": self._warm_start, "first_predictions": self._first_predictions}
        if self._eval_data is not None:
            result["eval"] = report = self._evaluator.evaluate(self._eval_data)
            if self._trains and self._spec.job.train.evaluation.save_best:
                if self._evaluator.judge_final(self._progress.step, report):
                    self._saver.mark_best(self._progress.step)
                result["best"] = {**self._evaluator.best(), "checkpoint": self._saver.best}
        self._context.group.barrier()
        return result

    # -- the beginning

    def _begin(self) -> None:
        """Tables and dense part: of a checkpoint, of another job, or new."""
        self._biases, self._left_out_before = None, Counter[str]()
        if self._spec.restore is not None:
            self._restore(self._spec.restore)
        elif self._trains:
            if self._spec.job.warm_start is not None:
                self._warm_start = self._saver.warm_start_tables(self._inputs)
            self._biases = self._first_biases()

    def _meet(self) -> None:
        """All trainers have begun, with the same inputs and the same dense part."""
        self._context.group.long_barrier()  # trainer 0 may have loaded for long
        check_same_inputs(self._context, self._inputs)
        if self._biases is not None:
            self._context.program.set_output_biases(self._context.group.all_reduce(self._biases))
        dense_hash(self._context)
        self._books.open(self._left_out_before)

    def _restore(self, address: str) -> None:
        saved = self._saver.restore(address)
        told, cursor, progress = saved.manifest, saved.cursor, self._progress
        self._warm_start = told.get("warm_start")
        self._first_predictions = told.get("first_predictions")
        if told.get("evaluation") is not None:
            self._evaluator.load_state(told["evaluation"])
            self._saver.restore_best(self._evaluator.best_step)
        progress.load_state(told.get("progress"), cursor)
        self._left_out_before = Counter(told.get("left_out", {}))
        if progress.epoch > 0 and not cursor["position"]["done"]:
            self._ended_epoch = progress.epoch - 1
        self._life.load_state(told.get("lifecycle"), self._position)
        if self._trains:
            self._resume_tables(address, saved)

    def _resume_tables(self, address: str, saved: SavedModel) -> None:
        """A checkpoint holds the state before a day boundary; training goes on after it."""
        spec, progress, context = self._spec, self._progress, self._context
        if context.is_first:
            self._life.on_saved(saved.tables(), readable=saved.readable)
        if spec.days is not None and self._ended_epoch is not None:
            self._life.report_day(self._ended_epoch)  # told already, unless something was lost just then
            publish_day(spec, context.link, self._ended_epoch, address, self._life.boundaries.counts)
        tables = self._life.boundaries.due(self._position)
        if tables and progress.epoch < spec.num_epochs:
            if context.is_first and any(
                spec.job.tables[name].lifecycle.delete_after_unseen_days is not None for name in tables
            ):
                self._saver.advance_unseen_days(tables, progress.step)
            self._life.run_boundary(tables, self._position, rows=progress.taken, redone=True)
            self._saver.on_boundary(tables)

    def _first_biases(self) -> NDArray[np.float64] | None:
        """Output biases for all trainers to add up, since trainer 0 alone has found them; None: they stay at zero."""
        job, program = self._spec.job, self._context.program
        takes_dense = job.warm_start is not None and job.warm_start.dense
        if not job.train.start_at_label_rate or takes_dense or not program.output_biases:
            return None
        biases_Y = np.zeros(len(job.data.labels))
        if self._context.is_first:
            found = first_biases(program, self._context.client, self._epochs[0], training_columns(job))
            if found is not None:
                biases_Y, self._first_predictions = found
        return biases_Y

    def _check_tables_are_ours(self) -> None:
        job, client = self._spec.job, self._context.client
        wishes = {
            "train.scheduled_tables is true": ("whose learning rate is fixed", job.train.scheduled_tables),
            f"checkpoint.full_every is {job.checkpoint.full_every}": (
                "which saves whole tables only",
                job.checkpoint.full_every is not None,
            ),
        }
        for wish, (why_not, is_wished) in wishes.items():
            others = [name for name in job.data.tables if not client.is_ours(name)] if is_wished else []
            if others:
                raise ValueError(
                    f"{wish}, but the servers hold table {others[0]!r} in Paddle's engine, {why_not}: set "
                    f"tables.{others[0]}.engine to paddlewheel to learn why, or leave it out"
                )

    @property
    def _position(self) -> int:
        """Where the tables' day boundaries see training: days or rows behind it."""
        return self._progress.epoch if self._spec.days is not None else self._progress.taken

    # -- epochs and days

    def _train(self) -> dict[str, Any] | None:
        """All epochs that are left, and the checkpoint of their end; None after an agreed stop."""
        progress, num_epochs = self._progress, self._epochs.num_epochs
        passes: list[dict[str, float]] = []
        is_over = self._owes_evaluation() and not self._evaluate_and_keep_best()
        for epoch in range(progress.epoch, progress.epoch if is_over else num_epochs):
            progress.epoch = epoch
            self._context.link.send(PhaseChanged(phase="training"))
            began = time.monotonic()
            finished = self._train_epoch(epoch)
            passes.append({"rows": progress.epoch_rows, "started": began, "ended": time.monotonic()})
            if finished and self._spec.days is not None:
                self._end_day(epoch, time.monotonic() - began)
            if not finished and not self._evaluator.stopped_early:
                return None
            is_due = due_after_epoch(self._spec.job.train.evaluation, epoch, num_epochs)
            if self._evaluator.stopped_early or (is_due and not self._evaluate_and_keep_best()):
                break
        result = self._result(passes)
        self._saver.settle()
        if not self._saver.has(progress.step):
            self._save()
        return result | self._saver.saved

    def _result(self, passes: Sequence[dict[str, float]]) -> dict[str, Any]:
        progress, pace = self._progress, self._books.pace()
        self._books.report()
        return {
            "rows": progress.rows,
            "expected_rows": self._epochs.num_rows,
            "steps": progress.step,
            **pace,
            "loss": progress.loss_sum / progress.weight_sum if progress.weight_sum else None,
            "bad_steps": progress.bad_steps,
            "bad_rows": progress.bad_rows,
            **self._books.left_out(),
            "stopped_early": self._evaluator.stopped_early,
            "evaluations": self._evaluator.evaluations,
            "curve": self._books.curve.to_json(),
            "dense_hash": dense_hash(self._context),
            "phase_seconds": self._loop.phases.seconds,
            "passes": passes,  # of this machine's monotonic clock, reading, pulls and pushes included
        }

    def _train_epoch(self, epoch: int) -> bool:
        """True when the epoch's rows are trained; False after an agreed stop, or when training is to end early."""
        job, spec, data = self._spec.job, self._spec, self._epochs[epoch]
        plan = plan_epoch(data, job.seed, epoch)
        done = self._context.coordinator.open_epoch(epoch, data, job.seed, plan)
        if spec.days is not None:
            self._begin_day(epoch, data, is_new=not done)
        slices: Iterable[Slice]
        if job.data.slice_assignment == "dynamic":
            slices = self._context.coordinator.leased(epoch, {piece.index: piece for piece in plan})
        else:
            left = [piece for piece in plan if done.get(piece.index, 0) < piece.num_rows]
            slices = assign(left, spec.num_trainers, spec.rank, done)
        columns = training_columns(job)
        with Loader(data, columns, slices, seed=job.seed, epoch=epoch, resume=done) as loader:
            self._books.begin_epoch(loader)
            finished = self._train_rows(loader, epoch, data.num_rows - sum(done.values()))
            self._books.end_epoch(loader)
        if not finished:
            self._saver.settle()
        return finished

    def _train_rows(self, loader: Loader, epoch: int, rows_left: int) -> bool:
        train, batches = self._spec.job.train, iter(loader)
        if train.negative_sampling is not None:
            batches = sample_negatives(batches, train.negative_sampling, seed=self._spec.job.seed, epoch=epoch)
        synchronous = train.max_staleness_steps == 0 and self._spec.num_trainers > 1
        with EmbeddingPipeline(
            self._context.client,
            batches,
            max_staleness_steps=train.max_staleness_steps,
            embedding_l2=train.embedding_l2,
            wait_for_all=synchronous,
            traffic=self._books.traffic,
            tables=tables_of(self._spec.job),
            growth=self._growth,
        ) as pipeline:
            for due in self._loop.run(pipeline, rows_left=rows_left, synchronous=synchronous):
                match due:
                    case StepTaken():
                        self._books.enter(due)
                    case CheckpointDue():
                        self._save(beside=True)
                    case BoundaryDue():
                        self._pass_boundary()
                    case EvaluationDue():
                        if not self._evaluate_and_keep_best():
                            return False
                    case EpochOver():
                        return True
                    case Stopped():
                        return False
        raise AssertionError("the loop ended without a word")

    def _pass_boundary(self) -> None:
        taken = self._progress.taken
        tables = self._life.boundaries.due(taken)
        self._save(advance_day=tables)
        self._life.run_boundary(tables, taken, rows=taken)
        self._saver.on_boundary(tables)

    def _begin_day(self, epoch: int, data: Dataset, *, is_new: bool) -> None:
        days = self._spec.job.train.days
        self._life.begin_day(epoch, data.num_rows)
        has_learnt = self._progress.step > 0 or self._spec.job.warm_start is not None
        if is_new and has_learnt and days is not None and days.progressive_validation:
            self._life.on_validated(self._evaluator.evaluate(data))
            self._context.link.send(PhaseChanged(phase="training"))

    def _end_day(self, epoch: int, seconds: float) -> None:
        """The checkpoint of a day's end and, if another day follows, the boundary between the two."""
        self._life.end_day(seconds)
        tables = self._life.boundaries.due(epoch + 1) if epoch + 1 < self._epochs.num_epochs else ()
        if self._save(advance_day=tables):
            self._life.report_day(epoch)
            address = self._saver.saved.get("checkpoint", "")
            publish_day(self._spec, self._context.link, epoch, address, self._life.boundaries.counts)
            if tables:
                self._life.run_boundary(tables, epoch + 1, rows=self._progress.taken)
                self._saver.on_boundary(tables)
        self._context.group.long_barrier()  # trainer 0 may have published for long

    # -- evaluations and checkpoints

    def _owes_evaluation(self) -> bool:
        """Whether the restored checkpoint's step may lack its evaluation."""
        return self._evaluator.is_owed(
            self._progress.step, ended_epoch=self._ended_epoch, epochs=self._epochs.num_epochs
        )

    def _evaluate_and_keep_best(self) -> bool:
        """Evaluate this step, if that has not been done; keep its checkpoint if it is the best. Whether to go on."""
        if self._evaluator.judge(self._progress):
            self._saver.keep_best(self._progress.step, self._save)
        return not self._evaluator.stopped_early

    def _save(self, advance_day: Sequence[str] = (), *, beside: bool = False) -> bool:
        """See `Checkpointer.save`."""
        facts = {
            "inputs_seen": self._inputs.model_dump(mode="json"),
            "warm_start": self._warm_start,
            "first_predictions": self._first_predictions,
            "progress": self._progress.state(),
            "left_out": self._books.left_out_totals(),
            "lifecycle": self._life.state(),
            "evaluation": self._evaluator.state(),
        }
        return self._saver.save(self._progress, self._books.spans.take(), facts, advance_day, beside=beside)
