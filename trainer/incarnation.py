"""One trainer in one incarnation: build or restore, train, save, evaluate. The coordinator decides; this does.

What is asked of the coordinator, and when, is described in coordinator/README.md.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.batch import Batch, Span
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset, Slice, assign, plan_epoch
from data_pipeline.days import open_days, parse_day
from data_pipeline.errors import DataError
from data_pipeline.loader import Loader
from pserver import chain
from pserver.checkpoint import open_table
from pserver.client import Client
from pserver.config import Tables
from trainer import checkpoint, warm_start
from trainer.checkpoints import is_remote, open_address, open_checkpoints
from trainer.config import JobConfig
from trainer.curve import LossCurve
from trainer.dense_sync import DenseSync
from trainer.epochs import Epochs
from trainer.evaluate import evaluate
from trainer.exchange import Exchange, Traffic
from trainer.growth import Growth
from trainer.ledger import SpanLog
from trainer.lifecycle import Lifecycle
from trainer.link import AgentLink
from trainer.loop import Progress, Signals, TrainLoop
from trainer.object_store import ObjectStore, RemoteCheckpoint
from trainer.placement import dense_program
from trainer.program import ListFeature, TableLayout
from trainer.sampling import sample_negatives
from trainer.schedule import rate_factor
from trainer.staging import RemoteDraft, StagingPlan, load_remote, tables_of
from trainer.stopping import BestSoFar, due, due_after_epoch
from trainer.telemetry import DurationHistogram

_SECONDS_BETWEEN_PROGRESS = 0.5
_COMMITTED, _STOP = 1, 2


class RefusedError(ValueError):
    """The coordinator refused a request; asking again, or starting again, cannot help."""


class SaveError(RuntimeError):
    """A checkpoint could not be saved or committed, and the job is told to stop then."""


@dataclass(frozen=True)
class Spec:
    """What the coordinator tells a trainer at its start (one JSON line)."""

    job: JobConfig
    mode: str  # train or evaluate
    rank: int
    num_trainers: int
    servers: list[str]
    server_identities: list[str] | None
    store: str
    interface: str | None
    incarnation: int
    restore: str | None
    staging: StagingPlan | None = None
    days: tuple[str, ...] | None = None

    @property
    def num_epochs(self) -> int:
        """Passes over the training data, or days."""
        return self.job.train.epochs if self.days is None else len(self.days)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Spec:
        """Raises ConfigError when the job inside is not usable."""
        return cls(
            job=JobConfig.parse(raw["job"]),
            mode=raw["mode"],
            rank=raw["rank"],
            num_trainers=raw["num_trainers"],
            servers=raw["servers"],
            server_identities=raw.get("server_identities"),
            store=raw["store"],
            interface=raw.get("interface"),
            incarnation=raw.get("incarnation", 1),
            restore=raw.get("restore"),
            staging=StagingPlan.from_json(raw["staging"]) if raw.get("staging") else None,
            days=tuple(raw["days"]) if raw.get("days") is not None else None,
        )


def layouts(data: DataConfig, tables: Tables) -> list[TableLayout]:
    """How the job's features enter the dense program, table by table in the order of first use."""
    result = []
    for name in data.tables:
        features = [f for f in data.sparse if f.table == name]
        result.append(
            TableLayout(
                name,
                tables[name].pull_width,
                tables[name].first_order,
                [f.name for f in features if not f.multi_valued],
                [ListFeature(f.name, f.pooling, f.weights is not None) for f in features if f.multi_valued],
            )
        )
    return result


class Incarnation:
    """All that this trainer holds: data, servers, dense part, place in the group.

    Building it restores the checkpoint that the spec names and ends when all trainers are as far.

    Raises:
        ValueError (ConfigError, DataError, CheckpointError): the job, its data or its checkpoint cannot be used.
    """

    def __init__(self, spec: Spec, link: AgentLink, signals: Signals, resources: ExitStack) -> None:
        self._spec, self._link, self._signals = spec, link, signals
        self._traffic, self._growth, self._log = Traffic(), Growth(), SpanLog()
        self._lease_waits = DurationHistogram()
        self._data_counters: Counter[str] = Counter()
        self._loader: Loader | None = None
        self._saved: dict[str, Any] = {}
        self._saved_step = self._restored_step = -1
        link.event("phase", phase="loading")
        job = spec.job
        used = {name: job.tables[name] for name in job.data.tables}
        self._eval_data = Dataset.open(job.data.eval, job.data) if job.data.eval else None
        if spec.mode == "train":
            self._epochs = self._open_epochs()
        self._sync = DenseSync(spec.rank, spec.num_trainers, spec.store, interface=spec.interface)
        self._client = resources.enter_context(
            Client(
                used,
                spec.servers,
                seed=job.seed,
                identities=spec.server_identities,
                rank=spec.rank,
                num_trainers=spec.num_trainers,
                pull_timeout_seconds=job.control.pull_timeout_seconds,
            )
        )
        self._program = dense_program(
            job,
            layouts(job.data, used),
            spec.rank,
            warn=lambda message: link.event("log", level="warning", message=message),
        )
        self._loop = TrainLoop(
            self._program,
            self._sync,
            max_bad_steps=job.train.max_bad_steps,
            checkpoint_every_steps=job.checkpoint.every_steps,
            signals=signals,
            on_step=self._on_step,
            rate_factor=lambda step: rate_factor(job.train.dense.schedule, step, self._total_steps),
            wire=job.train.allreduce,
        )
        self._best, self._evaluations, self._stopped_early = (
            BestSoFar(job.train.evaluation),
            list[dict[str, Any]](),
            False,
        )
        self._best_checkpoint: str | None = None
        self._life = Lifecycle(used, spec.days, self._client, self._sync, link, self._growth)
        self._curve = LossCurve()
        self._warm_start: dict[str, Any] | None = None
        started = time.monotonic()
        if spec.restore is not None:
            self._restore(spec.restore)
        elif spec.mode == "train" and job.warm_start is not None:
            self._begin_warm()
        self.load_seconds = time.monotonic() - started
        """What restoring has taken this trainer; on trainer 0 the servers' load is part of it."""
        self._sync.rendezvous()  # trainer 0 may have loaded for long
        self._check_identical()
        self._started = self._reported = time.monotonic()
        self._rows_before = self._loop.progress.rows

    @property
    def first_step(self) -> int:
        """Steps that the restored checkpoint had taken."""
        return self._loop.progress.step

    def run(self) -> dict[str, Any] | None:
        """Train and evaluate, or evaluate alone: the fields of the `result` event; None after an agreed stop."""
        result: dict[str, Any] = {"mode": self._spec.mode}
        if self._spec.mode == "train":
            trained = self._train()
            if trained is None:
                return None
            result |= trained | {"warm_start": self._warm_start}
        if self._eval_data is not None:
            result["eval"] = self._evaluate(self._eval_data)
            if self._spec.mode == "train" and self._spec.job.train.evaluation.keep_best:
                result["best"] = self._best_of_all(result["eval"])
        self._sync.barrier()
        return result

    def _restore(self, address: str) -> None:
        kept, _ = open_address(address)
        saved = self._load_tables(address)
        try:
            self._program.load_state(saved.dense())
        except ValueError as error:
            raise checkpoint.CheckpointError(f"{address}: {error}") from error
        self._warm_start = saved.manifest.get("warm_start")
        seen = saved.manifest.get("evaluation")
        if seen is not None:
            self._best.load_state(seen["best"])
            self._evaluations = list(seen["all"])
            self._best_checkpoint = kept.best()
        cursor, progress = saved.cursor, self._loop.progress
        progress.step, progress.rows, progress.taken = cursor["step"], cursor["rows"], cursor["rows"]
        self._restored_step = progress.step
        progress.epoch = cursor["position"]["epoch"]
        self._life.load_state(saved.manifest.get("lifecycle"), self._position)
        if self._spec.mode == "train":
            self._go_on_with_tables(address, saved)

    def _go_on_with_tables(self, address: str, saved: checkpoint.Checkpoint | RemoteCheckpoint) -> None:
        """A checkpoint holds the state before a day boundary; training goes on after it."""
        spec, progress = self._spec, self._loop.progress
        if spec.rank == 0:
            if isinstance(saved, RemoteCheckpoint):
                self._life.saved(tables_of(saved), readable=False)
            else:
                self._life.saved({name: open_table(saved.sparse / name) for name in spec.job.data.tables})
        if spec.days is not None and progress.epoch > 0 and not saved.cursor["position"]["done"]:
            self._life.tell_day(progress.epoch - 1)  # told already, unless something was lost just then
            self._publish(progress.epoch - 1, address)
        tables = self._life.boundaries.due(self._position)
        if tables and progress.epoch < spec.num_epochs:
            if spec.rank == 0 and any(
                spec.job.tables[name].lifecycle.delete_after_unseen_days is not None for name in tables
            ):
                self._advance_days(tables)
            self._life.carry_out(tables, self._position, rows=progress.taken, redone=True)

    def _advance_days(self, tables: Sequence[str]) -> None:
        """Only a save has the servers count a day; this one is thrown away."""
        progress, location = self._loop.progress, self._spec.job.checkpoint_location
        name = f".step-{progress.step}-incarnation-{self._spec.incarnation}-draft-boundary"
        self._draft(name, progress.step).save(self._client, advance_day=tables)
        if is_remote(location):
            assert self._spec.staging is not None
            ObjectStore(location, self._spec.staging.owner).discard(name)
        else:
            open_checkpoints(location).discard(name)

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

    def _begin_warm(self) -> None:
        """Begin with another job's model: trainer 0 fills the servers, all take the dense part."""
        job = self._spec.job
        start = warm_start.plan(job)
        if self._spec.rank == 0 and start.tables:
            # the servers read it, so it lies where they see checkpoints, or else the run
            seen = Path(job.run_dir if is_remote(job.checkpoint_location) else job.checkpoint_location)
            seen.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".warm-start-", dir=seen) as folder:
                keys = warm_start.write_tables(start, Path(folder), job, len(self._spec.servers))
                self._client.load(Path(folder), tables=keys)
            self._warm_start = start.record(keys)
        elif self._spec.rank == 0:
            self._warm_start = start.record({})
        if start.dense:
            self._program.load_parameters(start.source.parameters())

    def _load_tables(self, address: str) -> checkpoint.Checkpoint | RemoteCheckpoint:
        """Trainer 0 has the servers load; all get the dense part."""
        first = self._spec.rank == 0
        if not is_remote(address):
            local = checkpoint.read(Path(address), verify=first)  # one trainer reads all files through
            if first:
                self._client.load(local.sparse)
            return local
        remote = ObjectStore(address.rpartition("/")[0]).read(address)
        if first:
            assert self._spec.staging is not None
            load_remote(self._client, remote, self._spec.staging, self._ask_hosts)
        return remote

    def _ask_hosts(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self._ask("hosts", order=order)["answers"]
        return answers

    def _draft(self, name: str, step: int) -> checkpoint.Draft | RemoteDraft:
        location = self._spec.job.checkpoint_location
        if not is_remote(location):
            return checkpoint.Draft(Path(location), name, step)
        assert self._spec.staging is not None
        return RemoteDraft(location, self._spec.staging, name, step, self._ask_hosts)

    def _check_identical(self) -> str:
        """Hash of the dense parameters; raises when trainers differ, which the design rules out."""
        digest = xxhash.xxh3_64()
        for name, value in sorted(self._program.state().items()):
            digest.update(name.encode())
            digest.update(value.tobytes())
        hashes = self._sync.gather(digest.intdigest() >> 1)
        if len(set(hashes)) > 1:
            raise AssertionError(f"dense parameters differ between trainers: {[f'{h:x}' for h in hashes]}")
        return f"{hashes[0]:016x}"

    def _train(self) -> dict[str, Any] | None:
        job, progress = self._spec.job, self._loop.progress
        passes: list[dict[str, float]] = []
        # what came after a checkpoint was saved may be lost: the evaluation of its step, the mark of the best
        owed = self._restored_step >= 0 and (
            due(job.train.evaluation, progress.step) or self._best.step == progress.step
        )
        left = range(progress.epoch, self._epochs.num_epochs if not owed or self._judge() else progress.epoch)
        for epoch in left:
            progress.epoch = epoch
            self._link.event("phase", phase="training")
            began = time.monotonic()
            finished = self._train_epoch(epoch)
            passes.append({"rows": progress.epoch_rows, "started": began, "ended": time.monotonic()})
            if finished and self._spec.days is not None:
                self._end_day(epoch, time.monotonic() - began)
            if not finished and not self._stopped_early:
                return None
            if self._stopped_early or (
                due_after_epoch(job.train.evaluation, epoch, self._epochs.num_epochs) and not self._judge()
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
            "stopped_early": self._stopped_early,
            "evaluations": self._evaluations,
            "curve": self._curve.to_json(),
            "dense_hash": self._check_identical(),
            "phase_seconds": self._loop.phases.seconds,
            "passes": passes,  # of this machine's monotonic clock, reading, pulls and pushes included
        }
        if self._saved_step != progress.step:
            self._checkpoint()
        return result | self._saved

    def _left_out(self) -> dict[str, Any]:
        """What the readers of all trainers did not hand to training: rows, and ids of lists that were too long."""

        def total(name: str) -> int:
            return sum(self._sync.gather(self._data_counters[name]))

        lists = [feature.name for feature in self._spec.job.data.sparse if feature.multi_valued]
        truncated = {name: total(f"truncated_ids.{name}") for name in lists}
        return {
            "skipped_rows": total("skipped_rows"),  # those of unreadable files among them
            "unreadable_rows": total("unreadable_rows"),
            "left_out_rows": total("left_out_rows"),  # by train.negative_sampling
            "truncated_ids": {name: ids for name, ids in truncated.items() if ids},
        }

    def _train_epoch(self, epoch: int) -> bool:
        """True when the epoch's rows are trained, False after an agreed stop."""
        job, data, spec = self._spec.job, self._epochs[epoch], self._spec
        plan = plan_epoch(data, job.seed, epoch)
        reply = self._ask(
            "epoch",
            epoch=epoch,
            fingerprint=data.fingerprint,
            order=data.order,
            seed=job.seed,
            slices=[[piece.index, piece.num_rows] for piece in plan],
        )
        done = {int(index): int(rows) for index, rows in reply["done"]}
        if spec.days is not None:
            self._begin_day(epoch, data, is_new=not done)
        slices: Iterable[Slice]
        if job.control.leases == "dynamic":
            slices = self._leased(epoch, {piece.index: piece for piece in plan})
        else:
            left = [piece for piece in plan if done.get(piece.index, 0) < piece.num_rows]
            slices = assign(left, spec.num_trainers, spec.rank, done)
        synchronous = job.train.max_staleness_steps == 0 and spec.num_trainers > 1
        with (
            Loader(data, self._train_data, slices, seed=job.seed, epoch=epoch, resume=done) as loader,
            Exchange(
                self._client,
                self._sampled(iter(loader), epoch),
                max_staleness_steps=job.train.max_staleness_steps,
                embedding_l2=job.train.embedding_l2,
                wait_for_all=synchronous,
                traffic=self._traffic,
                growth=self._growth,
            ) as exchange,
        ):
            self._loader = loader
            finished = self._loop.epoch(
                exchange,
                rows_left=data.num_rows - sum(done.values()),
                synchronous=synchronous,
                on_checkpoint=self._checkpoint,
                evaluation_due=lambda step: due(job.train.evaluation, step),
                on_evaluation=self._judge,
                boundary_due=self._boundary_due,
                on_boundary=self._boundary,
            )
            self._data_counters.update(loader.counters)
            self._loader = None
        return finished

    def _begin_day(self, epoch: int, data: Dataset, *, is_new: bool) -> None:
        days = self._spec.job.train.days
        self._life.begin_day(epoch, data.num_rows)
        has_learnt = self._loop.progress.step > 0 or self._spec.job.warm_start is not None
        if is_new and has_learnt and days is not None and days.evaluate_first:
            self._life.validated(self._evaluate(data))
            self._link.event("phase", phase="training")

    def _end_day(self, epoch: int, seconds: float) -> None:
        """The checkpoint of a day's end and, if another day follows, the boundary between the two."""
        progress = self._loop.progress
        self._life.end_day(seconds)
        tables = self._life.boundaries.due(epoch + 1) if epoch + 1 < self._epochs.num_epochs else ()
        if self._checkpoint(advance_day=tables):
            self._life.tell_day(epoch)
            self._publish(epoch, self._saved.get("checkpoint", ""))
            if tables:
                self._life.carry_out(tables, epoch + 1, rows=progress.taken)
        self._sync.rendezvous()  # trainer 0 may have published for long

    def _publish(self, epoch: int, address: str) -> None:
        """Write what the tables are after a day beside the checkpoints, for whoever serves the model."""
        job, spec = self._spec.job, self._spec
        publisher = job.train.days.publish if job.train.days is not None else None
        if publisher is None or spec.days is None or spec.rank != 0:
            return
        self._link.event("phase", phase="saving")
        folder = Path(publisher.directory or Path(job.run_dir, "published"))
        try:
            for name in job.data.tables:
                link = chain.append(
                    folder / name,
                    open_table(Path(address, "sparse", name)),
                    day=spec.days[epoch],
                    num_boundaries=self._life.boundaries.counts[name],
                    base_every=publisher.base_every_days,
                    dtype=publisher.dtype,
                )
                if link is not None:
                    self._link.event("published", table=name, **link.model_dump(exclude={"format"}))
        except (OSError, ValueError, RuntimeError) as error:
            text = f"day {spec.days[epoch]} was not published, the next link will be a base: {error}"
            self._link.event("log", level="error", message=text)
        self._link.event("phase", phase="training")

    def _boundary_due(self) -> bool:
        """Whether rows make a boundary here, and more rows follow."""
        taken = self._loop.progress.taken
        return self._spec.days is None and taken < self._epochs.num_rows and bool(self._life.boundaries.due(taken))

    def _boundary(self) -> None:
        taken = self._loop.progress.taken
        tables = self._life.boundaries.due(taken)
        self._checkpoint(advance_day=tables)
        self._life.carry_out(tables, taken, rows=taken)

    def _sampled(self, batches: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        """The batches, without the rows that `train.negative_sampling` leaves out."""
        config = self._spec.job.train.negative_sampling
        if config is None:
            return batches

        def count(rows: int) -> None:
            self._data_counters["left_out_rows"] += rows

        return sample_negatives(batches, config, seed=self._spec.job.seed, epoch=epoch, on_left_out=count)

    def _judge(self) -> bool:
        """Evaluate this step, if that has not been done, and tell whether to go on."""
        if self._eval_data is None:
            return True
        progress = self._loop.progress
        if not self._evaluations or self._evaluations[-1]["step"] != progress.step:
            report = self._evaluate(self._eval_data)
            verdict = self._best.observe(progress.step, report)
            at = {"step": progress.step, "epoch": progress.epoch, "trained_rows": progress.rows}
            self._evaluations.append({**at, "loss": progress.last_loss, "best": verdict.best, **report})
            self._link.event("evaluation", **self._evaluations[-1])
            self._link.event("phase", phase="training")
        if self._best.step == progress.step and self._spec.job.train.evaluation.keep_best:
            if progress.step not in {self._saved_step, self._restored_step}:
                self._checkpoint()
            self._mark_best()
        self._stopped_early = self._best.exhausted
        return not self._stopped_early

    def _best_of_all(self, final: dict[str, Any]) -> dict[str, Any]:
        """The best evaluation, the final one (of the checkpoint just saved) included."""
        if self._best.observe(self._loop.progress.step, final).best:
            self._mark_best()
        metric = self._spec.job.train.evaluation.metric
        return {"step": self._best.step, metric: self._best.value, "checkpoint": self._best_checkpoint}

    def _mark_best(self) -> None:
        """Keep the checkpoint of this step as the best; a checkpoint that failed leaves the one before."""
        step = self._loop.progress.step
        if step not in {self._saved_step, self._restored_step}:
            return
        self._best_checkpoint = self._saved.get("checkpoint") if step == self._saved_step else self._spec.restore
        if self._best_checkpoint is not None and self._spec.rank == 0:
            kept, address = open_address(self._best_checkpoint)
            kept.mark_best(address)

    def _leased(self, epoch: int, by_index: dict[int, Slice]) -> Iterator[Slice]:
        """Slices as the coordinator gives them; it is asked when the loader needs more."""
        while indices := self._timed_lease(epoch):
            for index in indices:
                yield by_index[int(index)]

    def _timed_lease(self, epoch: int) -> list[int]:
        started = time.perf_counter()
        slices: list[int] = self._ask("lease", epoch=epoch)["slices"]
        self._lease_waits.observe(time.perf_counter() - started)
        return slices

    def _ask(self, what: str, **fields: Any) -> dict[str, Any]:
        reply = self._link.request(what, **fields)
        if "error" in reply and "committed" not in reply:  # a failed commit is an answer
            message = f"the coordinator refused {what!r}: {reply['error']}"
            raise (DataError if reply.get("kind") == "data" else RefusedError)(message)
        return reply

    def _on_step(self, progress: Progress, spans: tuple[Span, ...], skipped: bool) -> None:
        self._log.add(progress.epoch, spans, skipped=skipped)
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
        return self._spec.job.data.model_copy(update={"report_by": ()})

    @property
    def _total_steps(self) -> int:
        """Steps of the whole job, about; the same number on every trainer."""
        return self._epochs.num_steps(self._spec.job.data.batch_rows * self._spec.num_trainers)

    def _report(self) -> None:
        progress, traffic = self._loop.progress, self._traffic
        seconds = time.monotonic() - self._started
        rate = (progress.rows - self._rows_before) / seconds if seconds > 0 else 0.0
        counters = self._data_counters + (self._loader.counters if self._loader is not None else Counter())
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
            seconds_left=(self._epochs.num_rows - progress.rows) / rate if rate else None,
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
                "lease": self._lease_waits.to_json(),
            },
        )

    def _checkpoint(self, advance_day: Sequence[str] = ()) -> bool:
        """Save at a step that all trainers agreed on. This trainer's pushes are applied; the reply waits for all.

        advance_day: tables whose day ends here. Then a save that fails ends the incarnation: some servers have advanced
        their days, and only a restore can tell which. True when the checkpoint is committed.
        """
        progress = self._loop.progress
        life = self._life.state()
        self._link.event("phase", phase="saving")
        started = time.monotonic()
        reply = self._ask("cursor", step=progress.step, epoch=progress.epoch, **self._log.take())
        outcome = 0
        if self._spec.rank == 0:
            outcome = self._save_and_commit(progress, reply["draft"], reply["cursor"], started, life, advance_day)
        self._sync.rendezvous()  # trainer 0 may have saved for long
        outcome = max(self._sync.gather(outcome))
        if outcome == _STOP:
            raise SaveError("a checkpoint failed, and the coordinator ended the job: see trainer 0's log")
        if outcome == _COMMITTED:
            self._saved_step = progress.step
        elif advance_day:
            raise SaveError(f"the checkpoint at a day boundary (step {progress.step}) failed: see trainer 0's log")
        self._link.event("phase", phase="training")
        return outcome == _COMMITTED

    def _save_and_commit(
        self,
        progress: Progress,
        name: str,
        cursor: dict[str, Any],
        started: float,
        life: dict[str, Any],
        advance_day: Sequence[str],
    ) -> int:
        """Trainer 0's part: _COMMITTED, _STOP, or 0 when it failed and training goes on."""
        job = self._spec.job
        keys: dict[str, int] = {}
        try:
            draft = self._draft(name, progress.step)
            tables = draft.save(self._client, advance_day=advance_day)
            self._life.saved(tables, readable=not is_remote(draft.address))
            keys = {table: saved.num_rows for table, saved in tables.items()}
            draft.finish(
                dense=self._program.state(),
                cursor=cursor,
                facts={
                    "job": job.name,
                    "seed": job.seed,
                    "settings": job.model_dump(mode="json"),
                    "warm_start": self._warm_start,
                    "lifecycle": life,
                    "evaluation": {"best": self._best.state(), "all": self._evaluations},
                    "tables": {t: {"config": job.tables[t].model_dump(mode="json"), "keys": keys[t]} for t in keys},
                },
            )
        except (OSError, ValueError, RuntimeError) as error:
            fields: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
        else:
            fields = {"draft": draft.address, "seconds": time.monotonic() - started}
        reply = self._ask("commit", step=progress.step, **fields)
        if reply["committed"]:
            self._saved = {
                "keys": keys,
                "checkpoint": reply["path"],
                "checkpoint_seconds": time.monotonic() - started,
            }
            self._link.event("checkpoint", step=progress.step, **self._saved)
            return _COMMITTED
        self._link.event("log", level="error", message=f"checkpoint of step {progress.step} failed: {reply['error']}")
        return _STOP if reply.get("stop") else 0

    def _evaluate(self, data: Dataset) -> dict[str, Any]:
        job = self._spec.job
        self._link.event("phase", phase="evaluating")
        slices = assign(plan_epoch(data, job.seed, 0), self._spec.num_trainers, self._spec.rank)
        started = reported = time.monotonic()
        scored = 0

        def on_rows(rows: int) -> None:
            nonlocal scored, reported
            scored += rows
            if time.monotonic() - reported > _SECONDS_BETWEEN_PROGRESS:
                reported = time.monotonic()
                self._link.event("phase", phase="evaluating", rows=scored)

        with Loader(data, job.data, slices, seed=job.seed, epoch=0, training=False) as loader:
            report = evaluate(
                self._program,
                self._client,
                self._sync,
                iter(loader),
                labels=job.data.labels,
                weighted=job.data.sample_weight is not None,
                on_rows=on_rows,
            )
        return {**report, "seconds": time.monotonic() - started}
