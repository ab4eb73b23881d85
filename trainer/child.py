"""The trainer's Paddle process: `python -m trainer.child`, started by its agent, which speaks JSON lines with it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.batch import Span
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset, assign, plan_epoch
from data_pipeline.errors import DataError
from data_pipeline.loader import Loader
from pserver.client import Client
from pserver.config import Tables
from pserver.errors import RequirementError
from pserver.requirements import check
from trainer import checkpoint
from trainer.config import ConfigError, JobConfig
from trainer.dense_sync import DenseSync
from trainer.evaluate import evaluate
from trainer.exchange import Exchange, Traffic
from trainer.link import AgentLink
from trainer.loop import Progress, Signals, TrainLoop
from trainer.program import DenseProgram, ListFeature, TableLayout
from trainer.schedule import rate_factor

EXIT_DONE, EXIT_FIX_JOB, EXIT_RETRY = 0, 64, 75
_SECONDS_BETWEEN_PROGRESS = 0.5


@dataclass(frozen=True)
class Spec:
    """What the coordinator tells a trainer at its start (one JSON line)."""

    job: JobConfig
    mode: str  # train or evaluate
    rank: int
    num_trainers: int
    servers: list[str]
    store: str
    interface: str | None
    incarnation: int
    restore: str | None

    @classmethod
    def parse(cls, line: str) -> Spec:
        """Raises ConfigError when the job inside is not usable."""
        raw = json.loads(line)
        return cls(
            job=JobConfig.parse(raw["job"]),
            mode=raw["mode"],
            rank=raw["rank"],
            num_trainers=raw["num_trainers"],
            servers=raw["servers"],
            store=raw["store"],
            interface=raw.get("interface"),
            incarnation=raw.get("incarnation", 1),
            restore=raw.get("restore"),
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


class Trainer:
    """One incarnation of one trainer."""

    def __init__(self, spec: Spec, link: AgentLink, signals: Signals, resources: ExitStack) -> None:
        self.spec, self.link, self.signals = spec, link, signals
        self.traffic = Traffic()
        self.data_counters: Counter[str] = Counter()
        self.loader: Loader | None = None
        job = spec.job
        used = {name: job.tables[name] for name in job.data.tables}
        self.datasets = {"eval": Dataset.open(job.data.eval, job.data)} if job.data.eval else {}
        if spec.mode == "train":
            self.datasets["train"] = Dataset.open(job.data.train, job.data)
        self.sync = DenseSync(spec.rank, spec.num_trainers, spec.store, interface=spec.interface)
        self.client = resources.enter_context(
            Client(
                used,
                spec.servers,
                seed=job.seed,
                rank=spec.rank,
                num_trainers=spec.num_trainers,
                pull_timeout_seconds=job.control.pull_timeout_seconds,
            )
        )
        self.program = DenseProgram(
            layouts(job.data, used),
            num_dense=len(job.data.dense_columns),
            num_labels=len(job.data.labels),
            model=job.model,
            optimizer=job.train.dense,
            seed=job.seed,
            rank=spec.rank,
        )
        if spec.restore is not None:
            self._restore(Path(spec.restore))
        self.sync.barrier()
        self._check_identical()

    def run(self) -> dict[str, Any]:
        """Train and evaluate, or evaluate alone; the fields of the `result` event."""
        result: dict[str, Any] = {"mode": self.spec.mode}
        if self.spec.mode == "train":
            result |= self._train()
        if "eval" in self.datasets:
            result["eval"] = self._evaluate()
        self.sync.barrier()
        return result

    def _restore(self, path: Path) -> None:
        saved = checkpoint.read(path)
        if self.spec.rank == 0:
            self.client.load(saved.sparse)
        try:
            self.program.load_state(saved.dense())
        except ValueError as error:
            raise checkpoint.CheckpointError(f"{path}: {error}") from error

    def _check_identical(self) -> str:
        """Hash of the dense parameters; raises when trainers differ, which the design rules out."""
        digest = xxhash.xxh3_64()
        for name, value in sorted(self.program.state().items()):
            digest.update(name.encode())
            digest.update(value.tobytes())
        hashes = self.sync.gather(digest.intdigest() >> 1)
        if len(set(hashes)) > 1:
            raise AssertionError(f"dense parameters differ between trainers: {[f'{h:x}' for h in hashes]}")
        return f"{hashes[0]:016x}"

    def _train(self) -> dict[str, Any]:
        job, data = self.spec.job, self.datasets["train"]
        total_rows = data.num_rows * job.train.epochs
        started = reported = time.monotonic()

        def on_step(progress: Progress, spans: tuple[Span, ...]) -> None:
            nonlocal reported
            now = time.monotonic()
            if now - reported >= _SECONDS_BETWEEN_PROGRESS or progress.step == 1:
                reported = now
                self.link.event("progress", **self._progress(loop, total_rows, now - started))
                loop.running.decay(0.98)

        steps_per_epoch = -(-data.num_rows // (job.data.batch_rows * self.spec.num_trainers))
        total_steps = steps_per_epoch * job.train.epochs  # the same number on every trainer; the true one is about that
        loop = TrainLoop(
            self.program,
            self.sync,
            max_bad_steps=job.train.max_bad_steps,
            signals=self.signals,
            on_step=on_step,
            rate_factor=lambda step: rate_factor(job.train.dense.schedule, step, total_steps),
        )
        passes: list[dict[str, float]] = []
        for epoch in range(job.train.epochs):
            loop.progress.epoch = epoch
            pass_started = time.monotonic()
            slices = assign(plan_epoch(data, job.seed, epoch), self.spec.num_trainers, self.spec.rank)
            synchronous = job.train.max_staleness_steps == 0 and self.spec.num_trainers > 1
            with (
                Loader(data, job.data, slices, seed=job.seed, epoch=epoch) as loader,
                Exchange(
                    self.client,
                    iter(loader),
                    max_staleness_steps=job.train.max_staleness_steps,
                    embedding_l2=job.train.embedding_l2,
                    wait_for_all=synchronous,
                    traffic=self.traffic,
                ) as exchange,
            ):
                self.loader = loader
                finished = loop.epoch(exchange, synchronous=synchronous, on_checkpoint=lambda: None)
                self.data_counters.update(loader.counters)
                self.loader = None
            passes.append({"rows": loop.progress.epoch_rows, "started": pass_started, "ended": time.monotonic()})
            if not finished:
                break
        progress, seconds = loop.progress, time.monotonic() - started
        self.link.event("progress", **self._progress(loop, total_rows, seconds))
        result = {
            "rows": progress.rows,
            "expected_rows": total_rows,
            "steps": progress.step,
            "seconds": seconds,
            "rows_per_second": progress.rows / seconds,
            "loss": progress.loss_sum / progress.weight_sum if progress.weight_sum else None,
            "bad_steps": progress.bad_steps,
            "bad_rows": progress.bad_rows,
            "skipped_rows": self.data_counters["skipped_rows"],
            "dense_hash": self._check_identical(),
            "phase_seconds": loop.phases.seconds,
            "passes": passes,  # of this machine's monotonic clock, reading, pulls and pushes included
        }
        result |= self._save(loop.progress)
        return result

    def _progress(self, loop: TrainLoop, total_rows: int, seconds: float) -> dict[str, Any]:
        progress = loop.progress
        rate = progress.rows / seconds if seconds > 0 else 0.0
        counters = self.data_counters + (self.loader.counters if self.loader is not None else Counter())
        return {
            "epoch": progress.epoch,
            "epochs": self.spec.job.train.epochs,
            "step": progress.step,
            "rows": progress.rows,
            "total_rows": total_rows,
            "loss": progress.last_loss,
            "auc": loop.running.report().auc,
            "rows_per_second": rate,
            "seconds_left": (total_rows - progress.rows) / rate if rate else None,
            "bad_steps": progress.bad_steps,
            "phase_seconds": loop.phases.seconds,
            # for the metrics
            "own_rows": progress.own_rows,
            "bad_rows": progress.bad_rows,
            "skipped_rows": counters["skipped_rows"],
            "truncated_ids": counters["truncated_ids"],
            "pulled_keys": self.traffic.pulled_keys,
            "pulled_bytes": self.traffic.pulled_bytes,
            "pushed_bytes": self.traffic.pushed_bytes,
            "staleness_steps": self.traffic.staleness_steps,
            "ready_batches": self.traffic.ready_batches,
            "durations": {
                **{phase: histogram.to_json() for phase, histogram in loop.phases.durations.items()},
                "servers_pull": self.traffic.pulls.to_json(),
                "servers_push": self.traffic.pushes.to_json(),
            },
        }

    def _save(self, progress: Progress) -> dict[str, Any]:
        """A checkpoint of what the servers and this trainer hold. All trainers call it; trainer 0 writes."""
        job = self.spec.job
        self.client.flush()
        self.sync.barrier()  # every trainer's pushes have reached the servers
        result: dict[str, Any] = {}
        if self.spec.rank == 0:
            started = time.monotonic()
            draft = checkpoint.Draft(job.checkpoint_directory, f".step-{progress.step}.draft", progress.step)
            keys = {name: files.num_rows for name, files in self.client.save(draft.sparse).items()}
            draft.finish(
                dense=self.program.state(),
                cursor={"epoch": progress.epoch, "step": progress.step, "rows": progress.rows},
                facts={
                    "job": job.name,
                    "seed": job.seed,
                    "tables": {n: {"config": job.tables[n].model_dump(mode="json"), "keys": keys[n]} for n in keys},
                },
            )
            path = checkpoint.commit(draft.path, progress.step, job.checkpoint.keep)
            result = {"keys": keys, "checkpoint": str(path), "checkpoint_seconds": time.monotonic() - started}
        self.sync.barrier()
        return result

    def _evaluate(self) -> dict[str, Any]:
        job, data = self.spec.job, self.datasets["eval"]
        slices = assign(plan_epoch(data, job.seed, 0), self.spec.num_trainers, self.spec.rank)
        started = time.monotonic()
        with Loader(data, job.data, slices, seed=job.seed, epoch=0, training=False) as loader:
            report = evaluate(self.program, self.client, self.sync, iter(loader), labels=job.data.labels)
        return {**report, "seconds": time.monotonic() - started}


class _FixJobError(ValueError):
    """Building the trainer refused something that the job or its files say."""


def run(spec_line: str, link: AgentLink, signals: Signals) -> int:
    """One incarnation from its spec; the process's exit code. Errors become an `error` event."""
    try:
        check()
        with ExitStack() as resources:
            try:
                trainer = Trainer(Spec.parse(spec_line), link, signals, resources)
            except ValueError as error:
                raise _FixJobError(str(error)) from error
            link.event("ready")
            result = trainer.run()
            link.event("result", **result)
    except (ConfigError, DataError, RequirementError, _FixJobError) as error:
        link.event("error", kind="job", message=str(error), traceback=traceback.format_exc())
        return EXIT_FIX_JOB
    except Exception as error:  # noqa: BLE001  whatever it is, the agent must hear of it
        link.event(
            "error", kind="runtime", message=f"{type(error).__name__}: {error}", traceback=traceback.format_exc()
        )
        return EXIT_RETRY
    return EXIT_DONE


def main() -> None:
    """Read the spec, run, exit with the code. Never returns."""
    signals = Signals()

    def on_command(message: dict[str, Any]) -> None:
        if message.get("command") == "stop":
            signals.stop = True
        elif message.get("command") == "checkpoint":
            signals.checkpoint = True

    link = AgentLink(on_command)
    line = sys.stdin.readline()
    if not line:
        sys.exit(EXIT_RETRY)
    link.listen()
    code = run(line, link, signals)
    sys.stdout.flush()
    sys.stderr.flush()
    # threads of gloo and of the reader may still wait for peers; nothing is left to save
    os._exit(code)


if __name__ == "__main__":
    main()
