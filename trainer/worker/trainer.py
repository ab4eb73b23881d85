"""One trainer in one attempt: build or restore, train, save, evaluate. The coordinator decides; this does.

What is asked of the coordinator, and when, is described in coordinator/README.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset, Slice, assign, plan_epoch
from paddlewheel.data_pipeline.days import open_days, parse_day
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.data_pipeline.signature import InputSignature
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.saved_tables import open_table
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.checkpoint.folder_store import open_address
from paddlewheel.trainer.checkpoint.host_transfer import tables_of
from paddlewheel.trainer.checkpoint.object_store import RemoteCheckpoint
from paddlewheel.trainer.checkpoint.trained_model import inputs_of, trained_with
from paddlewheel.trainer.dense.backend import dense_program
from paddlewheel.trainer.dense.inputs import layouts
from paddlewheel.trainer.distributed.process_group import ProcessGroup
from paddlewheel.trainer.loop.early_stopping import due, due_after_epoch
from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingPipeline, Traffic
from paddlewheel.trainer.loop.evaluate import BrokenOffError
from paddlewheel.trainer.loop.loss_curve import LossCurve
from paddlewheel.trainer.loop.lr_schedule import rate_factor
from paddlewheel.trainer.loop.negative_sampling import sample_negatives
from paddlewheel.trainer.loop.new_keys import NewKeyCounter
from paddlewheel.trainer.loop.span_log import TrainedSpans
from paddlewheel.trainer.loop.train import Progress, Signals, TrainLoop
from paddlewheel.trainer.worker.agent_channel import AgentChannel
from paddlewheel.trainer.worker.checkpointer import Checkpointer
from paddlewheel.trainer.worker.coordinator_client import CoordinatorClient
from paddlewheel.trainer.worker.epoch_data import Epochs
from paddlewheel.trainer.worker.evaluator import Evaluator
from paddlewheel.trainer.worker.first_biases import first_biases
from paddlewheel.trainer.worker.publish import publish_day
from paddlewheel.trainer.worker.spec import Spec
from paddlewheel.trainer.worker.table_lifecycle import TableLifecycle

_SECONDS_BETWEEN_PROGRESS = 0.5


class Trainer:
    """All that this trainer holds: data, servers, dense part, place in the group.

    Building it restores the checkpoint that the spec names and ends when all trainers are as far.

    Raises:
        ValueError (ConfigError, DataError, CheckpointError): the job, its data or its checkpoint cannot be used.
    """

    def __init__(self, spec: Spec, link: AgentChannel, signals: Signals, resources: ExitStack) -> None:
        self._spec, self._link, self._signals = spec, link, signals
        self._traffic, self._growth, self._log = Traffic(), NewKeyCounter(), TrainedSpans()
        self._coordinator = CoordinatorClient(link)
        self._data_counters: Counter[str] = Counter()  # of epochs that are over
        self._own_left_out: Counter[str] = Counter()  # of this trainer's batches, since the start
        self._left_out_before: Counter[str] = Counter()  # of all trainers, before the restored checkpoint
        self._loader: Loader | None = None
        link.event("phase", phase="loading")
        job = spec.job
        used = {name: job.tables[name] for name in job.data.tables}
        self._eval_data = Dataset.open(job.data.eval, job.data) if job.data.eval else None
        if spec.mode == "train":
            self._epochs = self._open_epochs()
        self._inputs = self._check_inputs()
        self._sync = ProcessGroup(spec.rank, spec.num_trainers, spec.store, interface=spec.interface)
        self._client = resources.enter_context(
            Client(
                used,
                spec.servers,
                seed=job.seed,
                server_uids=spec.server_identities,
                rank=spec.rank,
                num_trainers=spec.num_trainers,
                pull_timeout_seconds=job.control.pull_timeout_seconds,
            )
        )
        self._program = dense_program(
            job,
            layouts(job.data, used),
            spec.rank,
            predicts=spec.mode != "train",
            warn=lambda message: link.event("log", level="warning", message=message),
        )
        self._loop = TrainLoop(
            self._program,
            self._sync,
            max_nonfinite_steps=job.train.max_nonfinite_steps,
            checkpoint_every_steps=job.checkpoint.every_steps,
            signals=signals,
            on_step=self._on_step,
            rate_factor=self._rate_factor,
            table_rate_factor=self._rate_factor if job.train.scheduled_tables else lambda _: 1.0,
            wire=job.train.allreduce_dtype,
        )
        self._life = TableLifecycle(used, spec.days, self._client, self._sync, link, self._growth)
        self._saver = Checkpointer(spec, self._client, self._program, self._sync, self._life, self._coordinator, link)
        self._judge = Evaluator(
            spec, self._eval_data, self._program, self._client, self._sync, link, self._saver, signals
        )
        self._curve = LossCurve()
        self._warm_start: dict[str, Any] | None = None
        self._first_predictions: dict[str, Any] | None = None  # on trainer 0: see `first_biases`
        self._ended_epoch: int | None = None  # at the restored checkpoint
        if spec.mode == "train":
            self._check_tables_are_ours()
        started = time.monotonic()
        if spec.restore is not None:
            self._restore(spec.restore)
        elif spec.mode == "train" and job.warm_start is not None:
            self._warm_start = self._saver.warm_start_tables(self._inputs)
        biases = self._first_biases() if spec.restore is None and spec.mode == "train" else None
        self.load_seconds = time.monotonic() - started
        """What restoring has taken this trainer; on trainer 0 the servers' load is part of it."""
        self._sync.long_barrier()  # trainer 0 may have loaded for long
        self._check_same_inputs()
        if biases is not None:
            self._program.set_output_biases(self._sync.all_reduce(biases))
        self._check_identical()
        self._started = self._reported = time.monotonic()
        self._rows_before, self._taken_before = self._loop.progress.rows, self._loop.progress.taken

    @property
    def first_step(self) -> int:
        """Steps that the restored checkpoint had taken."""
        return self._loop.progress.step

    def run(self) -> dict[str, Any] | None:
        """Train and evaluate, or evaluate alone: the fields of the `result` event; None after an agreed stop."""
        try:
            return self._run()
        except BrokenOffError:
            # an evaluation: no push is in flight on any trainer, and what was read ahead is not in the log
            save = max(self._sync.all_gather(int(self._signals.save_before_stop)))
            if save and not self._saver.has(self._loop.progress.step):
                self._checkpoint()
            return None

    def _run(self) -> dict[str, Any] | None:
        result: dict[str, Any] = {"mode": self._spec.mode}
        if self._spec.mode == "train":
            trained = self._train()
            if trained is None:
                return None
            result |= trained | {"warm_start": self._warm_start, "first_predictions": self._first_predictions}
        if self._eval_data is not None:
            result["eval"] = self._judge.evaluate(self._eval_data)
            if self._spec.mode == "train" and self._spec.job.train.evaluation.save_best:
                result["best"] = self._judge.best_of_all(self._loop.progress.step, result["eval"])
        self._sync.barrier()
        return result

    def _restore(self, address: str) -> None:
        kept, _ = open_address(address)
        saved = self._saver.restore(address)
        self._warm_start = saved.manifest.get("warm_start")
        self._first_predictions = saved.manifest.get("first_predictions")
        seen = saved.manifest.get("evaluation")
        if seen is not None:
            self._judge.load_state(seen, kept)
        cursor, progress = saved.cursor, self._loop.progress
        progress.load_state(saved.manifest.get("progress"), cursor)
        self._left_out_before = Counter(saved.manifest.get("left_out", {}))
        if progress.epoch > 0 and not cursor["position"]["done"]:
            self._ended_epoch = progress.epoch - 1
        self._life.load_state(saved.manifest.get("lifecycle"), self._position)
        if self._spec.mode == "train":
            self._go_on_with_tables(address, saved)

    def _go_on_with_tables(self, address: str, saved: manifest.Checkpoint | RemoteCheckpoint) -> None:
        """A checkpoint holds the state before a day boundary; training goes on after it."""
        spec, progress = self._spec, self._loop.progress
        if spec.rank == 0:
            if isinstance(saved, RemoteCheckpoint):
                self._life.on_saved(tables_of(saved), readable=False)
            else:
                self._life.on_saved({name: open_table(saved.sparse / name) for name in spec.job.data.tables})
        if spec.days is not None and self._ended_epoch is not None:
            self._life.report_day(self._ended_epoch)  # told already, unless something was lost just then
            publish_day(spec, self._link, self._ended_epoch, address, self._life.boundaries.counts)
        tables = self._life.boundaries.due(self._position)
        if tables and progress.epoch < spec.num_epochs:
            if spec.rank == 0 and any(
                spec.job.tables[name].lifecycle.delete_after_unseen_days is not None for name in tables
            ):
                self._saver.advance_unseen_days(tables, progress.step)
            self._life.run_boundary(tables, self._position, rows=progress.taken, redone=True)
            self._saver.on_boundary(tables)

    def _first_biases(self) -> NDArray[np.float64] | None:
        """Output biases for all trainers to add up, since trainer 0 alone has found them; None: they stay at zero."""
        job = self._spec.job
        takes_dense = job.warm_start is not None and job.warm_start.dense
        if not job.train.start_at_label_rate or takes_dense or not self._program.output_biases:
            return None
        biases_Y = np.zeros(len(job.data.labels))
        if self._spec.rank == 0:
            found = first_biases(self._program, self._client, self._epochs[0], self._train_data, self._spec.job.tables)
            if found is not None:
                biases_Y, self._first_predictions = found
        return biases_Y

    @property
    def _position(self) -> int:
        """Where the tables' day boundaries see training: days or rows behind it."""
        return self._loop.progress.epoch if self._spec.days is not None else self._loop.progress.taken

    def _open_epochs(self) -> Epochs:
        """What there is to train on, from the epoch on that a restored checkpoint stands in."""
        job, spec, data = self._spec.job, self._spec, self._train_data
        first, rows_before = 0, 0
        if spec.restore is not None:
            kept, address = open_address(spec.restore)
            cursor = kept.cursor(address)
            first = int(cursor["position"]["epoch"])
            rows_before = cursor["rows"] - sum(rows for _, rows in cursor["position"]["done"])
        if spec.days is None:
            whole = Dataset.open(job.data.train, data)
            return Epochs(dict.fromkeys(range(job.train.epochs), whole), job.train.epochs)
        assert job.train.days is not None
        left = {parse_day(day): first + number for number, day in enumerate(spec.days[first:])}
        found = open_days(job.data.train, data, job.train.days.column, left) if left else {}
        return Epochs({left[day]: dataset for day, dataset in found.items()}, len(spec.days), rows_before)

    def _check_inputs(self) -> InputSignature:
        """What the model knows of its inputs from here on.

        Raises:
            DataError: the data, or what was fitted, is not what the restored checkpoint was trained with.
        """
        spec = self._spec
        seen = []
        if spec.restore is not None:
            kept, address = open_address(spec.restore)
            known = inputs_of(kept.manifest(address), address)
            seen = [known] if known is not None else []
        if spec.mode == "train":
            mine = self._epochs.signature
            for known in seen:
                mine.check(known, trained_with(spec.restore), refitted=spec.resume == "always")
            seen.append(mine)
        inputs = InputSignature.joined(seen)
        if self._eval_data is not None:
            relation = trained_with(spec.restore) if spec.mode != "train" else "in the training data"
            self._eval_data.signature.check(inputs, relation)
        return inputs

    def _check_same_inputs(self) -> None:
        """Each trainer reads `data.statistics` from a disk of its own. Raises DataError."""
        mine = xxhash.xxh3_64_intdigest(self._inputs.identity.encode()) >> 1
        found = self._sync.all_gather(mine)
        if len(set(found)) > 1:
            others = ", ".join(f"trainer {rank}: {value:016x}" for rank, value in enumerate(found))
            raise DataError(
                f"data.statistics, or the kinds of columns, are not the same on all trainers ({others}). Copy one "
                f"{self._spec.job.data.statistics or 'data set'} to all of them"
            )

    def _check_identical(self) -> str:
        """Hash of the dense parameters; raises when trainers differ, which the design rules out."""
        digest = xxhash.xxh3_64()
        for name, value in sorted(self._program.state().items()):
            digest.update(name.encode())
            digest.update(value.tobytes())
        hashes = self._sync.all_gather(digest.intdigest() >> 1)
        if len(set(hashes)) > 1:
            raise AssertionError(f"dense parameters differ between trainers: {[f'{h:x}' for h in hashes]}")
        return f"{hashes[0]:016x}"

    def _train(self) -> dict[str, Any] | None:
        job, progress = self._spec.job, self._loop.progress
        passes: list[dict[str, float]] = []
        needs_evaluation = self._judge.needs_evaluation(
            progress.step, ended_epoch=self._ended_epoch, epochs=self._epochs.num_epochs
        )
        is_over = needs_evaluation and not self._is_to_go_on()
        left = range(progress.epoch, progress.epoch if is_over else self._epochs.num_epochs)
        for epoch in left:
            progress.epoch = epoch
            self._link.event("phase", phase="training")
            began = time.monotonic()
            finished = self._train_epoch(epoch)
            passes.append({"rows": progress.epoch_rows, "started": began, "ended": time.monotonic()})
            if finished and self._spec.days is not None:
                self._end_day(epoch, time.monotonic() - began)
            if not finished and not self._judge.stopped_early:
                return None
            if self._judge.stopped_early or (
                due_after_epoch(job.train.evaluation, epoch, self._epochs.num_epochs) and not self._is_to_go_on()
            ):
                break
        seconds = time.monotonic() - self._started
        self._report()
        result = {
            "rows": progress.rows,
            "expected_rows": self._epochs.num_rows,
            "steps": progress.step,
            "seconds": seconds,
            "rows_per_second": (progress.rows - self._rows_before) / seconds,
            "loss": progress.loss_sum / progress.weight_sum if progress.weight_sum else None,
            "bad_steps": progress.bad_steps,
            "bad_rows": progress.bad_rows,
            **self._left_out(),
            "stopped_early": self._judge.stopped_early,
            "evaluations": self._judge.evaluations,
            "curve": self._curve.to_json(),
            "dense_hash": self._check_identical(),
            "phase_seconds": self._loop.phases.seconds,
            "passes": passes,  # of this machine's monotonic clock, reading, pulls and pushes included
        }
        self._saver.settle()
        if not self._saver.has(progress.step):
            self._checkpoint()
        return result | self._saver.saved

    def _left_out(self) -> dict[str, Any]:
        """What the readers of all trainers did not hand to training: rows, and ids of lists that were too long.

        Of the whole run. Rows are those of the steps taken; unreadable rows and truncated ids are counted by readers,
        which are some batches ahead, so a restart may count a few twice.
        """
        counters = self._counters()

        def total(name: str, own: Mapping[str, int]) -> int:
            return self._left_out_before[name] + sum(self._sync.all_gather(own.get(name, 0)))

        lists = [feature.name for feature in self._spec.job.data.sparse if feature.multi_valued]
        truncated = {name: total(f"truncated_ids.{name}", counters) for name in lists}
        return {
            "skipped_rows": total("skipped_rows", self._own_left_out),  # those of unreadable files among them
            "unreadable_rows": total("unreadable_rows", counters),
            "left_out_rows": total("left_out_rows", self._own_left_out),  # by train.negative_sampling
            "truncated_ids": {name: ids for name, ids in truncated.items() if ids},
        }

    def _left_out_totals(self) -> dict[str, int]:
        """`_left_out` by the counters' names, for a checkpoint."""
        found = self._left_out()
        truncated = found.pop("truncated_ids")
        return {**found, **{f"truncated_ids.{name}": ids for name, ids in truncated.items()}}

    def _counters(self) -> Counter[str]:
        """What this trainer's readers have counted so far."""
        counted = Counter(self._data_counters)
        if self._loader is not None:
            counted.update(dict(self._loader.counters))  # a copy in one go: threads of the reader add names to it
        return counted

    def _train_epoch(self, epoch: int) -> bool:
        """True when the epoch's rows are trained, False after an agreed stop."""
        job, data, spec = self._spec.job, self._epochs[epoch], self._spec
        plan = plan_epoch(data, job.seed, epoch)
        done = self._coordinator.open_epoch(epoch, data, job.seed, plan)
        if spec.days is not None:
            self._begin_day(epoch, data, is_new=not done)
        slices: Iterable[Slice]
        if job.data.slice_assignment == "dynamic":
            slices = self._coordinator.leased(epoch, {piece.index: piece for piece in plan})
        else:
            left = [piece for piece in plan if done.get(piece.index, 0) < piece.num_rows]
            slices = assign(left, spec.num_trainers, spec.rank, done)
        synchronous = job.train.max_staleness_steps == 0 and spec.num_trainers > 1
        with (
            Loader(data, self._train_data, slices, seed=job.seed, epoch=epoch, resume=done) as loader,
            EmbeddingPipeline(
                self._client,
                self._sampled(iter(loader), epoch),
                max_staleness_steps=job.train.max_staleness_steps,
                embedding_l2=job.train.embedding_l2,
                wait_for_all=synchronous,
                traffic=self._traffic,
                tables={name: job.tables[name] for name in job.data.tables},
                growth=self._growth,
            ) as exchange,
        ):
            self._loader = loader
            finished = self._loop.epoch(
                exchange,
                rows_left=data.num_rows - sum(done.values()),
                synchronous=synchronous,
                on_checkpoint=lambda: self._checkpoint(beside=True),
                evaluation_due=lambda step: due(job.train.evaluation, step),
                on_evaluation=self._is_to_go_on,
                boundary_due=self._boundary_due,
                on_boundary=self._boundary,
            )
            self._data_counters.update(loader.counters)
            self._loader = None
        if not finished:
            self._saver.settle()
        return finished

    def _begin_day(self, epoch: int, data: Dataset, *, is_new: bool) -> None:
        days = self._spec.job.train.days
        self._life.begin_day(epoch, data.num_rows)
        has_learnt = self._loop.progress.step > 0 or self._spec.job.warm_start is not None
        if is_new and has_learnt and days is not None and days.progressive_validation:
            self._life.on_validated(self._judge.evaluate(data))
            self._link.event("phase", phase="training")

    def _end_day(self, epoch: int, seconds: float) -> None:
        """The checkpoint of a day's end and, if another day follows, the boundary between the two."""
        progress = self._loop.progress
        self._life.end_day(seconds)
        tables = self._life.boundaries.due(epoch + 1) if epoch + 1 < self._epochs.num_epochs else ()
        if self._checkpoint(advance_day=tables):
            self._life.report_day(epoch)
            address = self._saver.saved.get("checkpoint", "")
            publish_day(self._spec, self._link, epoch, address, self._life.boundaries.counts)
            if tables:
                self._life.run_boundary(tables, epoch + 1, rows=progress.taken)
                self._saver.on_boundary(tables)
        self._sync.long_barrier()  # trainer 0 may have published for long

    def _boundary_due(self) -> bool:
        """Whether rows make a boundary here, and more rows follow."""
        taken = self._loop.progress.taken
        return self._spec.days is None and taken < self._epochs.num_rows and bool(self._life.boundaries.due(taken))

    def _boundary(self) -> None:
        taken = self._loop.progress.taken
        tables = self._life.boundaries.due(taken)
        self._checkpoint(advance_day=tables)
        self._life.run_boundary(tables, taken, rows=taken)
        self._saver.on_boundary(tables)

    def _sampled(self, batches: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        """The batches, without the rows that `train.negative_sampling` leaves out."""
        config = self._spec.job.train.negative_sampling
        return batches if config is None else sample_negatives(batches, config, seed=self._spec.job.seed, epoch=epoch)

    def _on_step(self, progress: Progress, batch: Batch | None, skipped: bool) -> None:
        if batch is not None:
            self._log.add(progress.epoch, batch.spans, skipped=skipped)
            taken = sum(span.num_rows for span in batch.spans)
            self._own_left_out["skipped_rows"] += batch.num_skipped_rows
            self._own_left_out["left_out_rows"] += taken - batch.num_rows - batch.num_skipped_rows
        if not skipped and progress.last_loss is not None:
            self._curve.add(progress.step, progress.last_loss)
        now = time.monotonic()
        if now - self._reported >= _SECONDS_BETWEEN_PROGRESS or progress.step == 1:
            self._reported = now
            self._report()
            self._loop.running.decay(0.98)

    @property
    def _train_data(self) -> DataConfig:
        """What training reads: not the columns that only evaluation reports by."""
        return self._spec.job.data.model_copy(update={"slice_metrics_by": ()})

    def _rate_factor(self, step: int) -> float:
        return rate_factor(self._spec.job.train.dense_optimizer.schedule, step, self._total_steps)

    def _check_tables_are_ours(self) -> None:
        job = self._spec.job
        wishes = {
            "train.scheduled_tables is true": ("whose learning rate is fixed", job.train.scheduled_tables),
            f"checkpoint.full_every is {job.checkpoint.full_every}": (
                "which saves whole tables only",
                job.checkpoint.full_every is not None,
            ),
        }
        for wish, (why_not, is_wished) in wishes.items():
            others = [name for name in job.data.tables if not self._client.is_ours(name)] if is_wished else []
            if others:
                raise ValueError(
                    f"{wish}, but the servers hold table {others[0]!r} in Paddle's engine, {why_not}: set "
                    f"tables.{others[0]}.engine to paddlewheel to learn why, or leave it out"
                )

    @property
    def _total_steps(self) -> int:
        """Steps of the whole job, about; the same number on every trainer."""
        return self._epochs.num_steps(self._spec.job.data.batch_rows * self._spec.num_trainers)

    def _report(self) -> None:
        progress, traffic = self._loop.progress, self._traffic
        seconds = time.monotonic() - self._started
        rate = (progress.rows - self._rows_before) / seconds if seconds > 0 else 0.0
        counters = self._counters()
        self._link.event(
            "progress",
            epoch=progress.epoch,
            epochs=self._epochs.num_epochs,
            **({"day": self._spec.days[progress.epoch]} if self._spec.days is not None else {}),
            step=progress.step,
            rows=progress.rows,
            total_rows=self._epochs.num_rows,
            loss=progress.last_loss,
            auc=self._loop.running.report().auc,
            rows_per_second=rate,
            seconds_left=self._seconds_left(seconds),
            bad_steps=progress.bad_steps,
            phase_seconds=self._loop.phases.seconds,
            # for the metrics
            own_rows=progress.own_rows,
            bad_rows=progress.bad_rows,
            skipped_rows=counters["skipped_rows"],
            truncated_ids=sum(ids for name, ids in counters.items() if name.startswith("truncated_ids.")),
            pulled_keys=traffic.pulled_keys,
            pulled_bytes=traffic.pulled_bytes,
            pushed_bytes=traffic.pushed_bytes,
            staleness_steps=traffic.staleness_steps,
            ready_batches=traffic.ready_batches,
            **self._life.figures(),
            durations={
                **{phase: histogram.to_json() for phase, histogram in self._loop.phases.durations.items()},
                "servers_pull": traffic.pulls.to_json(),
                "servers_push": traffic.pushes.to_json(),
                "lease": self._coordinator.lease_waits.to_json(),
            },
        )

    def _seconds_left(self, seconds: float) -> float | None:
        """At the pace of the seconds since the start. Rows that are left out are gone through, too."""
        taken = self._loop.progress.taken
        done = taken - self._taken_before
        return (self._epochs.num_rows - taken) * seconds / done if done > 0 else None

    def _checkpoint(self, advance_day: Sequence[str] = (), *, beside: bool = False) -> bool:
        """See `Checkpointer.save`."""
        facts = {
            "inputs_seen": self._inputs.model_dump(mode="json"),
            "warm_start": self._warm_start,
            "first_predictions": self._first_predictions,
            "progress": self._loop.progress.state(),
            "left_out": self._left_out_totals(),
            "lifecycle": self._life.state(),
            "evaluation": self._judge.state(),
        }
        return self._saver.save(self._loop.progress, self._log.take(), facts, advance_day, beside=beside)

    def _is_to_go_on(self) -> bool:
        """See `Evaluator.judge`."""
        return self._judge.judge(self._loop.progress, self._checkpoint)
